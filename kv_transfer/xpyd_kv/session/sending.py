"""Transfers as P drives them: OFFER, wait for GRANT, stream frames, COMMIT, wait for DONE.

It is the Handler of P's Endpoint. The engine's side calls `offer`, `ready`, `complete` and `cancel`
through `Endpoint.call`, so everything here runs on the I/O thread; results go to `report`. It reads
the clock it was given and knows neither sockets nor threads nor the engine. Frames are Shipping's;
where P or D has several ranks, their ranks send them (Fanout), each pair of ranks by a SendSession
of its own, which `begin`s as granted.

A transfer's blocks are read from GRANT (or PULL, in mode get) until SendEnded is reported: not
while a frame is queued, not before D has answered a CANCEL, and at once when the connection is
closed. A stash given before GRANT is read in their place, and as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xpyd_core.errors import ProtocolError, XpydError
from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.memory.api import KvMemory, Room, Stash
from xpyd_kv.metrics import KvMetrics
from xpyd_kv.session.deadlines import Alarm, Deadlines, Remembered
from xpyd_kv.session.events import (
    SendDeferred,
    SendEnded,
    SendEvent,
    SendGranted,
    SendStashed,
)
from xpyd_kv.session.fanout import Fanout
from xpyd_kv.session.outgoing import (
    SEND_MOVES,
    Granted,
    OfferRequest,
    Outgoing,
    ReadyArea,
    SendState,
    Source,
    cancel_of,
    offer_of,
)
from xpyd_kv.session.probing import ProbeResult, Probes
from xpyd_kv.session.settings import MAX_LEASE_S, KvLimits
from xpyd_kv.session.shipping import SENDING, Shipping
from xpyd_kv.transport.api import Endpoint, Peer
from xpyd_kv.wire import messages as wire

_UNGRANTED = frozenset({SendState.INIT, SendState.OFFERED})
# An OFFER that D defers is repeated while P computes, when so much of its lease is over.
_REPEAT_AT = 0.5
# Why a state's deadline ends the transfer.
_TIMEOUTS = {
    SendState.INIT: "dial_timeout",
    SendState.OFFERED: "offer_timeout",
    SendState.GRANTED: "stalled",
    SendState.STREAMING: "stalled",
    SendState.COMMITTED: "done_timeout",
}


class SendSession:
    """All transfers that this process sends."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        memory: KvMemory,
        limits: KvLimits,
        max_frame_bytes: int,
        join_bytes: int = 0,
        clock: Callable[[], float],
        report: Callable[[SendEvent], None],
        metrics: KvMetrics,
        fanout: Fanout,
        alarm: Alarm | None = None,
    ) -> None:
        """`fanout`: to our ranks, where DATA may go from them; a rank's own session has none."""
        self._endpoint = endpoint
        self._memory = memory
        self._limits = limits
        self._clock = clock
        self.report = report
        self._metrics = metrics
        self._transfers: dict[TransferKey, Outgoing] = {}
        self._deadlines: Deadlines[TransferKey] = Deadlines(alarm)
        # DONE transfers whose KV may still be withdrawn: epoch and peer.
        self._done: Remembered[TransferKey, tuple[int, Peer]] = Remembered(limits.tombstone_s)
        self._shipping = Shipping(
            endpoint,
            owner=self,
            limits=limits,
            max_frame_bytes=max_frame_bytes,
            join_bytes=join_bytes,
            metrics=metrics,
        )
        self._fanout = fanout
        fanout.owner = self
        self._draining: set[Peer] = set()
        self.probes = Probes(
            endpoint,
            probe_s=limits.probe_s,
            clock=clock,
            outcomes=metrics.probes,
            ranks=fanout,
            alarm=alarm,
        )

    @property
    def open_transfers(self) -> int:
        """Transfers that are not over."""
        return len(self._transfers)

    # --- from the engine's side

    def offer(self, request: OfferRequest) -> None:
        """Begin a transfer: dial if needed, then OFFER."""
        self._add(Outgoing(request, since_s=self._clock()))

    def begin(self, request: OfferRequest, granted: Granted, stash: Room | None) -> None:
        """Between two ranks, whose engines have agreed: dial if needed, then send. `stash`: what is
        read instead of the blocks."""
        self._add(Outgoing(request, since_s=self._clock(), granted=granted, stash=stash))

    def ready(self, key: TransferKey, epoch: int, areas: Sequence[ReadyArea]) -> None:
        """These areas stand in the cache."""
        transfer = self.find(key, epoch)
        if transfer is None or transfer.state is SendState.CANCELLING:
            return
        transfer.handed += len(areas)
        if not transfer.pairs:
            transfer.waiting.extend(areas)
            self._shipping.pump(transfer)
        else:
            self._fanout.ready(transfer, areas)

    def complete(self, key: TransferKey, epoch: int) -> None:
        """No more areas follow: COMMIT when all is sent."""
        transfer = self.find(key, epoch)
        if transfer is not None and transfer.state is not SendState.CANCELLING:
            transfer.complete = True
            transfer.completed_s = self._clock()
            self._keep_offer(transfer)
            if not transfer.pairs:
                self._shipping.pump(transfer)
            else:
                self._fanout.complete(transfer)

    def stash(self, key: TransferKey, epoch: int, stash: Stash) -> None:
        """A complete transfer's KV stands here too: read it from here, if no frame was made yet.
        SendStashed says whether; nothing does where SendEnded was reported before."""
        transfer = self.find(key, epoch)
        if transfer is None:
            return
        taken = transfer.state in _UNGRANTED
        if taken:
            transfer.stash = stash
        self.report(SendStashed(key, epoch, taken))

    def cancel(self, key: TransferKey, epoch: int, reason: str) -> None:
        """Stop it; also withdraws KV that D has and no request has adopted."""
        transfer = self.find(key, epoch)
        if transfer is not None:
            self.give_up(transfer, reason)
            return
        done = self._done.get(key, self._clock())
        if done is not None and done[0] == epoch:
            self._done.drop(key)
            if done[1] in self._shipping:
                self._endpoint.send(done[1], cancel_of(key, epoch, reason))

    def pair_probed(self, number: int, pair: tuple[int, int], result: ProbeResult) -> None:
        """See Fanout's Owner."""
        self.probes.pair_probed(number, pair, result)

    # --- Handler

    def peer_up(self, peer: Peer) -> None:
        """A connection stands: OFFER what waited for it."""
        self._shipping.peer_up(peer)
        for transfer in list(self._transfers.values()):
            if transfer.state is SendState.INIT and transfer.request.address == peer.address:
                self._meet(transfer, peer)
        self.probes.peer_up(peer)

    def dial_failed(self, address: Address, reason: str) -> None:
        """No connection: what waited for it fails."""
        for transfer in list(self._transfers.values()):
            if transfer.state is SendState.INIT and transfer.request.address == address:
                self._end(transfer, reason)
        self.probes.dial_failed(address, reason)

    def peer_down(self, peer: Peer, reason: str) -> None:
        """Nothing of ours is read for this peer any more."""
        self._shipping.peer_down(peer)
        self._draining.discard(peer)
        for transfer in list(self._transfers.values()):
            if transfer.peer is not peer:
                continue
            transfer.in_flight = 0
            transfer.reason = transfer.reason or "peer_lost"
            if transfer.state is SendState.CANCELLING:
                transfer.peer_quiet = True
                transfer.owes_cancelled = False
                self.settle(transfer)
            elif transfer.pairs:
                # Our ranks may still be sending.
                transfer.peer_quiet = True
                self._begin_cancelling(transfer)
            else:
                self._end(transfer, transfer.reason)
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
                transfer = self.find(key, message.epoch)
                if transfer is not None and transfer.peer is peer:
                    self._on_answer(transfer, message, body)
            case _:
                raise ProtocolError(f"{type(message).__name__} to an instance that only sends KV")

    def data_begin(self, peer: Peer, header: wire.Data, length: int) -> None:
        """P takes no DATA: to nowhere."""
        self._metrics.refused_data["role"] += 1

    def data_end(
        self, peer: Peer, header: wire.Data, checksum: bytes, *, stored: bool, intact: bool
    ) -> None:
        """Nothing to do: nothing was stored."""

    def tick(self, now: float) -> float | None:
        """Deadlines."""
        self._done.purge(now)
        for key in self._deadlines.due(now):
            transfer = self._transfers[key]
            if transfer.state is SendState.CANCELLING and transfer.peer is not None:
                self.arm(transfer, self._limits.cancel_s)
                if not transfer.peer_quiet or transfer.in_flight:
                    # Only a closed connection proves that nothing is read any more.
                    self._endpoint.disconnect(transfer.peer, "CANCEL was not answered")
            else:
                self._metrics.leases_expired += transfer.state in SENDING
                self.give_up(transfer, _TIMEOUTS[transfer.state])
        times = (self._deadlines.next(), self.probes.tick(now))
        return min((time for time in times if time is not None), default=None)

    # --- moves

    def find(self, key: TransferKey, epoch: int) -> Outgoing | None:
        """The transfer of `key` that is not over, if it is of this epoch."""
        transfer = self._transfers.get(key)
        return transfer if transfer is not None and transfer.request.epoch == epoch else None

    def _add(self, transfer: Outgoing) -> None:
        self._transfers[transfer.request.key] = transfer
        self._metrics.open_transfers += 1
        self.arm(transfer, self._limits.dial_s)
        is_rank = transfer.granted is not None
        peer = self._endpoint.connect(transfer.request.address, data=is_rank)
        if peer is not None and transfer.state is SendState.INIT:
            self._meet(transfer, peer)

    def move(self, transfer: Outgoing, state: SendState) -> None:
        """See Owner; XpydError for a move that the table does not have."""
        if state not in SEND_MOVES[transfer.state]:
            raise XpydError(f"{transfer.request.key}: {transfer.state.name} -> {state.name}")
        transfer.state = state

    def arm(self, transfer: Outgoing, after_s: float) -> None:
        """See Owner."""
        self._deadlines.set(transfer.request.key, self._clock() + after_s)

    def _meet(self, transfer: Outgoing, peer: Peer) -> None:
        """The peer is there: OFFER, or send."""
        request, granted = transfer.request, transfer.granted
        if granted is not None and (
            (granted.incarnation, granted.rank) != (peer.hello.incarnation, peer.hello.rank)
        ):
            self._end(transfer, "restarted")
            return
        if peer in self._draining or request.tokens > peer.layout.max_tokens:
            self._end(transfer, "draining" if peer in self._draining else "too_long")
            return
        transfer.peer = peer
        if peer.pair is not None:
            transfer.source = Source(self._memory, peer.pair)
        if granted is not None:
            self._granted(transfer, granted.skip_tokens)
            self._shipping.pump(transfer)
            return
        self.move(transfer, SendState.OFFERED)
        self.arm(transfer, self._limits.offer_s)
        self._say_offer(transfer, peer)

    def _say_offer(self, transfer: Outgoing, peer: Peer) -> None:
        transfer.offered_s = self._clock()
        transfer.handed_at_offer = transfer.handed
        request = transfer.request
        offer = offer_of(request, self._memory.layout)
        self._endpoint.send(peer, offer, request.body)

    def _on_answer(self, transfer: Outgoing, message: wire.Message, body: bytes) -> None:
        state = transfer.state
        if state is SendState.CANCELLING:
            if isinstance(message, wire.Cancelled):
                transfer.peer_quiet = True
                self.settle(transfer)
            return
        match message:
            case wire.Grant() | wire.Pull() if state is SendState.OFFERED:
                self._on_grant(transfer, message)
            case wire.Lease() if state is SendState.OFFERED:
                self._on_lease(transfer, message)
            case wire.Done() if state is SendState.COMMITTED:
                assert transfer.peer is not None
                self.delivered(transfer, transfer.peer.transport)
            case wire.Done():
                raise ProtocolError("DONE before COMMIT")
            case wire.Nack() if state is SendState.COMMITTED:
                self._shipping.send_again(transfer, message, body)
            case _:
                # Repeated or late answers change nothing.
                return

    def _on_lease(self, transfer: Outgoing, message: wire.Lease) -> None:
        assert transfer.peer is not None
        transfer.lease_s = min(message.ttl_ms / 1000, MAX_LEASE_S)
        self.arm(transfer, transfer.lease_s)
        if not transfer.deferred:
            transfer.deferred = True
            request = transfer.request
            incarnation = transfer.peer.hello.incarnation
            self.report(SendDeferred(request.key, request.epoch, incarnation))
        if not transfer.complete:
            self._keep_offer(transfer)

    def _keep_offer(self, transfer: Outgoing) -> None:
        """No request asks for this KV at D while it is computed: the lease begins anew, if more of
        it stands than when it began."""
        if transfer.state is not SendState.OFFERED or transfer.handed == transfer.handed_at_offer:
            return
        age_s = self._clock() - transfer.offered_s
        if transfer.deferred and age_s > _REPEAT_AT * transfer.lease_s:
            assert transfer.peer is not None
            self._say_offer(transfer, transfer.peer)

    def _on_grant(self, transfer: Outgoing, message: wire.Grant | wire.Pull) -> None:
        block_size = self._memory.layout.block_size
        if message.skip_tokens % block_size or message.skip_tokens >= transfer.request.tokens:
            name = type(message).__name__.upper()
            raise ProtocolError(f"{name} skips {message.skip_tokens} tokens")
        assert transfer.peer is not None
        self._granted(transfer, message.skip_tokens)
        self._metrics.grant_wait.observe(transfer.granted_s - transfer.since_s)
        request = transfer.request
        self.report(
            SendGranted(request.key, request.epoch, transfer.peer.hello.incarnation),
        )
        if transfer.source is not None:
            self._shipping.pump(transfer)
        else:
            # The ranks have the deadlines of what they send.
            self._deadlines.clear(request.key)
            self._fanout.start(transfer, message.skip_tokens)

    def _granted(self, transfer: Outgoing, skip_tokens: int) -> None:
        transfer.skip_blocks = skip_tokens // self._memory.layout.block_size
        self.move(transfer, SendState.GRANTED)
        self.arm(transfer, self._limits.lease_s)
        transfer.granted_s = self._clock()

    def _on_cancel(self, peer: Peer, message: wire.Cancel) -> None:
        key = TransferKey(message.uuid, message.prompt_index)
        transfer = self.find(key, message.epoch)
        if transfer is None or transfer.peer is not peer:
            self._send_cancelled(peer, key, message.epoch)
            return
        # Both sides may cancel at once: then each still gets its CANCELLED.
        transfer.owes_cancelled = True
        if transfer.state is not SendState.CANCELLING:
            transfer.peer_quiet = True
            # The peer's word, if it is one: it goes into log lines.
            is_word = message.reason.isidentifier()
            transfer.reason = message.reason if is_word else "cancelled_by_peer"
            self._begin_cancelling(transfer)
        self.settle(transfer)

    def give_up(self, transfer: Outgoing, reason: str) -> None:
        """See Owner; also by the engine's side."""
        if transfer.state is SendState.CANCELLING:
            return
        if transfer.peer is None:
            self._end(transfer, reason)
            return
        transfer.reason = reason
        self._begin_cancelling(transfer)
        request = transfer.request
        self._endpoint.send(transfer.peer, cancel_of(request.key, request.epoch, reason))

    def _begin_cancelling(self, transfer: Outgoing) -> None:
        """Only what the endpoint has is still in flight."""
        self.move(transfer, SendState.CANCELLING)
        self.arm(transfer, self._limits.cancel_s)
        self._shipping.drop(transfer)
        if transfer.pairs:
            self._fanout.cancel(transfer)

    def settle(self, transfer: Outgoing) -> None:
        """See Owner; one that is given up ends when nothing of it is in flight any more."""
        if transfer.in_flight or transfer.pairs:
            return
        if transfer.owes_cancelled and transfer.peer is not None:
            transfer.owes_cancelled = False
            self._send_cancelled(transfer.peer, transfer.request.key, transfer.request.epoch)
        if transfer.peer_quiet:
            self._end(transfer, transfer.reason)

    def _send_cancelled(self, peer: Peer, key: TransferKey, epoch: int) -> None:
        answer = wire.Cancelled(uuid=key.uuid, prompt_index=key.prompt_index, epoch=epoch)
        self._endpoint.send(peer, answer)

    def _end(self, transfer: Outgoing, reason: str) -> None:
        if transfer.state is SendState.ENDED:
            return
        self.move(transfer, SendState.ENDED)
        request = transfer.request
        del self._transfers[request.key]
        self._deadlines.clear(request.key)
        self._metrics.open_transfers -= 1
        self._metrics.ended(reason)
        if transfer.source is None:
            self._fanout.forget(request.key, request.epoch)
        self.report(SendEnded(request.key, request.epoch, reason))

    def delivered(self, transfer: Outgoing, transport: str) -> None:
        """D has all of it, by `transport`."""
        assert transfer.peer is not None
        now = self._clock()
        self._done.set(transfer.request.key, (transfer.request.epoch, transfer.peer), now)
        self._metrics.transferred(transport, now - transfer.granted_s)
        # Ranks may have sent all before the engine hears that its last step is over.
        self._metrics.after_prefill_s.observe(now - (transfer.completed_s or now))
        self._end(transfer, "")
