"""Where each sequence of a rank is, as tensors, and the update that every step ends with.

In plain torch, for the host; `kernels.gpu.post_update` is the same in Triton, on the stream behind
the draw. Between a rank's RequestStates and the devices. It must not know messages or groups.

One step is launched ahead of the device: see docs/adr/0022.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Sampled(NamedTuple):
    """What one step drew for its requests: `tokens` int64 [requests, most tokens of a step], and
    how many of each row count, `num_sampled` int32 [requests]; `num_rejected` int32 [requests] of
    the tokens that entered the step's forward turned out wrong (speculation; 0 without)."""

    tokens: Tensor
    num_sampled: Tensor
    num_rejected: Tensor


@dataclass(frozen=True)
class Fields:
    """What is known of each slot's sequence, on the host, each int64 [slots] but for
    `all_token_ids` int32 [slots, most tokens].

    `total_len` tokens of a sequence are known, `num_computed` have gone through the forward, and of
    its `prefill_len` (the prompt's) `computed_prefill`. `last_sampled` is what was drawn last.
    What penalties count is in the history, behind the prompt.
    """

    last_sampled: Tensor
    all_token_ids: Tensor
    total_len: Tensor
    num_computed: Tensor
    prefill_len: Tensor
    computed_prefill: Tensor


def make_fields(slots: int, most_tokens: int, *, pinned: bool) -> Fields:
    """Make fields of zeros. `pinned`: where a GPU's kernels write to them, too; else the history's
    pages are taken when they are first written to."""

    def column() -> Tensor:
        return torch.zeros(slots, dtype=torch.int64, pin_memory=pinned)

    history = torch.zeros((slots, most_tokens), dtype=torch.int32, pin_memory=pinned)
    return Fields(column(), history, column(), column(), column(), column())


def post_update(fields: Fields, slots: Tensor, query_lens: Tensor, sampled: Sampled) -> None:
    """Update the fields after a step: rows `slots` int64 [requests], each once, of which
    `query_lens` int64 [requests] tokens entered its forward, have `sampled` drawn for them. What a
    history has no room for is left out: the last token of a sequence as long as the model
    allows."""
    tokens, num_sampled, num_rejected = sampled
    most_tokens = fields.all_token_ids.shape[1]
    total = fields.total_len[slots]
    for column in range(tokens.shape[1]):
        drew = num_sampled > column
        rows, drawn, at = slots[drew], tokens[drew, column], total[drew] + column
        fields.last_sampled[rows] = drawn
        # Behind the history's end the place before it is written again with what it has.
        end = at >= most_tokens
        at.clamp_(max=most_tokens - 1)
        kept = fields.all_token_ids[rows, at]
        fields.all_token_ids[rows, at] = torch.where(end, kept, drawn.to(torch.int32))
    fields.total_len[slots] = total + num_sampled
    fields.num_computed[slots] += query_lens - num_rejected
    fields.computed_prefill[slots] = torch.minimum(
        fields.computed_prefill[slots] + query_lens, fields.prefill_len[slots]
    )
