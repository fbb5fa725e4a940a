"""The store leases landings and spills: own blocks first, then device buffer, then host pool.

A spill is P's: KV that was in blocks which others need more; the I/O thread reads it. Engine thread
only. It keeps the books, in units of the space it is made with: what is taken of the
buffer and of the pool, and what comes back late, when a device has copied it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from xpyd_core.errors import XpydError
from xpyd_core.request_id import TransferKey
from xpyd_kv.memory.api import (
    Comparison,
    Landing,
    LandingKind,
    Room,
    Space,
    SpillKind,
    StagingRoom,
    StoreMetrics,
)
from xpyd_kv.memory.buddy import Buddy, Extent
from xpyd_kv.memory.device import DeviceError, Event, View
from xpyd_kv.values import BlockPool


class _Late(NamedTuple):
    event: Event
    give_back: Callable[[], None]


class Late:
    """Gives memory back when copies from it are done, in the order of the copies."""

    def __init__(self) -> None:
        self._waiting: deque[_Late] = deque()

    def give_back_after(self, event: Event, give_back: Callable[[], None]) -> None:
        """`give_back`, in a `poll` after `event`."""
        self._waiting.append(_Late(event, give_back))

    def poll(self) -> None:
        """Give back what is no longer copied. What comes after an event that fails stays taken:
        that device is lost."""
        while self._waiting:
            try:
                if not self._waiting[0].event.is_done():
                    return
            except DeviceError:
                self._waiting.popleft()
                continue
            self._waiting.popleft().give_back()


class LeaseError(XpydError):
    """A landing was used after it was given back: a defect of the caller."""


_Room = TypeVar("_Room", bound=Room)


class _Lease(Generic[_Room]):
    """The base of both kinds of landing. It drops its room at the end, because the room may own
    memory."""

    def __init__(
        self,
        owner: TransferKey,
        room: _Room,
        *,
        num_blocks: int,
        unit_bytes: int,
        on_end: Callable[[], None],
    ) -> None:
        self.owner = owner
        self.num_blocks = num_blocks
        self.size_bytes = num_blocks * unit_bytes
        self._room: _Room | None = room
        self._on_end = on_end

    @property
    def room(self) -> _Room:
        """The leased room. LeaseError after the end."""
        if self._room is None:
            raise LeaseError(f"landing of {self.owner} is used after its end")
        return self._room

    def views(
        self, first_layer: int, end_layer: int, first_block: int, end_block: int
    ) -> Sequence[View]:
        """See Room."""
        return self.room.views(first_layer, end_layer, first_block, end_block)

    def _end(self) -> Callable[[], None]:
        """End the lease; return the call that counts its end."""
        _ = self.room
        self._room = None
        return self._on_end


class DirectLanding(_Lease[Room]):
    """Blocks of the paged cache, reserved for one transfer."""

    kind: LandingKind = "direct"
    is_copying = False

    def __init__(
        self,
        owner: TransferKey,
        room: Room,
        block_ids: list[int],
        *,
        unit_bytes: int,
        pool: BlockPool,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(
            owner, room, num_blocks=len(block_ids), unit_bytes=unit_bytes, on_end=on_end
        )
        self._block_ids = block_ids
        self._pool = pool

    def adopt(self, skip_blocks: int = 0) -> list[int] | None:
        """The blocks themselves; nothing is copied, and what is skipped goes back to the pool."""
        self._end()()
        self._pool.release(self._block_ids[:skip_blocks])
        return self._block_ids[skip_blocks:]

    def free(self) -> None:
        """Give the blocks back to the pool."""
        self._end()()
        self._pool.release(self._block_ids)


class StagedLanding(_Lease[StagingRoom]):
    """A landing or a spill outside the paged cache: in the device buffer or in the host pool. It is
    given back exactly once, by `free`."""

    def __init__(
        self,
        owner: TransferKey,
        room: StagingRoom,
        *,
        kind: SpillKind,
        num_blocks: int,
        unit_bytes: int,
        pool: BlockPool,
        late: Late,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(owner, room, num_blocks=num_blocks, unit_bytes=unit_bytes, on_end=on_end)
        self.kind: SpillKind = kind
        self._pool = pool
        self._late = late
        # Blocks taken by `adopt`, and when they are filled.
        self._copying: tuple[Event, list[int]] | None = None
        # When what `fill` began is through.
        self._filling: Event | None = None

    @property
    def is_copying(self) -> bool:
        return self._copying is not None

    def adopt(self, skip_blocks: int = 0) -> list[int] | None:
        """Blocks from the pool with the bytes copied into them."""
        room = self.room
        if self._copying is None:
            block_ids = self._pool.take(self.num_blocks - skip_blocks)
            if block_ids is None:
                return None
            event = room.copy(block_ids, into_cache=True, first_block=skip_blocks)
            self._copying = None if event is None else (event, block_ids)
        else:
            event, block_ids = self._copying
        if event is not None:
            if not event.is_done():
                return None
            self._copying = None
        self.free()
        return block_ids

    def fill(self, block_ids: Sequence[int]) -> Event | None:
        """Copy `num_blocks` blocks of the paged cache here, in this order, once. A device says when
        that is through (None: it is); until then nothing here is read, and the blocks are not given
        back. DeviceError when the device fails."""
        self._filling = self.room.copy(block_ids, into_cache=False)
        return self._filling

    def compare(self, block_ids: Sequence[int], tokens: int) -> Comparison:
        """See StagingRoom."""
        return self.room.compare(block_ids, tokens)

    def free(self) -> None:
        """Give the memory back to the buffer or the host pool."""
        on_end = self._end()
        copying, self._copying = self._copying, None
        filling, self._filling = self._filling, None
        if filling is not None:
            self._late.give_back_after(filling, on_end)
            return
        if copying is None:
            on_end()
            return
        event, block_ids = copying

        def give_back() -> None:
            self._pool.release(block_ids)
            on_end()

        self._late.give_back_after(event, give_back)


@dataclass(frozen=True)
class StoreLimits:
    """Bounds of the memory that transfers use.

    `direct_free`: a transfer lands in D's own blocks while, after that, more than this share of
    them stays free; 1 means never. `buffer_bytes`: size of the device buffer, `pool_bytes` of the
    host pool; what is left over of a whole number of blocks is not used.
    """

    direct_free: float = 0.1
    buffer_bytes: int = 0
    pool_bytes: int = 0

    def units(self, unit_bytes: int) -> tuple[int, int]:
        """Return the whole units of buffer and pool. The engine's store and each rank's memory both
        count with this."""
        return self.buffer_bytes // unit_bytes, self.pool_bytes // unit_bytes


class LandingStore:
    """Gives landings (D) and spills (P)."""

    def __init__(self, limits: StoreLimits, *, pool: BlockPool, space: Space) -> None:
        self._limits = limits
        self._pool = pool
        self._space = space
        buffer, pool_units = limits.units(space.unit_bytes)
        # In the order in which they are tried.
        self._books: dict[SpillKind, Buddy] = {"buffer": Buddy(buffer), "pool": Buddy(pool_units)}
        self._late = Late()
        self._leases = 0

    def take(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        """A landing in the first place that has room: own blocks (while enough stay free), device
        buffer, host pool. None: defer."""
        free_after = self._pool.num_free - num_blocks
        if free_after > self._limits.direct_free * self._pool.num_blocks:
            landing = self.take_direct(owner, num_blocks)
            if landing is not None:
                return landing
        return self.take_staged(owner, num_blocks)

    def take_direct(self, owner: TransferKey, num_blocks: int) -> Landing | None:
        """Own blocks, whatever stays free: the request is about to run. None: not enough."""
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

    def take_staged(self, owner: TransferKey, num_blocks: int) -> StagedLanding | None:
        """Memory in the device buffer, else in the host pool. None: neither has room."""
        for kind, book in self._books.items():
            extents = book.take(num_blocks)
            if extents is None:
                continue
            return StagedLanding(
                owner,
                self._space.staging_room(kind, extents),
                kind=kind,
                num_blocks=num_blocks,
                unit_bytes=self._space.unit_bytes,
                pool=self._pool,
                late=self._late,
                on_end=self._lease(book, extents),
            )
        return None

    def poll(self) -> None:
        """Once per engine step: take back what a device copied from when it was freed."""
        self._late.poll()

    def close(self, deadline_s: float) -> None:
        """Give the store's own memory back; no landing is read or written any more. What a device
        still copies from after `deadline_s` is left to the end of the process."""
        self._space.close(deadline_s)
        self._late.poll()

    @property
    def regions(self) -> Sequence[View]:
        """Memory of the store's own that landings are made of, for as long as it lives. What else
        they are made of is the cache, or comes and goes."""
        return self._space.regions

    def metrics(self) -> StoreMetrics:
        """Return the gauges of the store."""
        # `take` leaves more than this free.
        kept = self._limits.direct_free * self._pool.num_blocks
        direct = max(0, math.ceil(self._pool.num_free - kept) - 1)
        buffer, pool, unit = self._books["buffer"], self._books["pool"], self._space.unit_bytes
        return StoreMetrics(
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
        """Count one more lease; return the call that ends it."""
        self._leases += 1

        def end() -> None:
            self._leases -= 1
            if book is not None:
                book.free(extents)

        return end
