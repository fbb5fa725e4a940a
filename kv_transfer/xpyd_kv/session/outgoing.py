"""One transfer on P: its state, its legal moves, what its frames are read from, its messages.

And the queue of frames to one peer (Outbox). The endpoint gets only a little ahead of what it is
sending: a frame that it has, it sends or drops when its turn comes. Were all of them there, a
cancelled transfer would be quiet only when everything queued before it had been sent; over a slow
connection that is later than CANCEL's deadline, and the connection would be closed with all other
transfers on it. Pure, but for the memory that Source hands out views of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import NamedTuple

import msgspec

from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.memory.api import KvMemory, Room
from xpyd_kv.memory.device import View
from xpyd_kv.plan.frames import Area, split
from xpyd_kv.plan.pairs import Pair
from xpyd_kv.transport.api import Peer
from xpyd_kv.values import KvLayout
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.messages import Mode


class ReadyArea(msgspec.Struct, frozen=True):
    """An area that is in the cache; `block_ids` are its blocks, `area.first_block` first."""

    area: Area
    block_ids: tuple[int, ...]


class Source:
    """One rank's memory as one pair reads it."""

    def __init__(self, memory: KvMemory, pair: Pair) -> None:
        self._memory = memory
        self._pair = pair
        self.block_bytes = pair.block_bytes
        """The bytes that are read of a block of one layer."""
        self._part = pair.source_part
        self._layers = pair.source_layers
        self._is_all = self._layers == tuple(range(len(memory.layout.layers)))

    def cut(self, areas: Sequence[ReadyArea]) -> Sequence[ReadyArea]:
        """Areas of the rank's layers, in the pair's: without those that it has not."""
        if self._is_all:
            return areas
        ours = ((self._pair.area_of(ready.area), ready.block_ids) for ready in areas)
        return [ReadyArea(area, ids) for area, ids in ours if area is not None]

    def views(self, ready: ReadyArea, spill: Room | None) -> Sequence[View]:
        """The bytes of one frame (its layers are the pair's), in the order of a DATA body, where
        they are now: in the spill, where there is one."""
        area = ready.area
        layers = self._layers[area.first_layer : area.end_layer]
        if spill is None:
            return self._parts(self._memory.views(layers, ready.block_ids))
        found: list[View] = []
        for layer in layers:
            found += spill.views(layer, layer + 1, area.first_block, area.end_block)
        return self._parts(found)

    def _parts(self, views: Sequence[View]) -> Sequence[View]:
        part = self._part
        if part is None:
            return views
        size = self._memory.layout.block_bytes
        return [
            view[at + part.start : at + part.stop]
            for view in views
            for at in range(0, len(view), size)
        ]


# With the endpoint however long they are: it begins the next one when it is through with one.
_AT_LEAST = 2


class _Frame(NamedTuple):
    owner: object
    length: int
    send: Callable[[], None]


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


class SendState(StrEnum):
    """The state of a transfer on P, in all modes. DEFERRED at D is OFFERED here, with a lease as
    deadline."""

    INIT = "waiting for the connection"
    OFFERED = "waiting for GRANT or PULL"
    GRANTED = "may send"
    STREAMING = "DATA sent"
    COMMITTED = "waiting for DONE"
    CANCELLING = "waiting until nothing is in flight"
    ENDED = "done, failed or cancelled"


_S = SendState
SEND_MOVES: dict[SendState, frozenset[SendState]] = {
    # To GRANTED: one rank to another, of what their engines have agreed on.
    _S.INIT: frozenset({_S.OFFERED, _S.GRANTED, _S.ENDED}),
    _S.OFFERED: frozenset({_S.GRANTED, _S.CANCELLING, _S.ENDED}),
    _S.GRANTED: frozenset({_S.STREAMING, _S.CANCELLING, _S.ENDED}),
    _S.STREAMING: frozenset({_S.COMMITTED, _S.CANCELLING, _S.ENDED}),
    # Back to STREAMING: NACK, once.
    _S.COMMITTED: frozenset({_S.STREAMING, _S.CANCELLING, _S.ENDED}),
    _S.CANCELLING: frozenset({_S.ENDED}),
    _S.ENDED: frozenset(),
}


PairName = tuple[int, int]
"""A rank of P and a rank of D."""


class OfferRequest(msgspec.Struct, frozen=True):
    """The engine's request to offer one prompt. `body`: the token ids as u32."""

    key: TransferKey
    epoch: int
    address: Address
    tokens: int
    prompt_tokens: int
    salt: bytes
    body: bytes
    mode: Mode = "put_async"


@dataclass(frozen=True)
class Granted:
    """The grant with which a rank begins to send: the D process that has room (its `incarnation`,
    and the number of its rank), and what that has already."""

    incarnation: str
    rank: int
    skip_tokens: int


