"""Which rank has which expert of a layer in which slot: how that follows from the experts' load,
and by which moves one placement becomes another. Pure, and in whole numbers: every rank of an
expert group comes to the same answer by itself.

Each rank has the same number of slots. An expert may be on several ranks, never twice on one; its
rows are divided evenly over its copies. Nothing here knows tensors. See docs/adr/0126.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Placement = tuple[tuple[int, ...], ...]
"""The expert in each slot of each rank. Every expert is somewhere; none is twice on a rank."""
Ints = npt.NDArray[np.int64]

# The load of a copy is counted in these parts of a token, rounded down.
_PARTS_BITS = 20
# A placement is good enough when its busiest rank has so many parts of the mean more than the mean,
# and another one is worth moving weights for when its busiest rank has so much less: 1/50.
_TOLERANCE = 50
# A change of one or two slots that takes less than 1/200 of the mean from the busiest rank is none.
_LEAST_GAIN = 200
_TOO_MUCH = np.iinfo(np.int64).max


class Write(NamedTuple):
    """`rank` gets `expert` into `slot`, from `source_slot` of `source_rank`."""

    rank: int
    slot: int
    expert: int
    source_rank: int
    source_slot: int


def first_placement(experts: int, redundant: int, ranks: int) -> Placement:
    """Before any load is known: the experts in their order, then the first ones once more. Before:
    `redundant` is such that slots divide evenly, and no expert is more often than there are ranks
    (check_eplb)."""
    each = (experts + redundant) // ranks
    return tuple(
        tuple(slot % experts for slot in range(rank * each, (rank + 1) * each))
        for rank in range(ranks)
    )


def holders(placement: Placement, experts: int) -> list[list[int]]:
    """Where the copies of each expert are, by the slots' numbers over all ranks, ascending."""
    found: list[list[int]] = [[] for _ in range(experts)]
    for number, expert in enumerate(expert for slots in placement for expert in slots):
        found[expert].append(number)
    return found


def imbalance(placement: Placement, tokens: Sequence[int]) -> float:
    """The load of the busiest rank over the mean of all, at least 1; 1 without any load."""
    loads = _Layout(placement, tokens).loads
    total = int(loads.sum())
    return int(loads.max()) * len(placement) / total if total else 1.0


def balanced(placement: Placement, tokens: Sequence[int]) -> Placement:
    """A placement whose busiest rank has less to do under the load `tokens`, by expert, and that is
    few moves away; `placement` itself where none is worth its moves."""
    before = _Layout(placement, tokens)
    mean = int(before.loads.sum()) // len(placement)
    worth = mean // _TOLERANCE
    if before.busiest <= mean + worth:
        return placement
    found = [_improved(_Layout(placement, tokens))]
    if found[0].busiest > mean + worth:
        found.append(_improved(_recopied(_Layout(placement, tokens))))
    busiest = min(one.busiest for one in found)
    if busiest + worth >= before.busiest:
        return placement
    enough = [_aligned(placement, one.placement) for one in found if one.busiest <= busiest + worth]
    return min(enough, key=lambda one: len(writes(placement, one)))


def towards(placement: Placement, goal: Placement, most: int) -> Placement:
    """`placement` a part of the way to `goal`: a rank gets at most `most` experts, and gives at
    most as many, or more where an exchange cannot be divided. Where the two differ it gets nearer,
    and the result is a placement like any other: no expert is lost on the way."""
    now = [list(slots) for slots in placement]
    count = [0] * (1 + max(expert for slots in placement for expert in slots))
    for slots in placement:
        for expert in slots:
            count[expert] += 1
    sources = _Sources(placement)
    pending = [
        (rank, slot)
        for rank, slots in enumerate(goal)
        for slot, expert in enumerate(slots)
        if expert != placement[rank][slot]
    ]
    got = [0] * len(placement)
    moved = False
    for first in pending:
        chain = _chain(first, now, goal, count)
        gives = [sources.least_busy(goal[rank][slot]) for rank, slot in chain]
        fits = all(
            got[rank] + [one for one, _ in chain].count(rank) <= most for rank, _ in chain
        ) and all(sources.given[rank] + gives.count(rank) <= most for rank in gives)
        if not chain or (moved and not fits):
            continue
        moved = True
        for rank, slot in chain:
            count[now[rank][slot]] -= 1
            now[rank][slot] = goal[rank][slot]
            count[now[rank][slot]] += 1
            got[rank] += 1
            sources.take(now[rank][slot])
    return tuple(map(tuple, now))


