"""The memory of a store: blocks of the paged cache, device buffer, host pool; copies between.

Views only: `store` decides who may use them, and for how long.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from xpyd_core.errors import UserError, XpydError
from xpyd_core.sizes import format_bytes
from xpyd_kv.memory.api import Deviation, KvMemory, Place, Room, SpillKind
from xpyd_kv.memory.buddy import Extent
from xpyd_kv.memory.device import (
    Device,
    DeviceError,
    DeviceView,
    Event,
    View,
    is_on_host,
    on_host,
)
from xpyd_kv.memory.paged import DevicePagedMemory, PagedMemory, farthest
from xpyd_kv.memory.store import StoreLimits


class Arena:
    """`memory` in units of `unit_bytes`."""

    def __init__(self, memory: View, unit_bytes: int) -> None:
        self.memory = memory
        self._unit_bytes = unit_bytes

    def view(self, extent: Extent) -> View:
        """The bytes of one extent."""
        first, size = extent.offset * self._unit_bytes, extent.units * self._unit_bytes
        return self.memory[first : first + size]


# A copy of a layer's 512 tokens takes milliseconds; the I/O thread waits for it.
_FETCH_S = 2.0
_FLAGS: dict[SpillKind, str] = {"buffer": "--kv-buffer-size", "pool": "--kv-host-pool-size"}


def _memory_of(kind: SpillKind, size_bytes: int, device: Device | None) -> View:
    """The buffer is the device's, the pool the host's and then pinned; without a device both are
    the host's. UserError, naming the flag, when there is less."""
    try:
        if device is None:
            return _map(size_bytes)
        return (
            device.allocate(size_bytes) if kind == "buffer" else device.allocate_pinned(size_bytes)
        )
    except (UserError, OSError, OverflowError) as error:
        raise UserError(
            f"{_FLAGS[kind]}: the system does not give {format_bytes(size_bytes)} ({error}); "
            "give a smaller size"
        ) from error


def _map(size_bytes: int) -> memoryview:
    """Allocate memory whose pages the system supplies at the first access."""
    return memoryview(mmap.mmap(-1, size_bytes))


class Copier:
    """Copies within the memory of `device`, and between it and pinned memory; None: the host's."""

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self._stream = device.stream() if device is not None else None

    def copy(self, targets: Sequence[View], sources: Sequence[View]) -> Event | None:
        """Begin to copy the bytes of all sources, in order, to all targets, each source as long as
        some targets together; when that is through (None: it is). DeviceError."""
        if self._device is None or self._stream is None:
            _copy_now(on_host(targets), on_host(sources))
            return None
        # The blocks' last readers may still be under way on the model's stream.
        self._stream.wait(self._device.compute_stream().record())
        self._stream.copy(targets, sources)
        return self._stream.record()

    def fetch(self, sources: Sequence[View], written: Event | None) -> bytearray:
        """The bytes of all sources, in the host's memory, as they are behind `written`. Waits: not
        for the hot path. UserError where there is no memory, DeviceError."""
        if is_on_host(sources):
            return bytearray(b"".join(on_host(sources)))
        device, stream = self._device, self._stream
        assert device is not None
        assert stream is not None
        pinned = device.allocate_pinned(sum(map(len, sources)))
        if written is not None:
            stream.wait(written)
        stream.copy([pinned], sources)
        if not stream.record().wait(_FETCH_S):
            # The device may yet write there: it is not given back.
            raise DeviceError(f"it has not copied KV to the host within {_FETCH_S:g} s")
        found = bytearray(pinned)
        device.free_pinned(pinned)
        return found

    def close(self, deadline_s: float) -> bool:
        """Wait for what is under way and give the stream back; whether it ended in time."""
        if self._stream is None:
            return True
        has_ended = self._stream.record().wait(deadline_s)
        self._stream.close()
        return has_ended


def _copy_now(targets: Sequence[memoryview], sources: Sequence[memoryview]) -> None:
    following = iter(targets)
    for source in sources:
        offset = 0
        while offset < len(source):
            target = next(following)
            target[:] = source[offset : offset + len(target)]
            offset += len(target)


class BlockRoom(msgspec.Struct, frozen=True):
    """Blocks of the paged cache: see Room."""

    memory: KvMemory
    block_ids: Sequence[int]

    def views(
        self, first_layer: int, end_layer: int, first_block: int, end_block: int
    ) -> Sequence[View]:
        """See Room. Neighbouring blocks may share one view."""
        blocks = self.block_ids[first_block:end_block]
        return self.memory.views(range(first_layer, end_layer), blocks)


@dataclass(frozen=True)
class Compared:
    """See Comparison: one that is over."""

    worst: Deviation

    def is_done(self) -> bool:
        """See Comparison."""
        return True


@dataclass(frozen=True)
class ExtentMemory:
    """Memory of `num_blocks` blocks of all layers: layer after layer, its blocks side by side."""

    memory: View
    num_blocks: int


