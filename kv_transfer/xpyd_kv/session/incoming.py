"""One transfer on D: its state, the ledger of what has arrived, where frames go, checks of OFFER.

DATA holds of P's blocks what both ranks have. Where that is a whole block on both sides it goes
block for block into the landing; else each is cut as the plan between the two caches says. Pure.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from itertools import accumulate, repeat
from typing import NamedTuple

from xpyd_core.blocks import blocks_for
from xpyd_core.errors import ProtocolError
from xpyd_core.request_id import TransferKey
from xpyd_kv.memory.api import Room
from xpyd_kv.memory.device import View
from xpyd_kv.plan.frames import Area
from xpyd_kv.plan.pairs import Pair, ScatterSpan
from xpyd_kv.spans import join, locate
from xpyd_kv.transport.api import Peer
from xpyd_kv.values import KvLayout
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.fit import engine_layout_of
from xpyd_kv.wire.messages import Mode

# Of one peer: frames of a transfer differ in their layers, seldom in their blocks. Those of a frame
# of 32 MiB take half a megabyte.
_KEPT_CUTS = 4


class _Cut(NamedTuple):
    """Bytes [begin, end) of a layer's `view`-th view; the one behind the last is spare memory."""

    view: int
    begin: int
    end: int


class Placing:
    """Maps the bytes of P's blocks into D's blocks, for one pair. `layers`: the layers that both
    ranks have; `source_size`: tokens of a P block; `source_bytes`: bytes of one layer that come of
    one P block."""

    def __init__(self, pair: Pair) -> None:
        self.layers = pair.layers
        self.source_size = pair.source.block_size
        self.source_bytes = pair.block_bytes
        self._size = pair.destination.block_size
        self._scatter = pair.scatter
        self._layers = pair.destination_layers
        self._cuts: dict[object, tuple[list[_Cut], int]] = {}

    def views(self, room: Room, area: Area, *, skip_tokens: int, tokens: int) -> Sequence[View]:
        """Room for the area's bytes (its layers are the pair's, its blocks P's) in that of what
        follows the first `skip_tokens` of a prompt of `tokens`."""
        skip = skip_tokens // self._size
        first_layer, end_layer, first_block, end_block = area
        layers = self._layers[first_layer:end_layer]
        found: list[View] = []
        if self._scatter is None:
            blocks = first_block - skip, end_block - skip
            for begin, count in join(layers, repeat(1)):
                found += room.views(begin, begin + count, *blocks)
            return found
        last = blocks_for(tokens, self._size)
        first, end = self._scatter.destination_blocks(first_block, end_block)
        for layer in layers:
            blocks = room.views(layer, layer + 1, first - skip, min(end, last) - skip)
            key = (first_block, end_block, last, *map(len, blocks))
            if key not in self._cuts:
                places = self._scatter.spans(first_block, end_block, last_block=last)
                self._keep(key, _cuts_of(places, [len(block) for block in blocks]))
            cuts, surplus = self._cuts[key]
            # The spare memory lives as long as this frame's views.
            views: list[View] = [*blocks, memoryview(bytearray(surplus))]
            found += [views[view][begin:stop] for view, begin, stop in cuts]
        return found

    def _keep(self, key: object, cuts: tuple[list[_Cut], int]) -> None:
        if len(self._cuts) >= _KEPT_CUTS:
            del self._cuts[next(iter(self._cuts))]
        self._cuts[key] = cuts


class Origin:
    """The values that all transfers of one peer share. `fits`: not where surplus could come to a
    GPU's memory, in which there is nothing to put it. `placing`: where frames of the peer go; None:
    there are none, since our ranks take them."""

    def __init__(self, peer: Peer, ours: KvLayout, *, on_device: bool) -> None:
        engine = engine_layout_of(peer.layout)
        self.fits = not (on_device and engine.block_size > ours.block_size)
        self.placing = None if peer.pair is None else Placing(peer.pair)
        self.alignment_tokens = max(engine.block_size, ours.block_size)
        """Blocks of both sides begin at its multiples."""
        self._block_size = engine.block_size
        self._bytes_per_block = engine.bytes_per_block

    def check(self, offer: wire.Offer, body: bytes) -> None:
        """ProtocolError where header, body and P's cache do not agree."""
        if not 0 < offer.prompt_tokens <= offer.tokens or len(body) != 4 * offer.tokens:
            raise ProtocolError("OFFER: number of tokens")
        if sha256(body).digest() != offer.digest:
            raise ProtocolError("OFFER: digest of the token ids")
        blocks = blocks_for(offer.tokens, self._block_size)
        if offer.total_bytes != blocks * self._bytes_per_block:
            raise ProtocolError("OFFER: total bytes")


