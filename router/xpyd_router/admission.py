"""Admission: how many requests and tokens run at once, and the queue in front of them.

`Gate` decides: a request that leaves hands its place to the first in the queue, and a new request
queues behind those that wait unless its priority is higher. So a large request at the head is never
overtaken by smaller ones of its key and priority. Which key is next says `fair_queue`; with several
processes each of them shares its own places so. A request larger than a limit counts as the whole
limit: it runs alone. Priorities are strict and do not age, as in engines that schedule by priority
(vLLM): a request keeps one meaning on its whole way, and its deadline bounds how long it waits.

`Admission` is the asyncio side: waiting tasks, their deadlines and refusals. Several router
processes share a table with one row of counts each. A process writes its own row and reads the
others'; places are not handed from process to process, so a process with a queue asks `Gate.admit`
again every few milliseconds, and new requests in any process queue while any request waits.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal

import msgspec

from xpyd_core.bodies import is_absent, read
from xpyd_core.errors import ApiError
from xpyd_router.fair_queue import Account, Cost, E, Entry, FairQueue
from xpyd_router.metrics import RouterMetrics

_CLASSES = {"high": -100, "normal": 0, "low": 100}
PRIORITY_HEADER = "X-Xpyd-Priority"


@dataclass(frozen=True)
class AdmissionLimits:
    """Limits of one router. Without queue entries no request waits: one over a limit is refused."""

    requests: int | None = None
    """Requests in flight; None: no limit."""
    tokens: int | None = None
    """Tokens in flight, of prompts and allowed outputs; None: no limit."""
    queue_entries: int = 1024
    """Requests that wait: about a minute's at 17 requests/s, the longest that they may."""
    queue_bytes: int = 256 * 1024 * 1024
    """Bodies of the requests that wait."""
    queue_timeout_s: float = 60.0
    """How long a request waits for a place; clients' own read timeouts are longer."""


def read_priority(member: msgspec.Raw, header: str | None) -> int:
    """A request's place in line: lower is earlier, 0 without a wish.

    `member` is the JSON of the body's `priority`, vLLM's; `header` is PRIORITY_HEADER's value, a
    class or a number. The header wins: a gateway sets it, and it does not reach the engines, which
    take a body's `priority` only where they schedule by it. Raises ApiError 400.
    """
    if header:
        wish = _CLASSES.get(header.strip().lower())
        if wish is not None:
            return wish
        try:
            return _bounded(int(header))
        except ValueError:
            message = f"{PRIORITY_HEADER}: expected High, Normal, Low or an integer"
            raise ApiError(400, message, param=PRIORITY_HEADER) from None
    return 0 if is_absent(member) else _bounded(read(int, member, "priority"))


def _bounded(value: int) -> int:
    """Within 64 bits: what engines take, and what compares in constant time."""
    return max(-(2**63), min(value, 2**63 - 1))


COLUMNS = 4
REQUESTS, TOKENS, WAITING, WAITING_BYTES = range(COLUMNS)
"""Columns of a row: requests and tokens in flight, requests in line, and their bodies."""


Row = list[int] | memoryview
"""The row of counters of one process; in shared memory where there are several."""
_LARGEST = 2**40
"""Tokens of one request where nothing limits it: sums of such stay within the 64 bits of a row."""
_LEARNING = 1 / 16
"""Weight of one request in the mean time that requests take: some dozen make it."""
_RETRY_AFTER_BOUNDS_S = (1, 60)
SPARE_PART = 16
"""With keys, this part of each limit is kept for keys that have few requests running: else all
places would be a flood's, and others wait until the first of its answers ends."""