def writes(before: Placement, after: Placement) -> list[Write]:
    """What makes `after` of `before`, all at once, by rank and slot. The ranks that give an expert
    take turns."""
    sources = _Sources(before)
    return [
        Write(rank, slot, expert, *sources.take(expert))
        for rank, slots in enumerate(after)
        for slot, expert in enumerate(slots)
        if expert != before[rank][slot]
    ]


class _Sources:
    """Who gives an expert to others: of the ranks that have it the one that gave the least."""

    def __init__(self, placement: Placement) -> None:
        self.given = [0] * len(placement)
        self._places: dict[int, list[tuple[int, int]]] = {}
        for rank, slots in enumerate(placement):
            for slot, expert in enumerate(slots):
                self._places.setdefault(expert, []).append((rank, slot))

    def least_busy(self, expert: int) -> int:
        """The rank that would give it next."""
        return min(self._places[expert], key=lambda place: self.given[place[0]])[0]

    def take(self, expert: int) -> tuple[int, int]:
        """Rank and slot, which has given it then."""
        rank, slot = min(self._places[expert], key=lambda place: self.given[place[0]])
        self.given[rank] += 1
        return rank, slot


def _chain(
    first: tuple[int, int], now: list[list[int]], goal: Placement, count: Sequence[int]
) -> list[tuple[int, int]]:
    """Slots that have to get their experts of `goal` together with `first`, so that none is lost:
    where the last copy of an expert would be overwritten, the slot that it is to go to, too."""
    found: list[tuple[int, int]] = []
    left = list(count)
    todo = [first]
    while todo:
        rank, slot = todo.pop()
        if now[rank][slot] == goal[rank][slot] or (rank, slot) in found:
            continue
        found.append((rank, slot))
        left[goal[rank][slot]] += 1
        lost = now[rank][slot]
        left[lost] -= 1
        if not left[lost]:
            todo.append(
                next(
                    (to, place)
                    for to, slots in enumerate(goal)
                    for place, expert in enumerate(slots)
                    if expert == lost
                )
            )
    return found


def _aligned(before: Placement, after: Placement) -> Placement:
    """`after` with what stays on a rank in the slots where it was."""
    found: list[tuple[int, ...]] = []
    for old, new in zip(before, after, strict=True):
        coming = iter([expert for expert in new if expert not in old])
        found.append(tuple(expert if expert in new else next(coming) for expert in old))
    return tuple(found)


class _Layout:
    """A placement under a load, to be changed slot by slot."""

    def __init__(self, placement: Placement, tokens: Sequence[int]) -> None:
        self.slots: Ints = np.array(placement, dtype=np.int64)
        self.parts: Ints = np.array(tokens, dtype=np.int64) << _PARTS_BITS
        self.look()

    def look(self) -> None:
        """See what the changes make."""
        ranks, experts = len(self.slots), len(self.parts)
        self.copies = np.bincount(self.slots.ravel(), minlength=experts)
        self.each = self.parts // np.maximum(self.copies, 1)
        self.weights: Ints = self.each[self.slots]
        self.loads: Ints = self.weights.sum(axis=1)
        self.has = np.zeros((ranks, experts), dtype=bool)
        self.has[np.arange(ranks)[:, None], self.slots] = True

    @property
    def busiest(self) -> int:
        """The load of the busiest rank."""
        return int(self.loads.max())

    @property
    def placement(self) -> Placement:
        return tuple(tuple(int(expert) for expert in slots) for slots in self.slots)


