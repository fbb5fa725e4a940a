"""The landings: blocks of the paged cache, or pieces of memory beside it.

Both are leases: their owner gives them back once, through the callable they were made with. Pieces
are also what a P stashes KV in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xpyd_core.errors import XpydError
from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.api import BlockPool, KvMemory
from xpyd_kv.device.api import Event, View
from xpyd_kv.store.api import LandingKind, StashKind
from xpyd_kv.store.copier import Copier
from xpyd_kv.store.rooms import BlockRoom, Piece, PieceRoom


class LeaseError(XpydError):
    """A landing was used after it was given back: a defect of the caller."""


class DirectLanding:
    """Blocks of the paged cache, reserved for one transfer."""

    kind: LandingKind = "direct"
    is_copying = False

    def __init__(
        self,
        owner: TransferKey,
        block_ids: Sequence[int],
        *,
        memory: KvMemory,
        pool: BlockPool,
        on_end: Callable[[], None],
    ) -> None:
        self.owner = owner
        self.num_blocks = len(block_ids)
        self.size_bytes = len(block_ids) * memory.layout.bytes_per_block
        self._block_ids = list(block_ids)
        self._room = BlockRoom(memory, self._block_ids)
        self._pool = pool
        self._on_end = on_end
        self._held = True

    def views(
        self, first_layer: int, end_layer: int, first_block: int, end_block: int
    ) -> Sequence[View]:
        """As the memory gives them: neighbours may be one."""
        self._check()
        return self._room.views(first_layer, end_layer, first_block, end_block)

    def adopt(self) -> list[int] | None:
        """The blocks themselves; nothing is copied."""
        self._end()
        return self._block_ids

    def free(self) -> None:
        """Give the blocks back to the pool."""
        self._end()
        self._pool.release(self._block_ids)

    def _check(self) -> None:
        if not self._held:
            raise LeaseError(f"landing of {self.owner} is used after its end")

    def _end(self) -> None:
        self._check()
        self._held = False
        self._on_end()


class PieceLanding:
    """Memory beside the paged cache: one piece of the device buffer, or extents of the host pool.
    A Landing, and a Stash."""

    def __init__(
        self,
        owner: TransferKey,
        pieces: Sequence[Piece],
        *,
        kind: StashKind,
        memory: KvMemory,
        pool: BlockPool,
        copier: Copier,
        on_end: Callable[[], None],
    ) -> None:
        self.owner = owner
        self.kind: StashKind = kind
        self._pieces: list[Piece] = list(pieces)
        self._room = PieceRoom(memory, self._pieces)
        self.num_blocks = self._room.num_blocks
        self.size_bytes = self.num_blocks * memory.layout.bytes_per_block
        self._pool = pool
        self._copier = copier
        self._on_end = on_end
        self._held = True
        # Blocks taken by `adopt`, and when the device has filled them.
        self._copying: tuple[Event, list[int]] | None = None
        # When the device has copied what `fill` told it to.
        self._filling: Event | None = None

    def views(
        self, first_layer: int, end_layer: int, first_block: int, end_block: int
    ) -> Sequence[View]:
        """One view for each layer and piece that the area touches."""
        self._check()
        return self._room.views(first_layer, end_layer, first_block, end_block)

    @property
    def is_copying(self) -> bool:
        return self._copying is not None

    def adopt(self) -> list[int] | None:
        """Blocks from the pool with the bytes copied into them."""
        self._check()
        if self._copying is None:
            block_ids = self._pool.take(self.num_blocks)
            if block_ids is None:
                return None
            event = self._copy_into(block_ids)
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
        self._check()
        here, blocks = self._room.beside(block_ids)
        self._filling = self._copier.copy(self._room.in_blocks(here), blocks)
        return self._filling

    def _copy_into(self, block_ids: Sequence[int]) -> Event | None:
        here, blocks = self._room.beside(block_ids)
        return self._copier.copy(blocks, here)

    def free(self) -> None:
        """Give the memory back to the buffer or the host pool."""
        self._check()
        self._held = False
        self._pieces.clear()
        copying, self._copying = self._copying, None
        filling, self._filling = self._filling, None
        if filling is not None:
            self._copier.give_back_after(filling, self._on_end)
            return
        if copying is None:
            self._on_end()
            return
        event, block_ids = copying

        def give_back() -> None:
            self._pool.release(block_ids)
            self._on_end()

        self._copier.give_back_after(event, give_back)

    def _check(self) -> None:
        if not self._held:
            raise LeaseError(f"landing of {self.owner} is used after its end")
