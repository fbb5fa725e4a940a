"""The small parts that a decoder is made of: weights that the loader fills and the kernels pack.

No nn.Module: at batch 1 its call overhead is a measurable share of a small model's step. A part is
made without memory, so that a checkpoint can be read and packed piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xpyd_worker.kernels.api import Kernels, Plan
from xpyd_worker.kernels.api import Linear as PackedLinear
from xpyd_worker.model.shards import Cut, Stored, by_name


@dataclass(frozen=True)
class StepContext:
    """What all layers of one forward share: operators, the step's angles, caches and plan."""

    kernels: Kernels
    angles: tuple[Tensor, Tensor]
    caches: Sequence[Tensor]
    plan: Plan
    kv_stored: Callable[[int], None]


class Linear:
    """y = x W^T + b. `weight` [out, in] and `bias` [out] have no memory before `allocate` and after
    `pack`. Of inputs and outputs a rank may hold a part (see `shards`)."""

    def __init__(
        self, inputs: Cut, outputs: Sequence[Cut], *, bias: bool, dtype: torch.dtype
    ) -> None:
        """`outputs`: what is computed together, one behind the other."""
        self._inputs, self._outputs = inputs, outputs
        rows = sum(len(cut.held) for cut in outputs)
        self.weight = torch.empty(rows, len(inputs.held), dtype=dtype, device="meta")
        self.bias = torch.empty(rows, dtype=dtype, device="meta") if bias else None
        self._packed: PackedLinear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, in] -> [tokens, out]. Only after `pack`."""
        assert self._packed is not None, "not loaded"
        return self._packed(x)

    def allocate(self, device: torch.device) -> None:
        """Memory, uninitialised, for the loader to fill."""
        self.weight = unfilled(self.weight, device)
        self.bias = None if self.bias is None else unfilled(self.bias, device)

    def pack(self, kernels: Kernels) -> None:
        """Hand the weights to the kernels, which may keep them in another form."""
        self._packed = kernels.linear(self.weight, self.bias)
        self.weight = unfilled(self.weight, "meta")
        self.bias = None if self.bias is None else unfilled(self.bias, "meta")

    def checkpoint_tensors(self, prefix: str, names: Sequence[str]) -> dict[str, Stored]:
        """Checkpoint name -> where it goes: each of the outputs under its own of `names`, or all
        under one."""
        tensors = by_name(self.weight, prefix, names, rows=self._outputs, columns=self._inputs)
        if self.bias is not None:
            tensors |= by_name(self.bias, prefix, names, rows=self._outputs, kind="bias")
        return tensors


def unfilled(like: Tensor, device: torch.device | str) -> Tensor:
    """A contiguous tensor of the same shape and dtype. torch.empty_like of one on `meta` imports
    sympy, which takes each rank a second or two."""
    return torch.empty(like.shape, dtype=like.dtype, device=device)


class Norm:
    """The weight of a root mean square norm over the last dimension."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype) -> None:
        self.weight = torch.empty(size, dtype=dtype, device="meta")
        self.eps = eps

    def allocate(self, device: torch.device) -> None:
        """Memory, uninitialised, for the loader to fill."""
        self.weight = unfilled(self.weight, device)
