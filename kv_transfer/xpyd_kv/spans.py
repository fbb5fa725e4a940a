"""Runs of bytes or blocks: cut two lists where either is cut, join neighbours, locate places. Pure.

The one home of this algebra: the plan between two caches, the views of landings, what a data path
lends and what a GPU copies are all lists of such runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """`length` bytes (or blocks) from `start` on."""

    start: int
    length: int


class Cut(NamedTuple):
    """`length` bytes that lie within one element of each of two lists: elements and offsets."""

    target: int
    target_offset: int
    source: int
    source_offset: int
    length: int


class Piece(NamedTuple):
    """`length` bytes of the `element`-th of a list, from its `offset` on."""

    element: int
    offset: int
    length: int


class CopyRun(NamedTuple):
    """`length` bytes from address `source` to address `target`."""

    target: int
    source: int
    length: int


def cut(targets: Sequence[int], sources: Sequence[int]) -> Iterator[Cut]:
    """Two lists of lengths, cut where either is cut, without empty pieces. ValueError where their
    sums differ."""
    if sum(targets) != sum(sources):
        raise ValueError("copy: targets and sources differ in length")
    source = offset = 0
    for target, length in enumerate(targets):
        done = 0
        while done < length:
            while offset == sources[source]:
                source, offset = source + 1, 0
            size = min(length - done, sources[source] - offset)
            yield Cut(target, done, source, offset, size)
            done, offset = done + size, offset + size


def join(starts: Iterable[int], lengths: Iterable[int]) -> list[Span]:
    """Spans at these places in this order, neighbours as one, without empty ones. Hot path."""
    spans: list[Span] = []
    begin = end = 0
    for start, length in zip(starts, lengths, strict=False):
        if start != end and length:
            if end != begin:
                spans.append(Span(begin, end - begin))
            begin = end = start
        end += length
    if end != begin:
        spans.append(Span(begin, end - begin))
    return spans


def locate(starts: Sequence[int], start: int, length: int) -> Iterator[Piece]:
    """The pieces of elements laid end to end that `length` bytes from `start` on are. `starts`:
    where each element begins, and behind the last one where it ends."""
    index = bisect_right(starts, start) - 1
    while length:
        size = min(length, starts[index + 1] - start)
        if size:
            yield Piece(index, start - starts[index], size)
        start, length, index = start + size, length - size, index + 1


def copy_runs(targets: Sequence[Span], sources: Sequence[Span]) -> list[CopyRun]:
    """Where each piece of the one list comes from in the other; neighbours are joined. ValueError
    when the lengths differ."""
    found: list[CopyRun] = []
    for piece in cut([span.length for span in targets], [span.length for span in sources]):
        target = targets[piece.target].start + piece.target_offset
        source = sources[piece.source].start + piece.source_offset
        last = found[-1] if found else None
        if (
            last is not None
            and last.target + last.length == target
            and last.source + last.length == source
        ):
            found[-1] = last._replace(length=last.length + piece.length)
        else:
            found.append(CopyRun(target, source, piece.length))
    return found
