"""One transfer on D: its state, and the ledger of what has arrived. Pure values."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256

from xpyd_core.request_id import TransferKey
from xpyd_kv.plan.frames import Area
from xpyd_kv.session.placing import Placing
from xpyd_kv.store.api import Room
from xpyd_kv.transport.api import Peer
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.messages import Mode


class ReceiveState(StrEnum):
    """Where a transfer stands on D."""

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
    """Which frames stand in the landing of one transfer: every block of every layer exactly
    once. The blocks are P's."""

    def __init__(
        self, *, num_layers: int, first_block: int, end_block: int, block_bytes: int
    ) -> None:
        self._num_layers = num_layers
        self._first_block = first_block
        self._width = end_block - first_block
        self._block_bytes = block_bytes
        self._covered = bytearray(num_layers * self._width)
        # The checksums of those that stand.
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
        """Its bytes are being written."""
        self._writing.add(header.seq)
        self._cover(header, 1)

    def end(self, header: wire.Data, checksum: bytes, *, intact: bool) -> None:
        """Its bytes are written; broken ones may come again."""
        self._writing.discard(header.seq)
        if intact:
            self._frames[header.seq] = checksum
        else:
            self._cover(header, 0)

    def missing(self, frames: int) -> list[int]:
        """Which of the seqs [0, frames) do not stand here."""
        return [seq for seq in range(frames) if seq not in self._frames]

    def agrees(self, commit: wire.Commit) -> bool:
        """Whether what stands here is all there is, byte by byte what COMMIT says; not while a
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
