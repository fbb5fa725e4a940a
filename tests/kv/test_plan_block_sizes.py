"""Where P's blocks belong in D's of another size: against a count token by token, head by head."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.plan.pairs import Scatter, ScatterSpan, scatter_of
from xpyd_kv.plan.transfers import plan_segments


def _scatter(source: int, destination: int, *, heads: int, row_bytes: int = 1) -> Scatter:
    p, d = (
        EngineLayout(kv_heads=heads, tp=1, stages=((0,),), block_size=size, row_bytes=row_bytes)
        for size in (source, destination)
    )
    (segment,) = plan_segments(p, d)
    return scatter_of(p, d, segment)


def _body(first: int, end: int, *, size: int, heads: int, row_bytes: int) -> list[tuple[int, ...]]:
    """(head, token, byte) of each byte that P sends of one layer, in its order."""
    return [
        (head, block * size + token, byte)
        for block in range(first, end)
        for head in range(heads)
        for token in range(size)
        for byte in range(row_bytes)
    ]


sizes = st.sampled_from([(a * s, b * s) for s in (1, 2, 3) for a, b in ((1, 2), (1, 4), (3, 1))])


@settings(max_examples=300, deadline=None)
@given(
    sizes=sizes,
    heads=st.integers(1, 4),
    row_bytes=st.integers(1, 3),
    tokens=st.integers(1, 60),
    data=st.data(),
)
def test_every_byte_goes_where_d_looks_for_its_token_and_head(
    sizes: tuple[int, int], heads: int, row_bytes: int, tokens: int, data: st.DataObject
) -> None:
    source, destination = sizes
    scatter = _scatter(source, destination, heads=heads, row_bytes=row_bytes)
    total = -(-tokens // source)
    first = data.draw(st.integers(0, total - 1))
    end = data.draw(st.integers(first + 1, total))
    last = -(-tokens // destination)
    first_d, end_d = scatter.destination_blocks(first, end)
    assert first_d == first * source // destination
    spans = scatter.spans(first, end, last_block=last)
    body = _body(first, end, size=source, heads=heads, row_bytes=row_bytes)
    at = 0
    for offset, length in spans:
        for head, token, byte in body[at : at + length]:
            if offset is None:
                assert token >= last * destination
                continue
            block, within = divmod(token, destination)
            assert first_d <= block < min(end_d, last)
            cell = ((block - first_d) * heads + head) * destination + within
            assert offset == cell * row_bytes + byte
            offset += 1
        at += length
    assert at == len(body)


@given(sizes=sizes, heads=st.integers(1, 4), blocks=st.integers(1, 12))
def test_no_two_spans_could_be_one(sizes: tuple[int, int], heads: int, blocks: int) -> None:
    scatter = _scatter(*sizes, heads=heads)
    spans = scatter.spans(0, blocks, last_block=blocks)
    for before, after in itertools.pairwise(spans):
        if before.offset_bytes is None or after.offset_bytes is None:
            assert before.offset_bytes is not after.offset_bytes
        else:
            assert before.offset_bytes + before.length_bytes != after.offset_bytes


@pytest.mark.parametrize(
    ("sizes", "heads", "blocks", "last", "spans"),
    [
        # One head: P's blocks lie in D's as they come.
        ((2, 4), 1, 4, 2, [(0, 8)]),
        ((4, 2), 1, 2, 4, [(0, 8)]),
        # A head of a small block is a run in the large one, and the other way round.
        ((2, 4), 2, 2, 1, [(0, 2), (4, 2), (2, 2), (6, 2)]),
        ((4, 2), 2, 1, 2, [(0, 2), (4, 2), (2, 2), (6, 2)]),
        # D's second block is none of the prompt's.
        ((4, 2), 2, 1, 1, [(0, 2), (None, 2), (2, 2), (None, 2)]),
        ((8, 2), 1, 1, 1, [(0, 2), (None, 6)]),
    ],
)
def test_runs_of_a_block(
    sizes: tuple[int, int],
    heads: int,
    blocks: int,
    last: int,
    spans: list[tuple[int | None, int]],
) -> None:
    scatter = _scatter(*sizes, heads=heads)
    assert scatter.spans(0, blocks, last_block=last) == [ScatterSpan(*span) for span in spans]
