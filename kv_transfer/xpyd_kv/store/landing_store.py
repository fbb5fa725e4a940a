"""The store of one D: own blocks first, then the device buffer, then the host pool.

Engine thread only. It accounts for what it gave out; the landings give back. The host pool is one
allocation at start, whose pages the system brings when they are first touched.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass

from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.api import BlockPool, KvMemory
from xpyd_kv.store.api import Landing, StoreFigures
from xpyd_kv.store.buddy import Buddy, Extent
from xpyd_kv.store.landing import DirectLanding, Piece, PieceLanding


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
        self._limits = limits
        self._memory = memory
        self._pool = pool
        # The unit is one block of all layers, so a landing is a whole number of units: no waste.
        self._unit_bytes = memory.layout.bytes_per_block
        self._buddy = Buddy(limits.pool_bytes // self._unit_bytes)
        size = self._buddy.total_units * self._unit_bytes
        self._host = memoryview(mmap.mmap(-1, size)) if size else memoryview(b"")
        self._buffer_used_bytes = 0
        self._leases = 0

    def take(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        """See Store."""
        free_after = self._pool.num_free - num_blocks
        if free_after > self._limits.direct_free * self._pool.num_blocks:
            landing = self.take_direct(owner, num_blocks)
            if landing is not None:
                return landing
        return self._take_buffer(owner, num_blocks) or self._take_pool(owner, num_blocks)

    def take_direct(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        """See Store."""
        block_ids = self._pool.take(num_blocks)
        if block_ids is None:
            return None
        self._leases += 1
        return DirectLanding(
            owner, block_ids, memory=self._memory, pool=self._pool, on_end=self._end_direct
        )

    def figures(self) -> StoreFigures:
        """See Store."""
        # `take` leaves more than this free.
        kept = self._limits.direct_free * self._pool.num_blocks
        direct = max(0, math.ceil(self._pool.num_free - kept) - 1)
        return StoreFigures(
            leases=self._leases,
            direct_free_bytes=direct * self._unit_bytes,
            buffer_used_bytes=self._buffer_used_bytes,
            buffer_bytes=self._limits.buffer_bytes,
            pool_used_bytes=self._buddy.used_units * self._unit_bytes,
            pool_bytes=self._buddy.total_units * self._unit_bytes,
            pool_high_water_bytes=self._buddy.high_water_units * self._unit_bytes,
            pool_fragmentation=self._buddy.fragmentation,
        )

    def _take_buffer(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        size = num_blocks * self._unit_bytes
        if self._buffer_used_bytes + size > self._limits.buffer_bytes:
            return None
        self._buffer_used_bytes += size

        def give_back() -> None:
            self._buffer_used_bytes -= size

        piece = Piece(memoryview(bytearray(size)), num_blocks)
        return self._piece_landing(owner, [piece], "buffer", give_back)

    def _take_pool(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        extents = self._buddy.take(num_blocks)
        if extents is None:
            return None
        taken: tuple[Extent, ...] = extents
        pieces = [
            Piece(
                self._host[
                    extent.offset * self._unit_bytes : (extent.offset + extent.units)
                    * self._unit_bytes
                ],
                extent.units,
            )
            for extent in taken
        ]
        return self._piece_landing(owner, pieces, "pool", lambda: self._buddy.free(taken))

    def _piece_landing(
        self,
        owner: TransferKey,
        pieces: list[Piece],
        kind: str,
        give_back: Callable[[], None],
    ) -> Landing:
        self._leases += 1

        def end() -> None:
            self._leases -= 1
            give_back()

        return PieceLanding(
            owner,
            pieces,
            kind="buffer" if kind == "buffer" else "pool",
            memory=self._memory,
            pool=self._pool,
            on_end=end,
        )

    def _end_direct(self) -> None:
        self._leases -= 1
