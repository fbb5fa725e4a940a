"""Attention of one flat batch over a paged KV cache, in plain torch.

`plan_attention` turns block tables into index tensors once per step; `store_kv` and
`paged_attention` run in every layer. The cache of a layer is [num_blocks, kv_heads, block_size,
2 * head_dim], K then V per token. A sequence attends to its own tokens only, whatever stands in the
unused slots of its blocks (NaN included). This file is the seam behind which a fused operator can
stand: it must not know weights, requests or sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

# A group of decoding sequences gathers at most so many bytes of KV per layer: more falls out of the
# cache between the gather and its use (and is given back to the system after each layer).
_GATHER_BYTES = 4 << 20
# Sequences of one group differ by at most so many blocks, or by a quarter: padding is wasted work.
_PADDING_BLOCKS = 4

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class KvShape:
    """Shape of one layer's paged cache."""

    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.kv_heads * self.block_size * 2 * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Span:
    """One sequence's share of the flat batch: `count` rows at positions start, start + 1, ..."""

    start: int
    count: int
    block_ids: Sequence[int]


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences with one new token each, in neighbouring rows, padded to the longest: `tokens`.

    `gather` indexes the cache as rows of (block, head). `mask` [count, 1, 1, tokens] is 0 or -inf.
    `unused` are the gathered token rows that belong to no token: zeroed, for 0 * NaN is NaN. Both
    are None where all sequences have the same length.
    """

    first_row: int
    count: int
    tokens: int
    gather: Tensor
    mask: Tensor | None
    unused: Tensor | None


@dataclass(frozen=True)
class PrefillPart:
    """One sequence with several new tokens. `gather` and `mask` are None when it has no earlier
    tokens: its keys and values are then the step's own."""

    first_row: int
    count: int
    tokens: int
    gather: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """What every layer of one step needs. `slots` indexes the cache as rows of (block, head,
    offset), for each row of the batch and each KV head."""

    shape: KvShape
    slots: Tensor
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillPart, ...]


def plan_attention(spans: Sequence[Span], shape: KvShape) -> AttentionPlan:
    """Index tensors for a flat batch whose rows are the spans' one behind the other.

    Any order of spans is right; with one-token spans first and sorted by length the groups are few.
    """
    slots: list[Ints] = []
    decode: list[DecodeGroup] = []
    prefill: list[PrefillPart] = []
    row = 0
    for run in _runs(spans, shape):
        if run[0].count == 1:
            group, group_slots = _decode_group(run, row, shape)
            decode.append(group)
            slots.append(group_slots)
        else:
            prefill.append(_prefill_part(run[0], row, shape))
            slots.append(_slots(run[0], shape))
        row += sum(span.count for span in run)
    return AttentionPlan(shape, _tensor(np.concatenate(slots)), tuple(decode), tuple(prefill))


def store_kv(cache: Tensor, kv: Tensor, plan: AttentionPlan) -> None:
    """Write the step's keys and values [rows, kv_heads, 2 * head_dim] to one layer."""
    width = 2 * plan.shape.head_dim
    cache.view(-1, width).index_copy_(0, plan.slots, kv.view(-1, width))


def paged_attention(query: Tensor, kv: Tensor, cache: Tensor, plan: AttentionPlan) -> Tensor:
    """Attention output [rows, heads, head_dim] for queries of that shape.

    `kv` are the step's own keys and values, already stored in `cache`.
    """
    rows, heads, head_dim = query.shape
    groups = query.view(rows, plan.shape.kv_heads, heads // plan.shape.kv_heads, head_dim)
    if len(plan.decode) == 1 and not plan.prefill:
        return _decode_attention(groups, cache, plan.decode[0], plan.shape).reshape(query.shape)
    out = torch.empty_like(groups)
    for group in plan.decode:
        part = slice(group.first_row, group.first_row + group.count)
        out[part] = _decode_attention(groups[part], cache, group, plan.shape)
    for prefill in plan.prefill:
        part = slice(prefill.first_row, prefill.first_row + prefill.count)
        out[part] = _prefill_attention(groups[part], kv[part], cache, prefill, plan.shape)
    return out.view(query.shape)


def _decode_attention(query: Tensor, cache: Tensor, group: DecodeGroup, shape: KvShape) -> Tensor:
    """[count, kv_heads, n, head_dim] -> the same. The n heads of a KV head are SDPA's rows."""
    width = 2 * shape.head_dim
    gathered = cache.view(-1, shape.block_size * width).index_select(0, group.gather)
    if group.unused is not None:
        gathered.view(-1, width).index_fill_(0, group.unused, 0)
    context = gathered.view(group.count, shape.kv_heads, -1, width)[:, :, : group.tokens]
    keys, values = context[..., : shape.head_dim], context[..., shape.head_dim :]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=group.mask)


