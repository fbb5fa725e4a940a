"""A rank's memory for transfers: its cache, and its share of buffer and pool beside it.

The engine's books say which units and blocks are whose; here is what they are made of. On the
rank's I/O thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from xpyd_core.errors import XpydError
from xpyd_kv.memory.api import KvMemory, Place, Room, Where
from xpyd_kv.memory.buddy import Extent
from xpyd_kv.memory.device import DeviceView, Event, View
from xpyd_kv.memory.space import (
    Arena,
    BlockRoom,
    Copier,
    Piece,
    PieceRoom,
    buffer_memory,
    pool_memory,
)


class Rooms:
    """`units`: of buffer and pool, as `StoreLimits.units` reckons them."""

    def __init__(self, memory: KvMemory, units: tuple[int, int]) -> None:
        """UserError, naming the flag, when there is less memory than they take."""
        self._memory = memory
        self._copier = Copier(memory.device)
        unit_bytes = memory.layout.bytes_per_block
        buffer_bytes, pool_bytes = (count * unit_bytes for count in units)
        device = memory.device
        self._arenas: dict[Where, Arena] = {}
        if buffer_bytes:
            self._arenas["buffer"] = Arena(buffer_memory(buffer_bytes, device), unit_bytes)
        if pool_bytes:
            self._arenas["pool"] = Arena(pool_memory(pool_bytes, device), unit_bytes)

    @property
    def regions(self) -> Sequence[View]:
        """The memory beside the cache."""
        return [arena.memory for arena in self._arenas.values()]

    def room(self, place: Place) -> Room:
        """Where that is. XpydError for what is not here."""
        if place.where == "blocks":
            return BlockRoom(self._memory, place.blocks)
        return self._beside(place)

    def copy(self, place: Place, block_ids: Sequence[int], *, into_cache: bool) -> Event | None:
        """Begin to copy between the place and blocks of the cache; when that is through (None: it
        is). DeviceError."""
        return self._beside(place).copy(block_ids, into_cache=into_cache)

    def close(self, deadline_s: float) -> None:
        """Give a device's memory back."""
        device = self._memory.device
        if not self._copier.close(deadline_s) or device is None:
            return
        for where, arena in self._arenas.items():
            if where == "buffer":
                device.free(cast("DeviceView", arena.memory))
            else:
                device.free_pinned(cast("memoryview", arena.memory))

    def _beside(self, place: Place) -> PieceRoom:
        arena = self._arenas.get(place.where)
        if arena is None:
            raise XpydError(f"this rank has no {place.where}")
        extents = [Extent(*extent) for extent in place.extents]
        pieces = [Piece(arena.view(extent), extent.units) for extent in extents]
        return PieceRoom(self._memory, pieces, self._copier)
