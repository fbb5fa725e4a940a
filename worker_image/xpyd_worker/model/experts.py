"""Router and experts of one layer, on one rank or on several.

Ranks have a slice of every expert, as of other MLPs, or some experts whole (ExpertGroup). Where all
ranks that share whole experts have the same rows, each computes what its own experts make of them,
and one sum ends the layer. Where replicas have rows of their own, rows go to the ranks of the
experts that they chose, and what came of them comes back; which rank has an expert changes nothing
of that. See docs/adr/0115. A layer must not know requests or block management.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from xpyd_core.parallel.partition import expert_shares
from xpyd_worker.kernels.api import NO_EXPERT, Kernels, PackedExperts
from xpyd_worker.model.config import ExpertsConfig
from xpyd_worker.model.layers import Linear, StepContext, unfilled
from xpyd_worker.model.shards import Stored, by_name, share, whole
from xpyd_worker.parallel.api import NO_GROUP, ExpertGroup, TensorGroup

Compute = Callable[[Tensor, Tensor], Tensor]
"""What experts make of rows [rows, hidden], of which each goes through one: its number [rows]."""


class ExpertMlps:
    """Router and experts of one layer, in the place of its MLP. The experts' weights have no memory
    before `allocate` and after `pack`."""

    def __init__(
        self,
        hidden: int,
        experts: ExpertsConfig,
        dtype: torch.dtype,
        *,
        group: TensorGroup = NO_GROUP,
        whole_experts: ExpertGroup | None = None,
    ) -> None:
        """Each rank has the router, and of `group` a share of every expert; or, of `whole_experts`,
        some experts whole."""
        self._experts, self._group, self._others = experts, group, whole_experts
        self._shares = expert_shares(experts.count, whole_experts.size if whole_experts else 1)
        self._held = self._shares[whole_experts.rank if whole_experts else 0]
        self._hidden, self._inner = (
            whole(hidden),
            share(experts.intermediate_size, NO_GROUP if whole_experts else group),
        )
        router = (whole(experts.count),)
        self._router = Linear(self._hidden, router, bias=False, dtype=dtype)
        count, size = len(self._held), len(self._inner.held)
        self._gate_up = torch.empty(count, 2 * size, hidden, dtype=dtype, device="meta")
        self._down = torch.empty(count, hidden, size, dtype=dtype, device="meta")
        self._packed: PackedExperts | None = None

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]. Only after `pack`."""
        assert self._packed is not None, "not loaded"
        others = self._others
        if others is not None and others.replicas > 1:
            return self._exchanged(x, others, step)
        weights, chosen = self._route(x, step)
        if others is not None:
            chosen = held_only(chosen, self._held)
        return self._group.all_reduce(self._packed(x, weights, chosen, step.plan))

    def join(self, device: torch.device) -> None:
        """Take part, without rows, in the layer of a forward that other replicas make."""
        others = self._others
        assert others is not None, "no replicas share the experts"
        rows = torch.empty(0, self._gate_up.shape[2], dtype=self._gate_up.dtype, device=device)
        weights = torch.empty(0, self._experts.per_token, device=device)
        chosen = weights.to(torch.int64)
        exchange(rows, weights, chosen, shares=self._shares, group=others, compute=self._computed)

    def _route(self, x: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        weights, chosen = route(
            self._router(x),
            per_token=self._experts.per_token,
            is_normalized=self._experts.is_normalized,
        )
        step.chosen.append(chosen)
        return weights, chosen

    def _exchanged(self, x: Tensor, others: ExpertGroup, step: StepContext) -> Tensor:
        """Rows that a replica's ranks all have are dealt out to them first, one to each in turn, so
        that no row goes twice, and gathered behind."""
        rows, ranks = x.shape[0], self._group.size
        own = x[self._group.rank :: ranks]
        weights, chosen = self._route(own, step)
        made = exchange(
            own, weights, chosen, shares=self._shares, group=others, compute=self._computed
        )
        if ranks == 1:
            return made
        each = -(-rows // ranks)
        padded = torch.zeros(each, x.shape[1], dtype=x.dtype, device=x.device)
        padded[: made.shape[0]] = made
        # A line of what is gathered has a row of each rank: the rows in their order.
        return self._group.all_gather(padded).view(each * ranks, x.shape[1])[:rows]

    def _computed(self, rows: Tensor, experts: Tensor) -> Tensor:
        """See Compute."""
        assert self._packed is not None, "not loaded"
        ones = torch.ones(experts.shape[0], 1, device=rows.device)
        return self._packed(rows, ones, experts.unsqueeze(1), None)

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        self._router.allocate(device)
        self._gate_up = unfilled(self._gate_up, device)
        self._down = unfilled(self._down, device)

    def pack(self, kernels: Kernels) -> None:
        """Hand the weights to the kernels, once all are read."""
        self._router.pack(kernels)
        self._packed = kernels.experts(self._gate_up, self._down)
        self._gate_up = unfilled(self._gate_up, "meta")
        self._down = unfilled(self._down, "meta")

    def checkpoint_tensors(self, prefix: str) -> dict[str, Stored]:
        """Checkpoint name -> where it goes; `prefix` is the block's."""
        names, hidden, inner = self._experts.names, self._hidden, self._inner
        tensors = self._router.checkpoint_tensors(prefix, ("gate",))
        for place, index in enumerate(self._held):
            expert = f"{prefix}experts.{index}."
            gate_up, down = self._gate_up[place], self._down[place]
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


def held_only(chosen: Tensor, held: range) -> Tensor:
    """`chosen` by the numbers among `held`; NO_EXPERT for others. Nothing waits for the device."""
    own = chosen - held.start
    return own.masked_fill((own < 0) | (own >= len(held)), NO_EXPERT)


def exchange(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    *,
    shares: Sequence[range],
    group: ExpertGroup,
    compute: Compute,
) -> Tensor:
    """What the experts of all ranks make of this rank's rows `x` [rows, hidden], of which each
    chose [rows, per_token] experts: [rows, hidden], summed as one rank would. `shares`: the experts
    of each rank; `compute`: what those of this one do, by their numbers here. All ranks of `group`
    call it at the same time, with any number of rows, 0 included. The host waits for the device: it
    has to know how many rows come."""
    rows, per_token = chosen.shape
    flat, own = chosen.reshape(-1), shares[group.rank]
    # By expert: so by rank, and what a rank gets of each is together.
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=shares[-1].stop)
    held = [len(one) for one in shares]
    coming = group.all_to_all(counts.unsqueeze(1), held, [len(own)] * group.size).view(-1)
    known = cast("list[int]", cast("Any", torch.cat((counts, coming))).tolist())
    leave, come = known[: shares[-1].stop], known[shares[-1].stop :]
    send = [sum(leave[one.start : one.stop]) for one in shares]
    receive = [sum(come[first : first + len(own)]) for first in range(0, len(come), len(own))]
    sent = group.all_to_all(x.index_select(0, order // per_token), send, receive)
    if sum(receive):
        experts = torch.arange(len(own), device=x.device).repeat(group.size)
        sent = compute(sent, experts.repeat_interleave(coming))
    back = group.all_to_all(sent, receive, send)
    parts = torch.empty_like(back).index_copy_(0, order, back).view(rows, per_token, x.shape[1])
    return _summed(parts, weights, chosen).to(x.dtype)


def _summed(parts: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The weighted sum of each row's parts in float32, in their experts' order."""
    out = torch.zeros(parts.shape[0], parts.shape[2], dtype=torch.float32, device=parts.device)
    rows = torch.arange(parts.shape[0], device=parts.device)
    for place in chosen.argsort(dim=1, stable=True).unbind(1):
        out += parts[rows, place] * weights[rows, place].unsqueeze(1)
    return out
