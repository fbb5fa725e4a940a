"""P's frames: what stands in the cache and is granted leaves, is repeated once, is counted.

The part of SendSession that knows frames and no engine; it makes no decision about a transfer's
life but tells the session (`Owner`). Pure; the I/O thread owns it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from xpyd_core.errors import ProtocolError
from xpyd_kv.session.events import SendFlushed
from xpyd_kv.session.limits import KvLimits
from xpyd_kv.session.metrics import KvMetrics
from xpyd_kv.session.outbox import Outbox
from xpyd_kv.session.outgoing import Outgoing, SendState, SentFrame, commit_of, cut, data_of
from xpyd_kv.transport.api import Endpoint, Peer
from xpyd_kv.wire import messages as wire

SENDING = frozenset({SendState.GRANTED, SendState.STREAMING})


class Owner(Protocol):
    """The session, as its frames see it."""

    def move(self, transfer: Outgoing, state: SendState) -> None:
        """Change the state."""
        ...

    def arm(self, transfer: Outgoing, after_s: float) -> None:
        """Set the deadline."""
        ...

    def give_up(self, transfer: Outgoing, reason: str) -> None:
        """It cannot go on."""
        ...

    def settle(self, transfer: Outgoing) -> None:
        """One that is given up has a frame less in flight."""
        ...

    def report(self, event: SendFlushed, /) -> None:
        """To the engine's side."""
        ...


class Shipping:
    """The frames of all transfers of one session, by peer."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        owner: Owner,
        limits: KvLimits,
        max_frame_bytes: int,
        join_bytes: int,
        metrics: KvMetrics,
    ) -> None:
        self._endpoint = endpoint
        self._owner = owner
        self._limits = limits
        self._max_frame_bytes = max_frame_bytes
        self._join_bytes = join_bytes
        self._metrics = metrics
        # Of those that are up.
        self._peers: dict[Peer, Outbox] = {}

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._peers

    def __len__(self) -> int:
        return len(self._peers)

    def peer_up(self, peer: Peer) -> None:
        """Frames may go there."""
        self._peers[peer] = Outbox(self._limits.ahead_bytes)

    def peer_down(self, peer: Peer) -> None:
        """None of ours is read for this peer any more."""
        self._peers.pop(peer, None)

    def pump(self, transfer: Outgoing) -> None:
        """Send what is ready and granted; COMMIT after the last byte."""
        if transfer.state not in SENDING:
            return
        assert transfer.peer is not None
        assert transfer.source is not None
        max_frame_bytes = min(self._max_frame_bytes, transfer.peer.layout.max_data_bytes)
        seqs = cut(transfer, transfer.source, max_frame_bytes, join_bytes=self._join_bytes)
        if seqs:
            if transfer.state is SendState.GRANTED:
                self._owner.move(transfer, SendState.STREAMING)
            self._send_frames(transfer, seqs)
        self._arm_progress(transfer)
        self._report_flushed(transfer)
        self._commit_if_sent(transfer)

    def drop(self, transfer: Outgoing) -> None:
        """Given up: only what the endpoint has is still in flight."""
        if transfer.peer in self._peers:
            transfer.in_flight -= self._peers[transfer.peer].drop(transfer)

    def send_again(self, transfer: Outgoing, message: wire.Nack, body: bytes) -> None:
        """What D asks for, once; ProtocolError where that was never sent."""
        if len(body) != 4 * message.frames:
            raise ProtocolError("NACK: length of the body")
        wanted = sorted({seq for (seq,) in struct.iter_unpack("<I", body)})
        if not wanted or wanted[-1] >= len(transfer.frames):
            raise ProtocolError("NACK: no such frame")
        if transfer.resent:
            self._owner.give_up(transfer, "nack")
            return
        transfer.resent = True
        self._owner.move(transfer, SendState.STREAMING)
        self._send_frames(transfer, wanted)

    def _report_flushed(self, transfer: Outgoing) -> None:
        """Only in PUT does anybody wait for it."""
        request = transfer.request
        if request.mode != "put" or transfer.in_flight or transfer.flushed == transfer.handed:
            return
        transfer.flushed = transfer.handed
        self._owner.report(SendFlushed(request.key, request.epoch, transfer.flushed))

    def _arm_progress(self, transfer: Outgoing) -> None:
        if transfer.state in SENDING:
            self._owner.arm(transfer, self._limits.lease_s)

    def _send_frames(self, transfer: Outgoing, seqs: Sequence[int]) -> None:
        assert transfer.peer is not None
        outbox = self._peers[transfer.peer]
        # All of them count before the first is sent: `done` may be called at once.
        transfer.in_flight += len(seqs)
        for seq in seqs:
            send = partial(self._send_frame, transfer, transfer.peer, seq)
            outbox.put(transfer, transfer.frames[seq].length, send)

    def _send_frame(self, transfer: Outgoing, peer: Peer, seq: int) -> None:
        frame = transfer.frames[seq]
        area = frame.ready.area

        def make_header() -> wire.Data | None:
            return data_of(transfer.request, seq, area) if transfer.state in SENDING else None

        def done(checksum: bytes | None) -> None:
            self._frame_done(transfer, frame, checksum)
            if peer in self._peers:
                self._peers[peer].done(frame.length)

        assert transfer.source is not None
        views = transfer.source.views(frame.ready, transfer.stash)
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
            self._owner.settle(transfer)
        elif transfer.state in SENDING:
            if checksum is None:
                self._owner.give_up(transfer, "peer_lost")
                self._owner.settle(transfer)
                return
            self._arm_progress(transfer)
            self._report_flushed(transfer)
            self._commit_if_sent(transfer)

    def _commit_if_sent(self, transfer: Outgoing) -> None:
        peer = transfer.peer
        if (
            transfer.state is not SendState.STREAMING
            or not transfer.complete
            or transfer.in_flight
            or peer is None
        ):
            return
        self._owner.move(transfer, SendState.COMMITTED)
        self._owner.arm(transfer, self._limits.done_s)
        self._endpoint.send(peer, commit_of(transfer))
