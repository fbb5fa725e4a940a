"""Calling the session from the I/O thread: one call at a time, defects contained, ticks kept.

Owned by the endpoint; the thread's other parts put their reports here.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable

from xpyd_kv.transport.api import Handler

_log = logging.getLogger(__name__)
_TICK_AFTER_ERROR_S = 1.0


class SessionCalls:
    """What has to be said to the Handler, and when its tick is due."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self._later: deque[Callable[[], None]] = deque()
        self._ran = True
        self._tick_at = -math.inf

    @property
    def due(self) -> float:
        """When `tick` has something to do; -inf = at once."""
        return -math.inf if self._ran or self._later else self._tick_at

    def note(self, ran: bool) -> None:
        """The session was called elsewhere (or not): its deadlines may have moved."""
        self._ran = self._ran or ran

    def run(self, function: Callable[[], None]) -> None:
        """Call it now; nothing of the session may be running."""
        self._ran = True
        try:
            function()
        except Exception:
            _log.exception("the session has failed in a call")

    def later(self, function: Callable[[], None]) -> None:
        """Call it when what runs now has returned."""
        self._later.append(function)

    def run_later(self) -> None:
        """The calls put off until now; what they put off in turn waits for the next time."""
        for _ in range(len(self._later)):
            self.run(self._later.popleft())

    def tick(self, now: float) -> None:
        """The session's tick, if it was called since the last one or its time has come."""
        if not self._ran and now < self._tick_at:
            return
        self._ran = False
        self._tick_at = now + _TICK_AFTER_ERROR_S
        try:
            tick_at = self.handler.tick(now)
            self._tick_at = math.inf if tick_at is None else tick_at
        except Exception:
            _log.exception("the session's tick has failed")