def _prefill_attention(
    query: Tensor, kv: Tensor, cache: Tensor, part: PrefillPart, shape: KvShape
) -> Tensor:
    """[count, kv_heads, n, head_dim] -> the same, causal.

    The n query heads of a KV head are SDPA's batch, over which K and V are broadcast uncopied.
    """
    width = 2 * shape.head_dim
    if part.gather is None:
        context = kv.transpose(0, 1)
    else:
        gathered = cache.view(-1, shape.block_size * width).index_select(0, part.gather)
        context = gathered.view(shape.kv_heads, -1, width)[:, : part.tokens]
    context = context.expand(query.shape[2], -1, -1, -1)
    out = F.scaled_dot_product_attention(
        query.permute(2, 1, 0, 3),
        context[..., : shape.head_dim],
        context[..., shape.head_dim :],
        attn_mask=part.mask,
        is_causal=part.mask is None,
    )
    return out.permute(2, 1, 0, 3)


def _blocks(span: Span, shape: KvShape) -> int:
    """Blocks that hold the sequence up to its last new token."""
    return -(-(span.start + span.count) // shape.block_size)


def _slots(span: Span, shape: KvShape) -> Ints:
    """Cache rows (block, head, offset) of the span's tokens: [count * kv_heads]."""
    positions = np.arange(span.start, span.start + span.count)
    table = np.asarray(span.block_ids, dtype=np.int64)
    heads = np.arange(shape.kv_heads)
    block_heads = table[positions // shape.block_size, None] * shape.kv_heads + heads
    offsets = positions[:, None] % shape.block_size
    return (block_heads * shape.block_size + offsets).reshape(-1)


def _runs(spans: Sequence[Span], shape: KvShape) -> Iterator[list[Span]]:
    """Cut the batch into parts: neighbouring one-token spans of similar length whose gather stays
    small, and each longer span alone."""
    run: list[Span] = []
    shortest = longest = 0
    for span in spans:
        blocks = _blocks(span, shape)
        low, high = min(shortest, blocks), max(longest, blocks)
        fits = (
            span.count == 1
            and high - low <= max(_PADDING_BLOCKS, low // 4)
            and high * (len(run) + 1) * shape.block_bytes <= _GATHER_BYTES
        )
        if run and not (fits and run[0].count == 1):
            yield run
            run = []
        shortest, longest = (low, high) if run else (blocks, blocks)
        run.append(span)
    if run:
        yield run


def _decode_group(
    spans: Sequence[Span], first_row: int, shape: KvShape
) -> tuple[DecodeGroup, Ints]:
    """The group and the cache rows (block, head, offset) of its new tokens."""
    count, tokens = len(spans), max(span.start for span in spans) + 1
    blocks = -(-tokens // shape.block_size)
    tables = np.zeros((count, blocks), dtype=np.int64)
    for index, span in enumerate(spans):
        used = _blocks(span, shape)
        tables[index, :used] = span.block_ids[:used]
    heads = np.arange(shape.kv_heads)
    starts = np.array([span.start for span in spans])
    last = tables[np.arange(count), starts // shape.block_size]
    block_heads = last[:, None] * shape.kv_heads + heads
    slots = block_heads * shape.block_size + (starts % shape.block_size)[:, None]
    gather = (tables[:, None, :] * shape.kv_heads + heads[:, None]).reshape(-1)
    mask = unused = None
    if int(starts.min()) + 1 < tokens:
        is_unused = np.arange(blocks * shape.block_size) > starts[:, None]
        padding = np.broadcast_to(is_unused[:, None], (count, shape.kv_heads, is_unused.shape[1]))
        unused = _tensor(np.flatnonzero(padding))
        mask = torch.zeros(count, 1, 1, tokens, dtype=shape.dtype)
        mask[:, 0, 0].masked_fill_(_tensor(is_unused[:, :tokens]), float("-inf"))
    group = DecodeGroup(first_row, count, tokens, _tensor(gather), mask, unused)
    return group, slots.reshape(-1)


def _prefill_part(span: Span, first_row: int, shape: KvShape) -> PrefillPart:
    tokens = span.start + span.count
    if span.start == 0:
        return PrefillPart(first_row, span.count, tokens, None, None)
    table = np.asarray(span.block_ids[: _blocks(span, shape)], dtype=np.int64)
    heads = np.arange(shape.kv_heads)[:, None]
    gather = (table[None, :] * shape.kv_heads + heads).reshape(-1)
    mask = torch.full((span.count, tokens), float("-inf"), dtype=shape.dtype)
    mask.triu_(span.start + 1)
    return PrefillPart(first_row, span.count, tokens, _tensor(gather), mask)


def _tensor(array: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType] - untyped in torch
