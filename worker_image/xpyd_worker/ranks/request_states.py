"""What a rank keeps of each sequence between steps, and the update that every step ends with.

Every stage has it, since every stage needs to know where a sequence is: the first one embeds the
token that the last one drew, and all rotate by positions. The update is the same on all of them:
from what was drawn (Sampled), for whom, and how many tokens entered the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from xpyd_worker.engine.executor import DRAWN_BEFORE
from xpyd_worker.parallel.api import Sampled
from xpyd_worker.ranks.step_decoder import State
from xpyd_worker.runner.device import CPU
from xpyd_worker.runner.tensors import numbers


@dataclass(frozen=True)
class Fields:
    """By slot, each int64 [slots] but for `all_token_ids` int32 [slots, most tokens].

    `total_len` tokens of a sequence are known, `num_computed` have gone through the forward, and of
    its `prefill_len` (the prompt's) `computed_prefill`. `last_sampled` is what was drawn last.
    """

    last_sampled: Tensor
    all_token_ids: Tensor
    total_len: Tensor
    num_computed: Tensor
    prefill_len: Tensor
    computed_prefill: Tensor


def make_fields(slots: int, most_tokens: int, device: torch.device) -> Fields:
    """All zero. The history's pages are taken when they are first written to."""

    def column() -> Tensor:
        return torch.zeros(slots, dtype=torch.int64, device=device)

    history = torch.zeros((slots, most_tokens), dtype=torch.int32, device=device)
    return Fields(column(), history, column(), column(), column(), column())


def post_update(fields: Fields, slots: Tensor, query_lens: Tensor, sampled: Sampled) -> None:
    """After a step: rows `slots` int64 [requests], each once, of which `query_lens` int64
    [requests] tokens entered its forward, have `sampled` drawn for them."""
    tokens, num_sampled, num_rejected = sampled
    num_sampled = num_sampled.to(torch.int64)
    width = torch.arange(tokens.shape[1])[None]
    is_drawn = width < num_sampled[:, None]
    last = tokens.gather(1, (num_sampled - 1).clamp(min=0)[:, None])[:, 0]
    fields.last_sampled[slots] = torch.where(num_sampled > 0, last, fields.last_sampled[slots])
    at = fields.total_len[slots][:, None] + width
    is_kept = is_drawn & (at < fields.all_token_ids.shape[1])
    rows = slots[:, None].expand_as(at)[is_kept]
    fields.all_token_ids[rows, at[is_kept]] = tokens[is_kept].to(torch.int32)
    fields.total_len[slots] += num_sampled
    fields.num_computed[slots] += query_lens - num_rejected
    computed = fields.computed_prefill[slots] + query_lens
    fields.computed_prefill[slots] = torch.minimum(computed, fields.prefill_len[slots])


class RequestStates:
    """The fields of one rank, and what its StepDecoder reads of them. One thread."""

    def __init__(self, slots: int, most_tokens: int) -> None:
        """`slots`: the StepEncoder's; `most_tokens`: of a sequence, the model's length."""
        self.slots = slots
        self.fields = make_fields(slots, most_tokens, CPU)
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