def _cuts_of(places: Sequence[ScatterSpan], lengths: Sequence[int]) -> tuple[list[_Cut], int]:
    """Where the places lie in views of these lengths, D's blocks of a layer; and the bytes
    of surplus, which go into memory of their own behind the last: less than a P block."""
    starts = [0, *accumulate(lengths)]
    cuts: list[_Cut] = []
    surplus = 0
    for offset, length in places:
        if offset is None:
            cuts.append(_Cut(len(lengths), surplus, surplus + length))
            surplus += length
            continue
        for view, begin, size in locate(starts, offset, length):
            cuts.append(_Cut(view, begin, begin + size))
    return cuts, surplus


class ReceiveState(StrEnum):
    """The state of a transfer on D."""

    OFFERED = "waiting for the engine to reserve"
    DEFERRED = "P keeps its blocks until there is room"
    GRANTED = "waiting for the first frame"
    STREAMING = "frames arrive"
    LANDED = "all there: waiting for a request"
    CANCELLING = "waiting until no write can land"


_R = ReceiveState
# What is not here has ended: an ended transfer is dropped, only its tombstone stays.
RECEIVE_MOVES: dict[ReceiveState, frozenset[ReceiveState]] = {
    _R.OFFERED: frozenset({_R.DEFERRED, _R.GRANTED, _R.CANCELLING}),
    _R.DEFERRED: frozenset({_R.GRANTED, _R.CANCELLING}),
    # To LANDED: ranks took it.
    _R.GRANTED: frozenset({_R.STREAMING, _R.LANDED, _R.CANCELLING}),
    _R.STREAMING: frozenset({_R.LANDED, _R.CANCELLING}),
    _R.LANDED: frozenset(),
    _R.CANCELLING: frozenset(),
}
# A write may land only in these.
RECEIVING = frozenset({_R.GRANTED, _R.STREAMING})


class Ledger:
    """Which frames are in the landing of one transfer: every block of every layer exactly
    once. The blocks are P's."""

    def __init__(
        self, *, num_layers: int, first_block: int, end_block: int, block_bytes: int
    ) -> None:
        self._num_layers = num_layers
        self._first_block = first_block
        self._width = end_block - first_block
        self._block_bytes = block_bytes
        self._covered = bytearray(num_layers * self._width)
        # The checksums of those that are here.
        self._frames: dict[int, bytes] = {}
        self._writing: set[int] = set()

    @property
    def cells(self) -> int:
        """Blocks x layers expected; no transfer has more frames than this."""
        return len(self._covered)

    def refusal(self, header: wire.Data, length: int) -> str | None:
        """Why this frame may not be written, or None."""
        if not (
            header.first_layer < header.end_layer <= self._num_layers
            and self._first_block <= header.first_block < header.end_block
            and header.end_block <= self._first_block + self._width
            and header.seq < self.cells
        ):
            return "range"
        if length != area_of(header).cells * self._block_bytes:
            return "length"
        if header.seq in self._frames or header.seq in self._writing:
            return "duplicate"
        if any(any(self._covered[row]) for row in self._rows(header)):
            return "overlap"
        return None

    def begin(self, header: wire.Data) -> None:
        """Note that the bytes of a frame are being written."""
        self._writing.add(header.seq)
        self._cover(header, 1)

    def end(self, header: wire.Data, checksum: bytes, *, intact: bool) -> None:
        """Note that the bytes of a frame are written; broken ones may come again."""
        self._writing.discard(header.seq)
        if intact:
            self._frames[header.seq] = checksum
        else:
            self._cover(header, 0)

    def missing(self, frames: int) -> list[int]:
        """Return the seqs of [0, frames) that have not arrived."""
        return [seq for seq in range(frames) if seq not in self._frames]

    def agrees(self, commit: wire.Commit) -> bool:
        """Whether what is here is all there is, byte by byte what COMMIT says; not while a
        frame is being written, which covers its place already."""
        if self._writing or len(self._frames) != commit.frames or not all(self._covered):
            return False
        checksums = b"".join(self._frames[seq] for seq in range(commit.frames))
        return (
            commit.total_bytes == self.cells * self._block_bytes
            and sha256(checksums).digest() == commit.digest
        )

    def _rows(self, header: wire.Data) -> list[slice]:
        first = header.first_block - self._first_block
        end = header.end_block - self._first_block
        return [
            slice(layer * self._width + first, layer * self._width + end)
            for layer in range(header.first_layer, header.end_layer)
        ]

    def _cover(self, header: wire.Data, value: int) -> None:
        blocks = bytes([value]) * (header.end_block - header.first_block)
        for row in self._rows(header):
            self._covered[row] = blocks