def _improved(layout: _Layout) -> _Layout:
    """Change what takes the most from the busiest rank, until that has hardly more than the mean or
    nothing takes much. Ends: each change leaves all ranks that it touches below what the busiest
    one had."""
    mean = int(layout.loads.sum()) // len(layout.slots)
    while True:
        busiest = int(layout.loads.argmax())
        load = int(layout.loads[busiest])
        if load <= mean + mean // _TOLERANCE:
            return layout
        copied, copies = _best_copy(layout, busiest)
        swapped, places = _best_swap(layout, busiest)
        if min(copied, swapped) + max(1, mean // _LEAST_GAIN) > load:
            return layout
        if copied <= swapped:
            expert, rank, slot = copies
            layout.slots[rank, slot] = expert
        else:
            own, rank, slot = places
            mine = layout.slots[busiest, own]
            layout.slots[busiest, own] = layout.slots[rank, slot]
            layout.slots[rank, slot] = mine
        layout.look()


def _best_swap(layout: _Layout, busiest: int) -> tuple[int, tuple[int, int, int]]:
    """The larger load of the two ranks behind the best exchange of a slot of the busiest rank for
    another's; and its slot, the other rank, and the slot there."""
    slots, loads = layout.slots, layout.loads
    mine = slots[busiest]
    gain = layout.weights[busiest][:, None, None] - layout.weights[None]
    after = np.maximum(loads[busiest] - gain, loads[None, :, None] + gain)
    is_new_here = ~layout.has[busiest][slots]
    is_new_there = ~layout.has[:, mine].T
    after[~(is_new_here[None] & is_new_there[:, :, None])] = _TOO_MUCH
    own, other = divmod(int(after.argmin()), slots.size)
    rank, slot = divmod(other, slots.shape[1])
    return int(after.min()), (own, rank, slot)


def _best_copy(layout: _Layout, busiest: int) -> tuple[int, tuple[int, int, int]]:
    """The largest load of the ranks that are touched when a copy of one expert takes the slot of a
    copy of another, for the best of those that concern the busiest rank; and the expert, the rank
    and the slot."""
    slots = layout.slots
    ranks, places = np.nonzero(layout.copies[slots] > 1)
    mine = slots[busiest]
    # A further copy of what the busiest rank has, anywhere; or of anything in its own slots.
    own = places[ranks == busiest]
    others = np.arange(len(layout.parts))
    expert = np.concatenate([np.repeat(mine, len(ranks)), np.repeat(others, len(own))])
    rank = np.concatenate([np.tile(ranks, len(mine)), np.full(len(own) * len(others), busiest)])
    slot = np.concatenate([np.tile(places, len(mine)), np.tile(own, len(others))])
    keep = ~layout.has[rank, expert]
    expert, rank, slot = expert[keep], rank[keep], slot[keep]
    if not len(expert):
        return _TOO_MUCH, (0, 0, 0)
    gone = slots[rank, slot]
    less = layout.parts[expert] // (layout.copies[expert] + 1)
    more = layout.parts[gone] // (layout.copies[gone] - 1)
    has_expert, has_gone = layout.has[:, expert].T, layout.has[:, gone].T
    after = layout.loads[None] + has_expert * (less - layout.each[expert])[:, None]
    after += has_gone * (more - layout.each[gone])[:, None]
    at = np.arange(len(rank))
    after[at, rank] += less - more
    has_expert[at, rank] = True
    largest = np.where(has_expert | has_gone, after, -1).max(axis=1)
    # What leaves the busiest rank as it is would help nobody.
    largest[~(has_expert | has_gone)[:, busiest]] = _TOO_MUCH
    best = int(largest.argmin())
    return int(largest[best]), (int(expert[best]), int(rank[best]), int(slot[best]))


def _recopied(layout: _Layout) -> _Layout:
    """With as many copies of each expert as leave the least load on the busiest copy, where slots
    of copies that are too many can take them."""
    ranks, experts = len(layout.slots), len(layout.parts)
    wanted = np.ones(experts, dtype=np.int64)
    for _ in range(layout.slots.size - experts):
        each = np.where(wanted < ranks, layout.parts // wanted, -1)
        wanted[each.argmax()] += 1
    while len(lacking := np.nonzero(layout.copies < wanted)[0]):
        expert = int(lacking[layout.each[lacking].argmax()])
        spare = (layout.copies > wanted)[layout.slots] & ~layout.has[:, expert][:, None]
        if not spare.any():
            wanted[expert] -= 1
            continue
        # From the rank that has the most to do without it.
        loads = np.where(spare, (layout.loads[:, None] - layout.weights), _TOO_MUCH)
        rank, slot = divmod(int(loads.argmin()), loads.shape[1])
        layout.slots[rank, slot] = expert
        layout.look()
    return layout
