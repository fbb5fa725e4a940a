"""The transfers that a P has open: their moves and deadlines, and how a granted one leaves.

The part of SendSession that knows no OFFER. Where the peer's connection moves DATA, what is
computed and granted leaves as frames of this process; else our ranks send it, each pair of ranks a
transfer by itself (`pairs`), and the pairs are counted until all have ended. Pure; the I/O thread
owns it.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from xpyd_core.errors import ProtocolError, UserError, XpydError
from xpyd_core.request_id import Address, TransferKey, is_dialable, parse_address
from xpyd_kv.metrics import KvMetrics
from xpyd_kv.plan.transfers import pairs_between, transfer_salt
from xpyd_kv.session import pairs
from xpyd_kv.session.deadlines import Deadlines, Remembered
from xpyd_kv.session.events import SendEnded, SendEvent, SendFlushed
from xpyd_kv.session.outgoing import (
    SEND_MOVES,
    Outbox,
    Outgoing,
    ReadyArea,
    SendState,
    SentFrame,
    Source,
    cancel_of,
    cancelled_of,
    commit_of,
    cut,
    data_of,
)
from xpyd_kv.session.settings import SessionContext
from xpyd_kv.transport.api import Peer
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.fit import engine_layout_of

SENDING = frozenset({SendState.GRANTED, SendState.STREAMING})
# Why a state's deadline ends the transfer.
_TIMEOUTS = {
    SendState.INIT: "dial_timeout",
    SendState.OFFERED: "offer_timeout",
    SendState.GRANTED: "stalled",
    SendState.STREAMING: "stalled",
    SendState.COMMITTED: "done_timeout",
}


@dataclass(frozen=True)
class _SendPath:
    """The way to a peer that is up. `source` reads the bytes of frames to it; None: our ranks
    send."""

    outbox: Outbox
    source: Source | None
    max_frame_bytes: int


class Departures:
    """All open transfers of one P, or of one rank of it (which has no `ranks`)."""

    def __init__(
        self,
        context: SessionContext,
        report: Callable[[SendEvent], None],
        *,
        metrics: KvMetrics,
        ranks: Sequence[pairs.Post],
    ) -> None:
        self._endpoint = context.endpoint
        self._memory = context.memory
        self._engine = context.engine
        self._clock = context.clock
        self._limits = limits = context.settings.limits
        self._frames = context.settings.frames
        self._report = report
        self._metrics = metrics
        self._ranks = tuple(ranks)
        self._open: dict[TransferKey, Outgoing] = {}
        self._deadlines: Deadlines[TransferKey] = Deadlines(context.alarm)
        self._paths: dict[Peer, _SendPath] = {}
        # DONE transfers whose KV may still be withdrawn: epoch and peer.
        self._done: Remembered[TransferKey, tuple[int, Peer]] = Remembered(limits.tombstone_s)

    def __len__(self) -> int:
        return len(self._open)

    def find(self, key: TransferKey, epoch: int) -> Outgoing | None:
        """The transfer of `key` that is not over, if it is of this epoch."""
        transfer = self._open.get(key)
        return transfer if transfer is not None and transfer.request.epoch == epoch else None

    def waiting_for(self, address: Address | None) -> list[Outgoing]:
        """Return the transfers that wait for the connection with this D."""
        return [
            transfer
            for transfer in self._open.values()
            if transfer.state is SendState.INIT and transfer.request.address == address
        ]

    def add(self, transfer: Outgoing) -> None:
        """Add a new transfer, which waits for its connection."""
        self._open[transfer.request.key] = transfer
        self._metrics.open_transfers += 1
        self.arm(transfer, self._limits.dial_s)

    # --- moves

    def move(self, transfer: Outgoing, state: SendState) -> None:
        """Change the state; XpydError for a move that the table does not have."""
        if state not in SEND_MOVES[transfer.state]:
            raise XpydError(f"{transfer.request.key}: {transfer.state.name} -> {state.name}")
        transfer.state = state

    def arm(self, transfer: Outgoing, after_s: float) -> None:
        """Set the deadline."""
        self._deadlines.set(transfer.request.key, self._clock() + after_s)

    def give_up(self, transfer: Outgoing, reason: str) -> None:
        """Send CANCEL to D, and wait until nothing of the transfer is in flight."""
        if transfer.state is SendState.CANCELLING:
            return
        if transfer.peer is None:
            self.end(transfer, reason)
            return
        transfer.reason = reason
        self.begin_cancelling(transfer)
        request = transfer.request
        self._endpoint.send(transfer.peer, cancel_of(request.key, request.epoch, reason))

    def begin_cancelling(self, transfer: Outgoing) -> None:
        """Drop the frames that the endpoint does not have yet, and cancel the transfer on our
        ranks."""
        self.move(transfer, SendState.CANCELLING)
        self.arm(transfer, self._limits.cancel_s)
        if transfer.peer in self._paths:
            transfer.in_flight -= self._paths[transfer.peer].outbox.drop(transfer)
        key, epoch, reason = transfer.request.key, transfer.request.epoch, transfer.reason
        for source in sorted({source for source, _ in transfer.pairs}):
            self._ranks[source](pairs.Cancel(key=key, epoch=epoch, reason=reason))

    def settle(self, transfer: Outgoing) -> None:
        """End a cancelled transfer when nothing of it is in flight any more."""
        if transfer.in_flight or transfer.pairs:
            return
        if transfer.owes_cancelled and transfer.peer is not None:
            transfer.owes_cancelled = False
            request = transfer.request
            self._endpoint.send(transfer.peer, cancelled_of(request.key, request.epoch))
        if transfer.peer_quiet:
            self.end(transfer, transfer.reason)

    def end(self, transfer: Outgoing, reason: str) -> None:
        """End a transfer: the engine may free its blocks."""
        if transfer.state is SendState.ENDED:
            return
        self.move(transfer, SendState.ENDED)
        key, epoch = transfer.request.key, transfer.request.epoch
        del self._open[key]
        self._deadlines.clear(key)
        self._metrics.open_transfers -= 1
        self._metrics.ended(reason, peer=str(transfer.request.address))
        if transfer.source is None:
            for post in self._ranks:
                post(pairs.Forget(key=key, epoch=epoch))
        self._report(SendEnded(key, epoch, reason))

    def delivered(self, transfer: Outgoing, transport: str) -> None:
        """Finish a transfer that D has received whole, by `transport`."""
        assert transfer.peer is not None
        now = self._clock()
        self._done.set(transfer.request.key, (transfer.request.epoch, transfer.peer), now)
        self._metrics.transferred(transport, now - transfer.granted_s)
        # Ranks may have sent all before the engine hears that its last step is over.
        self._metrics.after_prefill_s.observe(now - (transfer.completed_s or now))
        self.end(transfer, "")

    def withdraw(self, key: TransferKey, epoch: int, reason: str) -> None:
        """Send CANCEL for KV that D has received and no request has adopted."""
        done = self._done.get(key, self._clock())
        if done is not None and done[0] == epoch:
            self._done.drop(key)
            if done[1] in self._paths:
                self._endpoint.send(done[1], cancel_of(key, epoch, reason))

    # --- peers and deadlines

    def peer_up(self, peer: Peer) -> None:
        """Add a peer to which frames may be sent."""
        self._paths[peer] = _SendPath(
            Outbox(self._limits.ahead_bytes),
            None if peer.pair is None else Source(self._memory, peer.pair),
            min(self._frames.max_frame_bytes, peer.layout.max_data_bytes),
        )

    def peer_down(self, peer: Peer) -> None:
        """End the transfers to a peer whose connection is closed."""
        self._paths.pop(peer, None)
        for transfer in [one for one in self._open.values() if one.peer is peer]:
            transfer.in_flight = 0
            transfer.reason = transfer.reason or "peer_lost"
            if transfer.state is SendState.CANCELLING:
                transfer.peer_quiet = True
                transfer.owes_cancelled = False
                self.settle(transfer)
            elif transfer.pairs:
                # Our ranks may still be sending.
                transfer.peer_quiet = True
                self.begin_cancelling(transfer)
            else:
                self.end(transfer, transfer.reason)

    def tick(self, now: float) -> float | None:
        """Act on what is due; the next deadline."""
        self._done.purge(now)
        for key in self._deadlines.due(now):
            transfer = self._open[key]
            if transfer.state is SendState.CANCELLING and transfer.peer is not None:
                self.arm(transfer, self._limits.cancel_s)
                if not transfer.peer_quiet or transfer.in_flight:
                    # Only a closed connection proves that nothing is read any more.
                    self._endpoint.disconnect(transfer.peer, "CANCEL was not answered")
            else:
                self._metrics.leases_expired += transfer.state in SENDING
                self.give_up(transfer, _TIMEOUTS[transfer.state])
        return self._deadlines.next()

    # --- what is granted leaves

    def meet(self, transfer: Outgoing, peer: Peer) -> None:
        """Bind a transfer to its peer, which is up."""
        transfer.peer = peer
        transfer.source = self._paths[peer].source

    def grant(self, transfer: Outgoing, skip_tokens: int) -> None:
        """Mark a transfer as granted: D has room for what follows the first `skip_tokens`."""
        transfer.skip_blocks = skip_tokens // self._memory.layout.block_size
        self.move(transfer, SendState.GRANTED)
        self.arm(transfer, self._limits.lease_s)
        transfer.granted_s = self._clock()

    def start(self, transfer: Outgoing, skip_tokens: int) -> None:
        """Send what is ready of a transfer that was just granted."""
        if transfer.source is not None:
            self._pump(transfer)
        else:
            # The ranks have the deadlines of what they send.
            self._deadlines.clear(transfer.request.key)
            self._start_ranks(transfer, skip_tokens)

    def ready(self, transfer: Outgoing, areas: Sequence[ReadyArea]) -> None:
        """Send areas that are in the cache now."""
        if not transfer.pairs:
            transfer.waiting.extend(areas)
            self._pump(transfer)
        else:
            key, epoch = transfer.request.key, transfer.request.epoch
            for post in self._ranks:
                post(pairs.Ready(key=key, epoch=epoch, areas=areas))

    def complete(self, transfer: Outgoing) -> None:
        """Note that no more areas follow."""
        if not transfer.pairs:
            self._pump(transfer)
        else:
            for post in self._ranks:
                post(pairs.Complete(key=transfer.request.key, epoch=transfer.request.epoch))

    # --- as frames of this process

    def _pump(self, transfer: Outgoing) -> None:
        """Send what is ready and granted; COMMIT after the last byte."""
        if transfer.state not in SENDING:
            return
        assert transfer.peer is not None
        assert transfer.source is not None
        path = self._paths[transfer.peer]
        join_bytes = self._frames.join_bytes
        seqs = cut(transfer, transfer.source, path.max_frame_bytes, join_bytes=join_bytes)
        if seqs:
            if transfer.state is SendState.GRANTED:
                self.move(transfer, SendState.STREAMING)
            self._send_frames(transfer, seqs)
        self._progress(transfer)

    def send_again(self, transfer: Outgoing, message: wire.Nack, body: bytes) -> None:
        """Send the frames that D asks for again, once; ProtocolError for a frame that was never
        sent."""
        if len(body) != 4 * message.frames:
            raise ProtocolError("NACK: length of the body")
        wanted = sorted({seq for (seq,) in struct.iter_unpack("<I", body)})
        if not wanted or wanted[-1] >= len(transfer.frames):
            raise ProtocolError("NACK: no such frame")
        if transfer.resent:
            self.give_up(transfer, "nack")
            return
        transfer.resent = True
        self.move(transfer, SendState.STREAMING)
        self._send_frames(transfer, wanted)

    def _send_frames(self, transfer: Outgoing, seqs: Sequence[int]) -> None:
        assert transfer.peer is not None
        outbox = self._paths[transfer.peer].outbox
        # All of them count before the first is sent: `done` may be called at once.
        transfer.in_flight += len(seqs)
        for seq in seqs:
            send = partial(self._send_frame, transfer, transfer.peer, seq)
            outbox.put(transfer, transfer.frames[seq].length, send)

    def _send_frame(self, transfer: Outgoing, peer: Peer, seq: int) -> None:
        frame = transfer.frames[seq]

        def make_header() -> wire.Data | None:
            sends = transfer.state in SENDING
            return data_of(transfer.request, seq, frame.ready.area) if sends else None

        def done(checksum: bytes | None) -> None:
            self._frame_done(transfer, frame, checksum)
            if peer in self._paths:
                self._paths[peer].outbox.done(frame.length)

        assert transfer.source is not None
        views = transfer.source.views(frame.ready, transfer.spill)
        self._endpoint.send_data(peer, make_header, views, done)

    def _frame_done(self, transfer: Outgoing, frame: SentFrame, checksum: bytes | None) -> None:
        transfer.in_flight -= 1
        if checksum is not None:
            frame.checksum = checksum
            self._metrics.sent_frames += 1
            self._metrics.sent_bytes += frame.length
            if not transfer.complete:
                self._metrics.overlapped_bytes += frame.length
        if transfer.state is SendState.CANCELLING:
            self.settle(transfer)
        elif transfer.state in SENDING:
            if checksum is None:
                self.give_up(transfer, "peer_lost")
                self.settle(transfer)
            else:
                self._progress(transfer)

    def _progress(self, transfer: Outgoing) -> None:
        """Restart the lease; send COMMIT when all has been sent."""
        if transfer.state not in SENDING:
            return
        request, is_sent = transfer.request, not transfer.in_flight
        # Only in PUT does the engine wait for it.
        if is_sent and request.mode == "put" and transfer.flushed != transfer.handed:
            transfer.flushed = transfer.handed
            self._report(SendFlushed(request.key, request.epoch, transfer.flushed))
        if is_sent and transfer.complete and transfer.state is SendState.STREAMING:
            assert transfer.peer is not None
            self.move(transfer, SendState.COMMITTED)
            self.arm(transfer, self._limits.done_s)
            self._endpoint.send(transfer.peer, commit_of(transfer))
        else:
            self.arm(transfer, self._limits.lease_s)

    # --- by our ranks

    def _start_ranks(self, transfer: Outgoing, skip_tokens: int) -> None:
        peer, request = transfer.peer, transfer.request
        assert peer is not None
        addresses = _addresses_of(peer)
        if addresses is None:
            self.give_up(transfer, "address")
            return
        salt = transfer_salt(request.key) % self._engine.replicas
        transfer.pairs = set(pairs_between(self._engine, engine_layout_of(peer.layout), salt))
        transfer.flushed_by = dict.fromkeys(transfer.pairs, 0)
        targets: dict[int, list[pairs.Target]] = defaultdict(list)
        for source, destination in sorted(transfer.pairs):
            targets[source].append(pairs.Target(destination, addresses[destination]))
        for source, its in targets.items():
            self._ranks[source](
                pairs.Send(
                    key=request.key,
                    epoch=request.epoch,
                    tokens=request.tokens,
                    skip_tokens=skip_tokens,
                    mode=request.mode,
                    incarnation=peer.hello.incarnation,
                    targets=tuple(its),
                    spill=transfer.spill,
                )
            )
        areas, transfer.waiting = transfer.waiting, []
        self.ready(transfer, areas)
        if transfer.complete:
            self.complete(transfer)

    def probe_ranks(self, number: int, peer: Peer) -> dict[tuple[int, int], Address] | None:
        """Have each rank probe all ranks of the peer to which transfers of any salt may go: see
        Probes."""
        addresses = _addresses_of(peer)
        if addresses is None:
            return None
        theirs = engine_layout_of(peer.layout)
        salts = range(self._engine.replicas)
        found = {pair for salt in salts for pair in pairs_between(self._engine, theirs, salt)}
        for source, post in enumerate(self._ranks):
            its = sorted(destination for one, destination in found if one == source)
            targets = tuple(pairs.Target(one, addresses[one]) for one in its)
            post(pairs.Probe(number=number, targets=targets))
        return {(source, one): addresses[one] for source, one in found}

    def on_report(self, rank: int, report: pairs.Flushed | pairs.Ended) -> None:
        """Handle the report of one of our ranks on one of its pairs."""
        transfer = self.find(report.key, report.epoch)
        pair = (rank, report.destination)
        if transfer is None or pair not in transfer.pairs:
            return
        if isinstance(report, pairs.Ended):
            self._on_pair_ended(transfer, pair, report)
            return
        transfer.flushed_by[pair] = report.areas
        least = min(transfer.flushed_by.values())
        if least > transfer.flushed:
            transfer.flushed = least
            self._report(SendFlushed(report.key, report.epoch, least))

    def _on_pair_ended(self, transfer: Outgoing, pair: tuple[int, int], ended: pairs.Ended) -> None:
        transfer.pairs.discard(pair)
        transfer.transports.add(ended.transport)
        if transfer.state is SendState.CANCELLING:
            self.settle(transfer)
        elif ended.reason:
            self.give_up(transfer, ended.reason)
        elif not transfer.pairs:
            self.delivered(transfer, min(transfer.transports))


def _addresses_of(peer: Peer) -> Sequence[Address] | None:
    """Return the addresses of D's ranks; None where they cannot be dialled."""
    if not peer.layout.ranks:
        return None if peer.address is None else [peer.address]
    try:
        addresses = [parse_address(text) for text in peer.layout.ranks]
    except UserError:
        return None
    return addresses if all(map(is_dialable, addresses)) else None
