"""The store: own blocks first, then the device buffer, then the host pool. Of a D, or of a P that
may have to stash KV until it is pulled.

Engine thread only. It keeps the books, in units of the space it is made with: what is taken of the
buffer and of the pool, and what comes back late. The landings give back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.api import BlockPool
from xpyd_kv.device.api import View
from xpyd_kv.store.api import Landing, Space, StashKind, StoreFigures
from xpyd_kv.store.buddy import Buddy, Extent
from xpyd_kv.store.landing import BesideLanding, DirectLanding
from xpyd_kv.store.late import Late


@dataclass(frozen=True)
class StoreLimits:
    """What transfers may take.

    `direct_free`: a transfer lands in D's own blocks while, after that, more than this share of
    them stays free; 1 means never. `buffer_bytes`: size of the device buffer, `pool_bytes` of the
    host pool; what is left over of a whole number of blocks is not used.
    """

    direct_free: float = 0.1
    buffer_bytes: int = 0
    pool_bytes: int = 0

    def units(self, unit_bytes: int) -> tuple[int, int]:
        """Whole units of buffer and pool: books and memory reckon alike."""
        return self.buffer_bytes // unit_bytes, self.pool_bytes // unit_bytes


class LandingStore:
    """See Store."""

    def __init__(self, limits: StoreLimits, *, pool: BlockPool, space: Space) -> None:
        self._limits = limits
        self._pool = pool
        self._space = space
        buffer, pool_units = limits.units(space.unit_bytes)
        # In the order in which they are tried.
        self._books: dict[StashKind, Buddy] = {"buffer": Buddy(buffer), "pool": Buddy(pool_units)}
        self._late = Late()
        self._leases = 0

    def take(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        """See Store."""
        free_after = self._pool.num_free - num_blocks
        if free_after > self._limits.direct_free * self._pool.num_blocks:
            landing = self.take_direct(owner, num_blocks)
            if landing is not None:
                return landing
        return self.take_beside(owner, num_blocks)

    def take_direct(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        """See Store."""
        block_ids = self._pool.take(num_blocks)
        if block_ids is None:
            return None
        return DirectLanding(
            owner,
            self._space.blocks(block_ids),
            block_ids,
            unit_bytes=self._space.unit_bytes,
            pool=self._pool,
            on_end=self._lease(),
        )

    def take_beside(self, owner: TransferKey, num_blocks: int) -> BesideLanding | None:
        """See Store."""
        for kind, book in self._books.items():
            extents = book.take(num_blocks)
            if extents is None:
                continue
            return BesideLanding(
                owner,
                self._space.beside(kind, extents),
                kind=kind,
                num_blocks=num_blocks,
                unit_bytes=self._space.unit_bytes,
                pool=self._pool,
                late=self._late,
                on_end=self._lease(book, extents),
            )
        return None

    def poll(self) -> None:
        """See Store."""
        self._late.poll()

    def close(self, deadline_s: float) -> None:
        """See Store."""
        self._space.close(deadline_s)
        self._late.poll()

    @property
    def regions(self) -> Sequence[View]:
        """See Store."""
        return self._space.regions

    def figures(self) -> StoreFigures:
        """See Store."""
        # `take` leaves more than this free.
        kept = self._limits.direct_free * self._pool.num_blocks
        direct = max(0, math.ceil(self._pool.num_free - kept) - 1)
        buffer, pool, unit = self._books["buffer"], self._books["pool"], self._space.unit_bytes
        return StoreFigures(
            leases=self._leases,
            direct_free_bytes=direct * unit,
            buffer_used_bytes=buffer.used_units * unit,
            buffer_bytes=buffer.total_units * unit,
            pool_used_bytes=pool.used_units * unit,
            pool_bytes=pool.total_units * unit,
            pool_high_water_bytes=pool.high_water_units * unit,
            pool_fragmentation=pool.fragmentation,
        )

    def _lease(
        self, book: Buddy | None = None, extents: tuple[Extent, ...] = ()
    ) -> Callable[[], None]:
        """One more; what ends it."""
        self._leases += 1

        def end() -> None:
            self._leases -= 1
            if book is not None:
                book.free(extents)

        return end
