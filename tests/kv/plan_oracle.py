"""What a plan must do, without the planner: ownership by explicit tables, coverage by counting.

Slow and plain on purpose. It reads a layout's fields only, never its methods.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

from hypothesis import strategies as st

from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.plan.transfers import Segment, Unit, plan_segments, units


class TransferPlan(NamedTuple):
    """The segments between two engines, and the units of a prompt between them."""

    source: EngineLayout
    destination: EngineLayout
    segments: tuple[Segment, ...]

    def leaving(self, rank: int) -> frozenset[int]:
        """Indices of the segments that this rank of P sends."""
        return frozenset(i for i, s in enumerate(self.segments) if s.source == rank)

    def arriving(self, rank: int) -> frozenset[int]:
        """Indices of those that this rank of D waits for."""
        return frozenset(i for i, s in enumerate(self.segments) if s.destination == rank)

    def units(self, tokens: int, *, skip_tokens: int = 0) -> list[Unit]:
        return units(
            tokens,
            skip_tokens=skip_tokens,
            source_block_size=self.source.block_size,
            destination_block_size=self.destination.block_size,
        )

    @property
    def unit_bytes(self) -> int:
        """Bytes of all segments in one unit."""
        cells = sum(len(segment.layers) * segment.heads for segment in self.segments)
        tokens = min(self.source.block_size, self.destination.block_size)
        return cells * tokens * self.source.row_bytes


def plan_transfers(p: EngineLayout, d: EngineLayout, *, salt: int = 0) -> TransferPlan:
    return TransferPlan(p, d, plan_segments(p, d, salt=salt))


class Cell(NamedTuple):
    """One token of one head of one layer on one rank of D."""

    rank: int
    layer: int
    head: int
    token: int


def owned_heads(layout: EngineLayout) -> list[list[int]]:
    """Heads of each place of a stage: dealt out in order, each repeated where ranks are more."""
    heads = [0] if layout.is_mla else list(range(layout.kv_heads))
    times = max(1, layout.tp // len(heads))
    dealt = [head for head in heads for _ in range(times)]
    share = len(dealt) // layout.tp
    return [dealt[place * share : (place + 1) * share] for place in range(layout.tp)]


def holdings(layout: EngineLayout) -> list[tuple[tuple[int, ...], list[int]]]:
    """(layers, heads) of every rank."""
    return [(layers, heads) for layers in layout.stages for heads in owned_heads(layout)]


def wanted_cells(layout: EngineLayout, tokens: range) -> Counter[Cell]:
    """Each cell that D must get, once."""
    return Counter(
        Cell(rank, layer, head, token)
        for rank, (layers, heads) in enumerate(holdings(layout))
        for layer in layers
        for head in heads
        for token in tokens
    )


def planned_heads(plan: TransferPlan) -> Counter[Cell]:
    """What the segments bring, without tokens (all 0); fails where a source does not own it."""
    sources, destinations = holdings(plan.source), holdings(plan.destination)
    cells: Counter[Cell] = Counter()
    for segment in plan.segments:
        source_layers, source_heads = sources[segment.source]
        _, destination_heads = destinations[segment.destination]
        assert segment.heads > 0
        assert segment.layers
        for layer in segment.layers:
            assert layer in source_layers
            for i in range(segment.heads):
                head = destination_heads[segment.destination_head + i]
                assert source_heads[segment.source_head + i] == head
                cells[Cell(segment.destination, layer, head, 0)] += 1
    return cells


def planned_cells(plan: TransferPlan, tokens: int, skip_tokens: int) -> Counter[Cell]:
    """What the segments bring in their units, token by token; fails where a unit puts a token
    elsewhere than D expects it."""
    heads = planned_heads(plan)
    cells: Counter[Cell] = Counter()
    for unit in plan.units(tokens, skip_tokens=skip_tokens):
        for i in range(unit.tokens):
            token = unit.source_block * plan.source.block_size + unit.source_token + i
            there = unit.destination_block * plan.destination.block_size + unit.destination_token
            assert there + i == token
            assert unit.source_token + i < plan.source.block_size
            assert unit.destination_token + i < plan.destination.block_size
            for cell, times in heads.items():
                cells[cell._replace(token=token)] += times
    return cells


def source_load(plan: TransferPlan) -> list[int]:
    """Heads x layers that each rank of P sends."""
    load = [0] * len(holdings(plan.source))
    for segment in plan.segments:
        load[segment.source] += segment.heads * len(segment.layers)
    return load


# --- layouts to draw from


@st.composite
def _stages(draw: st.DrawFn, layers: list[int]) -> tuple[tuple[int, ...], ...]:
    """The layers cut into stages: even, uneven or interleaved."""
    count = draw(st.integers(1, min(4, len(layers))))
    if draw(st.booleans()):
        places = st.sampled_from(range(1, len(layers))) if count > 1 else st.nothing()
        edges = [0, *sorted(draw(st.sets(places, max_size=count - 1))), len(layers)]
        return tuple(tuple(layers[a:b]) for a, b in itertools.pairwise(edges))
    return tuple(tuple(layers[stage::count]) for stage in range(count))


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[EngineLayout, EngineLayout]:
    """Two sides that fit: the same heads and layers, all else of their own."""
    is_mla = draw(st.booleans())
    kv_heads = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    heads = 1 if is_mla else kv_heads
    widths = [tp for tp in range(1, 13) if tp % heads == 0 or heads % tp == 0]
    layers = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=9)))
    small = draw(st.sampled_from((1, 2, 4, 8)))
    sizes = draw(st.permutations((small, small * draw(st.integers(1, 4)))))

    def side(block_size: int) -> EngineLayout:
        return EngineLayout(
            kv_heads=kv_heads,
            is_mla=is_mla,
            tp=draw(st.sampled_from(widths)),
            stages=draw(_stages(layers)),
            block_size=block_size,
            row_bytes=8,
        )

    return side(sizes[0]), side(sizes[1])
