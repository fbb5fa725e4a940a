"""Who touched which bytes, and whether that was ordered: happens-before for the fake device.

Each operation of a stream has a number; a clock says of each stream how many of its operations are
known to have run. The host's clock grows by events that were seen done, a stream's by events that
it waits for and by what the host knew when it enqueued. Two operations that touch the same bytes,
one of them writing, must be ordered, whatever the fake happens to run first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Clock = dict[int, int]
Interval = tuple[int, int]


def merge(clock: Clock, other: Mapping[int, int]) -> None:
    """All that `other` knows is known to `clock`."""
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def intervals(spans: Iterable[Interval]) -> list[Interval]:
    """(start, length) pairs as sorted, disjoint (start, end)."""
    found: list[Interval] = []
    for start, length in sorted(spans):
        if not length:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], start + length))
        else:
            found.append((start, start + length))
    return found


def overlap(one: list[Interval], other: list[Interval]) -> bool:
    """Whether sorted, disjoint intervals share a byte."""
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i][0] < other[j][1] and other[j][0] < one[i][1]:
            return True
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return False


@dataclass
class Touch:
    """What one operation does to one allocation."""

    label: str
    stream: int
    number: int
    reads: list[Interval]
    writes: list[Interval]

    def is_known_to(self, clock: Mapping[int, int]) -> bool:
        return clock.get(self.stream, 0) >= self.number

    def clashes(self, other: Touch) -> bool:
        return (
            overlap(self.writes, other.writes)
            or overlap(self.writes, other.reads)
            or overlap(self.reads, other.writes)
        )


@dataclass
class Allocation:
    """Bytes at a place, and what may still be under way there."""

    address: int
    data: memoryview
    process: str
    is_host: bool
    is_freed: bool = False
    touches: list[Touch] = field(default_factory=list)

    def touch(self, new: Touch, clock: Clock, host: Clock) -> str:
        """The label of an operation that `new` clashes with and is not ordered after, or ''."""
        # What the host has seen done is before all that is enqueued from now on.
        self.touches = [old for old in self.touches if not old.is_known_to(host)]
        clash = next((o for o in self.touches if not o.is_known_to(clock) and o.clashes(new)), None)
        self.touches.append(new)
        return clash.label if clash else ""

    def unfinished(self, host: Clock, part: Interval | None = None) -> str:
        """The label of an operation here (in `part`: that writes there) not known to have run."""
        for old in self.touches:
            if old.is_known_to(host):
                continue
            if part is None or overlap(old.writes, [part]):
                return old.label
        return ""
