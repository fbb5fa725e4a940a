"""Has the experts of a rank's layers move to where their load asks for them, while steps run.

At the step that says so the ranks of an expert group add up what they counted. Each of them then
plans for itself (placement.py): one layer a step, and of that layer so many experts' weights go to
other ranks a step as a bound allows, so that no step waits long. All ranks do the same behind the
same step, or the first exchange says who does not. It must not know requests or processes.
See docs/adr/0126.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor

from xpyd_worker.engine.eplb import ExpertTurn
from xpyd_worker.engine.executor import LayerMoves
from xpyd_worker.model.experts import ExpertMlps, Slots
from xpyd_worker.model.placement import Placement, balanced, imbalance, towards, writes
from xpyd_worker.parallel.api import ExpertGroup, GroupError

_MOVED_BYTES = 32 << 20
"""Weights that a rank gets in one step, and gives, but for one expert that is larger: a few
milliseconds over memory, one over NVLink."""


class ExpertBalancer:
    """Moves the experts of one rank. The thread that runs its steps calls it, but for `moves`."""

    def __init__(
        self,
        blocks: Sequence[ExpertMlps],
        counts: Tensor,
        group: ExpertGroup,
        *,
        moved_bytes: int = _MOVED_BYTES,
    ) -> None:
        """`blocks`: those of the layers that are here, whose experts move; `counts` [blocks,
        experts]: how many tokens chose each since the start, of those that this rank counts."""
        self._blocks, self._counts, self._group = blocks, counts, group
        self._moved_bytes = moved_bytes
        self._window_begins = counts.clone()
        self._round = 0
        # Layers to be looked at yet, the one that experts move in first; its goal.
        self._left: deque[int] = deque()
        self._goal: Placement | None = None
        self._tokens: list[list[int]] = []
        self.moves = (LayerMoves(),) * len(blocks)
        """By layer. Any thread: replaced whole."""

    def begin_step(self, turn: ExpertTurn) -> None:
        """Before the step's forward. GroupError where another rank does not do the same."""
        if turn == ExpertTurn.COUNT:
            self._window_begins = self._counts.clone()
        elif turn == ExpertTurn.PLACE:
            counted = self._counts - self._window_begins
            self._window_begins = self._counts.clone()
            if not self._left:
                self._round += 1
                self._tokens = self._of_all_ranks(counted)
                self._left.extend(range(len(self._blocks)))
        if self._left:
            self._go_on(self._left[0])

    def _go_on(self, layer: int) -> None:
        block = self._blocks[layer]
        slots = _slots(block)
        if self._goal is None:
            self._goal = self._planned(layer, slots.placement)
        if self._goal != slots.placement:
            most = max(1, self._moved_bytes // block.expert_bytes)
            after = towards(slots.placement, self._goal, most)
            self._move(block, slots.placement, after)
            slots.lay(after)
        if self._goal == slots.placement:
            self._left.popleft()
            self._goal = None

    def _planned(self, layer: int, now: Placement) -> Placement:
        tokens = self._tokens[layer]
        goal = balanced(now, tokens)
        before = self.moves[layer]
        moves = LayerMoves(
            before.placements + (goal != now),
            before.moved + len(writes(now, goal)),
            imbalance(now, tokens),
            imbalance(goal, tokens),
        )
        self.moves = (*self.moves[:layer], moves, *self.moves[layer + 1 :])
        return goal

    def _of_all_ranks(self, counted: Tensor) -> list[list[int]]:
        """The sums over all ranks, behind a head by which they know that they are together."""
        group, placements = self._group, [_slots(block).placement for block in self._blocks]
        own = [self._round, crc32(repr(placements).encode())]
        head = torch.tensor(own, dtype=torch.int64, device=counted.device)
        row = torch.cat((head, counted.reshape(-1))).unsqueeze(0)
        ones = [1] * group.size
        rows = group.all_to_all(row.repeat(group.size, 1), ones, ones)
        heads = cast("list[list[int]]", cast("Any", rows[:, :2]).tolist())
        for rank, found in enumerate(heads):
            if found != own:
                raise GroupError(
                    f"rank {rank} of the expert group places experts for the {found[0]}. time, "
                    f"rank {group.rank} for the {own[0]}., or they lie elsewhere there"
                )
        total = rows[:, 2:].sum(0).view(counted.shape)
        return cast("list[list[int]]", cast("Any", total).tolist())

    def _move(self, block: ExpertMlps, before: Placement, after: Placement) -> None:
        """Exchange what changes between two placements; all ranks know what that is."""
        group, rank, changes = self._group, self._group.rank, writes(before, after)
        gives = [one for one in changes if one.source_rank == rank]
        gets = sorted((one for one in changes if one.rank == rank), key=lambda one: one.source_rank)
        ranks = range(group.size)
        rows = group.all_to_all(
            block.taken([one.source_slot for one in gives]),
            [sum(one.rank == other for one in gives) for other in ranks],
            [sum(one.source_rank == other for one in gets) for other in ranks],
        )
        for one, row in zip(gets, rows, strict=True):
            block.put(one.slot, row)


def _slots(block: ExpertMlps) -> Slots:
    assert block.slots is not None, "its experts move"
    return block.slots
