"""The mixture-of-experts block: each row of a batch goes through a few of many gated MLPs.

Rows are grouped by expert, so that an expert computes all of its rows at once and one without rows
is not touched: its weights are not read from memory. Which experts have rows is known only when the
router has run; a GPU is waited for in every such layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from xpyd_worker.kernels.api import Kernels
from xpyd_worker.model.config import Experts
from xpyd_worker.model.layers import Linear, StepContext
from xpyd_worker.model.mlp import Mlp


class ExpertMlps:
    """Router and experts of one layer, in the place of its MLP."""

    def __init__(self, hidden: int, experts: Experts, dtype: torch.dtype) -> None:
        self._experts = experts
        self._router = Linear(hidden, experts.count, bias=False, dtype=dtype)
        self._mlps = [
            Mlp(hidden, experts.intermediate_size, bias=False, names=experts.names, dtype=dtype)
            for _ in range(experts.count)
        ]

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]. Outputs are summed in float32 and in the experts'
        order, so a row's result does not depend on what else is in the batch."""
        weights, chosen = route(
            self._router(x),
            per_token=self._experts.per_token,
            is_normalized=self._experts.is_normalized,
        )
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, pairs in rows_by_expert(chosen, self._experts.count):
            rows = pairs // self._experts.per_token
            part = self._mlps[expert](x.index_select(0, rows), step)
            share = weights.view(-1).index_select(0, pairs).unsqueeze(-1)
            out.index_add_(0, rows, part * share)
        return out.to(x.dtype)

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        for part in (self._router, *self._mlps):
            part.allocate(device)

    def pack(self, kernels: Kernels) -> None:
        """All weights are read."""
        for part in (self._router, *self._mlps):
            part.pack(kernels)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> where it goes; `prefix` is the block's."""
        tensors = self._router.checkpoint_tensors(prefix, ("gate",))
        for index, mlp in enumerate(self._mlps):
            tensors |= mlp.checkpoint_tensors(f"{prefix}experts.{index}.")
        return tensors


def route(logits: Tensor, *, per_token: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """The router's choice for [tokens, experts] logits: weights (float32) and experts, each
    [tokens, per_token]. Softmax comes before the choice; `is_normalized` makes the weights sum to
    1 after it."""
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    weights, chosen = probabilities.topk(per_token, dim=-1)
    if is_normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen


def rows_by_expert(chosen: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
    """Experts that were chosen, in their order, each with the indices into the flat `chosen` that
    name it, ascending."""
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    counts = cast("list[int]", cast("Any", flat.bincount(minlength=experts)).tolist())
    first = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, order[first : first + count]
            first += count
