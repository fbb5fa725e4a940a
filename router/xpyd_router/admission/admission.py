"""Admission as the asyncio side uses it: `enter` waits for a place, `Ticket.leave` gives it back.

One object per router process, used in one event loop. The decisions are `gate`'s; here are the
waiting tasks, their deadlines and the refusals.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Literal

from xpyd_core.errors import ApiError
from xpyd_router.admission.gate import COLUMNS, REQUESTS, TOKENS, WAITING, Gate, Row
from xpyd_router.admission.line import Entry
from xpyd_router.admission.values import Cost, Limits
from xpyd_router.metrics import RouterMetrics

_TICK_S = 0.005
"""How often a line asks for places that other processes gave back: little beside a prefill."""

RejectReason = Literal["full", "displaced", "timeout"]
_Word = Literal["admitted", "displaced", "timeout"]

_REFUSALS: dict[RejectReason, tuple[int, str, str]] = {
    "full": (429, "queue_full", "too many requests: the router is busy and its queue is full"),
    "displaced": (
        429,
        "displaced",
        "too many requests: one of higher priority took this one's place in the full queue",
    ),
    "timeout": (503, "queue_timeout", "the router is busy: no place became free in time"),
}


class Ticket:
    """A place. Whoever got it calls `leave` once it is not needed; a second call does nothing."""

    __slots__ = ("_cost", "_gives_back", "_since_s", "queue_s")

    def __init__(
        self, gives_back: Callable[[Cost, float], None], cost: Cost, since_s: float
    ) -> None:
        self._gives_back: Callable[[Cost, float], None] | None = gives_back
        self._cost = cost
        self._since_s = since_s
        self.queue_s = 0.0
        """How long the request waited for it; 0.0 for not at all."""

    def leave(self) -> None:
        """Give the place to the next in line."""
        gives_back, self._gives_back = self._gives_back, None
        if gives_back is not None:
            gives_back(self._cost, self._since_s)


class _Waiter(Entry):
    def __init__(self, cost: Cost, priority: int, word: asyncio.Future[_Word]) -> None:
        super().__init__(cost, priority)
        self.word = word
        """How the wait ended. Who sets it has taken the waiter out of line before."""
        self.has_place = False


class Admission:
    """See the module. `clock` is monotonic seconds; `row` and `others` as in Gate."""

    def __init__(
        self,
        limits: Limits,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        *,
        row: Row | None = None,
        others: Sequence[Row] = (),
    ) -> None:
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._row: Row = [0] * COLUMNS if row is None else row
        self._gate = Gate[_Waiter](limits, self._row, others)
        self._give_back = self._leave
        self._tick: asyncio.TimerHandle | None = None
        metrics.queue_length.set_function(lambda: self._gate.waiting)
        metrics.tokens_in_flight.set_function(lambda: self._row[TOKENS])

    @property
    def is_limited(self) -> bool:
        """Whether anybody may have to wait, so that priorities matter."""
        return self._gate.is_limited

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return self._gate.waiting

    @property
    def in_flight(self) -> Cost:
        """What the requests with a ticket of this process take together."""
        return Cost(self._row[REQUESTS], self._row[TOKENS])

    def at_once(self, cost: Cost) -> Ticket | None:
        """A place where nothing limits any; else `enter`."""
        cost = self._gate.bounded(cost)
        if self._gate.is_limited or not self._gate.enter(cost, 0):
            return None
        return Ticket(self._give_back, cost, self._clock())

    async def enter(self, cost: Cost, *, priority: int = 0, deadline_s: float = math.inf) -> Ticket:
        """A place, at once or when it is this request's turn; lower priorities are earlier.

        `deadline_s`: when the request itself ends, on the router's clock. Raises ApiError: 429
        where the line is full, 503 where the turn did not come in time. Cancelled, it has no place.
        """
        now_s = self._clock()
        cost = self._gate.bounded(cost)
        if self._gate.enter(cost, priority):
            return Ticket(self._give_back, cost, now_s)
        return await self._wait(
            cost, priority, min(deadline_s - now_s, self._limits.queue_timeout_s)
        )

    async def _wait(self, cost: Cost, priority: int, left_s: float) -> Ticket:
        loop = asyncio.get_running_loop()
        waiter = _Waiter(cost, priority, loop.create_future())
        stands, displaced = self._gate.line_up(waiter)
        if displaced is not None:
            _tell(displaced, "displaced")
        if not stands:
            raise self._refusal("full")
        if self._gate.is_shared and self._tick is None:
            self._tick = loop.call_later(_TICK_S, self._on_tick)
        since_s = self._clock()
        deadline = loop.call_later(max(0.0, left_s), self._expire, waiter)
        try:
            word = await waiter.word
        except asyncio.CancelledError:
            self._abandon(waiter)
            raise
        finally:
            deadline.cancel()
            now_s = self._clock()
            self._metrics.queue_seconds.observe(now_s - since_s)
        if word != "admitted":
            raise self._refusal(word)
        ticket = Ticket(self._give_back, cost, now_s)
        ticket.queue_s = now_s - since_s
        return ticket

    def _leave(self, cost: Cost, since_s: float) -> None:
        self._gate.leave(cost, self._clock() - since_s)
        if self._row[WAITING]:
            self._admit()

    def _admit(self) -> None:
        for waiter in self._gate.admit():
            waiter.has_place = True
            _tell(waiter, "admitted")

    def _expire(self, waiter: _Waiter) -> None:
        if self._gate.remove(waiter):
            _tell(waiter, "timeout")
            self._admit()

    def _abandon(self, waiter: _Waiter) -> None:
        """The client left; it may have been told that it has a place already."""
        if waiter.has_place:
            self._gate.leave(waiter.cost, held_s=None)
        else:
            self._gate.remove(waiter)
        self._admit()

    def _on_tick(self) -> None:
        self._tick = None
        self._admit()
        if self._gate.waiting:
            self._tick = asyncio.get_running_loop().call_later(_TICK_S, self._on_tick)

    def _refusal(self, reason: RejectReason) -> ApiError:
        self._metrics.rejected.labels(reason).inc()
        status, code, message = _REFUSALS[reason]
        return ApiError(status, message, code=code, retry_after_s=self._gate.retry_after_s())


def _tell(waiter: _Waiter, word: _Word) -> None:
    # A cancelled task has not run yet; when it does, it gives its place back itself.
    if not waiter.word.done():
        waiter.word.set_result(word)
