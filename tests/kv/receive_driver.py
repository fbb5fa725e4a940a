"""A ReceiveSession with a P and an endpoint that are written by hand."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec

from tests.kv.kvfakes import LAYOUT, FakeKvMemory, FakePool
from tests.kv.kvsim import SessionDriver, SimPeer
from xpyd_core.blocks import token_bytes
from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.build import default_store
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.session.events import (
    ReceiveEvent,
    ReceiveOffered,
)
from xpyd_kv.session.receiving import ReceiveSession
from xpyd_kv.wire import messages as wire

UUID = "a" * 32
KEY = TransferKey(UUID, 0)
REF: dict[str, Any] = {"uuid": UUID, "prompt_index": 0}
TOKENS = 10
BLOCKS = 3
LAYERS = len(LAYOUT.layers)
HELLO = wire.Hello(
    major=1, minor=0, engine_id="p", incarnation="p1", role="P", nonce=bytes(32)
)  # fmt: skip


def checksum_of(seq: int) -> bytes:
    """Stands in for that of a frame."""
    return seq.to_bytes(8, "little")


class Driver(SessionDriver):
    """The session with an endpoint that writes down what was sent, and a P written by hand."""

    def __init__(self, *, on_device: bool = False) -> None:
        super().__init__()
        self.peer: Any = SimPeer(None, HELLO)
        limits = StoreLimits(1.0, 100 * LAYOUT.bytes_per_block)
        memory = FakeKvMemory(8)
        self.store = default_store(limits, memory, FakePool(8))
        self.session = ReceiveSession(
            self.context(memory, on_device=on_device), self.events.append, metrics=self.metrics
        )

    # What a P does.
    def offer(self, epoch: int = 0, *, peer: Any = None, **changes: Any) -> None:
        body = token_bytes(range(TOKENS))
        offer = wire.Offer(
            **REF,
            epoch=epoch,
            tokens=TOKENS,
            prompt_tokens=TOKENS,
            digest=sha256(body).digest(),
            total_bytes=BLOCKS * LAYOUT.bytes_per_block,
        )
        self.session.message(peer or self.peer, msgspec.structs.replace(offer, **changes), body)

    def granted(self, epoch: int = 0, skip_blocks: int = 0) -> Any:
        self.offer(epoch)
        landing = self.store.take(KEY, BLOCKS - skip_blocks)
        assert landing is not None
        self.session.grant(KEY, epoch, landing, skip_blocks * LAYOUT.block_size)
        return landing

    def data(
        self,
        seq: int,
        layer: int | None = None,
        *,
        epoch: int = 0,
        peer: Any = None,
        intact: bool = True,
        checksum: bytes | None = None,
        **changes: Any,
    ) -> bool:
        """One frame of one layer, begun and ended; whether it was stored."""
        stored, header = self.begin(seq, layer, epoch=epoch, peer=peer, **changes)
        digest = checksum or checksum_of(seq)
        sender, whole = peer or self.peer, stored and intact
        self.session.data_end(sender, header, digest, stored=stored, intact=whole)
        return stored

    def end(self, header: wire.Data) -> None:
        """The last byte of a frame that was begun."""
        digest = checksum_of(header.seq)
        self.session.data_end(self.peer, header, digest, stored=True, intact=True)

    def begin(
        self,
        seq: int,
        layer: int | None = None,
        *,
        epoch: int = 0,
        peer: Any = None,
        **changes: Any,
    ) -> tuple[bool, wire.Data]:
        first = seq if layer is None else layer
        header = wire.Data(
            **REF,
            epoch=epoch,
            seq=seq,
            first_layer=first,
            end_layer=first + 1,
            first_block=0,
            end_block=BLOCKS,
        )
        length = changes.pop("length", None)
        header = msgspec.structs.replace(header, **changes)
        if length is None:
            blocks = header.end_block - header.first_block
            length = (header.end_layer - header.first_layer) * blocks * LAYOUT.block_bytes
        views = self.session.data_begin(peer or self.peer, header, length)
        assert views is None or sum(len(view) for view in views) == length
        return views is not None, header

    def commit(self, frames: int = LAYERS, epoch: int = 0, **changes: Any) -> None:
        checksums = b"".join(checksum_of(seq) for seq in range(frames))
        commit = wire.Commit(
            **REF,
            epoch=epoch,
            frames=frames,
            total_bytes=BLOCKS * LAYOUT.bytes_per_block,
            digest=sha256(checksums).digest(),
        )
        self.session.message(self.peer, msgspec.structs.replace(commit, **changes), b"")

    def cancel(self, epoch: int = 0, peer: Any = None) -> None:
        self.session.message(peer or self.peer, wire.Cancel(**REF, epoch=epoch), b"")

    def cancelled(self, epoch: int = 0) -> None:
        self.session.message(self.peer, wire.Cancelled(**REF, epoch=epoch), b"")

    def take_events(self) -> list[ReceiveEvent]:
        """What the session reported since the last call, offers not among it."""
        events = [e for e in self.events if not isinstance(e, ReceiveOffered)]
        self.events.clear()
        return events
