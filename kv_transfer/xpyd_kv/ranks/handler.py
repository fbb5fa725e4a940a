"""The Handler of a process' endpoint, and what waits there for a GPU's compute stream.

Engine messages go to the session, rank messages to the rank. The endpoint is made first and needs a
handler; session and rank are set later, before `start`.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xpyd_core.request_id import Address
from xpyd_kv.memory.device import DeviceError, Event, View
from xpyd_kv.metrics import MetricsReporter
from xpyd_kv.session.deadlines import Alarm
from xpyd_kv.transport.api import Handler, Peer
from xpyd_kv.wire import messages as wire

_log = logging.getLogger(__name__)
POLL_S = 0.0005
"""Steps take milliseconds; a layer group that leaves half a millisecond later loses nothing."""
PURGE_S = 1.0
"""Expired tombstones wake no thread: a tick that comes so long after the last drops them."""
LIMIT_S = 30.0
"""A model that has not run in this time does not run any more."""


class _Waiting(NamedTuple):
    event: Event
    call: Callable[[], None]
    fail: Callable[[], None]
    until_s: float


class ComputeGate:
    """Calls in the order in which they came; there are never more than the engine enqueues in
    LIMIT_S. `clock` as the endpoint's; `lost`: called when the device has failed."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        alarm: Alarm | None = None,
        lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._alarm = alarm or Alarm()
        self._lost = lost
        self._waiting: deque[_Waiting] = deque()

    def add(self, event: Event, call: Callable[[], None], fail: Callable[[], None]) -> None:
        """`call` when `event` is done; `fail` when it fails or is not done in time."""
        self._waiting.append(_Waiting(event, call, fail, self._clock() + LIMIT_S))
        at = self.poll()
        if at is not None:
            self._alarm.at = min(self._alarm.at, at)

    def poll(self) -> float | None:
        """Make the calls whose event is done; return when to poll again (None: no call waits)."""
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


class ProcessHandler:
    """The Handler of one process: it passes each call to the engine's session or to the rank.
    `session` None: a rank's process, whose `reporter` reports to its engine what it counts. `rank`
    None: a process that only has an engine."""

    session: Handler | None = None
    rank: Handler | None = None
    reporter: MetricsReporter | None = None

    def __init__(self, gate: ComputeGate, alarm: Alarm) -> None:
        self._gate = gate
        self._alarm = alarm
        self._purge_at = -math.inf

    def peer_up(self, peer: Peer) -> None:
        self._of(peer).peer_up(peer)

    def dial_failed(self, address: Address, reason: str, detail: str = "") -> None:
        for part in (self.session, self.rank):
            if part is not None:
                part.dial_failed(address, reason, detail)

    def peer_down(self, peer: Peer, reason: str) -> None:
        self._of(peer).peer_down(peer, reason)

    def message(self, peer: Peer, message: wire.Message, body: bytes) -> None:
        part = self.rank if peer.is_data else self.session
        assert part is not None  # The endpoint takes no others.
        part.message(peer, message, body)

    def data_begin(self, peer: Peer, header: wire.Data, length: int) -> Sequence[View] | None:
        return self._of(peer).data_begin(peer, header, length)

    def data_end(
        self, peer: Peer, header: wire.Data, checksum: bytes, *, stored: bool, intact: bool
    ) -> None:
        self._of(peer).data_end(peer, header, checksum, stored=stored, intact=intact)

    def tick(self, now: float) -> float | None:
        alarm = self._alarm
        if now >= alarm.at or now >= self._purge_at:
            alarm.at = math.inf
            self._purge_at = now + PURGE_S
            times = [self._gate.poll()]
            parts = (self.session, self.rank, self.reporter)
            times += [part.tick(now) for part in parts if part is not None]
            # What they did meanwhile may have set it, too.
            alarm.at = min([alarm.at, *(time for time in times if time is not None)])
        return None if alarm.at == math.inf else alarm.at

    def _of(self, peer: Peer) -> Handler:
        part = self.rank if peer.is_data else self.session
        assert part is not None  # The endpoint takes no others.
        return part
