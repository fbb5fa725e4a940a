"""Where the bytes of a DATA frame go on D: a landing's views, whole or in parts.

DATA holds P's blocks. Where D's have the same size they go block for block into the landing; else
each is cut as the plan between the two caches says. Made once for a peer; no I/O, no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from xpyd_core.blocks import blocks_for
from xpyd_kv.connector.api import KvLayout
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_kv.plan.frames import Area
from xpyd_kv.plan.scatter import Scatter, Span, scatter_of
from xpyd_kv.plan.transfers import plan_transfers
from xpyd_kv.store.api import Landing
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.fit import engine_layout_of


@dataclass(frozen=True)
class Placing:
    """How the blocks of one P go into D's."""

    source_size: int
    """Tokens of a P block."""
    source_bytes: int
    """Of a P block of one layer."""
    destination_size: int
    """Tokens of a D block."""
    scatter: Scatter | None
    """None: block for block."""

    @property
    def alignment_tokens(self) -> int:
        """What is skipped must be a multiple of this: there blocks of both sides begin."""
        return max(self.source_size, self.destination_size)

    def views(
        self, landing: Landing, area: Area, *, skip_tokens: int, tokens: int
    ) -> Sequence[memoryview]:
        """Room for the area's bytes (its blocks are P's) in the landing of what follows the first
        `skip_tokens` of a prompt of `tokens`."""
        skip = skip_tokens // self.destination_size
        if self.scatter is None:
            return landing.views(
                area.first_layer, area.end_layer, area.first_block - skip, area.end_block - skip
            )
        last = blocks_for(tokens, self.destination_size)
        first, end = self.scatter.destination_blocks(area.first_block, area.end_block)
        spans = self.scatter.spans(area.first_block, area.end_block, last_block=last)
        return [
            view
            for layer in range(area.first_layer, area.end_layer)
            for view in _cut(
                landing.views(layer, layer + 1, first - skip, min(end, last) - skip), spans
            )
        ]


def placing_of(theirs: wire.Layout, ours: KvLayout) -> Placing:
    """For a P whose rank has the cache `theirs`. LayoutError when it does not fit ours."""
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
        theirs.block_size,
        theirs.block_bytes,
        ours.block_size,
        None if is_equal else scatter_of(plan),
    )


def _cut(views: Sequence[memoryview], spans: Sequence[Span]) -> list[memoryview]:
    """The spans as parts of `views`, which are D's blocks of a layer; surplus goes into memory that
    lives as long as these views: less than a P block for each layer of one frame."""
    starts = [0, *accumulate(map(len, views))]
    surplus = sum(length for offset, length in spans if offset is None)
    spare = memoryview(bytearray(surplus))
    parts: list[memoryview] = []
    for offset, length in spans:
        if offset is None:
            parts.append(spare[:length])
            spare = spare[length:]
            continue
        while length:
            index = bisect_right(starts, offset) - 1
            begin = offset - starts[index]
            part = views[index][begin : begin + length]
            parts.append(part)
            offset += len(part)
            length -= len(part)
    return parts
