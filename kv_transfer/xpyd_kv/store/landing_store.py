"""The store: own blocks first, then the device buffer, then the host pool. Of a D, or of a P that
may have to stash KV until it is pulled.

Engine thread only. It accounts for what it gave out; the landings give back. The host pool is one
allocation at start: on a CPU the system brings its pages when they are first touched, with a GPU
it is pinned. There the device buffer is one allocation of device memory; on a CPU, where nothing is
gained by that, it is a budget.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from xpyd_core.errors import UserError
from xpyd_core.request_id import TransferKey
from xpyd_core.sizes import format_bytes
from xpyd_kv.connector.api import BlockPool, KvMemory
from xpyd_kv.device.api import Device, DeviceView, View
from xpyd_kv.store.api import Landing, StashKind, StoreFigures
from xpyd_kv.store.arena import Arena
from xpyd_kv.store.buddy import Extent
from xpyd_kv.store.copier import Copier
from xpyd_kv.store.landing import DirectLanding, PieceLanding
from xpyd_kv.store.rooms import Piece


@dataclass(frozen=True)
class StoreLimits:
    """What transfers may take.

    `direct_free`: a transfer lands in D's own blocks while, after that, more than this share of
    them stays free; 1 means never. `buffer_bytes`: budget of the device buffer. `pool_bytes`:
    size of the host pool; what is left over of a whole number of blocks is not used.
    """

    direct_free: float = 0.1
    buffer_bytes: int = 0
    pool_bytes: int = 0


class LandingStore:
    """The default Store."""

    def __init__(self, limits: StoreLimits, *, memory: KvMemory, pool: BlockPool) -> None:
        """UserError, naming the flag, when there is less memory than the host pool takes."""
        self._limits = limits
        self._memory = memory
        self._pool = pool
        # The unit is one block of all layers, so a landing is a whole number of units: no waste.
        self._unit_bytes = memory.layout.bytes_per_block
        device = memory.device
        self._device = device
        self._copier = Copier(device)
        size = limits.pool_bytes // self._unit_bytes * self._unit_bytes
        self._host = Arena(_host_memory(size, device), self._unit_bytes)
        self._buffer: Arena | None = None
        size = limits.buffer_bytes // self._unit_bytes * self._unit_bytes
        if device is not None and size:
            self._buffer = Arena(device.allocate(size), self._unit_bytes)
        self._buffer_bytes = limits.buffer_bytes if device is None else 0
        self._buffer_used_bytes = 0
        self._leases = 0

    def take(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        """See Store."""
        free_after = self._pool.num_free - num_blocks
        if free_after > self._limits.direct_free * self._pool.num_blocks:
            landing = self.take_direct(owner, num_blocks)
            if landing is not None:
                return landing
        return self.take_beside(owner, num_blocks)

    def take_beside(self, owner: TransferKey, num_blocks: int) -> PieceLanding | None:
        """See Store."""
        return self._take_buffer(owner, num_blocks) or self._take_arena(
            owner, num_blocks, self._host, "pool"
        )

    def take_direct(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        """See Store."""
        block_ids = self._pool.take(num_blocks)
        if block_ids is None:
            return None
        self._leases += 1
        return DirectLanding(
            owner, block_ids, memory=self._memory, pool=self._pool, on_end=self._end_direct
        )

    def poll(self) -> None:
        """See Store."""
        self._copier.poll()

    def close(self, deadline_s: float) -> None:
        """See Store."""
        if not self._copier.close(deadline_s) or self._device is None:
            return
        if self._buffer is not None:
            self._device.free(cast("DeviceView", self._buffer.memory))
        if self._host.size_bytes:
            self._device.free_pinned(cast("memoryview", self._host.memory))

    @property
    def regions(self) -> Sequence[View]:
        """See Store."""
        arenas = (self._host, self._buffer)
        return [arena.memory for arena in arenas if arena is not None and arena.size_bytes]

    def figures(self) -> StoreFigures:
        """See Store."""
        # `take` leaves more than this free.
        kept = self._limits.direct_free * self._pool.num_blocks
        direct = max(0, math.ceil(self._pool.num_free - kept) - 1)
        buffer, pool = self._buffer, self._host
        return StoreFigures(
            leases=self._leases,
            direct_free_bytes=direct * self._unit_bytes,
            buffer_used_bytes=self._buffer_used_bytes if buffer is None else buffer.used_bytes,
            buffer_bytes=self._buffer_bytes if buffer is None else buffer.size_bytes,
            pool_used_bytes=pool.used_bytes,
            pool_bytes=pool.size_bytes,
            pool_high_water_bytes=pool.high_water_bytes,
            pool_fragmentation=pool.buddy.fragmentation,
        )

    def _take_buffer(self, owner: TransferKey, num_blocks: int) -> PieceLanding | None:
        if self._buffer is not None:
            return self._take_arena(owner, num_blocks, self._buffer, "buffer")
        size = num_blocks * self._unit_bytes
        if self._buffer_used_bytes + size > self._buffer_bytes:
            return None
        self._buffer_used_bytes += size

        def give_back() -> None:
            self._buffer_used_bytes -= size

        piece = Piece(memoryview(bytearray(size)), num_blocks)
        return self._piece_landing(owner, [piece], "buffer", give_back)

    def _take_arena(
        self, owner: TransferKey, num_blocks: int, arena: Arena, kind: StashKind
    ) -> PieceLanding | None:
        extents = arena.take(num_blocks)
        if extents is None:
            return None
        taken: tuple[Extent, ...] = extents
        pieces = [Piece(arena.view(extent), extent.units) for extent in taken]
        return self._piece_landing(owner, pieces, kind, lambda: arena.free(taken))

    def _piece_landing(
        self,
        owner: TransferKey,
        pieces: list[Piece],
        kind: StashKind,
        give_back: Callable[[], None],
    ) -> PieceLanding:
        self._leases += 1

        def end() -> None:
            self._leases -= 1
            give_back()

        return PieceLanding(
            owner,
            pieces,
            kind=kind,
            memory=self._memory,
            pool=self._pool,
            copier=self._copier,
            on_end=end,
        )

    def _end_direct(self) -> None:
        self._leases -= 1


def _host_memory(size_bytes: int, device: Device | None) -> View:
    if not size_bytes:
        return memoryview(b"")
    try:
        if device is not None:
            return device.allocate_pinned(size_bytes)
        return memoryview(mmap.mmap(-1, size_bytes))
    except (UserError, OSError, OverflowError) as error:
        raise UserError(
            f"--kv-host-pool-size: the system does not give {format_bytes(size_bytes)} ({error}); "
            "give a smaller size"
        ) from error
