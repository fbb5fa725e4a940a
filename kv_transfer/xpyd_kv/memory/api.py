"""The seams of KV memory: the paged cache, the memory of a store, and its landings.

A Landing is taken and given back on the engine's thread; between the two the I/O thread writes
through its views. The holder of a landing knows that no write can follow before it frees or adopts.
The store that leases them is `memory.store`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import msgspec

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
        """Engine thread: when all that the model has enqueued by now is in the cache. None: it
        does."""
        ...


class Deviation(msgspec.Struct, frozen=True, array_like=True):
    """How far KV is from our own where it is farthest: of a token's K or V of one head, as a part
    of the length that such rows have. `layer`: its absolute index."""

    layer: int = 0
    part: Literal["K", "V"] = "K"
    deviation: float = 0.0


class Comparison(Protocol):
    """KV beside the cache is being compared with blocks of the cache."""

    def is_done(self) -> bool:
        """Whether `worst` is known; both stay as they are until then."""
        ...

    @property
    def worst(self) -> Deviation:
        """The largest deviation of all layers and heads."""
        ...


Where = Literal["blocks", "buffer", "pool"]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Room that the engine's books name: blocks of the cache by their ids, or extents (unit, units)
    of the buffer or the pool. The same numbers mean a share of each rank's memory."""

    where: Where
    blocks: tuple[int, ...] = ()
    extents: tuple[tuple[int, int], ...] = ()


LandingKind = Literal["direct", "buffer", "pool"]
SpillKind = Literal["buffer", "pool"]


@dataclass(frozen=True)
class StoreMetrics:
    """Gauges of a store, in bytes; `leases` counts landings and spills that are held now,
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
    """Memory outside the paged cache, with copies between it and the cache."""

    def copy(
        self, block_ids: Sequence[int], *, into_cache: bool, first_block: int = 0
    ) -> Event | None:
        """Begin to copy its blocks from `first_block` on, as many as are named, into these blocks,
        or these blocks to there; when that is through (None: it is). Until then both stay as they
        are. DeviceError when the device fails."""
        ...

    def compare(self, block_ids: Sequence[int], tokens: int) -> Comparison:
        """Begin to compare the first `tokens` tokens with those of these blocks of the cache.
        UserError where there is no memory for that, DeviceError when the device fails."""
        ...


class Space(Protocol):
    """The memory of a store, in this process or on the ranks. The store decides which transfer uses
    what of it. Engine thread only."""

    @property
    def unit_bytes(self) -> int:
        """The size of one block of all layers of all ranks, in which the store counts. A landing is
        a whole number of units, so no memory is wasted."""
        ...

    def blocks(self, block_ids: Sequence[int]) -> Room:
        """Return a room made of these blocks of the paged cache."""
        ...

    def staging_room(self, kind: SpillKind, extents: Sequence[Extent]) -> StagingRoom:
        """Return a room made of these units of the device buffer or of the host pool."""
        ...

    @property
    def regions(self) -> Sequence[View]:
        """See LandingStore."""
        ...

    def close(self, deadline_s: float) -> None:
        """See LandingStore."""
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

    def adopt(self, skip_blocks: int = 0) -> list[int] | None:
        """The blocks of the paged cache that hold the bytes now, but for those of the first
        `skip_blocks`, which the caller has elsewhere; one reference on each the caller's. None (and
        nothing changed) when the pool has no blocks to copy into; None also while `is_copying`:
        then ask again. DeviceError when the device fails."""
        ...

    def free(self) -> None:
        """Give the memory back, bytes and all; what a device still copies from or to, when that
        has ended (`LandingStore.poll`)."""
        ...
