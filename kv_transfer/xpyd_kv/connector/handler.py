"""The Handler of a process' endpoint: to the session what engines say, to the rank what ranks do.

The endpoint comes first and needs a handler; session and rank come second, before `start`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from xpyd_core.request_id import Address
from xpyd_kv.connector.compute_gate import ComputeGate
from xpyd_kv.device.api import View
from xpyd_kv.transport.api import Handler, Peer
from xpyd_kv.wire import messages as wire


class Ticking(Protocol):
    """What Handler.tick asks."""

    def tick(self, now: float) -> float | None: ...


class LateHandler:
    """See Handler. `session` None: a rank's process, whose `teller` tells its engine what it
    counts. `rank` None: one that only has an engine."""

    session: Handler | None = None
    rank: Handler | None = None
    teller: Ticking | None = None

    def __init__(self, gate: ComputeGate) -> None:
        self._gate = gate

    def peer_up(self, peer: Peer) -> None:
        self._of(peer).peer_up(peer)

    def dial_failed(self, address: Address, reason: str) -> None:
        for part in (self.session, self.rank):
            if part is not None:
                part.dial_failed(address, reason)

    def peer_down(self, peer: Peer, reason: str) -> None:
        self._of(peer).peer_down(peer, reason)

    def message(self, peer: Peer, message: wire.Message, body: bytes) -> None:
        self._of(peer).message(peer, message, body)

    def data_begin(self, peer: Peer, header: wire.Data, length: int) -> Sequence[View] | None:
        return self._of(peer).data_begin(peer, header, length)

    def data_end(
        self, peer: Peer, header: wire.Data, checksum: bytes, *, stored: bool, intact: bool
    ) -> None:
        self._of(peer).data_end(peer, header, checksum, stored=stored, intact=intact)

    def tick(self, now: float) -> float | None:
        times = [self._gate.poll()]
        parts = (self.session, self.rank, self.teller)
        times += [part.tick(now) for part in parts if part is not None]
        return min((time for time in times if time is not None), default=None)

    def _of(self, peer: Peer) -> Handler:
        part = self.rank if peer.is_data else self.session
        assert part is not None  # The endpoint takes no others.
        return part
