"""D's transfers: answer OFFERs, let frames land where the engine granted, verify COMMIT, cancel.

It is the Handler of D's Endpoint. The engine's side calls `grant`, `defer`, `expect`, `finish`,
`release` and `drain` through `Endpoint.call`, so everything here runs on the I/O thread; what
happens goes to `report`. It reads the clock it was given and knows neither sockets nor threads
nor the engine.

A landing belongs to the engine's side again when ReceiveLanded or ReceiveQuiet is reported, not
before: until then a frame may be on its way into it. Late frames are known by (key, epoch).

See docs/adr/0003.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xpyd_core.errors import ProtocolError
from xpyd_core.request_id import TransferKey
from xpyd_kv.memory.api import Room
from xpyd_kv.memory.device import View
from xpyd_kv.metrics import KvMetrics
from xpyd_kv.session import pairs
from xpyd_kv.session.arrivals import Arrivals, Awaited
from xpyd_kv.session.deadlines import Tombstones
from xpyd_kv.session.events import (
    ReceiveEnded,
    ReceiveEvent,
    ReceiveOffered,
    ReceiveQuiet,
)
from xpyd_kv.session.incoming import (
    RECEIVING,
    Incoming,
    Ledger,
    Origin,
    Placing,
    ReceiveState,
    area_of,
    done_of,
    grant_of,
    nack_of,
    token_ids_of,
)
from xpyd_kv.session.outgoing import cancel_of, cancelled_of
from xpyd_kv.session.settings import SessionContext
from xpyd_kv.transport.api import Handler, Peer
from xpyd_kv.values import OfferedPrompt
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.frames import MAX_NACK_FRAMES

# DATA of a transfer that is over: P gets a CANCEL, in case it does not know.
_OVER = frozenset({"unknown", "stale", "finished", "released"})


class ReceiveSession(Handler):
    """All transfers that this process receives."""

    def __init__(
        self,
        context: SessionContext,
        report: Callable[[ReceiveEvent], None],
        *,
        metrics: KvMetrics,
        ranks: Sequence[pairs.Post] = (),
    ) -> None:
        """`ranks`: the ranks of this engine, to which DATA may come; and over which the engine is
        divided; a rank's own session has none."""
        self._endpoint = context.endpoint
        self._layout = context.memory.layout
        self._on_device = context.on_device
        self._limits = context.settings.limits
        self._clock = context.clock
        self._report = report
        self._metrics = metrics
        self._over = Tombstones(self._limits.tombstone_s)
        self._arrivals = Arrivals(
            context, report, metrics=metrics, tombstones=self._over, ranks=ranks
        )
        self._awaited = Awaited(self._limits.lease_s, context.alarm)
        # Of the connected peers that have sent something of a transfer.
        self._origins: dict[Peer, Origin] = {}
        self._expected: set[TransferKey] = set()
        self._draining = False

    @property
    def open_transfers(self) -> int:
        """Transfers that are live or not yet quiet."""
        return len(self._arrivals) + len(self._awaited)

    # --- from the engine's side

    def grant(self, key: TransferKey, epoch: int, landing: Room, skip_tokens: int) -> None:
        """Let the transfer land in `landing`; D has the KV of the first `skip_tokens` tokens
        already."""
        transfer = self._arrivals.live.get(key)
        if transfer is None or transfer.epoch != epoch or transfer.landing is not None:
            # It ended meanwhile: nothing was written, nothing will be.
            self._report(ReceiveQuiet(key, epoch))
            return
        transfer.landing = landing
        transfer.skip_tokens = skip_tokens
        if transfer.placing is not None:
            transfer.ledger = _ledger_of(transfer, transfer.placing)
            self._arrivals.opened(transfer)
        else:
            self._arrivals.open_ranks(transfer)

    def defer(self, key: TransferKey, epoch: int) -> None:
        """Defer a transfer that finds no room: P keeps its blocks while LEASEs come."""
        transfer = self._arrivals.live.get(key)
        if transfer is not None and transfer.epoch == epoch:
            self._arrivals.move(transfer, ReceiveState.DEFERRED)
            self._arrivals.renew(transfer)

    def expect(self, key: TransferKey) -> None:
        """A request waits for this key: its KV is no orphan."""
        self._expected.add(key)
        transfer = self._arrivals.live.get(key)
        if transfer is not None:
            transfer.expected = True
            self._arrivals.arm(transfer)

    def unexpect(self, key: TransferKey) -> None:
        """No request waits for this key any more; its KV is still wanted, until its lease ends."""
        self._expected.discard(key)
        transfer = self._arrivals.live.get(key)
        if transfer is not None:
            transfer.expected = False
            self._arrivals.touch(transfer)

    def finish(self, key: TransferKey, reason: str) -> None:
        """End the transfer of a key that the engine has adopted, aborted or given up."""
        now = self._clock()
        self._expected.discard(key)
        self._over.close(key, now)
        transfer = self._arrivals.live.get(key)
        if transfer is None:
            return
        if transfer.state is ReceiveState.LANDED:
            self._arrivals.drop(transfer)
        else:
            self._arrivals.give_up(transfer, reason)

    def release(self, uuid: str) -> None:
        """Give up all transfers of `uuid` and refuse its OFFERs for a while."""
        self._over.release(uuid, self._clock())
        for transfer in list(self._arrivals.live.values()):
            if transfer.key.uuid == uuid:
                self._arrivals.end(transfer, "released")

    def drain(self) -> None:
        """Refuse OFFERs from now on; what is under way finishes."""
        self._draining = True

    def hear(self, rank: int, message: pairs.FromRank) -> None:
        """Handle a message of one of our ranks."""
        self._arrivals.hear(rank, message)

    # --- a rank's, from its engine

    def open(self, opening: pairs.Open) -> None:
        """Accept what a rank of P sends of this transfer."""
        older = self._awaited.add(opening, self._clock())
        if older is not None:
            self._lost(older, "replaced")

    def stop(self, key: TransferKey, epoch: int, reason: str) -> None:
        """Refuse more bytes of a transfer. ReceiveQuiet follows, unless it was reported before."""
        opening = self._awaited.take(key, epoch)
        if opening is not None:
            self._lost(opening, reason)
            return
        transfer = self._arrivals.live.get(key)
        if transfer is not None and transfer.epoch == epoch:
            self._arrivals.give_up(transfer, reason)
        elif self._arrivals.quiescing(key, epoch) is None:
            self._report(ReceiveQuiet(key, epoch))

    def _lost(self, opening: pairs.Open, reason: str) -> None:
        """End an opening of which no frame has come; frames that come later are refused."""
        self._over.end(opening.key, opening.epoch, self._clock())
        self._metrics.ended(reason)
        self._report(ReceiveEnded(opening.key, opening.epoch, reason))
        self._report(ReceiveQuiet(opening.key, opening.epoch))

    def _bind(self, peer: Peer, key: TransferKey, epoch: int) -> None:
        """Start an awaited transfer at its first frame."""
        opening = self._awaited.take(key, epoch, peer)
        if opening is None:
            return
        origin = self._origin(peer)
        if origin.placing is None or not origin.fits:
            self._lost(opening, "layout")
            return
        now = self._clock()
        transfer = Incoming(
            key,
            epoch,
            peer,
            opening.tokens,
            activity_s=now,
            granted_s=now,
            placing=origin.placing,
            state=ReceiveState.GRANTED,
            skip_tokens=opening.skip_tokens,
            landing=opening.room,
            is_of_rank=True,
        )
        transfer.ledger = _ledger_of(transfer, origin.placing)
        live = self._arrivals.live.get(key)
        if live is not None:
            self._arrivals.end(live, "replaced")
        self._arrivals.add(transfer)

    # --- Handler

    def peer_down(self, peer: Peer, reason: str) -> None:
        """End the transfers of a closed connection."""
        self._origins.pop(peer, None)
        self._arrivals.peer_down(peer)

    def message(self, peer: Peer, message: wire.Message, body: bytes) -> None:
        """P's frames. ProtocolError for what only a D sends, and for OFFERs that lie."""
        match message:
            case wire.Offer():
                self._on_offer(peer, message, body)
            case wire.Commit():
                self._on_commit(peer, message)
            case wire.Cancel():
                self._on_cancel(peer, message)
            case wire.Cancelled():
                self._on_cancelled(peer, message)
            case wire.Goaway():
                # P drains: what it offered comes to its end by itself.
                return
            case _:
                raise ProtocolError(f"{type(message).__name__} to an instance that only takes KV")

    def data_begin(self, peer: Peer, header: wire.Data, length: int) -> Sequence[View] | None:
        """Where the frame's bytes go. A late or wrong one goes nowhere, and P may get a CANCEL."""
        key = TransferKey(header.uuid, header.prompt_index)
        self._bind(peer, key, header.epoch)
        transfer = self._arrivals.live.get(key)
        refusal = self._data_refusal(peer, transfer, header, length)
        if transfer is None or refusal is not None:
            reason = refusal or "unknown"
            self._metrics.refused_data[reason] += 1
            if reason in _OVER:
                self._endpoint.send(peer, cancel_of(key, header.epoch, reason))
            return None
        assert transfer.landing is not None
        assert transfer.ledger is not None
        assert transfer.placing is not None
        if transfer.state is ReceiveState.GRANTED:
            self._arrivals.move(transfer, ReceiveState.STREAMING)
        transfer.ledger.begin(header)
        transfer.writing += 1
        self._arrivals.touch(transfer)
        return transfer.placing.views(
            transfer.landing,
            area_of(header),
            skip_tokens=transfer.skip_tokens,
            tokens=transfer.tokens,
        )

    def data_end(
        self, peer: Peer, header: wire.Data, checksum: bytes, *, stored: bool, intact: bool
    ) -> None:
        """A frame is complete."""
        if not stored:
            return
        key = TransferKey(header.uuid, header.prompt_index)
        transfer = self._arrivals.quiescing(key, header.epoch) or self._arrivals.live.get(key)
        assert transfer is not None
        transfer.writing -= 1
        if transfer.state is ReceiveState.CANCELLING:
            self._arrivals.settle(transfer)
            return
        assert transfer.placing is not None
        if intact:
            self._metrics.received_frames += 1
            self._metrics.received_bytes += area_of(header).cells * transfer.placing.source_bytes
        else:
            self._metrics.checksum_mismatches += 1
        assert transfer.ledger is not None
        transfer.ledger.end(header, checksum, intact=intact)
        self._arrivals.touch(transfer)

    def tick(self, now: float) -> float | None:
        """Deadlines."""
        self._over.purge(now)
        for opening in self._awaited.due(now):
            self._metrics.leases_expired += 1
            self._lost(opening, "lease_expired")
        times = (self._arrivals.tick(now), self._awaited.next())
        return min((time for time in times if time is not None), default=None)

    # --- frames from P

    def _on_offer(self, peer: Peer, offer: wire.Offer, body: bytes) -> None:
        origin = self._origin(peer)
        origin.check(offer, body)
        key = TransferKey(offer.uuid, offer.prompt_index)
        live = self._arrivals.live.get(key)
        if live is not None and live.epoch == offer.epoch and live.peer is peer:
            self._answer_again(live)
            return
        refusal = self._offer_refusal(peer, origin, live, offer)
        if refusal is not None:
            self._endpoint.send(peer, cancel_of(key, offer.epoch, refusal))
            return
        if live is not None:
            # P counts up when it offers anew; the old landing is freed when it is quiet.
            self._arrivals.end(live, "replaced")
        now = self._clock()
        transfer = Incoming(
            key,
            offer.epoch,
            peer,
            offer.tokens,
            activity_s=now,
            placing=origin.placing,
            mode=offer.mode,
            expected=key in self._expected,
            # P waits `offer_s`: an engine in a long step must not cost the transfer.
            next_renewal_s=now + self._limits.offer_s / 2,
        )
        self._arrivals.add(transfer)
        prompt = OfferedPrompt(token_ids_of(body), offer.prompt_tokens)
        alignment = origin.alignment_tokens
        self._report(
            ReceiveOffered(
                key,
                offer.epoch,
                prompt,
                offer.salt,
                alignment,
                offer.mode,
                peer.hello.engine,
                peer.hello.incarnation,
            )
        )

    def _origin(self, peer: Peer) -> Origin:
        origin = self._origins.get(peer)
        if origin is None:
            origin = Origin(peer, self._layout, on_device=self._on_device)
            self._origins[peer] = origin
        return origin

    def _offer_refusal(
        self, peer: Peer, origin: Origin, live: Incoming | None, offer: wire.Offer
    ) -> str | None:
        if not origin.fits:
            return "layout"
        if self._draining:
            return "draining"
        if live is not None and (live.peer is not peer or live.epoch >= offer.epoch):
            return "duplicate"
        if len(self._arrivals) >= self._limits.max_transfers:
            return "busy"
        key = TransferKey(offer.uuid, offer.prompt_index)
        return self._over.refusal(key, offer.epoch, self._clock())

    def _answer_again(self, transfer: Incoming) -> None:
        if transfer.state is ReceiveState.DEFERRED:
            # P still computes, or has just done so: the lease begins anew.
            transfer.activity_s = self._clock()
            self._arrivals.renew(transfer)
        elif transfer.state in RECEIVING:
            self._endpoint.send(transfer.peer, grant_of(transfer))
        elif transfer.state is ReceiveState.LANDED:
            self._endpoint.send(transfer.peer, done_of(transfer))

    def _data_refusal(
        self, peer: Peer, transfer: Incoming | None, header: wire.Data, length: int
    ) -> str | None:
        key = TransferKey(header.uuid, header.prompt_index)
        if self._arrivals.quiescing(key, header.epoch) is not None:
            return "cancelled"
        if transfer is None:
            return self._over.refusal(key, header.epoch, self._clock()) or "unknown"
        if transfer.epoch != header.epoch:
            return "stale"
        if transfer.peer is not peer:
            return "foreign"
        if transfer.state not in RECEIVING or transfer.ledger is None:
            return "not_granted"
        return transfer.ledger.refusal(header, length)

    def _on_commit(self, peer: Peer, commit: wire.Commit) -> None:
        key = TransferKey(commit.uuid, commit.prompt_index)
        transfer = self._arrivals.live.get(key)
        if transfer is None or transfer.epoch != commit.epoch or transfer.peer is not peer:
            if self._arrivals.quiescing(key, commit.epoch) is None:
                self._endpoint.send(peer, cancel_of(key, commit.epoch, "unknown"))
            return
        if transfer.state not in RECEIVING or transfer.ledger is None:
            self._answer_again(transfer)
            return
        if not 0 < commit.frames <= transfer.ledger.cells:
            raise ProtocolError("COMMIT: more frames than blocks")
        self._arrivals.touch(transfer)
        missing = transfer.ledger.missing(commit.frames)
        if not missing and transfer.ledger.agrees(commit):
            self._arrivals.landed(transfer, peer.transport)
        elif 0 < len(missing) <= MAX_NACK_FRAMES and not transfer.nacked:
            transfer.nacked = True
            self._endpoint.send(peer, *nack_of(transfer, missing))
        else:
            self._arrivals.give_up(transfer, "corrupt")

    def _on_cancel(self, peer: Peer, message: wire.Cancel) -> None:
        key = TransferKey(message.uuid, message.prompt_index)
        now = self._clock()
        self._bind(peer, key, message.epoch)
        transfer = self._arrivals.quiescing(key, message.epoch)
        if transfer is not None and transfer.peer is peer:
            transfer.owes_cancelled = True
            self._arrivals.settle(transfer)
            return
        transfer = self._arrivals.live.get(key)
        if transfer is None or transfer.peer is not peer or transfer.epoch != message.epoch:
            if transfer is None or transfer.peer is peer:
                self._over.end(key, message.epoch, now)
            self._endpoint.send(peer, cancelled_of(key, message.epoch))
            return
        is_busy = bool(transfer.writing or transfer.pairs)
        if transfer.state is ReceiveState.LANDED or not is_busy:
            self._arrivals.withdraw(transfer, "cancelled")
            self._endpoint.send(peer, cancelled_of(key, message.epoch))
            return
        transfer.owes_cancelled = True
        transfer.peer_quiet = True
        self._arrivals.begin_quiescing(transfer, "cancelled")

    def _on_cancelled(self, peer: Peer, message: wire.Cancelled) -> None:
        key = TransferKey(message.uuid, message.prompt_index)
        transfer = self._arrivals.quiescing(key, message.epoch)
        if transfer is not None and transfer.peer is peer:
            transfer.peer_quiet = True
            self._arrivals.settle(transfer)


def _ledger_of(transfer: Incoming, placing: Placing) -> Ledger:
    return Ledger(
        num_layers=placing.layers,
        first_block=transfer.skip_tokens // placing.source_size,
        end_block=-(-transfer.tokens // placing.source_size),
        block_bytes=placing.source_bytes,
    )
