"""What P's frames are read from: a rank's cache or a stash of it, or the part that D's rank has.

Made once for a transfer and its peer. Pure, but for the memory that it hands out views of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xpyd_kv.connector.api import KvMemory
from xpyd_kv.device.api import View
from xpyd_kv.plan.frames import Area
from xpyd_kv.plan.pairs import Pair
from xpyd_kv.store.api import Room


@dataclass(frozen=True)
class ReadyArea:
    """An area that stands in the cache; `block_ids` are its blocks, `area.first_block` first."""

    area: Area
    block_ids: tuple[int, ...]


class Source:
    """One rank's memory as one pair reads it."""

    def __init__(self, memory: KvMemory, pair: Pair) -> None:
        self._memory = memory
        self._pair = pair
        self._part = pair.source_part
        self._layers = pair.source_layers
        self._is_all = self._layers == tuple(range(len(memory.layout.layers)))

    @property
    def block_bytes(self) -> int:
        """What is read of a block of one layer."""
        return self._pair.block_bytes

    def cut(self, areas: Sequence[ReadyArea]) -> Sequence[ReadyArea]:
        """Areas of the rank's layers, in the pair's: without those that it has not."""
        if self._is_all:
            return areas
        ours = ((self._pair.area_of(ready.area), ready.block_ids) for ready in areas)
        return [ReadyArea(area, ids) for area, ids in ours if area is not None]

    def views(self, ready: ReadyArea, stash: Room | None) -> Sequence[View]:
        """The bytes of one frame (its layers are the pair's), in the order of a DATA body, where
        they stand now: in the stash, where there is one."""
        area = ready.area
        layers = self._layers[area.first_layer : area.end_layer]
        if stash is None:
            return self._parts(self._memory.views(layers, ready.block_ids))
        found: list[View] = []
        for layer in layers:
            found += stash.views(layer, layer + 1, area.first_block, area.end_block)
        return self._parts(found)

    def _parts(self, views: Sequence[View]) -> Sequence[View]:
        part = self._part
        if part is None:
            return views
        size = self._memory.layout.block_bytes
        return [
            view[at + part.start : at + part.stop]
            for view in views
            for at in range(0, len(view), size)
        ]
