"""The landings: blocks of the paged cache, or room beside it.

Both are leases: their owner gives them back once, through the callable they were made with. Room
beside the cache is also what a P stashes KV in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from xpyd_core.errors import XpydError
from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.api import BlockPool
from xpyd_kv.device.api import Event, View
from xpyd_kv.store.api import Beside, LandingKind, Room, StashKind
from xpyd_kv.store.late import Late


class LeaseError(XpydError):
    """A landing was used after it was given back: a defect of the caller."""


_Room = TypeVar("_Room", bound=Room)


class _Lease(Generic[_Room]):
    """What both kinds have in common. The room is let go at the end: it may be memory."""

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
        """What is leased. LeaseError after the end."""
        if self._room is None:
            raise LeaseError(f"landing of {self.owner} is used after its end")
        return self._room

    def views(
        self, first_layer: int, end_layer: int, first_block: int, end_block: int
    ) -> Sequence[View]:
        """As the room gives them."""
        return self.room.views(first_layer, end_layer, first_block, end_block)

    def _end(self) -> Callable[[], None]:
        """Not leased any more; what is left to call."""
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

    def adopt(self) -> list[int] | None:
        """The blocks themselves; nothing is copied."""
        self._end()()
        return self._block_ids

    def free(self) -> None:
        """Give the blocks back to the pool."""
        self._end()()
        self._pool.release(self._block_ids)


class BesideLanding(_Lease[Beside]):
    """Room beside the paged cache: in the device buffer, or in the host pool. A Landing, and a
    Stash."""

    def __init__(
        self,
        owner: TransferKey,
        room: Beside,
        *,
        kind: StashKind,
        num_blocks: int,
        unit_bytes: int,
        pool: BlockPool,
        late: Late,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(owner, room, num_blocks=num_blocks, unit_bytes=unit_bytes, on_end=on_end)
        self.kind: StashKind = kind
        self._pool = pool
        self._late = late
        # Blocks taken by `adopt`, and when they are filled.
        self._copying: tuple[Event, list[int]] | None = None
        # When what `fill` began is through.
        self._filling: Event | None = None

    @property
    def is_copying(self) -> bool:
        return self._copying is not None

    def adopt(self) -> list[int] | None:
        """Blocks from the pool with the bytes copied into them."""
        room = self.room
        if self._copying is None:
            block_ids = self._pool.take(self.num_blocks)
            if block_ids is None:
                return None
            event = room.copy(block_ids, into_cache=True)
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
        """The bytes of these blocks."""
        self._filling = self.room.copy(block_ids, into_cache=False)
        return self._filling

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
