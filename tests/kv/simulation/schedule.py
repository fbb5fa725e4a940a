"""The virtual clock and what will happen when. Nothing here or above it reads another clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

START_S = 1000.0


class Schedule:
    """Events in the order of their time; those of one time in the order of their making."""

    def __init__(self) -> None:
        self.now = START_S
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def clock(self) -> float:
        return self.now

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now + seconds, event)

    def step(self) -> bool:
        """The next event happens; False when there is none."""
        if not self._heap:
            return False
        self.now, _, event = heapq.heappop(self._heap)
        event()
        return True
