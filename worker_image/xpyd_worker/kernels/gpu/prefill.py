# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN202
"""Causal attention of several new tokens for each sequence over a paged cache: prefill and chunks.

Basic typing: Triton's language is untyped. The new tokens' keys and values stand in the cache
already, so a first chunk, a later one, a hit in the prefix cache and a single token are one case.
A program takes a tile of new tokens of one sequence and one head, and walks over the context with a
running maximum (FlashAttention-2: Dao 2023).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

_TILE = 64
_TILE_FLOAT32 = 32
# tl.dot takes no fewer columns.
_LEAST_WIDTH = 16


@triton.jit
def _walk(
    asked,
    best,
    total,
    gathered,
    begin,
    end,
    query_position,
    context,
    window,
    scale,
    table,
    cache,
    kv_head,
    kv_heads,
    dim: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    is_masked: tl.constexpr,
    has_window: tl.constexpr,
):
    """Take the context's positions begin .. end into the running result. Unless `is_masked`, each
    of them is seen by each row."""
    column = tl.arange(0, width)
    for at in range(begin, end, tile):
        position = at + tl.arange(0, tile)
        # What is in unused slots is never loaded: 0 * NaN is NaN.
        is_loaded = (position < context)[:, None] & (column < dim)[None, :]
        block = tl.load(table + position // block_size, mask=position < context, other=0)
        token = (block.to(tl.int64) * kv_heads + kv_head) * block_size + position % block_size
        stored = cache + token[:, None] * (2 * dim) + column[None, :]
        keys = tl.load(stored, mask=is_loaded, other=0)
        scores = tl.dot(asked, tl.trans(keys), input_precision="ieee") * scale
        if is_masked:
            is_seen = position[None, :] <= query_position[:, None]
            if has_window:
                is_seen = is_seen & (position[None, :] > query_position[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet, behind its window: -inf - -inf would be NaN.
        base = tl.where(new_best > float("-inf"), new_best, 0.0)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(best - base)
        values = tl.load(stored + dim, mask=is_loaded, other=0)
        gathered = gathered * shrink[:, None] + tl.dot(
            weights.to(values.dtype), values, input_precision="ieee"
        )
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
    return best, total, gathered


@triton.jit
def _prefill(
    query,
    cache,
    block_tables,
    query_starts,
    contexts,
    tiles,
    out,
    heads,
    kv_heads,
    max_blocks,
    scale,
    window,
    dim: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    has_window: tl.constexpr,
) -> None:
    sequence = tl.load(tiles + tl.program_id(0) * 2).to(tl.int64)
    first = tl.load(tiles + tl.program_id(0) * 2 + 1)
    head = tl.program_id(1)
    kv_head = head // (heads // kv_heads)
    start_row = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - start_row
    context = tl.load(contexts + sequence)
    row = first + tl.arange(0, rows)
    column = tl.arange(0, width)
    inside = (row < count)[:, None] & (column < dim)[None, :]
    place = (start_row + row).to(tl.int64) * heads + head
    asked = tl.load(query + place[:, None] * dim + column[None, :], mask=inside, other=0)
    query_position = context - count + row
    first_position = context - count + first
    end = tl.minimum(first_position + rows, context)
    best = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    gathered = tl.zeros((rows, width), tl.float32)
    table = block_tables + sequence * max_blocks
    if has_window:
        begin = tl.maximum(first_position - window + 1, 0) // tile * tile
    else:
        # What lies before the tile's first token is seen by all its rows: no mask.
        begin = (first_position + 1) // tile * tile
        best, total, gathered = _walk(
            asked, best, total, gathered, 0, begin, query_position, context, window, scale, table,
            cache, kv_head, kv_heads, dim, width, block_size, tile, False, False,
        )  # fmt: skip
    best, total, gathered = _walk(
        asked, best, total, gathered, begin, end, query_position, context, window, scale, table,
        cache, kv_head, kv_heads, dim, width, block_size, tile, True, has_window,
    )  # fmt: skip
    result = gathered / tl.where(total > 0, total, 1.0)[:, None]
    target = out + place[:, None] * dim + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)


def prefill_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    contexts: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    *,
    window: int | None,
    tile_tokens: int,
) -> None:
    """Attention of the rows of `query` [rows, heads, head_dim] that `tiles` name, into `out` (the
    same shape); both are contiguous. Sequence s has rows query_starts[s] .. query_starts[s + 1],
    the last of its contexts[s] tokens, and blocks block_tables[s]. `tiles` [count, 2] are sequence
    and first of `tile_tokens` new tokens; all int32."""
    _, heads, dim = query.shape
    _, kv_heads, block_size, _ = cache.shape
    _prefill[(tiles.shape[0], heads)](
        query,
        cache,
        block_tables,
        query_starts,
        contexts,
        tiles,
        out,
        heads,
        kv_heads,
        block_tables.shape[1],
        dim**-0.5 / math.log(2),
        0 if window is None else window,
        dim=dim,
        width=max(_LEAST_WIDTH, triton.next_power_of_2(dim)),
        rows=tile_tokens,
        block_size=block_size,
        tile=_TILE_FLOAT32 if query.dtype == torch.float32 else _TILE,
        has_window=window is not None,
        num_warps=8 if tile_tokens > 64 else 4,
        num_stages=2,
    )
