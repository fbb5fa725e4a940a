"""Distributions of times and sizes: what a histogram of `/metrics` is made of. Pure.

The engine, the transfer library and the router fill them; their servers show them. One thread
writes each, any may read. An observation costs some 0.2 us and takes no lock: the router makes one
for each token of a stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# From a block over shared memory to a long prompt over a slow network.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Distribution:
    """How many values were at most each of `bounds`, how many in all, and their sum."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """All values."""
        return sum(self._counts)

    def observe(self, value: float) -> None:
        """Add a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_each(self, value: float, count: int) -> None:
        """`count` more values, all of them `value`."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def add(self, other: Distribution) -> None:
        """All values of `other`, which has the same bounds, too."""
        for index, count in enumerate(list(other._counts)):
            self._counts[index] += count
        self.sum += other.sum

    def cumulative(self) -> list[int]:
        """Values at most each bound, and all of them last."""
        total = 0
        # A copy: the writer may be at work.
        return [total := total + count for count in list(self._counts)]
