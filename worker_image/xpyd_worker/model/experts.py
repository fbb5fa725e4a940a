"""Router and experts of one layer, on one rank or on several.

Ranks have a slice of every expert, as of other MLPs, or some experts whole (ExpertGroup). Where all
ranks that share whole experts have the same rows, each computes what its own experts make of them,
and one sum ends the layer. Where replicas have rows of their own, rows go to the ranks of the
experts that they chose, and what came of them comes back; which rank has an expert changes nothing
of that. See docs/adr/0115. Where experts may move, it changes nothing in either case
(docs/adr/0126). A layer must not know requests or block management.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from xpyd_core.parallel.partition import expert_shares
from xpyd_worker.kernels.api import NO_EXPERT, Kernels, PackedExperts
from xpyd_worker.model.config import ExpertsConfig
from xpyd_worker.model.layers import Linear, StepContext, unfilled
from xpyd_worker.model.placement import Placement, first_placement, holders
from xpyd_worker.model.shards import Stored, by_name, share, whole
from xpyd_worker.parallel.api import NO_GROUP, ExpertGroup, TensorGroup

Compute = Callable[[Tensor, Tensor], Tensor]
"""What experts make of rows [rows, hidden], of which each goes through one: its number [rows]."""


class Slots:
    """Where the experts of a layer that may move are. A slot's number counts over all ranks."""

    def __init__(self, placement: Placement, experts: int) -> None:
        self.placement = placement
        self._experts = experts
        # By expert: how many copies there are, and the slots of the first, the second, ...; the
        # tensors stay where they are, so that graphs hold.
        self._copies, self._numbers = self._tables()

    def to(self, device: torch.device) -> None:
        """Have the tables where the rows are."""
        self._copies, self._numbers = self._copies.to(device), self._numbers.to(device)

    def of(self, chosen: Tensor, first: int) -> Tensor:
        """The slots for `chosen` [rows, per_token]: copies take turns by row, from `first` on.
        Nothing waits for the device."""
        rows = torch.arange(first, first + chosen.shape[0], device=chosen.device)
        return self._numbers[chosen, rows.unsqueeze(1) % self._copies[chosen]]

    def lay(self, placement: Placement) -> None:
        """Have rows go to where the experts are from now on."""
        self.placement = placement
        for table, now in zip((self._copies, self._numbers), self._tables(), strict=True):
            table.copy_(now)

    def _tables(self) -> tuple[Tensor, Tensor]:
        places, ranks = holders(self.placement, self._experts), len(self.placement)
        numbers = [[one[copy % len(one)] for copy in range(ranks)] for one in places]
        return torch.tensor([len(one) for one in places]), torch.tensor(numbers)


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
        redundant: int | None = None,
        is_elastic: bool = False,
    ) -> None:
        """Each rank has the router, and of `group` a share of every expert; or, of `whole_experts`,
        some experts whole. `redundant`: these may move, and have so many copies; None: they stay.
        `is_elastic`: other replicas may come and go (`deal`).
        """
        self._experts, self._group, self._others = experts, group, whole_experts
        self._is_elastic = is_elastic
        ranks, rank = (whole_experts.size, whole_experts.rank) if whole_experts else (1, 0)
        self.slots: Slots | None = None
        if redundant is not None:
            self.slots = Slots(first_placement(experts.count, redundant, ranks), experts.count)
        # Of each rank, by the numbers of slots where experts may move.
        self._shares = expert_shares(experts.count + (redundant or 0), ranks)
        self._own = self._shares[rank]
        held = self._own if self.slots is None else self.slots.placement[rank]
        self._hidden, self._inner = (
            whole(hidden),
            share(experts.intermediate_size, NO_GROUP if whole_experts else group),
        )
        router = (whole(experts.count),)
        self._router = Linear(self._hidden, router, bias=False, dtype=dtype)
        self._first_held = tuple(held)
        count, size = len(held), len(self._inner.held)
        self._gate_up = torch.empty(count, 2 * size, hidden, dtype=dtype, device="meta")
        self._down = torch.empty(count, hidden, size, dtype=dtype, device="meta")
        self._packed: PackedExperts | None = None
        self._device = torch.device("meta")

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]. Only after `pack`."""
        assert self._packed is not None, "not loaded"
        others = self._others
        if others is not None and (others.replicas > 1 or self._is_elastic):
            return self._exchanged(x, others, step)
        weights, chosen = self._route(x, step)
        if self.slots is not None:
            return self._moved(x, weights, chosen, self.slots)
        if others is not None:
            chosen = held_only(chosen, self._own)
        return self._group.all_reduce(self._packed(x, weights, chosen, step.plan))

    def join(self, device: torch.device) -> None:
        """Take part, without rows, in the layer of a forward that other replicas make."""
        others = self._others
        assert others is not None, "no replicas share the experts"
        rows = torch.empty(0, self._gate_up.shape[2], dtype=self._gate_up.dtype, device=device)
        weights = torch.empty(0, self._experts.per_token, device=device)
        chosen = weights.to(torch.int64)
        exchange(
            rows,
            weights,
            chosen,
            places=chosen,
            shares=self._shares,
            group=others,
            compute=self._computed,
        )

    def _moved(self, x: Tensor, weights: Tensor, chosen: Tensor, slots: Slots) -> Tensor:
        """What each expert made of a row is added up over ranks by itself: all but one add zeros,
        so nothing is rounded before the one sum in the experts' order, wherever they are."""
        own = held_only(slots.of(chosen, 0), self._own)
        rows, per_token = chosen.shape
        parts = self._computed(x.repeat_interleave(per_token, 0), own.view(-1))
        parts = self._group.all_reduce(parts).view(rows, per_token, x.shape[1])
        return _summed(parts, weights, chosen).to(x.dtype)

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
        # Ranks with few rows each would all begin with the first copy.
        places = chosen if self.slots is None else self.slots.of(chosen, others.rank)
        made = exchange(
            own,
            weights,
            chosen,
            places=places,
            shares=self._shares,
            group=others,
            compute=self._computed,
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

    @property
    def expert_bytes(self) -> int:
        """The weights of one expert here."""
        return 3 * len(self._inner.held) * len(self._hidden.held) * self._gate_up.itemsize

    def taken(self, slots: Sequence[int]) -> Tensor:
        """A copy of the weights of the experts in these slots of this rank, a row each."""
        assert self._packed is not None, "not loaded"
        weights = [self._packed.weights(slot) for slot in slots]
        width = self.expert_bytes // self._gate_up.itemsize
        flat = [one.reshape(-1) for one in chain.from_iterable(weights)]
        if not flat:
            return torch.empty(0, width, dtype=self._gate_up.dtype, device=self._device)
        return torch.cat(flat).view(len(slots), width)

    def put(self, slot: int, row: Tensor) -> None:
        """What `taken` gave of another rank's expert, into a slot of this one."""
        assert self._packed is not None, "not loaded"
        size, hidden = len(self._inner.held), len(self._hidden.held)
        gate_up, down = row[: 2 * size * hidden], row[2 * size * hidden :]
        self._packed.replace(slot, gate_up.view(2 * size, hidden), down.view(hidden, size))

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        self._device = device
        if self.slots is not None:
            self.slots.to(device)
        self._router.allocate(device)
        self._gate_up = unfilled(self._gate_up, device)
        self._down = unfilled(self._down, device)

    def deal(self, prefix: str) -> DealtExperts:
        """The group has other ranks: this one's experts among them, to be loaded. Until then the
        layer has none. `prefix` is the block's."""
        others = self._others
        assert others is not None, "no replicas share the experts"
        assert self.slots is None, "experts that move are not dealt out anew"
        had = self._own
        self._shares = expert_shares(self._experts.count, others.size)
        self._own = own = self._shares[others.rank]
        self._first_held = tuple(own)
        return DealtExperts(self, prefix, {one: had.index(one) for one in own if one in had})

    def take_over(self, kept: Mapping[int, int]) -> None:
        """Memory for the experts of this rank, behind `deal`, and in it those of `kept`: by expert,
        their places so far."""
        packed, count = self._packed, len(self._own)
        assert packed is not None, "not loaded"
        size, hidden = len(self._inner.held), len(self._hidden.held)
        dtype, device = self._gate_up.dtype, self._device
        self._gate_up = torch.empty(count, 2 * size, hidden, dtype=dtype, device=device)
        self._down = torch.empty(count, hidden, size, dtype=dtype, device=device)
        for expert, place in kept.items():
            gate_up, down = packed.weights(place)
            self._gate_up[expert - self._own.start].copy_(gate_up)
            self._down[expert - self._own.start].copy_(down)

    def pack(self, kernels: Kernels) -> None:
        """Hand the weights to the kernels, once all are read."""
        self._router.pack(kernels)
        self.pack_experts(kernels)

    def pack_experts(self, kernels: Kernels) -> None:
        """The same of the experts alone."""
        self._packed = kernels.experts(self._gate_up, self._down)
        self._gate_up = unfilled(self._gate_up, "meta")
        self._down = unfilled(self._down, "meta")

    def checkpoint_tensors(self, prefix: str) -> dict[str, Stored]:
        """Checkpoint name -> where it goes; `prefix` is the block's."""
        router = self._router.checkpoint_tensors(prefix, ("gate",))
        return router | self.expert_tensors(prefix, frozenset())

    def expert_tensors(self, prefix: str, kept: Set[int]) -> dict[str, Stored]:
        """The same of the experts alone, without those of `kept`."""
        names, hidden, inner = self._experts.names, self._hidden, self._inner
        tensors: dict[str, Stored] = {}
        for place, index in enumerate(self._first_held):
            if index in kept:
                continue
            expert = f"{prefix}experts.{index}."
            gate_up, down = self._gate_up[place], self._down[place]
            tensors |= by_name(gate_up, expert, names.gate_up, rows=(inner, inner), columns=hidden)
            tensors |= by_name(down, expert, (names.down,), rows=(hidden,), columns=inner)
        return tensors


class DealtExperts:
    """The experts of a layer that a rank has from now on; a WeightGroup. Those that it had are
    copied in memory, the others read: old and new weights are there at once of this layer alone."""

    def __init__(self, block: ExpertMlps, prefix: str, kept: Mapping[int, int]) -> None:
        """`kept`: see ExpertMlps.take_over."""
        self._block, self._prefix, self._kept = block, prefix, kept

    def checkpoint_tensors(self) -> dict[str, Stored]:
        """Checkpoint name -> where it goes."""
        return self._block.expert_tensors(self._prefix, self._kept.keys())

    def allocate(self, device: torch.device) -> None:
        """Memory, and in it what this rank has had."""
        self._block.take_over(self._kept)

    def pack(self, kernels: Kernels) -> None:
        """Hand the weights to the kernels, once all are read."""
        self._block.pack_experts(kernels)


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
    places: Tensor,
    shares: Sequence[range],
    group: ExpertGroup,
    compute: Compute,
) -> Tensor:
    """What the experts of all ranks make of this rank's rows `x` [rows, hidden], of which each
    chose [rows, per_token] experts: [rows, hidden], summed as one rank would. `places`: the slots
    that these are in; `shares`: the slots of each rank; `compute`: what those of this one do, by
    their numbers here. All ranks of `group` call it at the same time, with any number of rows, 0
    included. The host waits for the device: it has to know how many rows come."""
    rows, per_token = chosen.shape
    flat, own = places.reshape(-1), shares[group.rank]
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
