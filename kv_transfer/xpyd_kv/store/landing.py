"""The landings: blocks of the paged cache, or pieces of memory beside it.

Both are leases: their owner gives them back once, through the callable they were made with. Pieces
are also what a P stashes KV in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xpyd_core.errors import XpydError
from xpyd_core.request_id import TransferKey
from xpyd_kv.connector.api import BlockPool, KvMemory
from xpyd_kv.device.api import Event, View
from xpyd_kv.store.api import LandingKind, StashKind
from xpyd_kv.store.copier import Copier


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
        self._memory = memory
        self._pool = pool
        self._on_end = on_end
        self._held = True

    def views(
        self, first_layer: int, end_layer: int, first_block: int, end_block: int
    ) -> Sequence[View]:
        """As the memory gives them: neighbours may be one."""
        self._check()
        blocks = self._block_ids[first_block:end_block]
        return self._memory.views(range(first_layer, end_layer), blocks)

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


@dataclass(frozen=True)
class Piece:
    """Memory of `num_blocks` blocks of all layers: layer after layer, its blocks side by side."""

    memory: View
    num_blocks: int


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
        self.num_blocks = sum(piece.num_blocks for piece in pieces)
        self.size_bytes = self.num_blocks * memory.layout.bytes_per_block
        self._pieces: list[Piece] = list(pieces)
        self._memory = memory
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
        return [
            view
            for layer in range(first_layer, end_layer)
            for view in self._layer_views(layer, first_block, end_block)
        ]

    def _layer_views(self, layer: int, first_block: int, end_block: int) -> list[View]:
        size = self._memory.layout.block_bytes
        views: list[View] = []
        start = 0
        for piece in self._pieces:
            low = max(first_block - start, 0)
            high = min(end_block - start, piece.num_blocks)
            if low < high:
                row = layer * piece.num_blocks
                views.append(piece.memory[(row + low) * size : (row + high) * size])
            start += piece.num_blocks
        return views

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
        here, blocks = self._views_beside(block_ids)
        size = self._memory.layout.block_bytes
        targets = [run[at : at + size] for run in here for at in range(0, len(run), size)]
        self._filling = self._copier.copy(targets, blocks)
        return self._filling

    def _copy_into(self, block_ids: Sequence[int]) -> Event | None:
        here, blocks = self._views_beside(block_ids)
        return self._copier.copy(blocks, here)

    def _views_beside(self, block_ids: Sequence[int]) -> tuple[list[View], list[View]]:
        """What is here, and as many bytes of the paged cache, layer by layer."""
        here: list[View] = []
        blocks: list[View] = []
        for layer in range(len(self._memory.layout.layers)):
            here += self._layer_views(layer, 0, self.num_blocks)
            blocks += [self._memory.block_view(layer, block) for block in block_ids]
        return here, blocks

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
