"""The small parts that a decoder is made of. Weights are plain tensors, filled by the loader.

No nn.Module: at batch 1 its call overhead is a measurable share of a small model's step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """y = x W^T + b. `weight` [out, in] and `bias` [out] are uninitialised until loaded."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype
    ) -> None:
        self.weight = torch.empty(out_features, in_features, dtype=dtype)
        self.bias = torch.empty(out_features, dtype=dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] -> [tokens, out]."""
        return F.linear(x, self.weight, self.bias)

    def rows(self, start: int, count: int) -> tuple[Tensor, Tensor | None]:
        """Views of `count` output rows of weight and bias: one part of a fused projection."""
        bias = None if self.bias is None else self.bias[start : start + count]
        return self.weight[start : start + count], bias


class RmsNorm:
    """Root mean square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype) -> None:
        self.weight = torch.empty(size, dtype=dtype)
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] -> the same shape. In float32 bit for bit what transformers computes."""
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[tokens, 2 n], gate then up -> silu(gate) * up, [tokens, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
