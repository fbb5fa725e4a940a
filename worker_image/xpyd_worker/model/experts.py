"""The mixture-of-experts block: each row of a batch goes through a few of many gated MLPs.

The router's linear layer and its choice are made here, without a wait for the device; how rows find
their experts is the Kernels' matter (xpyd_worker.kernels.api). The weights of all experts stand in
two tensors, so that a device can reach each by its number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpyd_worker.kernels.api import Experts as PackedExperts
from xpyd_worker.kernels.api import Kernels
from xpyd_worker.model.config import Experts
from xpyd_worker.model.layers import Linear, StepContext, unfilled
from xpyd_worker.model.shards import Stored, by_name, share, whole
from xpyd_worker.parallel.api import NO_GROUP, TensorGroup


class ExpertMlps:
    """Router and experts of one layer, in the place of its MLP. The experts' weights have no memory
    before `allocate` and after `pack`."""

    def __init__(
        self, hidden: int, experts: Experts, dtype: torch.dtype, group: TensorGroup = NO_GROUP
    ) -> None:
        """Each rank of `group` has the router and a share of every expert."""
        self._experts, self._group = experts, group
        self._hidden, self._inner = whole(hidden), share(experts.intermediate_size, group)
        router = (whole(experts.count),)
        self._router = Linear(self._hidden, router, bias=False, dtype=dtype)
        count, size = experts.count, len(self._inner.held)
        self._gate_up = torch.empty(count, 2 * size, hidden, dtype=dtype, device="meta")
        self._down = torch.empty(count, hidden, size, dtype=dtype, device="meta")
        self._packed: PackedExperts | None = None

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]. Only after `pack`."""
        assert self._packed is not None, "not loaded"
        weights, chosen = route(
            self._router(x),
            per_token=self._experts.per_token,
            is_normalized=self._experts.is_normalized,
        )
        return self._group.all_reduce(self._packed(x, weights, chosen, step.plan))

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        self._router.allocate(device)
        self._gate_up = unfilled(self._gate_up, device)
        self._down = unfilled(self._down, device)

    def pack(self, kernels: Kernels) -> None:
        """All weights are read."""
        self._router.pack(kernels)
        self._packed = kernels.experts(self._gate_up, self._down)
        self._gate_up = unfilled(self._gate_up, "meta")
        self._down = unfilled(self._down, "meta")

    def checkpoint_tensors(self, prefix: str) -> dict[str, Stored]:
        """Checkpoint name -> where it goes; `prefix` is the block's."""
        names, hidden, inner = self._experts.names, self._hidden, self._inner
        tensors = self._router.checkpoint_tensors(prefix, ("gate",))
        for index in range(self._experts.count):
            expert = f"{prefix}experts.{index}."
            gate_up, down = self._gate_up[index], self._down[index]
            tensors |= by_name(gate_up, expert, names.gate_up, rows=(inner, inner), columns=hidden)
            tensors |= by_name(down, expert, (names.down,), rows=(hidden,), columns=inner)
        return tensors


def route(logits: Tensor, *, per_token: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """The router's choice for [tokens, experts] logits: weights (float32) and experts, each
    [tokens, per_token]. Softmax comes before the choice; `is_normalized` makes the weights sum to
    1 after it. Nothing waits for the device."""
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    weights, chosen = probabilities.topk(per_token, dim=-1)
    if is_normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen
