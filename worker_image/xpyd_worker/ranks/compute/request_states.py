"""What a rank keeps of each sequence between steps, and the update that every step ends with.

Every stage has it, since every stage needs to know where a sequence is: the first one embeds the
token that the last one drew, and all rotate by positions. The update is the same on all of them:
from what was drawn (Sampled), for which, and how many tokens entered the forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xpyd_worker.engine.executor import DRAWN_BEFORE
from xpyd_worker.kernels.post_update import Sampled, make_fields, post_update
from xpyd_worker.ranks.step.decoder import State
from xpyd_worker.runner.device import CPU
from xpyd_worker.runner.tensors import numbers


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