class Gate(Generic[E]):
    """Decides which requests run; one per router process. `others` are the rows of the other
    processes. `keeps_spare`: requests are of several keys.
    """

    def __init__(
        self,
        limits: AdmissionLimits,
        row: Row,
        others: Sequence[Row] = (),
        *,
        keeps_spare: bool = False,
    ) -> None:
        self._limits = limits
        self._row = row
        self._others = others
        self._queue = FairQueue[E]()
        self.is_limited: Final = bool(limits.requests or limits.tokens)
        self._most_requests: float = limits.requests or math.inf
        self._most_tokens: float = limits.tokens or math.inf
        part = SPARE_PART if keeps_spare else _LARGEST
        self._spare = (limits.requests or 0) // part, (limits.tokens or 0) // part
        self._few = max(1, self._spare[0])
        self._largest = Cost(limits.requests or _LARGEST, limits.tokens or _LARGEST)
        self._mean_s: float | None = None

    @property
    def waiting(self) -> int:
        """Requests in line, of this process."""
        return len(self._queue)

    @property
    def is_shared(self) -> bool:
        """Whether places become free without being handed over."""
        return bool(self._others)

    def bounded(self, cost: Cost) -> Cost:
        """`cost`, but no more of it than a limit: what the other methods take."""
        most = self._largest
        if cost.requests <= most.requests and cost.tokens <= most.tokens:
            return cost
        requests, tokens = min(cost.requests, most.requests), min(cost.tokens, most.tokens)
        return cost._replace(requests=requests, tokens=tokens)

    def enter(self, cost: Cost, priority: int, account: Account) -> bool:
        """Take a place now; False where the request has to line up."""
        if self.is_limited:
            if self._must_wait(priority) or not self._has_room(cost, account):
                return False
            self._begin(account, cost)
        self._row[REQUESTS] += cost.requests
        self._row[TOKENS] += cost.tokens
        return True

    def enqueue(self, entry: E) -> tuple[bool, E | None]:
        """Whether `entry` is in the queue now, and the entry that it displaced.

        A full line takes an entry of higher priority, or of an account that has less in it, in the
        place of its last one, if that makes room: else a line full of batch work would shut out
        what is urgent, and one key's flood all others.
        """
        if self._fits_queue(entry.cost, self._queue.held_bytes, len(self._queue)):
            self._add(entry)
            return True, None
        if not self._queue or not self._queue.gives_way(self._queue.last, entry):
            return False, None
        last = self._queue.last
        left_bytes = self._queue.held_bytes - last.cost.body_bytes
        if not self._fits_queue(entry.cost, left_bytes, len(self._queue) - 1):
            return False, None
        self.remove(last)
        self._add(entry)
        return True, last

    def remove(self, entry: E) -> bool:
        """`entry` waits no more; whether it did. Call `admit` then: it may have held up others."""
        was_waiting = self._queue.remove(entry)
        if was_waiting:
            self._row[WAITING] -= 1
            self._row[WAITING_BYTES] -= entry.cost.body_bytes
        return was_waiting

    def admit(self) -> list[E]:
        """The entries whose turn has come, in order; each holds its place now."""
        admitted: list[E] = []
        while (entry := self._next()) is not None:
            self.remove(entry)
            self._row[REQUESTS] += entry.cost.requests
            self._row[TOKENS] += entry.cost.tokens
            self._begin(entry.account, entry.cost)
            admitted.append(entry)
        return admitted

    def is_next(self, entry: E) -> bool:
        """Whether `entry`, which is in the queue, has a place if it is asked for now."""
        return self._next() is entry

    def _next(self) -> E | None:
        """Who has a place now."""
        if not self._queue:
            return None
        entry: E | None = self._queue.first
        if self._has_room(entry.cost, entry.account):
            return entry
        if not any(self._spare) or self._has_few(entry.account):
            return None
        # What is kept is not for it, but for keys that wait behind it.
        entry = self._queue.first_of(self._has_few)
        return entry if entry and self._has_room(entry.cost, entry.account) else None

    def leave(
        self, cost: Cost, held_s: float | None, account: Account, used: int | None = None
    ) -> None:
        """Give back a place; `held_s` None for one that was not used. Call `admit` then. `used`:
        the tokens that the request took; None: as many as it cost.
        """
        self._row[REQUESTS] -= cost.requests
        self._row[TOKENS] -= cost.tokens
        if self.is_limited:
            account.add_running(-1)
            if used is not None or held_s is None:
                self._queue.settle(account, cost.tokens, used or 0)
        if held_s is None:
            return
        mean_s = self._mean_s
        self._mean_s = held_s if mean_s is None else mean_s + _LEARNING * (held_s - mean_s)

    def retry_after_s(self) -> int:
        """The time until a newcomer's turn, by the queue in front of it; 1 to 60 s.

        Little's law: in flight / mean time = requests per second.
        """
        ahead = 1 + self._row[WAITING] + self._elsewhere(WAITING)
        in_flight = max(1, self._row[REQUESTS] + self._elsewhere(REQUESTS))
        least, most = _RETRY_AFTER_BOUNDS_S
        return math.ceil(min(max(ahead * (self._mean_s or 0.0) / in_flight, least), most))

    def _must_wait(self, priority: int) -> bool:
        if self._row[WAITING] and self._queue.first.priority <= priority:
            return True
        return self.is_shared and any(row[WAITING] for row in self._others)

    def _begin(self, account: Account, cost: Cost) -> None:
        account.add_running(1)
        self._queue.charge(account, cost.tokens)

    def _has_room(self, cost: Cost, account: Account) -> bool:
        requests = self._row[REQUESTS] + cost.requests
        tokens = self._row[TOKENS] + cost.tokens
        for row in self._others:
            requests += row[REQUESTS]
            tokens += row[TOKENS]
        places, room = self._spare
        if not self._has_few(account):
            requests, tokens = requests + places, tokens + room
        return requests <= self._most_requests and tokens <= self._most_tokens

    def _has_few(self, account: Account) -> bool:
        return account.running < self._few

    def _fits_queue(self, cost: Cost, held_bytes: int, entries: int) -> bool:
        limits = self._limits
        held_bytes += self._elsewhere(WAITING_BYTES)
        fits_bytes = held_bytes + cost.body_bytes <= limits.queue_bytes
        return entries + self._elsewhere(WAITING) < limits.queue_entries and fits_bytes

    def _add(self, entry: E) -> None:
        self._queue.add(entry)
        self._row[WAITING] += 1
        self._row[WAITING_BYTES] += entry.cost.body_bytes

    def _elsewhere(self, column: int) -> int:
        return sum(row[column] for row in self._others)


