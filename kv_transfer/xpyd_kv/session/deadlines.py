"""At most one deadline for each thing, the next one in O(log n). Pure."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
_MIN_STALE = 64


class Deadlines(Generic[K]):
    """Deadlines by key. A heap with stale entries, dropped when they come up or outnumber the
    rest."""

    def __init__(self) -> None:
        self._at: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._at)

    def set(self, key: K, at: float) -> None:
        """`key`'s deadline is `at` now, whatever it was."""
        if self._at.get(key) == at:
            return
        self._at[key] = at
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, key))
        if len(self._heap) > 2 * len(self._at) + _MIN_STALE:
            self._heap = [(time, order, key) for order, (key, time) in enumerate(self._at.items())]
            heapq.heapify(self._heap)
            self._order = len(self._heap)

    def clear(self, key: K) -> None:
        """`key` has no deadline any more."""
        self._at.pop(key, None)

    def due(self, now: float) -> list[K]:
        """Keys whose deadline has come, earliest first; they have none after that."""
        keys: list[K] = []
        while self._heap and self._heap[0][0] <= now:
            at, _, key = heapq.heappop(self._heap)
            if self._at.get(key) == at:
                del self._at[key]
                keys.append(key)
        return keys

    def next(self) -> float | None:
        """The earliest deadline, or None."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


class Remembered(Generic[K, V]):
    """Values that are forgotten `ttl_s` after they were last set: tombstones."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._values: dict[K, tuple[float, V]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def set(self, key: K, value: V, now: float) -> None:
        """Remember `value` from now on."""
        self.purge(now)
        # Moved to the end: the dict stays ordered by time of expiry.
        self._values.pop(key, None)
        self._values[key] = (now + self._ttl_s, value)

    def get(self, key: K, now: float) -> V | None:
        """The value, or None where there is none or it has expired."""
        expiry, value = self._values.get(key, (0.0, None))
        return value if now < expiry else None

    def drop(self, key: K) -> None:
        """Forget it now."""
        self._values.pop(key, None)

    def purge(self, now: float) -> None:
        """Forget what has expired."""
        while self._values:
            key = next(iter(self._values))
            if self._values[key][0] > now:
                break
            del self._values[key]
