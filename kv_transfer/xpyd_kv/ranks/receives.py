"""One rank of D: what ranks of P send it goes where its engine said before.

The Handler of connections that ranks of P dial, and what does its engine's messages, in the
engine's process or in one of its own. Each rank number of P has a ReceiveSession of its own here,
to which a pair of ranks is a whole transfer. Everything on the I/O thread that the sessions run on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from xpyd_kv.memory.device import Event, View
from xpyd_kv.ranks.handler import ComputeGate
from xpyd_kv.session import pairs
from xpyd_kv.session.events import ReceiveEnded, ReceiveEvent, ReceiveLanded, ReceiveQuiet
from xpyd_kv.session.receiving import ReceiveSession
from xpyd_kv.transport.api import Handler, Peer
from xpyd_kv.wire import messages as wire

MakeSession = Callable[[Callable[[ReceiveEvent], None]], ReceiveSession]
"""Makes a session that reports its events to this function."""


class RankReceives(Handler):
    """`report` must not call back before it returns. `written`: when what the model has enqueued
    is in the cache (None: it is), for which `gate` waits before a landing is opened: on a GPU the
    model may still read what the blocks held before."""

    def __init__(
        self,
        make_session: MakeSession,
        *,
        report: pairs.Report,
        written: Callable[[], Event | None],
        gate: ComputeGate,
    ) -> None:
        self._make_session = make_session
        self._report = report
        self._written = written
        self._gate = gate
        # By the number of P's rank; LAYOUT bounds how many there are.
        self._sessions: dict[int, ReceiveSession] = {}

    def do(self, message: pairs.ToRank) -> None:
        """Handle a message of the engine."""
        if isinstance(message, pairs.Open):
            self._open(message)
        elif isinstance(message, pairs.Stop):
            self._stop(message)

    def _open(self, opening: pairs.Open) -> None:
        key, epoch = opening.key, opening.epoch
        for source in opening.sources:
            self._session_of(source).open(opening)
        opened = partial(self._report, pairs.Opened(key=key, epoch=epoch))
        event = self._written()
        if event is None:
            opened()
        else:
            stop = pairs.Stop(key=key, epoch=epoch, reason="device_failed")
            self._gate.add(event, opened, partial(self._stop, stop))

    def _stop(self, stop: pairs.Stop) -> None:
        for session in self._sessions.values():
            session.stop(stop.key, stop.epoch, stop.reason)

    def _session_of(self, source: int) -> ReceiveSession:
        session = self._sessions.get(source)
        if session is None:
            session = self._make_session(lambda event: self._on_event(source, event))
            self._sessions[source] = session
        return session

    def _on_event(self, source: int, event: ReceiveEvent) -> None:
        key, epoch = event.key, event.epoch
        match event:
            case ReceiveLanded():
                transport = event.transport
                self._report(pairs.Landed(key=key, epoch=epoch, source=source, transport=transport))
            case ReceiveEnded():
                reason = event.reason
                self._report(pairs.Lost(key=key, epoch=epoch, source=source, reason=reason))
            case ReceiveQuiet():
                self._report(pairs.Quiet(key=key, epoch=epoch, source=source))
            case _:
                return

    # --- Handler, of connections that ranks of P have dialled

    def peer_up(self, peer: Peer) -> None:
        """Handle the connection of a rank of P."""
        self._session_of(peer.hello.rank).peer_up(peer)

    def peer_down(self, peer: Peer, reason: str) -> None:
        """Handle the end of the connection of a rank of P."""
        self._session_of(peer.hello.rank).peer_down(peer, reason)

    def message(self, peer: Peer, message: wire.Message, body: bytes) -> None:
        """See Handler."""
        self._session_of(peer.hello.rank).message(peer, message, body)

    def data_begin(self, peer: Peer, header: wire.Data, length: int) -> Sequence[View] | None:
        """See Handler."""
        return self._session_of(peer.hello.rank).data_begin(peer, header, length)

    def data_end(
        self, peer: Peer, header: wire.Data, checksum: bytes, *, stored: bool, intact: bool
    ) -> None:
        """See Handler."""
        session = self._session_of(peer.hello.rank)
        session.data_end(peer, header, checksum, stored=stored, intact=intact)

    def tick(self, now: float) -> float | None:
        """Tick the sessions of all pairs; return the next deadline."""
        times = [session.tick(now) for session in self._sessions.values()]
        return min((time for time in times if time is not None), default=None)