_TICK_S = 0.005
"""How often a line asks for places that other processes gave back: little compared with a prefill.
"""
RejectReason = Literal["full", "displaced", "timeout"]
_Word = Literal["admitted", "displaced", "timeout"]
_REFUSALS: dict[RejectReason, tuple[int, str, str]] = {
    "full": (429, "queue_full", "too many requests: the router is busy and its queue is full"),
    "displaced": (
        429,
        "displaced",
        "too many requests: one of higher priority, or of a client with fewer that wait, took this "
        "one's place in the full queue",
    ),
    "timeout": (503, "queue_timeout", "the router is busy: no place became free in time"),
}


@dataclass(slots=True, eq=False)
class Ticket:
    """A place. Its holder calls `leave` once it is not needed; a second call does nothing."""

    _gives_back: Callable[[Cost, float, Account, int | None], None] | None
    _cost: Cost
    _since_s: float
    _account: Account
    queue_s: float = 0.0
    """How long the request waited for it; 0.0 for not at all."""
    used: int | None = None
    """Tokens that the request took, once they are known."""

    def leave(self) -> None:
        """Give the place to the next in line."""
        gives_back, self._gives_back = self._gives_back, None
        if gives_back is not None:
            gives_back(self._cost, self._since_s, self._account, self.used)


@dataclass(eq=False)
class _Waiter(Entry):
    word: asyncio.Future[_Word]
    """How the wait ended. Set only after the waiter was taken out of the queue."""
    has_place: bool = False


class Admission:
    """See the module. `clock` is monotonic seconds; `row` and the rest as in Gate."""

    def __init__(
        self,
        limits: AdmissionLimits,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        *,
        row: Row | None = None,
        others: Sequence[Row] = (),
        keeps_spare: bool = False,
    ) -> None:
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._row: Row = [0] * COLUMNS if row is None else row
        self._gate = Gate[_Waiter](limits, self._row, others, keeps_spare=keeps_spare)
        self._give_back = self._leave
        self._everyone = Account()
        """Of requests without a key."""
        self._tick: asyncio.TimerHandle | None = None
        metrics.queue_length.set_function(lambda: self._gate.waiting)
        metrics.tokens_in_flight.set_function(lambda: self._row[TOKENS])

    @property
    def is_limited(self) -> bool:
        """Whether a request may have to wait, so that priorities matter."""
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
        if self._gate.is_limited or not self._gate.enter(cost, 0, self._everyone):
            return None
        return Ticket(self._give_back, cost, self._clock(), self._everyone)

    async def enter(
        self,
        cost: Cost,
        *,
        priority: int = 0,
        deadline_s: float = math.inf,
        account: Account | None = None,
    ) -> Ticket:
        """A place, at once or when it is this request's turn; lower priorities are earlier.
        `account`: that of its key, if it has one.

        `deadline_s`: when the request itself ends, on the router's clock. Raises ApiError: 429
        where the line is full, 503 where the turn did not come in time. Cancelled, it has no place.
        """
        now_s = self._clock()
        cost, account = self._gate.bounded(cost), account or self._everyone
        if self._gate.enter(cost, priority, account):
            return Ticket(self._give_back, cost, now_s, account)
        left_s = min(deadline_s - now_s, self._limits.queue_timeout_s)
        waiter = _Waiter(cost, priority, account, asyncio.get_running_loop().create_future())
        return await self._wait(waiter, left_s)

    async def _wait(self, waiter: _Waiter, left_s: float) -> Ticket:
        loop = asyncio.get_running_loop()
        is_queued, displaced = self._gate.enqueue(waiter)
        if displaced is not None:
            _resolve(displaced, "displaced")
        if not is_queued:
            raise self._refusal("full")
        if self._gate.is_next(waiter):
            self._admit()  # before one of another key for which there is no room
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
        ticket = Ticket(self._give_back, waiter.cost, now_s, waiter.account)
        ticket.queue_s = now_s - since_s
        return ticket

    def _leave(self, cost: Cost, since_s: float, account: Account, used: int | None) -> None:
        self._gate.leave(cost, self._clock() - since_s, account, used)
        if self._row[WAITING]:
            self._admit()

    def _admit(self) -> None:
        for waiter in self._gate.admit():
            waiter.has_place = True
            _resolve(waiter, "admitted")

    def _expire(self, waiter: _Waiter) -> None:
        if self._gate.remove(waiter):
            _resolve(waiter, "timeout")
            self._admit()

    def _abandon(self, waiter: _Waiter) -> None:
        """The client left; it may have got its place already."""
        if waiter.has_place:
            self._gate.leave(waiter.cost, None, waiter.account)
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


def _resolve(waiter: _Waiter, word: _Word) -> None:
    # A cancelled task has not run yet; when it does, it gives its place back itself.
    if not waiter.word.done():
        waiter.word.set_result(word)