def joined(areas: Sequence[ReadyArea], *, block_bytes: int, most_bytes: int) -> list[ReadyArea]:
    """Join neighbouring layers of the same blocks in one area of at most `most_bytes`: what has
    piled up goes in fewer frames."""
    found: list[ReadyArea] = []
    for ready in areas:
        last = found[-1] if found else None
        if last is not None and last.block_ids == ready.block_ids:
            whole = last.area._replace(end_layer=ready.area.end_layer)
            is_next = (
                ready.area == whole._replace(first_layer=last.area.end_layer)
                and whole.cells * block_bytes <= most_bytes
            )
            if is_next:
                found[-1] = ReadyArea(whole, ready.block_ids)
                continue
        found.append(ready)
    return found


@dataclass
class SentFrame:
    """One DATA frame; its index in the transfer's list is its seq. Kept for NACK and COMMIT."""

    ready: ReadyArea
    length: int
    checksum: bytes = b""


@dataclass
class Outgoing:
    """Mutable state of one transfer; the SendSession owns it."""

    request: OfferRequest
    since_s: float
    granted_s: float = 0.0
    # When the prefill had ended.
    completed_s: float = 0.0
    state: SendState = SendState.INIT
    # Of a transfer that begins as granted: see SendSession.begin.
    granted: Granted | None = None
    peer: Peer | None = None
    # Where its frames are read; None: until the peer is known, and where ranks send them.
    source: Source | None = None
    # Where ranks send: the pairs of them that are not over, and how many areas each has sent.
    pairs: set[PairName] = field(default_factory=set[PairName])
    flushed_by: dict[PairName, int] = field(default_factory=dict[PairName, int])
    transports: set[str] = field(default_factory=set[str])
    # When D was last sent the OFFER, with how many areas handed over; whether it has answered by
    # LEASE, and for how long that was.
    offered_s: float = 0.0
    handed_at_offer: int = 0
    deferred: bool = False
    lease_s: float = 0.0
    skip_blocks: int = 0
    # What is read instead of the blocks.
    spill: Room | None = None
    # Areas that were handed over, and how many of them were reported as sent.
    handed: int = 0
    flushed: int = 0
    waiting: list[ReadyArea] = field(default_factory=list[ReadyArea])
    frames: list[SentFrame] = field(default_factory=list[SentFrame])
    # Frames that the endpoint has and did not report done.
    in_flight: int = 0
    complete: bool = False
    resent: bool = False
    # Nothing more is expected from D; and whether D is owed a CANCELLED.
    peer_quiet: bool = False
    owes_cancelled: bool = False
    reason: str = ""


def offer_of(request: OfferRequest, layout: KvLayout) -> wire.Offer:
    """The OFFER that announces a transfer."""
    return wire.Offer(
        uuid=request.key.uuid,
        prompt_index=request.key.prompt_index,
        epoch=request.epoch,
        tokens=request.tokens,
        prompt_tokens=request.prompt_tokens,
        digest=sha256(request.body).digest(),
        total_bytes=-(-request.tokens // layout.block_size) * layout.bytes_per_block,
        salt=request.salt,
        mode=request.mode,
    )


def cut(transfer: Outgoing, source: Source, max_frame_bytes: int, *, join_bytes: int) -> range:
    """Make frames of what waits, without what D has; their seqs. Groups of layers that have piled
    up go together, up to `join_bytes`."""
    block_bytes = source.block_bytes
    ours = source.cut(transfer.waiting)
    waiting = joined(ours, block_bytes=block_bytes, most_bytes=join_bytes)
    transfer.waiting = []
    first_seq = len(transfer.frames)
    for ready in waiting:
        area = ready.area.behind(transfer.skip_blocks)
        parts = area and split(area, block_bytes=block_bytes, max_frame_bytes=max_frame_bytes)
        for part in parts or ():
            start = part.first_block - ready.area.first_block
            ids = ready.block_ids[start : start + part.end_block - part.first_block]
            length = part.cells * block_bytes
            transfer.frames.append(SentFrame(ReadyArea(part, ids), length))
    return range(first_seq, len(transfer.frames))


def data_of(request: OfferRequest, seq: int, area: Area) -> wire.Data:
    """The header of one frame."""
    return wire.Data(
        uuid=request.key.uuid,
        prompt_index=request.key.prompt_index,
        epoch=request.epoch,
        seq=seq,
        **area._asdict(),
    )


def commit_of(transfer: Outgoing) -> wire.Commit:
    """The COMMIT over all frames sent."""
    request = transfer.request
    checksums = b"".join(frame.checksum for frame in transfer.frames)
    return wire.Commit(
        uuid=request.key.uuid,
        prompt_index=request.key.prompt_index,
        epoch=request.epoch,
        frames=len(transfer.frames),
        total_bytes=sum(frame.length for frame in transfer.frames),
        digest=sha256(checksums).digest(),
    )


def cancel_of(key: TransferKey, epoch: int, reason: str) -> wire.Cancel:
    """A CANCEL, from either side."""
    return wire.Cancel(
        uuid=key.uuid, prompt_index=key.prompt_index, epoch=epoch, reason=reason[:64]
    )


def cancelled_of(key: TransferKey, epoch: int) -> wire.Cancelled:
    """A CANCELLED, the answer to CANCEL."""
    return wire.Cancelled(uuid=key.uuid, prompt_index=key.prompt_index, epoch=epoch)
