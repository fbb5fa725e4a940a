"""How plain torch's operators group a batch, and where new tokens land."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from xpyd_worker.kernels.api import KvShape, Span
from xpyd_worker.kernels.plain import PlainKernels, PlainPlan

SHAPE = KvShape(kv_heads=2, head_dim=16, block_size=16, dtype=torch.float32)


def plan_of(spans: Sequence[Span], shape: KvShape = SHAPE) -> PlainPlan:
    return cast("PlainPlan", PlainKernels().plan(spans, shape))


def test_similar_lengths_decode_together_and_others_apart() -> None:
    lengths = [1, 10, 100, 110, 1000]
    spans = [Span(n - 1, 1, list(range(-(-n // 16)))) for n in lengths]
    plan = plan_of([*spans, Span(0, 5, [0])])
    found = [(part.first_row, part.sequences, part.count, part.tokens) for part in plan.parts]
    assert found == [(0, 2, 1, 10), (2, 2, 1, 110), (4, 1, 1, 1000), (5, 1, 5, 5)]


def test_a_group_gathers_a_bounded_number_of_bytes() -> None:
    shape = KvShape(kv_heads=8, head_dim=128, block_size=16, dtype=torch.float32)
    spans = [Span(799, 1, list(range(50))) for _ in range(64)]
    counts = [part.sequences for part in plan_of(spans, shape).parts]
    assert sum(counts) == 64
    assert max(counts) * 50 * shape.block_bytes <= 8 << 20


def test_a_new_token_lands_in_its_slot() -> None:
    cache = torch.zeros(4, 2, 16, 32)
    plan = plan_of([Span(17, 1, [3, 1]), Span(15, 2, [2, 0])])
    flat = cache.view(-1, 32)
    flat[plan.slots] = torch.arange(1.0, 7.0)[:, None].expand(6, 32)
    assert [float(cache[1, head, 1, 0]) for head in range(2)] == [1.0, 2.0]
    assert [float(cache[2, head, 15, 0]) for head in range(2)] == [3.0, 4.0]
    assert [float(cache[0, head, 0, 31]) for head in range(2)] == [5.0, 6.0]
    assert int((cache != 0).sum()) == 6 * 32