@dataclass(frozen=True)
class ExtentRoom:
    """A room of several extents, in order: see StagingRoom. `memory` is the paged cache that it
    copies from and to."""

    memory: KvMemory
    pieces: Sequence[ExtentMemory]
    copier: Copier

    def views(
        self, first_layer: int, end_layer: int, first_block: int, end_block: int
    ) -> Sequence[View]:
        """One view for each layer and piece that the area touches."""
        return [
            view
            for layer in range(first_layer, end_layer)
            for view in self._layer_views(layer, first_block, end_block)
        ]

    def copy(
        self, block_ids: Sequence[int], *, into_cache: bool, first_block: int = 0
    ) -> Event | None:
        """See StagingRoom."""
        here: list[View] = []
        blocks: list[View] = []
        for layer in range(len(self.memory.layout.layers)):
            here += self._layer_views(layer, first_block, first_block + len(block_ids))
            blocks += [self.memory.block_view(layer, block) for block in block_ids]
        if into_cache:
            return self.copier.copy(blocks, here)
        return self.copier.copy(self._in_blocks(here), blocks)

    def compare(self, block_ids: Sequence[int], tokens: int) -> Compared:
        """See StagingRoom."""
        memory, written = self.memory, self.memory.written()
        found: list[Deviation] = []
        for layer in range(len(memory.layout.layers)):
            landed = self._layer_views(layer, 0, len(block_ids))
            if isinstance(memory, PagedMemory):
                found.append(memory.deviation(layer, block_ids, on_host(landed), tokens=tokens))
                continue
            assert isinstance(memory, DevicePagedMemory)
            theirs = self.copier.fetch(landed, written)
            own = self.copier.fetch(memory.views([layer], block_ids), written)
            found.append(memory.deviation(layer, theirs, own, tokens=tokens))
        return Compared(farthest(found))

    def _in_blocks(self, views: Sequence[View]) -> list[View]:
        """Cut the views into one for each block."""
        size = self.memory.layout.block_bytes
        return [view[at : at + size] for view in views for at in range(0, len(view), size)]

    def _layer_views(self, layer: int, first_block: int, end_block: int) -> list[View]:
        size = self.memory.layout.block_bytes
        views: list[View] = []
        start = 0
        for piece in self.pieces:
            low = max(first_block - start, 0)
            high = min(end_block - start, piece.num_blocks)
            if low < high:
                row = layer * piece.num_blocks
                views.append(piece.memory[(row + low) * size : (row + high) * size])
            start += piece.num_blocks
        return views


class OwnSpace:
    """See Space: the memory of this process apart from the cache `memory`. A rank whose engine
    leases its memory from another process resolves the engine's places here.

    The host pool is one allocation at start: on a CPU the system supplies its pages at the first
    access, with a GPU it is pinned. So is the device buffer, except on a CPU where no other process
    names its units: there each landing gets memory of its own.
    """

    def __init__(
        self, memory: KvMemory, limits: StoreLimits, *, book_unit_bytes: int | None = None
    ) -> None:
        """`book_unit_bytes`: a unit in the books of an engine of several ranks; None: the books are
        ours. UserError, naming the flag, when there is less memory than buffer and pool take."""
        self._memory = memory
        self.unit_bytes = memory.layout.bytes_per_block
        device = self._device = memory.device
        self._copier = Copier(device)
        units = limits.units(book_unit_bytes or self.unit_bytes)
        buffer, pool = (count * self.unit_bytes for count in units)
        self._arenas: dict[SpillKind, Arena] = {}
        if buffer and (device is not None or book_unit_bytes is not None):
            self._arenas["buffer"] = Arena(_memory_of("buffer", buffer, device), self.unit_bytes)
        if pool:
            self._arenas["pool"] = Arena(_memory_of("pool", pool, device), self.unit_bytes)

    def blocks(self, block_ids: Sequence[int]) -> Room:
        """See Space."""
        return BlockRoom(self._memory, block_ids)

    def staging_room(self, kind: SpillKind, extents: Sequence[Extent]) -> ExtentRoom:
        """See Space."""
        arena = self._arenas.get(kind)
        if arena is not None:
            pieces = [ExtentMemory(arena.view(extent), extent.units) for extent in extents]
        else:
            units = sum(extent.units for extent in extents)
            pieces = [ExtentMemory(memoryview(bytearray(units * self.unit_bytes)), units)]
        return ExtentRoom(self._memory, pieces, self._copier)

    def room(self, place: Place) -> Room:
        """Return the memory of this rank at a place that the engine names. XpydError for a place
        that the rank does not have."""
        return self.blocks(place.blocks) if place.where == "blocks" else self._staging_room(place)

    def copy(
        self, place: Place, block_ids: Sequence[int], *, into_cache: bool, first_block: int = 0
    ) -> Event | None:
        """Begin to copy between the place, from its `first_block` on, and blocks of the cache; when
        that is through (None: it is). DeviceError."""
        room = self._staging_room(place)
        return room.copy(block_ids, into_cache=into_cache, first_block=first_block)

    def compare(self, place: Place, block_ids: Sequence[int], tokens: int) -> Deviation:
        """Compare the place with blocks of the cache: see StagingRoom."""
        return self._staging_room(place).compare(block_ids, tokens).worst

    @property
    def regions(self) -> Sequence[View]:
        """See LandingStore."""
        return [arena.memory for arena in self._arenas.values()]

    def close(self, deadline_s: float) -> None:
        """See LandingStore."""
        if not self._copier.close(deadline_s) or self._device is None:
            return
        for kind, arena in self._arenas.items():
            if kind == "buffer":
                self._device.free(cast("DeviceView", arena.memory))
            else:
                self._device.free_pinned(cast("memoryview", arena.memory))

    def _staging_room(self, place: Place) -> ExtentRoom:
        if place.where == "blocks" or place.where not in self._arenas:
            raise XpydError(f"this rank has no {place.where}")
        return self.staging_room(place.where, [Extent(*extent) for extent in place.extents])
