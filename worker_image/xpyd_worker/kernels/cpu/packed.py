"""Matrices that oneDNN has laid out for itself once, in place of at every call.

torch keeps these operators to itself (its inductor uses them), so each use is checked first, and
torch's own linear does it where they are gone or give something else. A few rows go through
matvec.cpp, out of the same memory. Measured on two cores with avx512_bf16, 443 million parameters
in bfloat16: one row takes oneDNN 21.3 ms and us 18.7, reading the bytes alone 17; 512 rows oneDNN
412 ms.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

_log = logging.getLogger(__name__)

# oneDNN lays out a matrix for so many rows; others are as fast with it as with a layout of theirs.
_ROWS = 512
# What matvec.cpp does: so many rows, outputs in such blocks, inputs that oneDNN does not pad.
_FEW = 4
_BLOCK = 64
_PADDED_TO = 32


class OneDnnLinear:
    """y = x W^T + b over a packed copy of `weight`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        ops = _operators()
        self.outputs, self.inputs = weight.shape
        self.dtype = weight.dtype
        self.bias = bias
        self._packed: Tensor = ops._reorder_linear_weight(weight, _ROWS)
        self._run: Any = ops._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return self._run(x, self._packed, self.bias, "none", [], None)

    def packed_bytes(self) -> tuple[int, int]:
        """Where the packed copy stands, and its length."""
        ops = _operators()
        return ops.data_ptr(self._packed), ops._nbytes(self._packed)


class FewRowsLinear:
    """The same, with a way of its own for up to 4 rows."""

    def __init__(self, packed: OneDnnLinear, address: int, run: Any, threads: int) -> None:  # noqa: ANN401 - ctypes
        """`address`: of the packed copy; `run`: xpyd_matvec."""
        self._packed = packed
        self._address = address
        self._bias = None if packed.bias is None else packed.bias.data_ptr()
        self._run = run
        self._threads = threads

    @classmethod
    def of(
        cls, packed: OneDnnLinear, operators: ctypes.CDLL, threads: int
    ) -> FewRowsLinear | OneDnnLinear:
        """Over `packed`; itself where its layout is not the one of matvec.cpp: a row tells."""
        if packed.outputs % _BLOCK or packed.inputs % _PADDED_TO:
            return packed
        try:
            address, length = packed.packed_bytes()
        except (RuntimeError, AttributeError, TypeError, NotImplementedError):
            return packed
        if length != packed.outputs * packed.inputs * packed.dtype.itemsize:
            return packed
        found = cls(packed, address, operators.xpyd_matvec, threads)
        x = _probe(packed.inputs, packed.dtype)
        if not _agree(found(x), packed(x)):
            _log.debug("oneDNN packs a matrix of %d x %d otherwise", packed.outputs, packed.inputs)
            return packed
        return found

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        rows, packed = x.shape[0], self._packed
        if rows > _FEW:
            return packed(x)
        x = x.contiguous()
        out = torch.empty(rows, packed.outputs, dtype=packed.dtype)
        self._run(
            self._address,
            x.data_ptr(),
            self._bias,
            out.data_ptr(),
            rows,
            packed.outputs,
            packed.inputs,
            self._threads,
        )
        return out


@cache
def _probe(inputs: int, dtype: torch.dtype) -> Tensor:
    """A row in which every input counts, and no two alike."""
    return torch.linspace(-1, 2, inputs).view(1, -1).to(dtype)


def _agree(found: Tensor, expected: Tensor) -> bool:
    """But for rounding; whatever the size of the weights."""
    difference = (found.float() - expected.float()).abs().max()
    return bool(difference <= 0.02 * expected.float().abs().max())


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether packed matrices of `dtype` work here and are worth it: bfloat16, in which torch's own
    linear lays out the matrix at each call. Float32 keeps torch's."""
    if dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    weight = torch.linspace(-1, 1, 64 * 96).view(64, 96).to(dtype)
    x = torch.linspace(-2, 2, 3 * 96).view(3, 96).to(dtype)
    bias = torch.linspace(-1, 1, 64).to(dtype)
    try:
        found = OneDnnLinear(weight, bias)(x)
    except (RuntimeError, AttributeError, TypeError, NotImplementedError):
        return False
    return _agree(found, F.linear(x, weight, bias))


def _operators() -> Any:  # noqa: ANN401 - torch.ops is untyped
    return cast("Any", torch.ops.mkldnn)
