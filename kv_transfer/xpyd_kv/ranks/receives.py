"""One rank of D: what ranks of P send it goes where its engine said before.

The Handler of connections that ranks of P dial. Each rank number of P has a ReceiveSession of its
own here, to which a pair of ranks is a whole transfer. Everything on the I/O thread that the
sessions run on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.memory.device import View
from xpyd_kv.session.events import ReceiveEnded, ReceiveEvent, ReceiveLanded, ReceiveQuiet
from xpyd_kv.session.pairs import Opening, PairLanded, PairLost, PairQuiet, ReceiveReport
from xpyd_kv.session.receiving import ReceiveSession
from xpyd_kv.transport.api import Peer
from xpyd_kv.wire import messages as wire

MakeSession = Callable[[Callable[[ReceiveEvent], None]], ReceiveSession]
"""A session that tells this function what becomes of its transfers."""
Report = Callable[[TransferKey, int, ReceiveReport], None]


class RankReceives:
    """A ReceivingRank but for Opened, which its user says. `report` must not call back before it
    returns."""

    def __init__(self, make_session: MakeSession, *, report: Report) -> None:
        self._make_session = make_session
        self._report = report
        # By the number of P's rank; LAYOUT bounds how many there are.
        self._sessions: dict[int, ReceiveSession] = {}

    def open(self, opening: Opening) -> None:
        """Take what comes."""
        for source in opening.sources:
            self._session_of(source).open(opening)

    def stop(self, key: TransferKey, epoch: int, reason: str) -> None:
        """See ReceivingRank."""
        for session in self._sessions.values():
            session.stop(key, epoch, reason)

    def _session_of(self, source: int) -> ReceiveSession:
        session = self._sessions.get(source)
        if session is None:
            session = self._make_session(lambda event: self._on_event(source, event))
            self._sessions[source] = session
        return session

    def _on_event(self, source: int, event: ReceiveEvent) -> None:
        match event:
            case ReceiveLanded():
                report: ReceiveReport = PairLanded(source, event.transport)
            case ReceiveEnded():
                report = PairLost(source, event.reason)
            case ReceiveQuiet():
                report = PairQuiet(source)
            case _:
                return
        self._report(event.key, event.epoch, report)

    # --- Handler, of connections that ranks of P have dialled

    def peer_up(self, peer: Peer) -> None:
        """A rank of P is there."""
        self._session_of(peer.hello.rank).peer_up(peer)

    def dial_failed(self, address: Address, reason: str) -> None:
        """D dials nobody."""

    def peer_down(self, peer: Peer, reason: str) -> None:
        """A rank of P is gone."""
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
        """Deadlines of all pairs."""
        times = [session.tick(now) for session in self._sessions.values()]
        return min((time for time in times if time is not None), default=None)
