"""The small parts that a decoder is made of: weights that the loader fills and the kernels pack.

No nn.Module: at batch 1 its call overhead is a measurable share of a small model's step. A part is
made without memory, so that a checkpoint can be read and packed piece by piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpyd_worker.kernels.api import Kernels
from xpyd_worker.kernels.api import Linear as PackedLinear


class Linear:
    """y = x W^T + b. `weight` [out, in] and `bias` [out] have no memory before `allocate` and after
    `pack`."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype
    ) -> None:
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device="meta")
        self.bias = torch.empty(out_features, dtype=dtype, device="meta") if bias else None
        self._packed: PackedLinear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] -> [tokens, out]. Only after `pack`."""
        assert self._packed is not None, "not loaded"
        return self._packed(x)

    def allocate(self, device: torch.device) -> None:
        """Memory, uninitialised, for the loader to fill."""
        self.weight = torch.empty_like(self.weight, device=device)
        self.bias = None if self.bias is None else torch.empty_like(self.bias, device=device)

    def pack(self, kernels: Kernels) -> None:
        """Hand the weights to the kernels, which may keep them in another form."""
        self._packed = kernels.linear(self.weight, self.bias)
        self.weight = torch.empty_like(self.weight, device="meta")
        self.bias = None if self.bias is None else torch.empty_like(self.bias, device="meta")

    def rows(self, start: int, count: int) -> tuple[Tensor, Tensor | None]:
        """Views of `count` output rows of weight and bias: one part of a fused projection."""
        bias = None if self.bias is None else self.bias[start : start + count]
        return self.weight[start : start + count], bias


class Norm:
    """The weight of a root mean square norm over the last dimension."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype) -> None:
        self.weight = torch.empty(size, dtype=dtype, device="meta")
        self.eps = eps

    def allocate(self, device: torch.device) -> None:
        """Memory, uninitialised, for the loader to fill."""
        self.weight = torch.empty_like(self.weight, device=device)


def add_linear(tensors: dict[str, Tensor], name: str, weight: Tensor, bias: Tensor | None) -> None:
    """Put a linear layer's (part of a) weight and bias under the names of a checkpoint."""
    tensors[f"{name}.weight"] = weight
    if bias is not None:
        tensors[f"{name}.bias"] = bias
