"""The gated feed-forward block of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from xpyd_worker.kernels.api import Kernels
from xpyd_worker.model.config import MlpNames
from xpyd_worker.model.layers import Linear, StepContext
from xpyd_worker.model.shards import Stored, is_first, share, whole
from xpyd_worker.parallel.api import NO_GROUP, TensorGroup


class Mlp:
    """down(silu(gate(x)) * up(x)), with gate and up in one linear."""

    def __init__(
        self,
        hidden: int,
        size: int,
        *,
        bias: bool,
        names: MlpNames,
        dtype: torch.dtype,
        group: TensorGroup = NO_GROUP,
    ) -> None:
        """Each rank of `group` has a share of the `size` numbers between the two linears."""
        self._names, self._group = names, group
        inner = share(size, group)
        self._gate_up = Linear(whole(hidden), (inner, inner), bias=bias, dtype=dtype)
        has_bias = bias and is_first(group)
        self._down = Linear(inner, (whole(hidden),), bias=has_bias, dtype=dtype)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self._group.all_reduce(self._down(step.kernels.silu_mul(self._gate_up(x))))

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        self._gate_up.allocate(device)
        self._down.allocate(device)

    def pack(self, kernels: Kernels) -> None:
        """All weights are read."""
        self._gate_up.pack(kernels)
        self._down.pack(kernels)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Stored]:
        """Checkpoint name -> where it goes."""
        return {
            **self._gate_up.checkpoint_tensors(prefix, self._names.gate_up),
            **self._down.checkpoint_tensors(prefix, (self._names.down,)),
        }
