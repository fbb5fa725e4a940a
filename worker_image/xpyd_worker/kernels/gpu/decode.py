# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# ruff: noqa: ANN001
"""Attention of one new token for each sequence over a paged cache, in parts of its context.

Basic typing: Triton's language is untyped. A step that decodes is bound by reading the cache, and a
few long sequences do not fill a device: each context is cut into `splits` parts whose results are
put together by a second kernel (Flash-Decoding: Dao, Haziza, Massa, Sizov 2023). The query heads
that share a KV head are the rows of one matrix, so its keys and values are read once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

# tl.dot takes no fewer rows, and no fewer columns.
_LEAST = 16
# Positions read at once; float32 takes twice the shared memory.
_TILE = 64
_TILE_FLOAT32 = 32
NO_WINDOW = 1 << 30


@triton.jit
def _decode(
    query,
    cache,
    block_tables,
    contexts,
    out,
    sums,
    kv_heads,
    max_blocks,
    scale,
    window,
    group: tl.constexpr,
    dim: tl.constexpr,
    rows: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    splits: tl.constexpr,
) -> None:
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(contexts + sequence)
    low = tl.maximum(context - window, 0)
    per_split = tl.cdiv(tl.cdiv(context - low, splits), tile) * tile
    begin = low + split * per_split
    end = tl.minimum(begin + per_split, context)

    member = tl.arange(0, rows)
    column = tl.arange(0, width)
    inside = (member < group)[:, None] & (column < dim)[None, :]
    head = (sequence * kv_heads + kv_head) * group + member
    asked = tl.load(query + head[:, None] * dim + column[None, :], mask=inside, other=0)
    best = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    gathered = tl.zeros((rows, width), tl.float32)
    for at in range(begin, end, tile):
        position = at + tl.arange(0, tile)
        is_seen = position < end
        table = block_tables + sequence * max_blocks + position // block_size
        block = tl.load(table, mask=is_seen, other=0).to(tl.int64)
        token = (block * kv_heads + kv_head) * block_size + position % block_size
        stored = cache + token[:, None] * (2 * dim) + column[None, :]
        # What is in unused slots is never loaded: 0 * NaN is NaN.
        is_loaded = is_seen[:, None] & (column < dim)[None, :]
        keys = tl.load(stored, mask=is_loaded, other=0)
        scores = tl.dot(asked, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        # Never -inf: each tile holds a position that is seen.
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        shrink = tl.exp2(best - new_best)
        values = tl.load(stored + dim, mask=is_loaded, other=0)
        gathered = gathered * shrink[:, None] + tl.dot(
            weights.to(values.dtype), values, input_precision="ieee"
        )
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
    # A part without positions leaves zeros, and no weight: below, the logarithm of nothing.
    divisor = tl.where(total > 0, total, 1.0)
    place = head * splits + split
    target = out + place[:, None] * dim + column[None, :]
    tl.store(target, (gathered / divisor[:, None]).to(out.dtype.element_ty), mask=inside)
    if splits > 1:
        log_sum = tl.where(total > 0, best + tl.log2(divisor), float("-inf"))
        tl.store(sums + place, log_sum, mask=member < group)


@triton.jit
def _put_together(
    parts, sums, out, dim: tl.constexpr, width: tl.constexpr, splits: tl.constexpr
) -> None:
    head = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, splits)
    column = tl.arange(0, width)
    log_sum = tl.load(sums + head * splits + split)
    best = tl.max(log_sum, 0)
    # A padded sequence has no part at all; -inf - -inf would be NaN.
    weight = tl.exp2(log_sum - tl.where(best > float("-inf"), best, 0.0))
    source = parts + (head * splits + split)[:, None] * dim + column[None, :]
    part = tl.load(source, mask=(column < dim)[None, :], other=0)
    total = tl.sum(weight, 0)
    result = tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + head * dim + column, result.to(out.dtype.element_ty), mask=column < dim)


def decode_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    contexts: torch.Tensor,
    out: torch.Tensor,
    *,
    window: int | None,
    splits: int,
) -> None:
    """Attention of `query` [seqs, heads, head_dim] over `contexts` [seqs] int32 tokens each, the
    new one included, into `out` (the same shape; zeros where the context is 0). Both are
    contiguous. `block_tables` is [seqs, max_blocks] int32, `splits` a power of two."""
    sequences, heads, dim = query.shape
    _, kv_heads, block_size, _ = cache.shape
    device = query.device
    group = heads // kv_heads
    parts, sums = out, out
    if splits > 1:
        parts = torch.empty((sequences, heads, splits, dim), dtype=torch.float32, device=device)
        sums = torch.empty((sequences, heads, splits), dtype=torch.float32, device=device)
    width = max(_LEAST, triton.next_power_of_2(dim))
    _decode[(sequences, kv_heads, splits)](
        query,
        cache,
        block_tables,
        contexts,
        parts,
        sums,
        kv_heads,
        block_tables.shape[1],
        dim**-0.5 / math.log(2),
        NO_WINDOW if window is None else window,
        group=group,
        dim=dim,
        rows=max(_LEAST, triton.next_power_of_2(group)),
        width=width,
        block_size=block_size,
        tile=_TILE_FLOAT32 if query.dtype == torch.float32 else _TILE,
        splits=splits,
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        _put_together[(sequences * heads,)](
            parts, sums, out, dim=dim, width=width, splits=splits, num_warps=2
        )
