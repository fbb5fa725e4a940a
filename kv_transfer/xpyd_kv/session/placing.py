"""Where the bytes of a DATA frame go on D: a landing's views, whole or in parts.

DATA holds P's blocks. Where D's have the same size they go block for block into the landing; else
each is cut as the plan between the two caches says. Made once for a peer; no I/O, no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from xpyd_core.blocks import blocks_for
from xpyd_kv.connector.api import KvLayout
from xpyd_kv.device.api import View
from xpyd_kv.plan.engine_layout import EngineLayout, LayoutError
from xpyd_kv.plan.frames import Area
from xpyd_kv.plan.scatter import Scatter, Span, scatter_of
from xpyd_kv.plan.transfers import plan_transfers
from xpyd_kv.store.api import Landing
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.fit import engine_layout_of

# Of one peer: frames of a transfer differ in their layers, seldom in their blocks. Those of a frame
# of 32 MiB take half a megabyte.
_KEPT_CUTS = 4


class _Cut(NamedTuple):
    """Bytes [begin, end) of a layer's `view`-th view; the one behind the last is spare memory."""

    view: int
    begin: int
    end: int


class Placing:
    """How the blocks of one P go into D's. `source_size`, `destination_size`: tokens of a block;
    `source_bytes`: of a P block of one layer; `scatter`: None for block for block."""

    def __init__(
        self,
        *,
        source_size: int,
        source_bytes: int,
        destination_size: int,
        scatter: Scatter | None,
    ) -> None:
        self.source_size = source_size
        self.source_bytes = source_bytes
        self._size = destination_size
        self._scatter = scatter
        self._cuts: dict[object, tuple[list[_Cut], int]] = {}

    @property
    def alignment_tokens(self) -> int:
        """What is skipped must be a multiple of this: there blocks of both sides begin."""
        return max(self.source_size, self._size)

    def views(
        self, landing: Landing, area: Area, *, skip_tokens: int, tokens: int
    ) -> Sequence[View]:
        """Room for the area's bytes (its blocks are P's) in the landing of what follows the first
        `skip_tokens` of a prompt of `tokens`."""
        skip = skip_tokens // self._size
        first_layer, end_layer, first_block, end_block = area
        if self._scatter is None:
            return landing.views(first_layer, end_layer, first_block - skip, end_block - skip)
        last = blocks_for(tokens, self._size)
        first, end = self._scatter.destination_blocks(first_block, end_block)
        found: list[View] = []
        for layer in range(first_layer, end_layer):
            blocks = landing.views(layer, layer + 1, first - skip, min(end, last) - skip)
            key = (first_block, end_block, last, *map(len, blocks))
            if key not in self._cuts:
                spans = self._scatter.spans(first_block, end_block, last_block=last)
                self._keep(key, _cuts_of(spans, [len(block) for block in blocks]))
            cuts, surplus = self._cuts[key]
            # The spare memory lives as long as this frame's views.
            views: list[View] = [*blocks, memoryview(bytearray(surplus))]
            found += [views[view][begin:stop] for view, begin, stop in cuts]
        return found

    def _keep(self, key: object, cuts: tuple[list[_Cut], int]) -> None:
        if len(self._cuts) >= _KEPT_CUTS:
            del self._cuts[next(iter(self._cuts))]
        self._cuts[key] = cuts


def placing_of(theirs: wire.Layout, ours: KvLayout, *, on_device: bool) -> Placing:
    """For a P whose rank has the cache `theirs`. LayoutError when it does not fit ours, or when
    surplus could come to a GPU's memory, where there is nothing to put it."""
    if on_device and theirs.block_size > ours.block_size:
        raise LayoutError("block_size", "P's must not be larger where D's cache is on a GPU")
    plan = plan_transfers(
        engine_layout_of(theirs),
        EngineLayout(
            kv_heads=ours.kv_heads,
            tp=1,
            stages=(ours.layers,),
            block_size=ours.block_size,
            row_bytes=ours.block_bytes // (ours.kv_heads * ours.block_size),
        ),
    )
    is_equal = theirs.block_size == ours.block_size
    return Placing(
        source_size=theirs.block_size,
        source_bytes=theirs.block_bytes,
        destination_size=ours.block_size,
        scatter=None if is_equal else scatter_of(plan),
    )


def _cuts_of(spans: Sequence[Span], lengths: Sequence[int]) -> tuple[list[_Cut], int]:
    """Where the spans lie in views of these lengths, which are D's blocks of a layer; and the bytes
    of surplus, which go into memory of their own behind the last: less than a P block."""
    starts = [0, *accumulate(lengths)]
    cuts: list[_Cut] = []
    surplus = 0
    for offset, length in spans:
        if offset is None:
            cuts.append(_Cut(len(lengths), surplus, surplus + length))
            surplus += length
            continue
        while length:
            view = bisect_right(starts, offset) - 1
            begin = offset - starts[view]
            end = min(begin + length, lengths[view])
            cuts.append(_Cut(view, begin, end))
            offset += end - begin
            length -= end - begin
    return cuts, surplus
