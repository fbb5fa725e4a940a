"""The store of an engine whose ranks have the memory: its books, in units of one block of all
layers of all ranks.

A unit means the same place in each rank's arena, as a block does in each rank's cache. Engine
thread only. Fills the seam of `store.api`; the ranks' half is `rooms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from xpyd_core.errors import XpydError
from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.api import BlockPool
from xpyd_kv.device.api import Event, View
from xpyd_kv.ranks.messages import Place
from xpyd_kv.store.api import Landing, LandingKind, Room, StashKind, StoreFigures
from xpyd_kv.store.buddy import Buddy, Extent
from xpyd_kv.store.copier import Copier
from xpyd_kv.store.landing import LeaseError
from xpyd_kv.store.landing_store import StoreLimits


class Copies(Protocol):
    """Copies on every rank."""

    def begin(self, place: Place, block_ids: Sequence[int], *, into_cache: bool) -> Event:
        """Between the place and these blocks; all ranks are through when the Event is done."""
        ...


def units_of(limits: StoreLimits, unit_bytes: int) -> tuple[int, int]:
    """Units of buffer and pool, where `unit_bytes` is one block of all layers of all ranks. Engine
    and ranks reckon alike."""
    return limits.buffer_bytes // unit_bytes, limits.pool_bytes // unit_bytes


def place_of(room: Room) -> Place:
    """What the ranks are told of a lease of this store."""
    if not isinstance(room, _Lease):
        raise XpydError("a room that ranks know nothing of")
    return room.place


class _Lease:
    """What direct and other leases have in common."""

    def __init__(
        self,
        owner: TransferKey,
        place: Place,
        *,
        num_blocks: int,
        unit_bytes: int,
        on_end: Callable[[], None],
    ) -> None:
        self.owner = owner
        self.place = place
        self.num_blocks = num_blocks
        self.size_bytes = num_blocks * unit_bytes
        self._on_end = on_end
        self._held = True

    def views(
        self, first_layer: int, end_layer: int, first_block: int, end_block: int
    ) -> Sequence[View]:
        """Not in this process."""
        raise XpydError("the bytes stand on the ranks")

    def check(self) -> None:
        if not self._held:
            raise LeaseError(f"landing of {self.owner} is used after its end")

    def end(self) -> None:
        self.check()
        self._held = False
        self._on_end()


class _Direct(_Lease):
    """Blocks of the paged caches. See Landing."""

    kind: LandingKind = "direct"
    is_copying = False

    def __init__(
        self,
        owner: TransferKey,
        block_ids: list[int],
        *,
        pool: BlockPool,
        unit_bytes: int,
        on_end: Callable[[], None],
    ) -> None:
        place = Place("blocks", blocks=tuple(block_ids))
        super().__init__(
            owner, place, num_blocks=len(block_ids), unit_bytes=unit_bytes, on_end=on_end
        )
        self._block_ids = block_ids
        self._pool = pool

    def adopt(self) -> list[int] | None:
        self.end()
        return self._block_ids

    def free(self) -> None:
        self.end()
        self._pool.release(self._block_ids)


class _Beside(_Lease):
    """Extents of the ranks' arenas. See Landing, and Stash."""

    def __init__(
        self,
        owner: TransferKey,
        place: Place,
        *,
        kind: StashKind,
        num_blocks: int,
        unit_bytes: int,
        pool: BlockPool,
        copies: Copies,
        late: Copier,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(owner, place, num_blocks=num_blocks, unit_bytes=unit_bytes, on_end=on_end)
        self.kind: StashKind = kind
        self._pool = pool
        self._copies = copies
        self._late = late
        self._copying: tuple[Event, list[int]] | None = None
        self._filling: Event | None = None

    @property
    def is_copying(self) -> bool:
        return self._copying is not None

    def adopt(self) -> list[int] | None:
        self.check()
        if self._copying is None:
            block_ids = self._pool.take(self.num_blocks)
            if block_ids is None:
                return None
            event = self._copies.begin(self.place, block_ids, into_cache=True)
            self._copying = event, block_ids
        event, block_ids = self._copying
        if not event.is_done():
            return None
        self._copying = None
        self.free()
        return block_ids

    def fill(self, block_ids: Sequence[int]) -> Event | None:
        self.check()
        self._filling = self._copies.begin(self.place, block_ids, into_cache=False)
        return self._filling

    def free(self) -> None:
        self.check()
        self._held = False
        copying, self._copying = self._copying, None
        filling, self._filling = self._filling, None
        if filling is not None:
            self._late.give_back_after(filling, self._on_end)
        elif copying is not None:
            event, block_ids = copying

            def give_back() -> None:
                self._pool.release(block_ids)
                self._on_end()

            self._late.give_back_after(event, give_back)
        else:
            self._on_end()


class RankedStore:
    """See Store."""

    def __init__(
        self, limits: StoreLimits, *, unit_bytes: int, pool: BlockPool, copies: Copies
    ) -> None:
        self._limits = limits
        self._unit_bytes = unit_bytes
        self._pool = pool
        self._copies = copies
        # Keeps what is still copied from until it is not.
        self._late = Copier(None)
        buffer_units, pool_units = units_of(limits, unit_bytes)
        self._books: dict[StashKind, Buddy] = {
            "buffer": Buddy(buffer_units),
            "pool": Buddy(pool_units),
        }
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
        self._leases += 1
        return _Direct(
            owner,
            block_ids,
            pool=self._pool,
            unit_bytes=self._unit_bytes,
            on_end=self._end,
        )

    def take_beside(self, owner: TransferKey, num_blocks: int) -> _Beside | None:
        """See Store."""
        for kind, book in self._books.items():
            extents = book.take(num_blocks)
            if extents is None:
                continue

            def give_back(book: Buddy = book, extents: tuple[Extent, ...] = extents) -> None:
                book.free(extents)
                self._end()

            self._leases += 1
            return _Beside(
                owner,
                Place(kind, extents=tuple((e.offset, e.units) for e in extents)),
                kind=kind,
                num_blocks=num_blocks,
                unit_bytes=self._unit_bytes,
                pool=self._pool,
                copies=self._copies,
                late=self._late,
                on_end=give_back,
            )
        return None

    def poll(self) -> None:
        """See Store."""
        self._late.poll()

    def close(self, deadline_s: float) -> None:
        """Nothing here is memory."""

    @property
    def regions(self) -> Sequence[View]:
        """None in this process."""
        return ()

    def figures(self) -> StoreFigures:
        """See Store."""
        kept = self._limits.direct_free * self._pool.num_blocks
        direct = max(0, math.ceil(self._pool.num_free - kept) - 1)
        buffer, pool, unit = self._books["buffer"], self._books["pool"], self._unit_bytes
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

    def _end(self) -> None:
        self._leases -= 1
