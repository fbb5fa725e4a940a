"""Two lists of places of equal length in all, cut where either is cut. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """`length` bytes from address `source` to address `target`."""

    target: int
    source: int
    length: int


class Span(NamedTuple):
    """`length` bytes from `address` on."""

    address: int
    length: int


def segments(targets: Sequence[Span], sources: Sequence[Span]) -> list[Segment]:
    """Where each piece of the one list comes from in the other; neighbours are joined. ValueError
    when the lengths differ."""
    if sum(span.length for span in targets) != sum(span.length for span in sources):
        raise ValueError("copy: targets and sources differ in length")
    found: list[Segment] = []
    for target, source, length in _cuts(targets, sources):
        last = found[-1] if found else None
        if (
            last is not None
            and last.target + last.length == target
            and last.source + last.length == source
        ):
            found[-1] = Segment(last.target, last.source, last.length + length)
        else:
            found.append(Segment(target, source, length))
    return found


def _cuts(targets: Sequence[Span], sources: Sequence[Span]) -> Iterator[Segment]:
    following = iter(sources)
    source = left = 0
    for address, rest in targets:
        target = address
        while rest:
            while not left:
                source, left = next(following)
            length = min(rest, left)
            yield Segment(target, source, length)
            target, rest = target + length, rest - length
            source, left = source + length, left - length
