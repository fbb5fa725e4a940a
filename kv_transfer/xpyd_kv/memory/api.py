"""The seams of KV memory: the paged cache, landings, stashes and the store that leases them.

A Landing is taken and given back on the engine's thread; between the two the I/O thread writes
through its views. The holder of a landing knows that no write can follow before it frees or adopts.
A Stash is P's: KV that stood in blocks which others need more; the I/O thread reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import msgspec

from xpyd_core.request_id import TransferKey
from xpyd_kv.memory.buddy import Extent
from xpyd_kv.memory.device import Device, Event, View
from xpyd_kv.values import KvLayout


class KvMemory(Protocol):
    """The paged cache as bytes. May be used by the engine's and the I/O thread at once: the owner
    of a block decides who touches it."""

    @property
    def layout(self) -> KvLayout: ...

    @property
    def device(self) -> Device | None:
        """The GPU whose memory it is; None: the host's."""
        ...

    def block_view(self, layer: int, block_id: int) -> View:
        """Writable bytes of one block of one layer (index into `layout.layers`), `block_bytes`
        long."""
        ...

    def views(self, layers: Sequence[int], block_ids: Sequence[int]) -> Sequence[View]:
        """The bytes of these blocks of these layers in order: layer after layer, for each block
        after block. Neighbours may be one view. Hot path."""
        ...

    def written(self) -> Event | None:
        """Engine thread: when all that the model has enqueued by now stands in the cache. None: it
        does."""
        ...


Where = Literal["blocks", "buffer", "pool"]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Room that the engine's books name: blocks of the cache by their ids, or extents (unit, units)
    of the buffer or the pool. The same numbers mean a share of each rank's memory."""

    where: Where
    blocks: tuple[int, ...] = ()
    extents: tuple[tuple[int, int], ...] = ()


LandingKind = Literal["direct", "buffer", "pool"]
StashKind = Literal["buffer", "pool"]


@dataclass(frozen=True)
class StoreMetrics:
    """Gauges of a store, in bytes; `leases` counts landings and stashes that are held now,
    `direct_free_bytes` what may still land in own blocks, `pool_fragmentation` is the share of the
    pool's free memory that is not in its largest free piece."""

    leases: int = 0
    direct_free_bytes: int = 0
    buffer_used_bytes: int = 0
    buffer_bytes: int = 0
    pool_used_bytes: int = 0
    pool_bytes: int = 0
    pool_high_water_bytes: int = 0
    pool_fragmentation: float = 0.0


@runtime_checkable
class Room(Protocol):
    """Memory for blocks of all layers of a rank, as the I/O thread sees it. Checked at run time
    where a rank decodes a message (`ranks.remote`)."""

    def views(
        self, first_layer: int, end_layer: int, first_block: int, end_block: int
    ) -> Sequence[View]:
        """The bytes of the area in the order of a DATA body: for each layer, for each block. Blocks
        count from the room's first. Any thread, while the room is held."""
        ...


class StagingRoom(Room, Protocol):
    """Room that is no block of the paged cache, and what copies between the two."""

    def copy(self, block_ids: Sequence[int], *, into_cache: bool) -> Event | None:
        """Begin to copy all of it into these blocks, or all of them to here; when that is through
        (None: it is). Until then both stay as they are and nobody else's. DeviceError when the
        device fails."""
        ...


class Space(Protocol):
    """The memory of a store, in this process or on the ranks; the store's books say what of it is
    whose. Engine thread only."""

    @property
    def unit_bytes(self) -> int:
        """One block of all layers, of all ranks: what the books count in. A landing is a whole
        number of units, so nothing is wasted."""
        ...

    def blocks(self, block_ids: Sequence[int]) -> Room:
        """These blocks of the paged cache."""
        ...

    def beside(self, kind: StashKind, extents: Sequence[Extent]) -> StagingRoom:
        """These units of the device buffer or of the host pool."""
        ...

    @property
    def regions(self) -> Sequence[View]:
        """See Store."""
        ...

    def close(self, deadline_s: float) -> None:
        """See Store."""
        ...


class Landing(Room, Protocol):
    """Memory for `num_blocks` blocks of all layers, leased to one transfer. Given back exactly
    once: by `free`, or by an `adopt` that succeeds; a second time raises XpydError."""

    @property
    def kind(self) -> LandingKind: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def is_copying(self) -> bool:
        """Whether `adopt` has taken blocks, into which a device still copies."""
        ...

    def adopt(self) -> list[int] | None:
        """The blocks of the paged cache that hold the bytes now, one reference on each the
        caller's. None (and nothing changed) when the pool has no blocks to copy into; None also
        while `is_copying`: then ask again. DeviceError when the device fails."""
        ...

    def free(self) -> None:
        """Give the memory back, bytes and all; what a device still copies from or to, when that
        has ended (`Store.poll`)."""
        ...


class Stash(Room, Protocol):
    """Memory beside the paged cache that keeps the KV of `num_blocks` blocks of all layers. Given
    back exactly once, by `free`; a second time raises XpydError."""

    @property
    def kind(self) -> StashKind: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    def fill(self, block_ids: Sequence[int]) -> Event | None:
        """Copy `num_blocks` blocks of the paged cache here, in this order, once. A device says when
        that is through (None: it is); until then nothing here is read, and the blocks are not given
        back. DeviceError when the device fails."""
        ...

    def free(self) -> None:
        """Give the memory back; no read may follow. As with a landing, what a device still copies
        to comes back when that has ended."""
        ...


class Store(Protocol):
    """Gives landings (D) and stashes (P). Engine thread only."""

    def take(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        """A landing in the first place that has room: own blocks (while enough stay free), device
        buffer, host pool. None: defer."""
        ...

    def take_direct(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        """Own blocks, whatever stays free: the request is about to run. None: not enough."""
        ...

    def take_beside(self, owner: TransferKey, num_blocks: int) -> Stash | None:
        """Memory in the device buffer, else in the host pool. None: neither has room."""
        ...

    def poll(self) -> None:
        """Once per engine step: take back what a device copied from when it was freed."""
        ...

    def close(self, deadline_s: float) -> None:
        """Give the store's own memory back; no landing is read or written any more. What a device
        still copies from after `deadline_s` is left to the end of the process."""
        ...

    @property
    def regions(self) -> Sequence[View]:
        """Memory of the store's own that landings are made of, for as long as it lives. What else
        they are made of is the cache, or comes and goes."""
        ...

    def figures(self) -> StoreMetrics: ...
