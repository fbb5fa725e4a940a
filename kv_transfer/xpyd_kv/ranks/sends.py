"""One rank of P: what its engine granted goes to ranks of D, over a connection to each.

The Handler of connections that this rank dials, and what does its engine's messages, in the
engine's process or in one of its own. Each rank of D has a SendSession of its own here, to which a
pair of ranks is a whole transfer. Everything on the I/O thread that the sessions run on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.session import pairs
from xpyd_kv.session.deadlines import Remembered
from xpyd_kv.session.events import SendEnded, SendEvent, SendFlushed
from xpyd_kv.session.outgoing import Granted, OfferRequest, ReadyArea
from xpyd_kv.session.probing import ProbeResult
from xpyd_kv.session.sending import SendSession
from xpyd_kv.transport.api import Handler, Peer
from xpyd_kv.wire import messages as wire

MakeSession = Callable[[Callable[[SendEvent], None]], SendSession]
"""Makes a session that reports its events to this function."""


@dataclass
class _Part:
    """This rank's part of a transfer, until its engine forgets it."""

    epoch: int
    # What is in the cache and no session was given: before the grant.
    areas: list[ReadyArea] = field(default_factory=list[ReadyArea])
    is_complete: bool = False
    targets: dict[Address, int] | None = None


class RankSends(Handler):
    """`report` must not call back before it returns."""

    def __init__(
        self,
        make_session: MakeSession,
        *,
        report: pairs.Report,
        tombstone_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._make_session = make_session
        self._report = report
        self._clock = clock
        # By the address of a rank of D: of those that are connected, dialled or sent to.
        self._sessions: dict[Address, SendSession] = {}
        self._up: dict[Address, Peer] = {}
        self._transports: dict[Address, str] = {}
        self._parts: dict[TransferKey, _Part] = {}
        # What runners say may come late.
        self._over: Remembered[TransferKey, int] = Remembered(tombstone_s)

    # --- from the engine

    def do(self, message: pairs.ToRank) -> None:
        """Handle a message of the engine."""
        match message:
            case pairs.Send():
                self._send(message)
            case pairs.Ready():
                self.ready(message.key, message.epoch, message.areas)
            case pairs.Complete():
                self.complete(message.key, message.epoch)
            case pairs.Cancel():
                self.cancel(message.key, message.epoch, message.reason)
            case pairs.Forget():
                self._forget(message.key, message.epoch)
            case pairs.Probe():
                self._probe(message)
            case _:
                return

    def _send(self, sending: pairs.Send) -> None:
        part = self._part(sending.key, sending.epoch)
        targets = {target.address: target.rank for target in sending.targets}
        if part is None or part.targets is not None or len(targets) < len(sending.targets):
            key, epoch = sending.key, sending.epoch
            for rank, _ in sending.targets:
                ended = pairs.Ended(key=key, epoch=epoch, destination=rank, reason="cancelled")
                self._report(ended)
            return
        part.targets = targets
        areas, part.areas = part.areas, []
        for address, rank in targets.items():
            request = OfferRequest(
                key=sending.key,
                epoch=sending.epoch,
                address=address,
                tokens=sending.tokens,
                prompt_tokens=sending.tokens,
                salt=b"",
                body=b"",
                mode=sending.mode,
            )
            session = self._session_at(address)
            granted = Granted(sending.incarnation, rank, sending.skip_tokens)
            session.begin(request, granted, sending.spill)
            session.ready(sending.key, sending.epoch, areas)
            if part.is_complete:
                session.complete(sending.key, sending.epoch)

    def ready(self, key: TransferKey, epoch: int, areas: Sequence[ReadyArea]) -> None:
        """Send areas that are in the cache now. This rank's runner calls it, too."""
        part = self._part(key, epoch)
        if part is None:
            return
        if part.targets is None:
            part.areas.extend(areas)
        for session in self._sessions_of(part):
            session.ready(key, epoch, areas)

    def complete(self, key: TransferKey, epoch: int) -> None:
        """Note that no more areas follow. This rank's runner calls it, too."""
        part = self._part(key, epoch)
        if part is None:
            return
        part.is_complete = True
        for session in self._sessions_of(part):
            session.complete(key, epoch)

    def cancel(self, key: TransferKey, epoch: int, reason: str) -> None:
        """Stop sending. This rank's runner calls it, too."""
        part = self._parts.get(key)
        if part is None or part.epoch != epoch:
            return
        for session in self._sessions_of(part):
            session.cancel(key, epoch, reason)

    def _forget(self, key: TransferKey, epoch: int) -> None:
        self._over.set(key, epoch, self._clock())
        part = self._parts.get(key)
        if part is not None and part.epoch <= epoch:
            del self._parts[key]
            for address in part.targets or ():
                self._drop_if_idle(address)

    def _probe(self, probe: pairs.Probe) -> None:
        for rank, address in probe.targets:
            done = partial(self._on_probed, probe.number, rank)
            self._session_at(address).probes.ask(address, done, data=True)

    def _on_probed(self, number: int, rank: int, result: ProbeResult) -> None:
        self._report(pairs.Probed(number=number, destination=rank, result=result))

    def _part(self, key: TransferKey, epoch: int) -> _Part | None:
        """Return the part of this epoch, a new one where it is the first that is heard of it; None
        for one that is over."""
        part = self._parts.get(key)
        if part is not None and part.epoch == epoch:
            return part
        last = self._over.get(key, self._clock())
        if (last is not None and last >= epoch) or (part is not None and part.epoch > epoch):
            return None
        part = self._parts[key] = _Part(epoch)
        return part

    # --- sessions

    def _sessions_of(self, part: _Part) -> list[SendSession]:
        """Return the sessions of the part's targets that exist; a session that was dropped has no
        transfers."""
        found = (self._sessions.get(address) for address in part.targets or ())
        return [session for session in found if session is not None]

    def _session_at(self, address: Address) -> SendSession:
        session = self._sessions.get(address)
        if session is None:
            session = self._make_session(lambda event: self._on_event(address, event))
            self._sessions[address] = session
            if address in self._up:
                session.peer_up(self._up[address])
        return session

    def _on_event(self, address: Address, event: SendEvent) -> None:
        part = self._parts.get(event.key)
        if part is None or part.epoch != event.epoch or part.targets is None:
            return
        rank = part.targets.get(address)
        if rank is None:
            return
        key, epoch = event.key, event.epoch
        if isinstance(event, SendFlushed):
            areas = event.areas
            self._report(pairs.Flushed(key=key, epoch=epoch, destination=rank, areas=areas))
        elif isinstance(event, SendEnded):
            self._report(
                pairs.Ended(
                    key=key,
                    epoch=epoch,
                    destination=rank,
                    reason=event.reason,
                    transport=self._transports.get(address, ""),
                )
            )

    def _drop_if_idle(self, address: Address) -> None:
        """Forget a D that is not connected and to which nothing is sent."""
        session = self._sessions.get(address)
        if session is None or address in self._up:
            return
        if not session.open_transfers:
            del self._sessions[address]
            self._transports.pop(address, None)

    # --- Handler, of connections that this rank has dialled

    def peer_up(self, peer: Peer) -> None:
        """Handle the connection to a rank of D."""
        assert peer.address is not None
        self._up[peer.address] = peer
        self._transports[peer.address] = peer.transport
        self._session_at(peer.address).peer_up(peer)

    def dial_failed(self, address: Address, reason: str, detail: str = "") -> None:
        """Handle a dial of a rank of D that failed."""
        session = self._sessions.get(address)
        if session is not None:
            session.dial_failed(address, reason, detail)
            self._drop_if_idle(address)

    def peer_down(self, peer: Peer, reason: str) -> None:
        """Handle the end of the connection to a rank of D."""
        assert peer.address is not None
        session = self._session_at(peer.address)
        if self._up.get(peer.address) is peer:
            del self._up[peer.address]
        session.peer_down(peer, reason)
        self._drop_if_idle(peer.address)

    def message(self, peer: Peer, message: wire.Message, body: bytes) -> None:
        """See Handler."""
        assert peer.address is not None
        self._session_at(peer.address).message(peer, message, body)

    def data_begin(self, peer: Peer, header: wire.Data, length: int) -> None:
        """P takes no DATA."""
        assert peer.address is not None
        self._session_at(peer.address).data_begin(peer, header, length)

    def tick(self, now: float) -> float | None:
        """Tick the sessions of all pairs; return the next deadline."""
        self._over.purge(now)
        times = [session.tick(now) for session in list(self._sessions.values())]
        return min((time for time in times if time is not None), default=None)
