"""What two ranks are to each other: against the plans of all transfers, and byte by byte."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv.plan_oracle import holdings, layout_pairs
from xpyd_kv.plan.engine_layout import EngineLayout, LayoutError
from xpyd_kv.plan.frames import Area
from xpyd_kv.plan.pairs import pair_of
from xpyd_kv.plan.transfers import plan_segments, segment_between

Layouts = tuple[EngineLayout, EngineLayout]


@settings(max_examples=200, deadline=None)
@given(engines=layout_pairs())
def test_two_ranks_move_the_same_in_every_transfer_that_uses_them(engines: Layouts) -> None:
    p, d = engines
    planned = {
        (s.source, s.destination): s
        for salt in range(p.replicas)
        for s in plan_segments(p, d, salt=salt)
    }
    found = {
        (s, r): segment_between(p, d, source_rank=s, destination_rank=r)
        for s in range(p.num_ranks)
        for r in range(d.num_ranks)
    }
    assert {ranks: one for ranks, one in found.items() if one is not None} == planned


@settings(max_examples=200, deadline=None)
@given(engines=layout_pairs(), salt=st.integers(0, 10), data=st.data())
def test_frames_of_all_pairs_bring_each_row_where_d_looks_for_it(
    engines: Layouts, salt: int, data: st.DataObject
) -> None:
    p, d = engines
    tokens = data.draw(st.integers(1, 3 * max(p.block_size, d.block_size)))
    last = -(-tokens // d.block_size)
    # (rank, layer, head, token) -> what stands in the row: whose it is.
    landed: dict[tuple[int, int, int, int], tuple[int, int, int]] = {}
    for segment in plan_segments(p, d, salt=salt):
        pair = pair_of(p, d, source_rank=segment.source, destination_rank=segment.destination)
        p_layers, p_heads = holdings(p)[segment.source]
        d_layers, d_heads = holdings(d)[segment.destination]
        part = pair.source_part or slice(0, p.block_bytes)
        for at in range(pair.layers):
            layer = p_layers[pair.source_layers[at]]
            assert layer == d_layers[pair.destination_layers[at]]
            for block in range(-(-tokens // p.block_size)):
                rows = [
                    (layer, head, block * p.block_size + token)
                    for head in p_heads
                    for token in range(p.block_size)
                ][part.start // p.row_bytes : part.stop // p.row_bytes]
                assert len(rows) * p.row_bytes == pair.block_bytes
                if pair.scatter is None:
                    first, spans = block, [(0, pair.block_bytes)]
                else:
                    first, _ = pair.scatter.destination_blocks(block, block + 1)
                    spans = pair.scatter.spans(block, block + 1, last_block=last)
                for offset, length in spans:
                    here, rows = rows[: length // p.row_bytes], rows[length // p.row_bytes :]
                    for index, row in enumerate(here):
                        if offset is None:
                            assert row[2] >= last * d.block_size
                            continue
                        at_row = offset // d.row_bytes + index
                        further, within = divmod(at_row, len(d_heads) * d.block_size)
                        head, token = divmod(within, d.block_size)
                        cell = (
                            segment.destination,
                            layer,
                            d_heads[head],
                            (first + further) * d.block_size + token,
                        )
                        assert cell not in landed
                        landed[cell] = row
                assert not rows
    assert all(cell[1:] == row for cell, row in landed.items())
    wanted = {
        (rank, layer, head, token)
        for rank, (layers, heads) in enumerate(holdings(d))
        for layer in layers
        for head in heads
        for token in range(tokens)
    }
    assert wanted <= set(landed)


@given(engines=layout_pairs(), data=st.data())
def test_an_area_of_a_rank_is_cut_to_the_layers_that_both_have(
    engines: Layouts, data: st.DataObject
) -> None:
    p, d = engines
    segment = data.draw(st.sampled_from(plan_segments(p, d)))
    pair = pair_of(p, d, source_rank=segment.source, destination_rank=segment.destination)
    held = p.layers_of(segment.source)
    first = data.draw(st.integers(0, len(held) - 1))
    end = data.draw(st.integers(first + 1, len(held)))
    area = pair.area_of(Area(first, end, 3, 5))
    found = () if area is None else segment.layers[area.first_layer : area.end_layer]
    assert found == tuple(layer for layer in held[first:end] if layer in segment.layers)
    assert area is None or area[2:] == (3, 5)


def test_ranks_that_never_meet_are_no_pair() -> None:
    p = EngineLayout(kv_heads=2, tp=2, stages=((0,), (1,)), block_size=4, row_bytes=8)
    d = EngineLayout(kv_heads=2, tp=1, stages=((0,), (1,)), block_size=4, row_bytes=8)
    assert pair_of(p, d, source_rank=1, destination_rank=0).heads == 1
    for source, destination in ((2, 0), (0, 1), (4, 0), (0, 2), (-1, 0)):
        with pytest.raises(LayoutError, match=r"^rank: "):
            pair_of(p, d, source_rank=source, destination_rank=destination)
