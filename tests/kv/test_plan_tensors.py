"""The plan moves real bytes: caches of P's ranks to caches of D's, against slices of the whole."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.plan_oracle import TransferPlan, holdings, layout_pairs, plan_transfers
from xpyd_kv.memory.paged import PagedMemory
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.plan.transfers import Segment, Unit, runs
from xpyd_kv.spans import Span

# fp32, 1 element each for K and V: layout_pairs' row of 8 bytes.
WIDTH = 2
UNTOUCHED = -1.0
SPARE_BLOCKS = 2


def source_runs(plan: TransferPlan, segment: Segment, unit: Unit) -> list[Span]:
    """Where the segment lies in the unit's block of each of its layers on P."""
    return runs(
        plan.source,
        first_head=segment.source_head,
        heads=segment.heads,
        first_token=unit.source_token,
        tokens=unit.tokens,
    )


def destination_runs(plan: TransferPlan, segment: Segment, unit: Unit) -> list[Span]:
    """The same on D. What P's runs hold, joined, is what D's take."""
    return runs(
        plan.destination,
        first_head=segment.destination_head,
        heads=segment.heads,
        first_token=unit.destination_token,
        tokens=unit.tokens,
    )


@dataclass(frozen=True)
class Engine:
    """The caches of an engine's ranks: [rank][layer] of [blocks, heads, block size, WIDTH], and the
    block table that all of them share."""

    layout: EngineLayout
    caches: list[list[torch.Tensor]]
    table: list[int]

    @property
    def memories(self) -> list[PagedMemory]:
        return [
            PagedMemory(tensors, layers=layers)
            for tensors, (layers, _) in zip(self.caches, holdings(self.layout), strict=True)
        ]


def _engine(layout: EngineLayout, kv: torch.Tensor, written: range, max_tokens: int) -> Engine:
    """An engine in which the tokens `written` of `kv` [layer, head, token, WIDTH] stand, by direct
    slicing, in blocks that are not in the prompt's order."""
    size = layout.block_size
    num_blocks = -(-max_tokens // size) + SPARE_BLOCKS
    table = list(range(num_blocks))[::-1]
    caches = []
    for layers, heads in holdings(layout):
        tensors = [torch.full((num_blocks, len(heads), size, WIDTH), UNTOUCHED) for _ in layers]
        for tensor, layer in zip(tensors, layers, strict=True):
            for token in written:
                tensor[table[token // size], :, token % size] = kv[layer, heads, token]
        caches.append(tensors)
    return Engine(layout, caches, table)


def _move(plan: TransferPlan, p: Engine, d: Engine, *, tokens: int, skip_tokens: int) -> int:
    """Carry out the plan, rank by rank of P; returns the bytes moved."""
    sources, destinations = p.memories, d.memories
    moved = 0
    for rank in range(plan.source.num_ranks):
        for segment in (plan.segments[i] for i in sorted(plan.leaving(rank))):
            for unit in plan.units(tokens, skip_tokens=skip_tokens):
                for layer in segment.layers:
                    view = sources[rank].block_view(
                        p.layout.layers_of(rank).index(layer), p.table[unit.source_block]
                    )
                    wire = b"".join(
                        view[offset : offset + length]
                        for offset, length in source_runs(plan, segment, unit)
                    )
                    moved += len(wire)
                    view = destinations[segment.destination].block_view(
                        d.layout.layers_of(segment.destination).index(layer),
                        d.table[unit.destination_block],
                    )
                    for offset, length in destination_runs(plan, segment, unit):
                        view[offset : offset + length] = wire[:length]
                        wire = wire[length:]
                    assert not wire
    return moved


def _check(p: EngineLayout, d: EngineLayout, *, tokens: int, skip_tokens: int, salt: int) -> int:
    """Transfer a prompt; every cache of D must equal direct slices of the whole. The bytes."""
    unit = min(p.block_size, d.block_size)
    end = -(-tokens // unit) * unit
    longest = -(-tokens // p.block_size) * p.block_size
    num_layers = 1 + max(layer for stage in p.stages for layer in stage)
    shape = (num_layers, p.heads, longest, WIDTH)
    kv = torch.arange(num_layers * p.heads * longest * WIDTH, dtype=torch.float32).reshape(shape)
    source = _engine(p, kv, range(longest), tokens)
    target = _engine(d, kv, range(0), tokens)
    plan = plan_transfers(p, d, salt=salt)
    moved = _move(plan, source, target, tokens=tokens, skip_tokens=skip_tokens)
    wanted = _engine(d, kv, range(skip_tokens, end), tokens)
    for got, want in zip(target.caches, wanted.caches, strict=True):
        assert all(map(torch.equal, got, want))
    units = plan.units(tokens, skip_tokens=skip_tokens)
    assert moved == len(units) * plan.unit_bytes
    return moved


@settings(max_examples=120, deadline=None)
@given(pair=layout_pairs(), salt=st.integers(0, 100), data=st.data())
def test_d_holds_what_slicing_the_whole_gives_and_nothing_else_is_touched(
    pair: tuple[EngineLayout, EngineLayout], salt: int, data: st.DataObject
) -> None:
    p, d = pair
    unit = min(p.block_size, d.block_size)
    tokens = data.draw(st.integers(1, 4 * unit))
    skip = unit * data.draw(st.integers(0, (tokens - 1) // unit))
    _check(p, d, tokens=tokens, skip_tokens=skip, salt=salt)


def _side(tp: int, block_size: int, *, is_mla: bool) -> EngineLayout:
    stages = ((0, 1, 2), (3, 4)) if tp == 2 else ((0, 1), (2, 3, 4))
    return EngineLayout(
        kv_heads=4, is_mla=is_mla, tp=tp, stages=stages, block_size=block_size, row_bytes=8
    )


@pytest.mark.parametrize("is_mla", [False, True], ids=["gqa", "mla"])
@pytest.mark.parametrize(("tp_p", "tp_d"), [(1, 8), (8, 1), (2, 4), (8, 2), (4, 4)])
@pytest.mark.parametrize(("block_p", "block_d"), [(4, 4), (8, 4), (4, 16)])
def test_grouped_heads_and_latent_rows_move_between_any_tp_and_block_sizes(
    is_mla: bool, tp_p: int, tp_d: int, block_p: int, block_d: int
) -> None:
    p, d = _side(tp_p, block_p, is_mla=is_mla), _side(tp_d, block_d, is_mla=is_mla)
    moved = [_check(p, d, tokens=32, skip_tokens=skip, salt=5) for skip in (0, 16)]
    # What D has already is not sent: half of the prompt, half of the bytes.
    assert moved[0] == 2 * moved[1] == 5 * 32 * 8 * d.tp * d.heads_per_rank


def test_the_cache_of_a_rank_has_the_shape_that_the_layout_says() -> None:
    layout = _side(2, 16, is_mla=False)
    engine = _engine(layout, torch.zeros(5, 4, 32, WIDTH), range(0), 17)
    for rank, memory in enumerate(engine.memories):
        assert memory.layout.layers == layout.layers_of(rank)
        assert memory.layout.kv_heads == layout.heads_per_rank
        assert memory.layout.block_bytes == layout.block_bytes
