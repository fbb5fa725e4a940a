"""Calls that wait until what the model has enqueued on its GPU has run.

Between the connector on the engine's thread, which hands in calls and events, and the session,
which must not read blocks that the model has not written, nor let others write into blocks that
it still reads. I/O thread; polled by the Handler's tick. On a CPU nothing comes here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from xpyd_kv.device.api import DeviceError, Event

_log = logging.getLogger(__name__)
POLL_S = 0.0005
"""Steps take milliseconds; a layer group that leaves half a millisecond later loses nothing."""
LIMIT_S = 30.0
"""A model that has not run in this time does not run any more."""


class _Waiting(NamedTuple):
    event: Event
    call: Callable[[], None]
    fail: Callable[[], None]
    until_s: float


class ComputeGate:
    """Calls in the order in which they came; there are never more than the engine enqueues in
    LIMIT_S. `clock` as the endpoint's; `lost`: told when the device has failed."""

    def __init__(
        self, clock: Callable[[], float], *, lost: Callable[[str], None] = lambda _: None
    ) -> None:
        self._clock = clock
        self._lost = lost
        self._waiting: deque[_Waiting] = deque()

    def add(self, event: Event, call: Callable[[], None], fail: Callable[[], None]) -> None:
        """`call` when `event` is done; `fail` when it fails or is not done in time."""
        self._waiting.append(_Waiting(event, call, fail, self._clock() + LIMIT_S))
        self.poll()

    def poll(self) -> float | None:
        """Make the calls whose time has come; when to ask again (None: nothing waits)."""
        while self._waiting:
            oldest = self._waiting[0]
            try:
                is_done = oldest.event.is_done()
            except DeviceError as error:
                _log.error("the GPU has failed: %s", error)
                self._waiting.popleft()
                self._lost(f"the GPU has failed: {error}")
                oldest.fail()
                continue
            now = self._clock()
            if is_done:
                self._waiting.popleft()
                oldest.call()
            elif now >= oldest.until_s:
                _log.error("the GPU has not run the model's work within %.0f s", LIMIT_S)
                self._waiting.popleft()
                oldest.fail()
            else:
                return now + POLL_S
        return None
