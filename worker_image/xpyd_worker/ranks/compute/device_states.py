"""RequestStates of a last stage on a GPU, which are updated behind the draw, on its stream.

The host launches the next step without a wait: of a sequence in a step under way it knows where
that will end, and of which token only that the device draws it. What it reads besides is of
sequences whose steps are over. It must not know the messages or the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from xpyd_worker.kernels.post_update import Fields, Sampled
from xpyd_worker.ranks.compute.request_states import RequestStates
from xpyd_worker.ranks.step.decoder import State
from xpyd_worker.runner.device import Device, Mark
from xpyd_worker.runner.runner import DeviceDraw
from xpyd_worker.runner.tensors import put_ints

Update = Callable[[Fields, Tensor, Tensor, Sampled], None]


class Row(NamedTuple):
    """One sequence's share of a step: `num_tokens` entered the forward, `place` is its token's
    among those that the step draws; None where none is drawn for it."""

    slot: int
    num_tokens: int
    place: int | None


@dataclass(frozen=True)
class UnderWay:
    """An update that is enqueued: over when `mark` is reached. `ends`: by slot, how many tokens are
    computed then."""

    ends: dict[int, int]
    mark: Mark


class DeviceStates(RequestStates):
    """See RequestStates. `begin` and `tokens` are for slots without an update under way, and so is
    what `look` says of the token drawn last."""

    def __init__(self, slots: int, most_tokens: int, *, device: Device, update: Update) -> None:
        """`update`: post_update on that device."""
        self._device = device
        super().__init__(slots, most_tokens, pinned=device.torch_device.type == "cuda")
        self._update = update
        # Where the newest step under way with a slot ends.
        self._ends: dict[int, int] = {}

    def look(self, slots: Sequence[int]) -> list[State]:
        """See States."""
        ends = self._ends
        found = super().look(slots)
        for at, slot in enumerate(slots):
            if slot in ends:
                found[at] = found[at]._replace(num_computed=ends[slot])
        return found

    def enqueue(self, rows: Sequence[Row], starts: Sequence[int], draw: DeviceDraw) -> UnderWay:
        """A step is enqueued in which `rows` began at `starts`: update them behind it."""
        with self._device.use(), torch.inference_mode():
            slots, lens, sampled = self._on_device(rows, draw)
            self._update(self.fields, slots, lens, sampled)
            mark = self._device.mark()
        ends = {row.slot: start + row.num_tokens for row, start in zip(rows, starts, strict=True)}
        self._ends.update(ends)
        return UnderWay(ends, mark)

    def settle(self, update: UnderWay) -> None:
        """The oldest update under way is over."""
        for slot, end in update.ends.items():
            # A later step has gone further.
            if self._ends.get(slot) == end:
                del self._ends[slot]

    def _on_device(self, rows: Sequence[Row], draw: DeviceDraw) -> tuple[Tensor, Tensor, Sampled]:
        places = [0 if row.place is None else row.place for row in rows]
        asks = [int(row.place is not None) for row in rows]
        lists = [[row.slot for row in rows], [row.num_tokens for row in rows], places, asks]
        slots, lens, at, asking = put_ints(lists, self._device.torch_device)
        none = torch.zeros_like(asking, dtype=torch.int32)
        if draw.tokens is None or not any(asks):
            return slots, lens, Sampled(torch.zeros_like(slots)[:, None], none, none)
        tokens = draw.tokens.index_select(0, at)
        # A row whose numbers were not finite has no token.
        counts = (asking * (tokens >= 0)).to(torch.int32)
        return slots, lens, Sampled(tokens[:, None], counts, none)
