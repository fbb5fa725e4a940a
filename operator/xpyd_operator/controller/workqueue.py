"""Decides which fleet has its turn next, and when. Level-triggered: a wake carries no content.

`Schedule` is pure: times are arguments, in seconds of any steady clock. `FleetQueue` is its shell:
workers wait in `take()`. At most one worker has a fleet; all wakes during a turn count as
one. Both are bounded by the number of fleets.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from xpyd_operator.controller.decision.cache import FleetKey

GATHER_S = 0.02
"""A wake waits so long for others: a Deployment's event comes with its pods'."""
SPACING_S = 0.1
"""Between two turns of one fleet, at least. A fleet of a thousand pods has hundreds of events a
second; each turn reads all of its pods."""
SPACING_PER_TURN = 9.0
"""A turn of d seconds is followed by 9 d of quiet: one fleet takes at most a tenth of the loop."""
MAX_SPACING_S = 2.0
BACKOFF_FIRST_S = 1.0
BACKOFF_MOST_S = 60.0


@dataclass
class _Entry:
    due: float | None = None
    active: bool = False
    not_before: float = 0.0
    failures: int = 0
    urgent: bool = False
    """Woken urgently while a worker has it: no back-off comes before the next turn."""


class Schedule:
    """Due times of fleets. A fleet that nothing is planned for has no entry but its failures."""

    def __init__(self) -> None:
        self._entries: dict[FleetKey, _Entry] = {}
        self._heap: list[tuple[float, FleetKey]] = []

    def wake(
        self, key: FleetKey, now: float, *, after: float = GATHER_S, urgent: bool = False
    ) -> None:
        """Plan a turn of the fleet in `after` seconds, or sooner if one is planned already.

        During a back-off, only an `urgent` wake (its document changed) comes earlier.
        """
        entry = self._entries.setdefault(key, _Entry())
        if urgent:
            entry.not_before = min(entry.not_before, now)
            entry.urgent = entry.active
        due = max(now + after, entry.not_before)
        if entry.due is None or due < entry.due:
            entry.due = due
            if not entry.active:
                heapq.heappush(self._heap, (due, key))

    def take(self, now: float) -> FleetKey | None:
        """The fleet that is due longest, which the caller then has; None: none is due."""
        self._drop_stale()
        if not self._heap or self._heap[0][0] > now:
            return None
        _, key = heapq.heappop(self._heap)
        entry = self._entries[key]
        entry.due, entry.active, entry.urgent = None, True, False
        return key

    def done(
        self, key: FleetKey, now: float, *, took_s: float, recheck_after: float | None
    ) -> None:
        """The turn succeeded. The next turn is in `recheck_after` seconds; None: at the next
        wake."""
        entry = self._entries[key]
        entry.failures = 0
        spacing = min(MAX_SPACING_S, max(SPACING_S, took_s * SPACING_PER_TURN))
        self._let_go(key, entry, now + spacing)
        if recheck_after is not None:
            self.wake(key, now, after=recheck_after)

    def failed(self, key: FleetKey, now: float, *, at_least: float = 0.0) -> float:
        """The turn failed: the next turn is in 1, 2, 4 ... 60 s, and `at_least` that; returns the
        wait."""
        entry = self._entries[key]
        wait_s = min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2.0 ** min(entry.failures, 16))
        # A proxy may ask for a day.
        wait_s = max(wait_s, min(at_least, BACKOFF_MOST_S))
        entry.failures += 1
        self._let_go(key, entry, now if entry.urgent else now + wait_s)
        self.wake(key, now, after=wait_s)
        return wait_s

    def forget(self, key: FleetKey) -> None:
        """The fleet is gone; wakes that wait for it are dropped. Not while it is taken."""
        entry = self._entries.get(key)
        if entry is not None and not entry.active:
            del self._entries[key]

    def wait_s(self, now: float) -> float | None:
        """Seconds until a fleet is due, 0: one is, None: none is planned."""
        self._drop_stale()
        return max(0.0, self._heap[0][0] - now) if self._heap else None

    def depth(self, now: float) -> int:
        """Fleets that are due and wait for a worker."""
        return sum(
            1 for e in self._entries.values() if not e.active and e.due is not None and e.due <= now
        )

    def __len__(self) -> int:
        return len(self._entries)

    def _let_go(self, key: FleetKey, entry: _Entry, not_before: float) -> None:
        entry.active = False
        entry.not_before = not_before
        if entry.due is not None:
            # Woken meanwhile.
            entry.due = max(entry.due, not_before)
            heapq.heappush(self._heap, (entry.due, key))

    def _drop_stale(self) -> None:
        """Entries of the heap that were overtaken by an earlier wake, or whose fleet is gone."""
        while self._heap:
            due, key = self._heap[0]
            entry = self._entries.get(key)
            if entry is not None and not entry.active and entry.due == due:
                return
            heapq.heappop(self._heap)


class FleetQueue:
    """A Schedule that workers wait on. Owned by one event loop; `clock` must be steady.

    One timer runs until the next fleet is due and wakes one worker. A wake of a fleet that is due
    already costs one look-up in a map.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._schedule = Schedule()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._closed = False

    def close(self) -> None:
        """Give out no more fleets: `take` returns None from now on."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        while self._idle:
            self._call_one()

    def wake(self, key: FleetKey, *, after: float = GATHER_S, urgent: bool = False) -> None:
        """Wake the fleet; see Schedule.wake."""
        self._schedule.wake(key, self._clock(), after=after, urgent=urgent)
        self._arm()

    async def take(self) -> FleetKey | None:
        """Wait for a fleet that is due; `done` or `failed` must follow. None: closed."""
        while not self._closed:
            key = self._schedule.take(self._clock())
            if key is not None:
                # There may be more for others.
                self._arm()
                return key
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(waiting)
            self._arm()
            try:
                await waiting
            except asyncio.CancelledError:
                if waiting in self._idle:
                    self._idle.remove(waiting)
                raise
        return None

    def done(self, key: FleetKey, *, took_s: float, recheck_after: float | None) -> None:
        """End the turn; see Schedule.done."""
        self._schedule.done(key, self._clock(), took_s=took_s, recheck_after=recheck_after)
        self._arm()

    def failed(self, key: FleetKey, *, at_least: float = 0.0) -> float:
        """End a turn that failed; see Schedule.failed."""
        wait_s = self._schedule.failed(key, self._clock(), at_least=at_least)
        self._arm()
        return wait_s

    def forget(self, key: FleetKey) -> None:
        """Forget the fleet; see Schedule.forget."""
        self._schedule.forget(key)

    def depth(self) -> int:
        """The number of fleets that wait; see Schedule.depth."""
        return self._schedule.depth(self._clock())

    def _arm(self) -> None:
        """Start the timer for the next due fleet, if a worker waits for one."""
        if not self._idle or self._closed:
            return
        now = self._clock()
        wait_s = self._schedule.wait_s(now)
        if wait_s is None:
            return
        due = now + wait_s
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer_due = due
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._go_off)

    def _go_off(self) -> None:
        self._timer = None
        # The worker takes the fleet and starts the timer for the next.
        self._call_one()

    def _call_one(self) -> None:
        while self._idle:
            waiting = self._idle.popleft()
            if not waiting.done():
                waiting.set_result(None)
                return
