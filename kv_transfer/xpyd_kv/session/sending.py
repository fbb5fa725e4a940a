"""Transfers as P drives them: OFFER, wait for GRANT, stream frames, COMMIT, wait for DONE.

It is the Handler of P's Endpoint. The engine's side calls `offer`, `ready`, `complete` and `cancel`
through `Endpoint.call`, so everything here runs on the I/O thread; results go to `report`. It reads
the clock it was given and knows neither sockets nor threads nor the engine. What is granted leaves
by Departures: as frames, or where P or D has several ranks by P's ranks, each pair of ranks by a
SendSession of its own, which `begin`s as granted.

A transfer's blocks are read from GRANT (or PULL, in mode get) until SendEnded is reported: not
while a frame is queued, not before D has answered a CANCEL, and at once when the connection is
closed. A spill given before GRANT is read in their place, and as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xpyd_core.errors import ProtocolError
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.memory.api import Room
from xpyd_kv.memory.store import StagedLanding
from xpyd_kv.metrics import KvMetrics
from xpyd_kv.session import pairs
from xpyd_kv.session.departures import Departures
from xpyd_kv.session.events import SendDeferred, SendEvent, SendGranted, SendSpilled
from xpyd_kv.session.outgoing import (
    Granted,
    OfferRequest,
    Outgoing,
    ReadyArea,
    SendState,
    cancelled_of,
    offer_of,
)
from xpyd_kv.session.probing import Probes
from xpyd_kv.session.settings import MAX_LEASE_S, SessionContext
from xpyd_kv.transport.api import Handler, Peer
from xpyd_kv.wire import messages as wire

_UNGRANTED = frozenset({SendState.INIT, SendState.OFFERED})
# An OFFER that D defers is repeated while P computes, when so much of its lease is over.
_REPEAT_AT = 0.5


class SendSession(Handler):
    """All transfers that this process sends."""

    def __init__(
        self,
        context: SessionContext,
        report: Callable[[SendEvent], None],
        *,
        metrics: KvMetrics,
        ranks: Sequence[pairs.Post] = (),
    ) -> None:
        """`ranks`: the ranks of this engine, by which DATA may go; and over which the engine is
        divided; a rank's own session has none."""
        self._endpoint = context.endpoint
        self._layout = context.memory.layout
        self._limits = context.settings.limits
        self._clock = context.clock
        self._report = report
        self._metrics = metrics
        self._departures = Departures(context, report, metrics=metrics, ranks=ranks)
        self._draining: set[Peer] = set()
        self.probes = Probes(
            context.endpoint,
            probe_s=self._limits.probe_s,
            clock=context.clock,
            outcomes=metrics.probes,
            ask_ranks=self._departures.probe_ranks,
            alarm=context.alarm,
        )

    @property
    def open_transfers(self) -> int:
        """Transfers that are not over."""
        return len(self._departures)

    # --- from the engine's side

    def offer(self, request: OfferRequest) -> None:
        """Begin a transfer: dial if needed, then OFFER."""
        self._add(Outgoing(request, since_s=self._clock()))

    def begin(self, request: OfferRequest, granted: Granted, spill: Room | None) -> None:
        """Between two ranks, whose engines have agreed: dial if needed, then send. `spill`: what is
        read instead of the blocks."""
        self._add(Outgoing(request, since_s=self._clock(), granted=granted, spill=spill))

    def ready(self, key: TransferKey, epoch: int, areas: Sequence[ReadyArea]) -> None:
        """Send areas that are in the cache now."""
        transfer = self._departures.find(key, epoch)
        if transfer is not None and transfer.state is not SendState.CANCELLING:
            transfer.handed += len(areas)
            self._departures.ready(transfer, areas)

    def complete(self, key: TransferKey, epoch: int) -> None:
        """Note that no more areas follow: COMMIT goes when all is sent."""
        transfer = self._departures.find(key, epoch)
        if transfer is not None and transfer.state is not SendState.CANCELLING:
            transfer.complete = True
            transfer.completed_s = self._clock()
            self._keep_offer(transfer)
            self._departures.complete(transfer)

    def spill(self, key: TransferKey, epoch: int, spill: StagedLanding) -> None:
        """A complete transfer's KV is here too: read it from here, if no frame was made yet.
        SendSpilled says whether; nothing does where SendEnded was reported before."""
        transfer = self._departures.find(key, epoch)
        if transfer is None:
            return
        taken = transfer.state in _UNGRANTED
        if taken:
            transfer.spill = spill
        self._report(SendSpilled(key, epoch, taken))

    def cancel(self, key: TransferKey, epoch: int, reason: str) -> None:
        """Stop it; also withdraws KV that D has and no request has adopted."""
        transfer = self._departures.find(key, epoch)
        if transfer is not None:
            self._departures.give_up(transfer, reason)
        else:
            self._departures.withdraw(key, epoch, reason)

    def hear(self, rank: int, message: pairs.FromRank) -> None:
        """A message of one of our ranks."""
        match message:
            case pairs.Flushed() | pairs.Ended():
                self._departures.on_report(rank, message)
            case pairs.Probed():
                pair = (rank, message.destination)
                self.probes.pair_probed(message.number, pair, message.result)
            case _:
                return

    # --- Handler

    def peer_up(self, peer: Peer) -> None:
        """A connection is up: OFFER what waited for it."""
        self._departures.peer_up(peer)
        for transfer in self._departures.waiting_for(peer.address):
            self._meet(transfer, peer)
        self.probes.peer_up(peer)

    def dial_failed(self, address: Address, reason: str, detail: str = "") -> None:
        """Fail the transfers that waited for this connection."""
        for transfer in self._departures.waiting_for(address):
            self._departures.end(transfer, reason)
        self.probes.dial_failed(address, reason, detail)

    def peer_gone(self, address: Address) -> None:
        """The D at this address was dead when a router said so: fail the transfers that waited for
        a connection then. A younger one may be for the next D there, which is not to wait for KV
        that never comes; it has its own deadline."""
        said_s = self._clock() - self._limits.word_s
        for transfer in self._departures.waiting_for(address):
            if transfer.since_s <= said_s:
                self._departures.end(transfer, "unreachable")

    def peer_down(self, peer: Peer, reason: str) -> None:
        """End the transfers to a peer whose connection is closed."""
        self._draining.discard(peer)
        self._departures.peer_down(peer)
        self.probes.peer_down(peer, reason)

    def message(self, peer: Peer, message: wire.Message, body: bytes) -> None:
        """D's answers. ProtocolError for what only a P sends."""
        match message:
            case wire.Goaway():
                self._draining.add(peer)
            case wire.Probed():
                self.probes.probed(peer, message)
            case wire.Cancel():
                self._on_cancel(peer, message)
            case (
                wire.Grant()
                | wire.Pull()
                | wire.Lease()
                | wire.Done()
                | wire.Nack()
                | wire.Cancelled()
            ):
                key = TransferKey(message.uuid, message.prompt_index)
                transfer = self._departures.find(key, message.epoch)
                if transfer is not None and transfer.peer is peer:
                    self._on_answer(transfer, message, body)
            case _:
                raise ProtocolError(f"{type(message).__name__} to an instance that only sends KV")

    def data_begin(self, peer: Peer, header: wire.Data, length: int) -> None:
        """P takes no DATA: to nowhere."""
        self._metrics.refused_data["role"] += 1

    def tick(self, now: float) -> float | None:
        """Deadlines."""
        times = (self._departures.tick(now), self.probes.tick(now))
        return min((time for time in times if time is not None), default=None)

    # --- until D has room

    def _add(self, transfer: Outgoing) -> None:
        self._departures.add(transfer)
        is_rank = transfer.granted is not None
        peer = self._endpoint.connect(transfer.request.address, data=is_rank)
        if peer is not None and transfer.state is SendState.INIT:
            self._meet(transfer, peer)

    def _meet(self, transfer: Outgoing, peer: Peer) -> None:
        """The peer is there: OFFER, or send."""
        request, granted = transfer.request, transfer.granted
        if granted is not None and (
            (granted.incarnation, granted.rank) != (peer.hello.incarnation, peer.hello.rank)
        ):
            self._departures.end(transfer, "restarted")
            return
        if peer in self._draining or request.tokens > peer.layout.max_tokens:
            reason = "draining" if peer in self._draining else "too_long"
            self._departures.end(transfer, reason)
            return
        self._departures.meet(transfer, peer)
        if granted is not None:
            self._departures.grant(transfer, granted.skip_tokens)
            self._departures.start(transfer, granted.skip_tokens)
            return
        self._departures.move(transfer, SendState.OFFERED)
        self._departures.arm(transfer, self._limits.offer_s)
        self._send_offer(transfer, peer)

    def _send_offer(self, transfer: Outgoing, peer: Peer) -> None:
        transfer.offered_s = self._clock()
        transfer.handed_at_offer = transfer.handed
        request = transfer.request
        self._endpoint.send(peer, offer_of(request, self._layout), request.body)

    def _on_answer(self, transfer: Outgoing, message: wire.Message, body: bytes) -> None:
        state = transfer.state
        if state is SendState.CANCELLING:
            if isinstance(message, wire.Cancelled):
                transfer.peer_quiet = True
                self._departures.settle(transfer)
            return
        match message:
            case wire.Grant() | wire.Pull() if state is SendState.OFFERED:
                self._on_grant(transfer, message)
            case wire.Lease() if state is SendState.OFFERED:
                self._on_lease(transfer, message)
            case wire.Done() if state is SendState.COMMITTED:
                assert transfer.peer is not None
                self._departures.delivered(transfer, transfer.peer.transport)
            case wire.Done():
                raise ProtocolError("DONE before COMMIT")
            case wire.Nack() if state is SendState.COMMITTED:
                self._departures.send_again(transfer, message, body)
            case _:
                # Repeated or late answers change nothing.
                return

    def _on_lease(self, transfer: Outgoing, message: wire.Lease) -> None:
        assert transfer.peer is not None
        transfer.lease_s = min(message.ttl_ms / 1000, MAX_LEASE_S)
        self._departures.arm(transfer, transfer.lease_s)
        if not transfer.deferred:
            transfer.deferred = True
            request = transfer.request
            incarnation = transfer.peer.hello.incarnation
            self._report(SendDeferred(request.key, request.epoch, incarnation))
        if not transfer.complete:
            self._keep_offer(transfer)

    def _keep_offer(self, transfer: Outgoing) -> None:
        """No request asks for this KV at D while it is computed: the lease begins anew, if more of
        it is computed than when it began."""
        if transfer.state is not SendState.OFFERED or transfer.handed == transfer.handed_at_offer:
            return
        age_s = self._clock() - transfer.offered_s
        if transfer.deferred and age_s > _REPEAT_AT * transfer.lease_s:
            assert transfer.peer is not None
            self._send_offer(transfer, transfer.peer)

    def _on_grant(self, transfer: Outgoing, message: wire.Grant | wire.Pull) -> None:
        skip_tokens, request = message.skip_tokens, transfer.request
        if skip_tokens % self._layout.block_size or skip_tokens >= request.tokens:
            name = type(message).__name__.upper()
            raise ProtocolError(f"{name} skips {skip_tokens} tokens")
        assert transfer.peer is not None
        self._departures.grant(transfer, skip_tokens)
        self._metrics.grant_wait.observe(transfer.granted_s - transfer.since_s)
        self._report(SendGranted(request.key, request.epoch, transfer.peer.hello.incarnation))
        self._departures.start(transfer, skip_tokens)

    def _on_cancel(self, peer: Peer, message: wire.Cancel) -> None:
        key = TransferKey(message.uuid, message.prompt_index)
        transfer = self._departures.find(key, message.epoch)
        if transfer is None or transfer.peer is not peer:
            self._endpoint.send(peer, cancelled_of(key, message.epoch))
            return
        # Both sides may cancel at once: then each still gets its CANCELLED.
        transfer.owes_cancelled = True
        if transfer.state is not SendState.CANCELLING:
            transfer.peer_quiet = True
            # The peer's word, if it is one: it goes into log lines.
            is_word = message.reason.replace(":", "", 1).isidentifier()
            transfer.reason = message.reason if is_word else "cancelled_by_peer"
            self._departures.begin_cancelling(transfer)
        self._departures.settle(transfer)
