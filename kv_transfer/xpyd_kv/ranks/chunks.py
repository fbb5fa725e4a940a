"""The chunks of a step where ranks send them: told in the step's message, counted here.

Of the engine's process, in the place of StepChunks, which each rank has for itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from xpyd_kv.connector.chunks import Chunk
from xpyd_kv.connector.offered import Prompt
from xpyd_kv.plan.frames import Area
from xpyd_kv.ranks.messages import StepChunk, encode_chunks
from xpyd_kv.session.source import ReadyArea


class ToldChunks:
    """`ready` counts: the areas that it gets name all layers and no blocks."""

    def __init__(
        self, *, layers: int, ready: Callable[[Prompt, Sequence[ReadyArea]], None]
    ) -> None:
        self._layers = layers
        self._ready = ready
        self._told: list[StepChunk] = []
        self._chunks: list[Chunk[Prompt]] = []
        # Of the steps that were launched and are not over.
        self._steps: deque[list[Chunk[Prompt]]] = deque()

    def cached(self, owner: Prompt, first: int, block_ids: tuple[int, ...]) -> None:
        """Blocks from `first` on that were computed before."""
        self._tell(owner, first, block_ids, is_cached=True)

    def add(self, owner: Prompt, first: int, block_ids: tuple[int, ...]) -> None:
        """Blocks from `first` on that the step completes."""
        self._tell(owner, first, block_ids, is_cached=False)

    def layer_done(self, layer: int) -> None:
        """The ranks see to it."""

    def message(self) -> bytes:
        """What the ranks are told of the step that is launched next, which begins here."""
        told, self._told = self._told, []
        chunks, self._chunks = self._chunks, []
        self._steps.append(chunks)
        return encode_chunks(told)

    def end(self, *, failed: bool) -> Sequence[Chunk[Prompt]]:
        """The oldest step is over: its chunks."""
        chunks = self._steps.popleft()
        for chunk in () if failed else chunks:
            area = Area(0, self._layers, chunk.first_block, chunk.end_block)
            self._ready(chunk.owner, [ReadyArea(area, ())])
        return chunks

    def _tell(
        self, owner: Prompt, first: int, block_ids: tuple[int, ...], *, is_cached: bool
    ) -> None:
        chunk = Chunk(owner, first, first + len(block_ids), block_ids)
        self._chunks.append(chunk)
        self._told.append(
            StepChunk(
                uuid=owner.key.uuid,
                prompt_index=owner.key.prompt_index,
                epoch=owner.epoch,
                first_block=first,
                block_ids=block_ids,
                is_cached=is_cached,
                is_last=chunk.end_block == owner.num_blocks,
            )
        )
