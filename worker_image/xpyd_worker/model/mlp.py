"""The gated feed-forward block of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from xpyd_worker.kernels.api import Kernels
from xpyd_worker.model.config import MlpNames
from xpyd_worker.model.layers import Linear, StepContext


class Mlp:
    """down(silu(gate(x)) * up(x)), with gate and up in one linear."""

    def __init__(
        self, hidden: int, size: int, *, bias: bool, names: MlpNames, dtype: torch.dtype
    ) -> None:
        self._names = names
        self._size = size
        self._gate_up = Linear(hidden, 2 * size, bias=bias, dtype=dtype)
        self._down = Linear(size, hidden, bias=bias, dtype=dtype)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self._down(step.kernels.silu_mul(self._gate_up(x)))

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        self._gate_up.allocate(device)
        self._down.allocate(device)

    def pack(self, kernels: Kernels) -> None:
        """All weights are read."""
        self._gate_up.pack(kernels)
        self._down.pack(kernels)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> where it goes."""
        sizes = (self._size, self._size)
        return {
            **self._gate_up.checkpoint_tensors(prefix, self._names.gate_up, sizes),
            **self._down.checkpoint_tensors(prefix, (self._names.down,)),
        }