@dataclass
class Incoming:
    """Mutable state of one transfer; the ReceiveSession owns it."""

    key: TransferKey
    epoch: int
    peer: Peer
    tokens: int
    activity_s: float
    # Where frames go; None: our ranks take them.
    placing: Placing | None = None
    mode: Mode = "put_async"
    granted_s: float = 0.0
    state: ReceiveState = ReceiveState.OFFERED
    expected: bool = False
    skip_tokens: int = 0
    landing: Room | None = None
    ledger: Ledger | None = None
    # Frames that are being written into the landing.
    writing: int = 0
    # Where our ranks take them: the pairs (rank of P, rank of ours) that are neither here nor
    # quiet, and our ranks that were not heard to know of it.
    pairs: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    unopened: set[int] = field(default_factory=set[int])
    transports: set[str] = field(default_factory=set[str])
    # Of one rank, which forgets it as soon as it is complete: its engine has the landing.
    is_of_rank: bool = False
    nacked: bool = False
    # CANCELLING: P said CANCELLED or CANCEL, or is gone; and whether it is owed a CANCELLED.
    peer_quiet: bool = False
    owes_cancelled: bool = False
    next_renewal_s: float = 0.0


def area_of(header: wire.Data) -> Area:
    """The area that a frame covers."""
    return Area(header.first_layer, header.end_layer, header.first_block, header.end_block)


def nack_of(transfer: Incoming, missing: list[int]) -> tuple[wire.Nack, bytes]:
    """NACK and its body."""
    message = wire.Nack(
        uuid=transfer.key.uuid,
        prompt_index=transfer.key.prompt_index,
        epoch=transfer.epoch,
        frames=len(missing),
    )
    return message, struct.pack(f"<{len(missing)}I", *missing)


def grant_of(transfer: Incoming) -> wire.Grant | wire.Pull:
    """GRANT, or PULL in mode get."""
    kind = wire.Pull if transfer.mode == "get" else wire.Grant
    return kind(
        uuid=transfer.key.uuid,
        prompt_index=transfer.key.prompt_index,
        epoch=transfer.epoch,
        skip_tokens=transfer.skip_tokens,
    )


def lease_of(transfer: Incoming, ttl_s: float) -> wire.Lease:
    """LEASE for `ttl_s` from its receipt."""
    return wire.Lease(
        uuid=transfer.key.uuid,
        prompt_index=transfer.key.prompt_index,
        epoch=transfer.epoch,
        ttl_ms=int(ttl_s * 1000),
    )


def done_of(transfer: Incoming) -> wire.Done:
    """DONE."""
    return wire.Done(
        uuid=transfer.key.uuid, prompt_index=transfer.key.prompt_index, epoch=transfer.epoch
    )


def token_ids_of(body: bytes) -> tuple[int, ...]:
    """Little-endian u32 ids."""
    ids = array("I", body)
    if sys.byteorder == "big":
        ids.byteswap()
    return tuple(ids)
