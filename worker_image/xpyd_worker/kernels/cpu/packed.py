"""Matrices that oneDNN has laid out for itself once, in place of at every call.

torch keeps these operators to itself (its inductor uses them), so each use is checked first, and
torch's own linear does it where they are gone or give something else. A few rows go through
matvec.cpp, out of the same memory and with the same sums to the last bit: what is drawn for one
must not depend on how many run with it. Measured: ADR 0021 (bfloat16), ADR 0138 (float32).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from xpyd_worker.system import cpu_flags

_log = logging.getLogger(__name__)

# oneDNN lays out a matrix for so many rows; others are as fast with it as with a layout of theirs.
_ROWS = 512
# What matvec.cpp does: outputs in such blocks, inputs that oneDNN does not pad.
_BLOCK = 64
_PADDED_TO = 32
# Rows that each matrix is tried with, and those that a shape is tried with beside the few that are
# ours: oneDNN may choose another way by them. Outputs that tell one order of additions from others.
_PROBE_ROWS = 8
_PROBED_OUTPUTS = 1 << 18
_CHUNK_LENGTHS = (2048, 1024, 512, 256, 128, 64, 32)


class _FewRows(NamedTuple):
    """What matvec.cpp has for a dtype: its function, up to how many rows it is the faster one, and
    a flag in /proc/cpuinfo without which it does not run. A library may lack the function."""

    function: str
    rows: int
    needs: str = ""


_FEW_ROWS = {
    torch.bfloat16: _FewRows("xpyd_matvec_bfloat", 4, "avx512_bf16"),
    torch.float32: _FewRows("xpyd_matvec_float", 32),
}


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

    def weight(self) -> Tensor:
        """[out, in], unpacked."""
        return self._packed.to_dense()

    def packed_bytes(self) -> tuple[int, int]:
        """The address of the packed copy, and its length."""
        ops = _operators()
        return ops.data_ptr(self._packed), ops._nbytes(self._packed)


class FewRowsLinear:
    """A packed linear with the same results, bit for bit, and its own code for a few rows."""

    def __init__(
        self,
        packed: OneDnnLinear,
        address: int,
        run: Any,  # noqa: ANN401 - ctypes
        *,
        chunk: int,
        threads: int,
    ) -> None:
        """`address`: of the packed copy; `run`: matvec.cpp's function for the dtype; `chunk`:
        inputs summed in one go."""
        self.most = _FEW_ROWS[packed.dtype].rows
        self.chunk = chunk
        self.packed = packed
        self._address = address
        self._bias = None if packed.bias is None else packed.bias.data_ptr()
        self._run = run
        self._threads = threads

    @classmethod
    def of(
        cls, packed: OneDnnLinear, operators: ctypes.CDLL, threads: int
    ) -> FewRowsLinear | OneDnnLinear:
        """The linear over `packed`; `packed` itself where matvec.cpp cannot give what that gives
        for more rows."""
        run = getattr(operators, _FEW_ROWS[packed.dtype].function, None)
        if run is None or not _can_run(packed.dtype) or packed.outputs < _BLOCK * threads:
            return packed
        address = _known_layout(packed)
        if address is None:
            return packed

        def with_chunk(chunk: int) -> FewRowsLinear:
            return cls(packed, address, run, chunk=chunk, threads=threads)

        shape = (packed.dtype, packed.outputs, packed.inputs, packed.bias is not None, threads)
        if shape not in _CHUNKS:
            _CHUNKS[shape] = _chunk(packed, with_chunk)
        chunk = _CHUNKS[shape]
        if chunk is None:
            return packed
        found = with_chunk(chunk)
        return found if is_equal(found, packed, _PROBE_ROWS) else packed

    def weight(self) -> Tensor:
        """[out, in], unpacked."""
        return self.packed.weight()

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        rows, packed = x.shape[0], self.packed
        if not 0 < rows <= self.most:
            return packed(x)
        x = x.contiguous()
        out = torch.empty(rows, packed.outputs, dtype=packed.dtype)
        failed = self._run(
            self._address,
            x.data_ptr(),
            self._bias,
            out.data_ptr(),
            rows,
            packed.outputs,
            packed.inputs,
            self.chunk,
            self._threads,
        )
        return packed(x) if failed else out


# By dtype, outputs, inputs, whether there is a bias, and threads: oneDNN decides by these how many
# inputs it sums in one go. None: matvec.cpp sums otherwise.
_CHUNKS: dict[tuple[torch.dtype, int, int, bool, int], int | None] = {}


@cache
def _can_run(dtype: torch.dtype) -> bool:
    """Whether matvec.cpp does it here. Asked for each matrix, of which experts are thousands."""
    needs = _FEW_ROWS[dtype].needs
    return not needs or needs in cpu_flags()


def _known_layout(packed: OneDnnLinear) -> int | None:
    """Where the packed copy is, if it can be laid out as matvec.cpp expects it."""
    if packed.outputs % _BLOCK or packed.inputs % _PADDED_TO:
        return None
    try:
        address, length = packed.packed_bytes()
    except (RuntimeError, AttributeError, TypeError, NotImplementedError):
        return None
    return address if length == packed.outputs * packed.inputs * packed.dtype.itemsize else None


def _chunk(packed: OneDnnLinear, with_chunk: Callable[[int], FewRowsLinear]) -> int | None:
    """How many inputs oneDNN sums in one go; a few rows rule most lengths out, more all but one.
    Where the order is another, about one output in 10,000 is rounded otherwise."""
    rows = max(_FEW_ROWS[packed.dtype].rows + _PROBE_ROWS, _PROBED_OUTPUTS // packed.outputs)
    for chunk in dict.fromkeys((packed.inputs, *_CHUNK_LENGTHS)):
        found = with_chunk(chunk)
        if is_equal(found, packed, _PROBE_ROWS) and is_equal(found, packed, rows):
            return chunk
    _log.debug("oneDNN sums %d inputs in an order of its own", packed.inputs)
    return None


def is_equal(found: FewRowsLinear, packed: OneDnnLinear, rows: int) -> bool:
    """Whether both give the same bits for random rows, a few at a time and all at once."""
    x = torch.randn(
        rows, packed.inputs, generator=torch.Generator().manual_seed(rows), dtype=torch.float32
    ).to(packed.dtype)
    parts = [found(x[first : first + found.most]) for first in range(0, rows, found.most)]
    return torch.equal(torch.cat(parts), packed(x))


def _agree(found: Tensor, expected: Tensor) -> bool:
    """But for rounding; whatever the size of the weights."""
    difference = (found.float() - expected.float()).abs().max()
    return bool(difference <= 0.02 * expected.float().abs().max())


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether packed matrices of `dtype` work here and are worth it: torch's own linear lays out a
    matrix of bfloat16 at each call, and one of float32 is multiplied by a few rows several times as
    slowly as packed."""
    if dtype not in _FEW_ROWS or not torch.backends.mkldnn.is_available():
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
