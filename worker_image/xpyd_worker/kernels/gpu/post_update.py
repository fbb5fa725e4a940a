# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# ruff: noqa: ANN001
"""The update that every step of a rank ends with, on the stream: one program for a request.

Basic typing: Triton's language is untyped. The fields stand in pinned memory of the host, which the
kernel writes to over the bus: a few numbers for each request. So the host has them when the step's
mark is reached, without a copy, and the history takes none of the device's memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from xpyd_worker.kernels.post_update import Fields, Sampled


@triton.jit
def _post_update(
    last_sampled,
    all_token_ids,
    total_len,
    num_computed,
    prefill_len,
    computed_prefill,
    slots,
    query_lens,
    tokens,
    num_sampled,
    num_rejected,
    most_tokens,
    width,
    columns: tl.constexpr,
) -> None:
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    query_len = tl.load(query_lens + request)
    count = tl.load(num_sampled + request).to(tl.int64)
    # What nothing was drawn for is left alone: the host may be writing the next tokens of a prompt.
    if count > 0:
        total = tl.load(total_len + slot)
        column = tl.arange(0, columns)
        row = tokens + request.to(tl.int64) * width
        drawn = tl.load(row + column, mask=column < count, other=0)
        at = total + column
        place = all_token_ids + slot * most_tokens + at
        tl.store(place, drawn.to(tl.int32), mask=(column < count) & (at < most_tokens))
        tl.store(last_sampled + slot, tl.load(row + count - 1))
        tl.store(total_len + slot, total + count)
    rejected = tl.load(num_rejected + request).to(tl.int64)
    tl.store(num_computed + slot, tl.load(num_computed + slot) + query_len - rejected)
    computed = tl.load(computed_prefill + slot) + query_len
    tl.store(computed_prefill + slot, tl.minimum(computed, tl.load(prefill_len + slot)))


def post_update(
    fields: Fields, slots: torch.Tensor, query_lens: torch.Tensor, sampled: Sampled
) -> None:
    """See the twin in plain torch. `fields` are pinned, the rest is on the device; nothing waits
    for it."""
    requests, width = sampled.tokens.shape
    _post_update[(requests,)](
        fields.last_sampled,
        fields.all_token_ids,
        fields.total_len,
        fields.num_computed,
        fields.prefill_len,
        fields.computed_prefill,
        slots,
        query_lens,
        sampled.tokens.contiguous(),
        sampled.num_sampled,
        sampled.num_rejected,
        fields.all_token_ids.shape[1],
        width,
        columns=triton.next_power_of_2(width),
        num_warps=1,
    )
