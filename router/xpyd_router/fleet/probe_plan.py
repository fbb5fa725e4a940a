"""Whom to probe when. Pure.

`health` says who is due when, `prober` takes who is due. A probe is regular (each instance once per
interval, spread by chance) or hastened (an instance in doubt, at once). Both stay below one rate:
when thousands of instances come into doubt together, they are probed one after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from xpyd_router.fleet.registry import InstanceKey

MAX_PROBES_PER_S = 200.0
_REGULAR_PER_S = MAX_PROBES_PER_S / 2
"""Regular probes leave room for those in doubt: with more instances the interval grows."""
_BURST = 16.0


class ProbePlan:
    """See the module. `draw` gives a random number from 0 to 1; `now` is one monotonic clock's."""

    def __init__(self, *, interval_s: float, draw: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._draw = draw
        self._members: set[InstanceKey] = set()
        self._due: dict[InstanceKey, float] = {}
        self._heap: list[tuple[float, int, InstanceKey]] = []
        self._numbers = count()
        self._hurry: set[InstanceKey] = set()
        self._tokens = _BURST
        self._filled_s = 0.0

    @property
    def interval_s(self) -> float:
        """Between two regular probes of one instance, on average."""
        return max(self._interval_s, len(self._members) / _REGULAR_PER_S)

    def add(self, key: InstanceKey, now: float) -> None:
        """Probe `key` from now on; the first time within one interval."""
        self._members.add(key)
        self._set(key, now + self._draw() * self.interval_s)

    def discard(self, key: InstanceKey) -> None:
        """Probe `key` no more."""
        self._members.discard(key)
        self._due.pop(key, None)
        self._hurry.discard(key)

    def hasten(self, key: InstanceKey, now: float) -> None:
        """Probe `key` at once; once more, if it is being probed: that one may be too early."""
        if key not in self._members:
            return
        due_s = self._due.get(key)
        if due_s is None:
            self._hurry.add(key)
        elif due_s > now:
            self._set(key, now)

    def again(self, key: InstanceKey, now: float, in_s: float | None = None) -> None:
        """A probe of `key` has ended; the next one is `in_s` away, None: an interval."""
        if key not in self._members:
            return
        if key in self._hurry:
            self._hurry.discard(key)
            in_s = 0.0
        elif in_s is None:
            in_s = self.interval_s * (0.75 + 0.5 * self._draw())
        self._set(key, now + in_s)

    def take(self, now: float, limit: int) -> list[InstanceKey]:
        """Who is due, at most `limit` and what the rate allows. Each must end in `again`."""
        self._tokens = min(_BURST, self._tokens + (now - self._filled_s) * MAX_PROBES_PER_S)
        self._filled_s = now
        taken: list[InstanceKey] = []
        while self._skip_stale() <= now and len(taken) < limit and self._tokens >= 1.0:
            _, _, key = heapq.heappop(self._heap)
            del self._due[key]
            self._tokens -= 1.0
            taken.append(key)
        return taken

    def wait_s(self, now: float) -> float:
        """Until `take` may give somebody; infinite where nobody is due."""
        missing = max(0.0, 1.0 - self._tokens) / MAX_PROBES_PER_S
        return max(missing, self._skip_stale() - now, 0.0)

    def _set(self, key: InstanceKey, due_s: float) -> None:
        self._due[key] = due_s
        heapq.heappush(self._heap, (due_s, next(self._numbers), key))

    def _skip_stale(self) -> float:
        """When the first one is due, without those that were moved or left."""
        while self._heap:
            due_s, _, key = self._heap[0]
            if self._due.get(key) == due_s:
                return due_s
            heapq.heappop(self._heap)
        return float("inf")
