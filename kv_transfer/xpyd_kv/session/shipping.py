"""P's frames: what is computed and granted leaves, is repeated once, is counted.

The endpoint gets only a little ahead of what it is sending (Outbox): a frame that it has, it sends
or drops when its turn comes. Were all of them there, a cancelled transfer would be quiet only when
everything queued before it had been sent; over a slow connection that is later than CANCEL's
deadline, and the connection would be closed with all other transfers on it. Pure.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from xpyd_core.errors import ProtocolError
from xpyd_kv.metrics import KvMetrics
from xpyd_kv.session.events import SendFlushed
from xpyd_kv.session.outgoing import Outgoing, SendState, SentFrame, commit_of, cut, data_of
from xpyd_kv.session.settings import KvLimits
from xpyd_kv.transport.api import Endpoint, Peer
from xpyd_kv.wire import messages as wire


class _Frame(NamedTuple):
    owner: object
    length: int
    send: Callable[[], None]


# With the endpoint however long they are: it begins the next one when it is through with one.
_AT_LEAST = 2


class Outbox:
    """Frames in the order in which they were put, at most `ahead_bytes` of them (but at least two
    frames) with the endpoint."""

    def __init__(self, ahead_bytes: int) -> None:
        self._ahead_bytes = ahead_bytes
        self._given = self._given_bytes = 0
        self._frames: deque[_Frame] = deque()

    def put(self, owner: object, length: int, send: Callable[[], None]) -> None:
        """`send` gives a frame of `length` bytes to the endpoint; it is called when it is its
        turn."""
        self._frames.append(_Frame(owner, length, send))
        self._give()

    def done(self, length: int) -> None:
        """The endpoint is through with a frame."""
        self._given -= 1
        self._given_bytes -= length
        self._give()

    def drop(self, owner: object) -> int:
        """Forget the frames of `owner` that the endpoint has not; how many they were."""
        kept = deque(frame for frame in self._frames if frame.owner is not owner)
        dropped = len(self._frames) - len(kept)
        self._frames = kept
        return dropped

    def _give(self) -> None:
        while self._frames:
            frame = self._frames[0]
            is_full = self._given_bytes + frame.length > self._ahead_bytes
            if is_full and self._given >= _AT_LEAST:
                return
            self._frames.popleft()
            self._given += 1
            self._given_bytes += frame.length
            frame.send()


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
