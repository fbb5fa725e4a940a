"""The memory of a store in the process of the engine itself.

The host pool is one allocation at start: on a CPU the system brings its pages when they are first
touched, with a GPU it is pinned. There the device buffer is one allocation of device memory; on a
CPU, where nothing is gained by that, each landing gets memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from xpyd_kv.connector.api import KvMemory
from xpyd_kv.device.api import DeviceView, View
from xpyd_kv.store.api import Room, StashKind
from xpyd_kv.store.arena import Arena, buffer_memory, pool_memory
from xpyd_kv.store.buddy import Extent
from xpyd_kv.store.copier import Copier
from xpyd_kv.store.landing_store import StoreLimits
from xpyd_kv.store.rooms import BlockRoom, Piece, PieceRoom


class OwnSpace:
    """See Space. `memory` is the cache that it stands beside."""

    def __init__(self, memory: KvMemory, limits: StoreLimits) -> None:
        """UserError, naming the flag, when there is less memory than buffer and pool take."""
        self._memory = memory
        self.unit_bytes = memory.layout.bytes_per_block
        device = self._device = memory.device
        self._copier = Copier(device)
        buffer, pool = (units * self.unit_bytes for units in limits.units(self.unit_bytes))
        self._arenas: dict[StashKind, Arena] = {}
        if pool:
            self._arenas["pool"] = Arena(pool_memory(pool, device), self.unit_bytes)
        if buffer and device is not None:
            self._arenas["buffer"] = Arena(buffer_memory(buffer, device), self.unit_bytes)

    def blocks(self, block_ids: Sequence[int]) -> Room:
        """See Space."""
        return BlockRoom(self._memory, block_ids)

    def beside(self, kind: StashKind, extents: Sequence[Extent]) -> PieceRoom:
        """See Space."""
        arena = self._arenas.get(kind)
        if arena is not None:
            pieces = [Piece(arena.view(extent), extent.units) for extent in extents]
        else:
            units = sum(extent.units for extent in extents)
            pieces = [Piece(memoryview(bytearray(units * self.unit_bytes)), units)]
        return PieceRoom(self._memory, pieces, self._copier)

    @property
    def regions(self) -> Sequence[View]:
        """See Store."""
        return [arena.memory for arena in self._arenas.values()]

    def close(self, deadline_s: float) -> None:
        """See Store."""
        if not self._copier.close(deadline_s) or self._device is None:
            return
        for kind, arena in self._arenas.items():
            if kind == "buffer":
                self._device.free(cast("DeviceView", arena.memory))
            else:
                self._device.free_pinned(cast("memoryview", arena.memory))
