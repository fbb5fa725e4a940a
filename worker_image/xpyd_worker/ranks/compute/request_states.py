"""What a rank keeps of each sequence between steps, and the update that every step ends with.

Every stage has it, since every stage needs to know where a sequence is: the first one embeds the
token that the last one drew, and all rotate by positions. The update is the same on all of them:
from what was drawn (Sampled), for which, and how many tokens entered the forward. It must not know
the messages or the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xpyd_worker.engine.executor import DRAWN_BEFORE
from xpyd_worker.kernels.post_update import Fields, Sampled, make_fields, post_update
from xpyd_worker.ranks.step.decoder import State
from xpyd_worker.runner.device import CPU, Device, Mark
from xpyd_worker.runner.runner import DeviceDraw
from xpyd_worker.runner.tensors import numbers, put_ints

Update = Callable[[Fields, Tensor, Tensor, Sampled], None]


class RequestStates:
    """The fields of one rank, and what its StepDecoder reads of them. One thread."""

    def __init__(self, slots: int, most_tokens: int, *, pinned: bool = False) -> None:
        """`slots`: the StepEncoder's; `most_tokens`: of a sequence, the model's length. `pinned`:
        see make_fields."""
        self.slots = slots
        self.fields = make_fields(slots, most_tokens, pinned=pinned)
        # The same memory: single numbers go in and out of it in a fraction of a tensor's time.
        self._total_len = _numbers_of(self.fields.total_len)
        self._num_computed = _numbers_of(self.fields.num_computed)
        self._prefill_len = _numbers_of(self.fields.prefill_len)
        self._computed_prefill = _numbers_of(self.fields.computed_prefill)
        self._last_sampled = _numbers_of(self.fields.last_sampled)
        self._all_token_ids = _numbers_of(self.fields.all_token_ids)

    def begin(
        self, slot: int, *, start: int, tokens: Sequence[int], before: Sequence[int], prompt: int
    ) -> None:
        """See States."""
        self._num_computed[slot] = start
        self._prefill_len[slot] = prompt
        self._computed_prefill[slot] = min(start, prompt)
        self._all_token_ids[slot, : len(before)] = before
        self._total_len[slot] = start
        if DRAWN_BEFORE in tokens:
            self._total_len[slot] = start + 1
        else:
            self.extend(slot, tokens)

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """See States."""
        at = int(self._total_len[slot])
        self._all_token_ids[slot, at : at + len(tokens)] = tokens
        self._total_len[slot] = at + len(tokens)

    def look(self, slots: Sequence[int]) -> list[State]:
        """See States."""
        computed = self._num_computed[slots].tolist()
        return list(map(State, computed, self._last_sampled[slots].tolist()))

    def tokens(self, slot: int, end: int) -> list[int]:
        """See States."""
        return self._all_token_ids[slot, :end].tolist()

    def post_update(
        self, slots: Sequence[int], query_lens: Sequence[int], sampled: Sampled | None
    ) -> None:
        """A step is over in which these sequences had so many tokens; `sampled` was drawn for them,
        None: nothing."""
        if sampled is None:
            none = torch.zeros(len(slots), dtype=torch.int32)
            sampled = Sampled(torch.zeros((len(slots), 1), dtype=torch.int64), none, none)
        post_update(
            self.fields,
            numbers(slots, torch.int64, CPU),
            numbers(query_lens, torch.int64, CPU),
            sampled,
        )


def _numbers_of(tensor: Tensor) -> npt.NDArray[np.int64]:
    return tensor.numpy()


# --- a last stage on a GPU


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
    """RequestStates that are updated behind the draw, on its stream. The host launches the next
    step without a wait: of a sequence in a step under way it knows where that will end, and of
    which token only that the device draws it. What it reads besides is of sequences whose steps are
    over. `begin` and `tokens` are for slots without an update under way, and so is
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
