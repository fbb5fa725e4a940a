"""Paged attention beside its twin: decode with split contexts, prefill, chunks, mixed batches."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from tests.gpu import twins
from tests.gpu.conftest import Kit
from xpyd_worker.kernels.api import KvShape, Span

# Query heads, KV heads, head_dim, block size.
SHAPES = [(4, 4, 64, 16), (9, 3, 96, 8), (8, 1, 32, 64), (6, 2, 128, 32), (14, 2, 64, 16)]


def spans_of(sizes: Sequence[tuple[int, int]], block_size: int) -> list[Span]:
    """Sequences with (earlier, new) tokens, their blocks anywhere; block 0 is nobody's."""
    needed = [-(-(start + count) // block_size) for start, count in sizes]
    free = list(range(1, 1 + sum(needed)))
    random.Random(0).shuffle(free)
    return [
        Span(start, count, tuple(free.pop() for _ in range(blocks)))
        for (start, count), blocks in zip(sizes, needed, strict=True)
    ]


def cache_of(kit: Kit, spans: Sequence[Span], shape: KvShape) -> torch.Tensor:
    """Noise where a token stands, NaN everywhere else."""
    blocks = 1 + sum(len(span.block_ids) for span in spans)
    size = (blocks, shape.kv_heads, shape.block_size, 2 * shape.head_dim)
    cache = torch.full(size, float("nan"))
    noise = kit.noise(*size, seed=3).float().cpu()
    for span in spans:
        for position in range(span.start + span.count):
            block, offset = twins.place(span, position, shape.block_size)
            cache[block, :, offset] = noise[block, :, offset]
    return cache.to(kit.dtype).to(kit.device)


def check(
    kit: Kit,
    sizes: Sequence[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    window: int | None = None,
) -> None:
    """The whole seam, plan and attention, beside the twin."""
    shape = KvShape(kv_heads, dim, block_size, kit.dtype)
    spans = spans_of(sizes, block_size)
    cache = cache_of(kit, spans, shape)
    query = kit.noise(sum(count for _, count in sizes), heads, dim, seed=4)
    kernels = kit.gpu.kernels.TritonKernels(kit.device)
    found = kernels.attention(query, cache, kernels.plan(spans, shape), window)
    kit.close(found, twins.attention(query, cache, spans, window))


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size"), SHAPES)
@pytest.mark.parametrize("window", [None, 20])
def test_a_step_of_chunks_and_single_tokens_attends_each_to_its_own(
    kit: Kit, *, heads: int, kv_heads: int, dim: int, block_size: int, window: int | None
) -> None:
    sizes = [(70, 1), (0, 1), (15, 1), (0, 37), (33, 18), (64, 2), (5, 1)]
    check(kit, sizes, heads=heads, kv_heads=kv_heads, dim=dim, block_size=block_size, window=window)


@pytest.mark.parametrize("group", range(1, 9))
def test_any_number_of_query_heads_shares_a_kv_head(kit: Kit, group: int) -> None:
    sizes = [(40, 1), (0, 20)]
    check(kit, sizes, heads=3 * group, kv_heads=3, dim=32, block_size=16)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("context", [0, 1, 7, 8, 62, 63, 64, 127, 128, 129])
def test_contexts_end_anywhere_in_a_block(kit: Kit, context: int, block_size: int) -> None:
    sizes = [(context, 1), (context, 3)]
    check(kit, sizes, heads=4, kv_heads=2, dim=32, block_size=block_size)


@pytest.mark.parametrize("dim", [2, 8, 12])
def test_heads_may_be_narrower_than_what_is_multiplied_at_once(kit: Kit, dim: int) -> None:
    sizes = [(40, 1), (700, 1), (3, 20)]
    check(kit, sizes, heads=4, kv_heads=2, dim=dim, block_size=16)


def test_long_chunks_take_several_tiles_of_rows_and_of_positions(kit: Kit) -> None:
    sizes = [(0, 200), (150, 130)]
    check(kit, sizes, heads=2, kv_heads=1, dim=32, block_size=16)
    check(kit, sizes, heads=2, kv_heads=1, dim=32, block_size=16, window=40)


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 1000])
def test_a_window_counts_the_token_itself(kit: Kit, window: int) -> None:
    sizes = [(80, 1), (50, 40), (0, 3)]
    check(kit, sizes, heads=2, kv_heads=1, dim=32, block_size=16, window=window)


@pytest.mark.parametrize("splits", [1, 2, 8, 64])
@pytest.mark.parametrize("window", [None, 70])
def test_a_context_in_parts_gives_what_it_gives_whole(
    kit: Kit, splits: int, window: int | None
) -> None:
    shape = KvShape(2, 64, 16, kit.dtype)
    spans = spans_of([(299, 1), (1, 1), (130, 1)], 16)
    cache = cache_of(kit, spans, shape)
    query = kit.noise(3, 8, 64)
    plan = kit.gpu.plan.make_plan(spans, shape, kit.device)
    out = torch.full_like(query, float("nan"))
    kit.gpu.decode.decode_attention(
        query, cache, plan.block_tables, plan.contexts, out, window=window, splits=splits
    )
    kit.close(out.view(3, -1), twins.attention(query, cache, spans, window))


def test_a_few_long_contexts_are_split_and_many_or_short_ones_are_not(kit: Kit) -> None:
    splits = kit.gpu.kernels.splits
    assert splits(528, 8, 8192) == 32
    assert splits(528, 8, 1024) == 4
    assert splits(528, 8, 300) == 1
    assert splits(528, 512, 8192) == 1
    assert splits(528, 1, 1 << 20) == 64


@pytest.mark.parametrize("splits", [1, 4])
def test_scores_far_apart_neither_overflow_nor_vanish(kit: Kit, splits: int) -> None:
    shape = KvShape(1, 32, 16, kit.dtype)
    spans = spans_of([(100, 1)], 16)
    cache = cache_of(kit, spans, shape) * 8
    query = kit.noise(1, 2, 32) * 40
    plan = kit.gpu.plan.make_plan(spans, shape, kit.device)
    out = torch.empty_like(query)
    kit.gpu.decode.decode_attention(
        query, cache, plan.block_tables, plan.contexts, out, window=None, splits=splits
    )
    assert math.isfinite(float(out.float().sum()))
    wanted = twins.attention(query, cache, spans, None)
    torch.testing.assert_close(out.view(1, -1).double().cpu(), wanted.cpu(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("window", [None, 9])
def test_a_static_plan_with_free_rows_stores_and_attends_for_the_others(
    kit: Kit, window: int | None
) -> None:
    shape = KvShape(2, 64, 16, kit.dtype)
    kernels = kit.gpu.kernels.TritonKernels(kit.device)
    static = kernels.static_plan(shape, max_sequences=4, max_context=600)
    addresses = [static.plan.slots.data_ptr(), static.plan.block_tables.data_ptr()]
    for sizes in ([(40, 1), (15, 1), (599, 1)], [(3, 1)], []):
        spans = spans_of(sizes, 16)
        static.copy_(spans)
        cache = cache_of(kit, spans, shape)
        before = cache.clone()
        angles = (torch.ones(4, 32, device=kit.device), torch.zeros(4, 32, device=kit.device))
        qkv = kit.noise(4, 8, 64)
        query = kernels.rotate_and_store(qkv, angles, None, cache, static.plan)
        found = kernels.attention(query, cache, static.plan, window)
        assert not found[len(spans) :].any()
        for row, span in enumerate(spans):
            block, offset = twins.place(span, span.start, 16)
            assert torch.equal(cache[block, :, offset, :64], qkv[row, 4:6])
            assert torch.equal(cache[block, :, offset, 64:], qkv[row, 6:8])
            cache_row = cache[block, :, offset].clone()
            before[block, :, offset] = cache_row
        assert torch.equal(cache.nan_to_num(7), before.nan_to_num(7))
        if spans:
            wanted = twins.attention(query[: len(spans)], cache, spans, window)
            kit.close(found[: len(spans)], wanted)
    assert addresses == [static.plan.slots.data_ptr(), static.plan.block_tables.data_ptr()]
