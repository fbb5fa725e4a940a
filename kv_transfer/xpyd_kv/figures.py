"""Figures that are more than a number: names with a bound, and distributions. Pure.

Session and transport fill them, the server shows them. One thread writes each, any may read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

MAX_NAMES = 64
OTHER = "other"
# From a block over shared memory to a long prompt over a slow network.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Names(Counter[str]):
    """Counts by name, where a peer may have chosen the name: over MAX_NAMES it becomes `other`."""

    def add(self, name: str) -> None:
        """One more under `name`."""
        if name not in self and len(self) >= MAX_NAMES:
            name = OTHER
        self[name] += 1


class Distribution:
    """How many values were at most each of `bounds`, how many in all, and their sum."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """All values."""
        return sum(self._counts)

    def observe(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[int]:
        """Values at most each bound, and all of them last."""
        total = 0
        # A copy: the writer may be at work.
        return [total := total + count for count in list(self._counts)]
