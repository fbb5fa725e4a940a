"""The two kinds of room: blocks of a rank's paged cache, or pieces of memory beside it.

Views only: who may use them, and for how long, is a lease's business (`landing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xpyd_kv.connector.api import KvMemory
from xpyd_kv.device.api import Event, View
from xpyd_kv.store.copier import Copier


@dataclass(frozen=True)
class BlockRoom:
    """Blocks of the paged cache: see Room."""

    memory: KvMemory
    block_ids: Sequence[int]

    def views(
        self, first_layer: int, end_layer: int, first_block: int, end_block: int
    ) -> Sequence[View]:
        """As the memory gives them: neighbours may be one."""
        blocks = self.block_ids[first_block:end_block]
        return self.memory.views(range(first_layer, end_layer), blocks)


@dataclass(frozen=True)
class Piece:
    """Memory of `num_blocks` blocks of all layers: layer after layer, its blocks side by side."""

    memory: View
    num_blocks: int


@dataclass(frozen=True)
class PieceRoom:
    """Pieces one after another: see Beside. `memory` is the cache that they stand beside."""

    memory: KvMemory
    pieces: Sequence[Piece]
    copier: Copier

    @property
    def num_blocks(self) -> int:
        """Blocks of all pieces."""
        return sum(piece.num_blocks for piece in self.pieces)

    def views(
        self, first_layer: int, end_layer: int, first_block: int, end_block: int
    ) -> Sequence[View]:
        """One view for each layer and piece that the area touches."""
        return [
            view
            for layer in range(first_layer, end_layer)
            for view in self._layer_views(layer, first_block, end_block)
        ]

    def copy(self, block_ids: Sequence[int], *, into_cache: bool) -> Event | None:
        """See Beside."""
        here: list[View] = []
        blocks: list[View] = []
        for layer in range(len(self.memory.layout.layers)):
            here += self._layer_views(layer, 0, self.num_blocks)
            blocks += [self.memory.block_view(layer, block) for block in block_ids]
        if into_cache:
            return self.copier.copy(blocks, here)
        return self.copier.copy(self._in_blocks(here), blocks)

    def _in_blocks(self, views: Sequence[View]) -> list[View]:
        """The same bytes, a view for each block."""
        size = self.memory.layout.block_bytes
        return [view[at : at + size] for view in views for at in range(0, len(view), size)]

    def _layer_views(self, layer: int, first_block: int, end_block: int) -> list[View]:
        size = self.memory.layout.block_bytes
        views: list[View] = []
        start = 0
        for piece in self.pieces:
            low = max(first_block - start, 0)
            high = min(end_block - start, piece.num_blocks)
            if low < high:
                row = layer * piece.num_blocks
                views.append(piece.memory[(row + low) * size : (row + high) * size])
            start += piece.num_blocks
        return views
