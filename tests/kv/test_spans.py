"""The algebra of runs: cut, join, locate."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from xpyd_kv.spans import Span, copy_runs, cut, join, locate


def _lengths(rng: random.Random, total: int) -> list[int]:
    """Some lengths, with empty ones among them, of this sum."""
    found: list[int] = []
    while total:
        found.append(min(total, rng.choice([0, 1, 2, 5, 9])))
        total -= found[-1]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_gives_each_byte_once_in_order_within_one_element_of_both_lists(seed: int) -> None:
    rng = random.Random(seed)
    targets, sources = _lengths(rng, 60), _lengths(rng, 60)
    ends = [list(accumulate(side, initial=0)) for side in (targets, sources)]
    at = 0
    for piece in cut(targets, sources):
        assert ends[0][piece.target] + piece.target_offset == at
        assert ends[1][piece.source] + piece.source_offset == at
        assert 0 < piece.length <= targets[piece.target] - piece.target_offset
        assert piece.length <= sources[piece.source] - piece.source_offset
        at += piece.length
    assert at == 60


def test_lists_of_different_sums_are_not_cut() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        list(cut([3], [2]))


@pytest.mark.parametrize(
    ("starts", "lengths", "spans"),
    [
        ([], [], []),
        ([0, 4, 8], [4, 4, 4], [(0, 12)]),
        ([4, 0, 8], [4, 4, 4], [(4, 4), (0, 4), (8, 4)]),
        ([7, 3, 3], [0, 0, 2], [(3, 2)]),
        ([0, 2], [0, 2], [(2, 2)]),
    ],
)
def test_neighbours_are_joined_and_empty_spans_dropped(
    starts: list[int], lengths: list[int], spans: list[tuple[int, int]]
) -> None:
    assert join(starts, lengths) == [Span(*span) for span in spans]


@pytest.mark.parametrize("seed", range(20))
def test_a_place_is_found_in_elements_laid_end_to_end(seed: int) -> None:
    rng = random.Random(seed)
    lengths = _lengths(rng, 40)
    starts = list(accumulate(lengths, initial=0))
    begin = rng.randrange(40)
    length = rng.randrange(40 - begin + 1)
    at = begin
    for piece in locate(starts, begin, length):
        assert starts[piece.element] + piece.offset == at
        assert 0 < piece.length <= lengths[piece.element] - piece.offset
        at += piece.length
    assert at == begin + length


def test_segments_join_what_is_next_to_each_other_on_both_sides() -> None:
    targets, sources = [Span(0, 4), Span(4, 4)], [Span(10, 2), Span(12, 6)]
    assert copy_runs(targets, sources) == [(0, 10, 8)]
    assert copy_runs([Span(0, 4), Span(8, 4)], sources) == [(0, 10, 4), (8, 14, 4)]
