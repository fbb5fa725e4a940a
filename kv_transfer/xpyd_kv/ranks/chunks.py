"""What the chunks of a step make ready, and when: one group of layers after another, or at its end.

Of the process whose cache it is: the engine's, or a rank's. On the thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from xpyd_kv.plan.frames import Area, FrameLimits, frames, layer_groups
from xpyd_kv.session.outgoing import ReadyArea
from xpyd_kv.values import KvLayout
from xpyd_kv.wire.messages import Mode

Owner = TypeVar("Owner")


@dataclass
class Chunk(Generic[Owner]):
    """Blocks [first_block, end_block) of one prompt that the running step completes."""

    owner: Owner
    first_block: int
    end_block: int
    block_ids: tuple[int, ...]
    # First layer that was not handed over.
    next_layer: int = 0


class StepChunks(Generic[Owner]):
    """The chunks of the running step. `ready` hands areas over, to be sent."""

    def __init__(
        self,
        layout: KvLayout,
        *,
        mode: Mode,
        limits: FrameLimits,
        ready: Callable[[Owner, Sequence[ReadyArea]], None],
    ) -> None:
        self._layout = layout
        self._mode: Mode = mode
        self._limits = limits
        self._ready = ready
        # Of the running step: its chunks, and those whose group of layers ends with a layer.
        self._chunks: list[Chunk[Owner]] = []
        self._group_ends: dict[int, list[Chunk[Owner]]] = {}

    def cached(self, owner: Owner, first: int, block_ids: tuple[int, ...]) -> None:
        """Blocks from `first` on that were computed before: ready now, or (PUT) with the step."""
        if self._mode == "put":
            self._chunks.append(Chunk(owner, first, first + len(block_ids), block_ids))
            return
        areas = frames(
            len(self._layout.layers),
            first,
            first + len(block_ids),
            block_bytes=self._layout.block_bytes,
            limits=self._limits,
        )
        self._ready(owner, [ReadyArea(area, _ids_of(area, first, block_ids)) for area in areas])

    def add(self, owner: Owner, first: int, block_ids: tuple[int, ...]) -> None:
        """Blocks from `first` on that the step completes."""
        chunk = Chunk(owner, first, first + len(block_ids), block_ids)
        self._chunks.append(chunk)
        if self._mode == "put":
            return
        groups = layer_groups(
            len(self._layout.layers),
            self._layout.block_bytes * len(block_ids),
            self._limits.group_bytes,
        )
        for _, end_layer in groups:
            self._group_ends.setdefault(end_layer - 1, []).append(chunk)

    def layer_done(self, layer: int) -> None:
        """Layer `layer` of all chunks is in the cache. Hot path: called for each layer of each
        step, usually with nothing to hand over."""
        for chunk in self._group_ends.get(layer, ()):
            self._hand_over(chunk, layer + 1)

    def message(self) -> bytes:
        """Return no message: no other process needs the chunks."""
        return b""

    def end(self, *, failed: bool) -> Sequence[Chunk[Owner]]:
        """End the step and return its chunks: what was left of them handed over, unless
        it failed."""
        chunks, self._chunks = self._chunks, []
        self._group_ends = {}
        for chunk in () if failed else chunks:
            self._hand_over(chunk, len(self._layout.layers))
        return chunks

    def _hand_over(self, chunk: Chunk[Owner], end_layer: int) -> None:
        if chunk.next_layer >= end_layer:
            return
        area = Area(chunk.next_layer, end_layer, chunk.first_block, chunk.end_block)
        chunk.next_layer = end_layer
        self._ready(chunk.owner, [ReadyArea(area, chunk.block_ids)])


def _ids_of(area: Area, first_block: int, ids: tuple[int, ...]) -> tuple[int, ...]:
    return ids[area.first_block - first_block : area.end_block - first_block]
