"""Who may go on now: limits, the line in front of them, and how long it will last. Pure.

Places are handed over: who leaves gives its place to the first in line, and whoever comes while
others wait lines up behind them, unless its priority is higher. So a large request at the head is
never overtaken by smaller ones of its priority. One that is larger than a limit counts as the whole
limit: it runs, alone.

Several router processes share a table with one row of counts each. A process writes its own row and
reads the others'; between two processes nothing is handed over, so a process with a line asks
`admit` again every few milliseconds, and newcomers anywhere line up while anybody waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Generic, Protocol

from xpyd_router.admission.line import E, Line
from xpyd_router.admission.values import Cost, Limits

COLUMNS = 4
REQUESTS, TOKENS, WAITING, WAITING_BYTES = range(COLUMNS)
"""Columns of a row: requests and tokens in flight, requests in line, and their bodies."""


class Row(Protocol):
    """A list, or a piece of shared memory."""

    def __getitem__(self, column: int, /) -> int: ...
    def __setitem__(self, column: int, value: int, /) -> None: ...


_LARGEST = 2**40
"""Of one request where nothing limits it: sums of such stay within the 64 bits of a row."""
_LEARNING = 1 / 16
"""Weight of one request in the mean time that requests take: some dozen make it."""
_RETRY_AFTER_BOUNDS_S = (1, 60)


class Gate(Generic[E]):
    """One per router process. `others` are the rows of the other processes."""

    def __init__(self, limits: Limits, row: Row, others: Sequence[Row] = ()) -> None:
        self._limits = limits
        self._row = row
        self._others = others
        self._line = Line[E]()
        self.is_limited: Final = bool(limits.requests or limits.tokens)
        self._most_requests: float = limits.requests or math.inf
        self._most_tokens: float = limits.tokens or math.inf
        self._largest = Cost(limits.requests or _LARGEST, limits.tokens or _LARGEST)
        self._mean_s: float | None = None

    @property
    def waiting(self) -> int:
        """Requests in line, of this process."""
        return len(self._line)

    @property
    def is_shared(self) -> bool:
        """Whether places become free that nobody hands over."""
        return bool(self._others)

    def bounded(self, cost: Cost) -> Cost:
        """`cost`, but no more of it than a limit: what the other methods take."""
        most = self._largest
        if cost.requests <= most.requests and cost.tokens <= most.tokens:
            return cost
        requests, tokens = min(cost.requests, most.requests), min(cost.tokens, most.tokens)
        return cost._replace(requests=requests, tokens=tokens)

    def enter(self, cost: Cost, priority: int) -> bool:
        """Take a place now; False where the request has to line up."""
        if self.is_limited and (self._must_wait(priority) or not self._has_room(cost)):
            return False
        self._row[REQUESTS] += cost.requests
        self._row[TOKENS] += cost.tokens
        return True

    def line_up(self, entry: E) -> tuple[bool, E | None]:
        """Whether `entry` stands in line now, and whom it displaced.

        A full line takes an entry of higher priority in the place of its last one, if that makes
        room: else a line full of batch work would shut out what is urgent.
        """
        if self._fits_line(entry.cost, self._line.held_bytes, len(self._line)):
            self._add(entry)
            return True, None
        if not self._line or self._line.last.priority <= entry.priority:
            return False, None
        last = self._line.last
        left_bytes = self._line.held_bytes - last.cost.body_bytes
        if not self._fits_line(entry.cost, left_bytes, len(self._line) - 1):
            return False, None
        self.remove(last)
        self._add(entry)
        return True, last

    def remove(self, entry: E) -> bool:
        """`entry` waits no more; whether it did. Call `admit` then: it may have held up others."""
        was_waiting = self._line.remove(entry)
        if was_waiting:
            self._row[WAITING] -= 1
            self._row[WAITING_BYTES] -= entry.cost.body_bytes
        return was_waiting

    def admit(self) -> list[E]:
        """Those whose turn has come, in order. They have their places."""
        admitted: list[E] = []
        while self._line and self._has_room(self._line.first.cost):
            entry = self._line.first
            self.remove(entry)
            self._row[REQUESTS] += entry.cost.requests
            self._row[TOKENS] += entry.cost.tokens
            admitted.append(entry)
        return admitted

    def leave(self, cost: Cost, held_s: float | None) -> None:
        """Give back a place; None for one that was not used. Call `admit` then."""
        self._row[REQUESTS] -= cost.requests
        self._row[TOKENS] -= cost.tokens
        if held_s is None:
            return
        mean_s = self._mean_s
        self._mean_s = held_s if mean_s is None else mean_s + _LEARNING * (held_s - mean_s)

    def retry_after_s(self) -> int:
        """When the line in front of a newcomer will have gone in, within 1 to 60 s.

        Little's law: in flight / mean time = requests per second.
        """
        ahead = 1 + self._row[WAITING] + self._elsewhere(WAITING)
        in_flight = max(1, self._row[REQUESTS] + self._elsewhere(REQUESTS))
        least, most = _RETRY_AFTER_BOUNDS_S
        return math.ceil(min(max(ahead * (self._mean_s or 0.0) / in_flight, least), most))

    def _must_wait(self, priority: int) -> bool:
        if self._row[WAITING] and self._line.first.priority <= priority:
            return True
        return self.is_shared and any(row[WAITING] for row in self._others)

    def _has_room(self, cost: Cost) -> bool:
        requests = self._row[REQUESTS] + cost.requests
        tokens = self._row[TOKENS] + cost.tokens
        for row in self._others:
            requests += row[REQUESTS]
            tokens += row[TOKENS]
        return requests <= self._most_requests and tokens <= self._most_tokens

    def _fits_line(self, cost: Cost, held_bytes: int, entries: int) -> bool:
        limits = self._limits
        held_bytes += self._elsewhere(WAITING_BYTES)
        fits_bytes = held_bytes + cost.body_bytes <= limits.queue_bytes
        return entries + self._elsewhere(WAITING) < limits.queue_entries and fits_bytes

    def _add(self, entry: E) -> None:
        self._line.add(entry)
        self._row[WAITING] += 1
        self._row[WAITING_BYTES] += entry.cost.body_bytes

    def _elsewhere(self, column: int) -> int:
        return sum(row[column] for row in self._others)
