"""What a rank keeps of each sequence between steps, and the update that every step ends with.

Every stage has it, since every stage needs to know where a sequence is: the first one embeds the
token that the last one drew, and all rotate by positions. The update is the same on all of them:
from what was drawn (Sampled), for whom, and how many tokens entered the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xpyd_worker.engine.executor import DRAWN_BEFORE
from xpyd_worker.parallel.api import Sampled
from xpyd_worker.ranks.step_decoder import State
from xpyd_worker.runner.tensors import numbers, to_ints


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
        self.fields = make_fields(slots, most_tokens, torch.device("cpu"))

    def begin(
        self, slot: int, *, start: int, tokens: Sequence[int], before: Sequence[int], prompt: int
    ) -> None:
        """See States."""
        fields = self.fields
        fields.num_computed[slot] = start
        fields.prefill_len[slot] = prompt
        fields.computed_prefill[slot] = min(start, prompt)
        fields.total_len[slot] = start
        fields.all_token_ids[slot, : len(before)] = torch.tensor(before, dtype=torch.int32)
        if DRAWN_BEFORE in tokens:
            fields.total_len[slot] = start + 1
        else:
            self.extend(slot, tokens)

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """See States."""
        at, end = self._total_len(slot), self._total_len(slot) + len(tokens)
        self.fields.all_token_ids[slot, at:end] = torch.tensor(tokens, dtype=torch.int32)
        self.fields.total_len[slot] = end

    def look(self, slots: Sequence[int]) -> list[State]:
        """See States."""
        rows = numbers(slots, torch.int64, torch.device("cpu"))
        computed = to_ints(self.fields.num_computed[rows])
        return list(map(State, computed, to_ints(self.fields.last_sampled[rows])))

    def tokens(self, slot: int, end: int) -> list[int]:
        """See States."""
        return to_ints(self.fields.all_token_ids[slot, :end])

    def post_update(
        self, slots: Sequence[int], query_lens: Sequence[int], sampled: Sampled | None
    ) -> None:
        """A step is over in which these sequences had so many tokens; `sampled` was drawn for them,
        None: nothing."""
        cpu = torch.device("cpu")
        if sampled is None:
            none = torch.zeros(len(slots), dtype=torch.int32)
            sampled = Sampled(torch.zeros((len(slots), 1), dtype=torch.int64), none, none)
        post_update(
            self.fields,
            numbers(slots, torch.int64, cpu),
            numbers(query_lens, torch.int64, cpu),
            sampled,
        )

    def _total_len(self, slot: int) -> int:
        return int(self.fields.total_len[slot])
