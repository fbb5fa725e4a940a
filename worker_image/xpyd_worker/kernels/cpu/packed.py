"""Matrices that oneDNN has laid out for itself once, in place of at every call.

torch keeps these operators to itself (its inductor uses them), so each use is checked first, and
torch's own linear does it where they are gone or give something else. Measured on two cores with
avx512_bf16, 443 million parameters in bfloat16: 20.3 ms for one row, 412 ms for 512.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN lays out a matrix for so many rows; others are as fast with it as with a layout of theirs.
_ROWS = 512


class OneDnnLinear:
    """y = x W^T + b over a packed copy of `weight`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        ops = _operators()
        self._packed: Tensor = ops._reorder_linear_weight(weight, _ROWS)
        self._bias = bias
        self._run: Any = ops._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return self._run(x, self._packed, self._bias, "none", [], None)


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
    return torch.allclose(found.float(), F.linear(x, weight, bias).float(), rtol=0.02, atol=0.05)


def _operators() -> Any:  # noqa: ANN401 - torch.ops is untyped
    return cast("Any", torch.ops.mkldnn)
