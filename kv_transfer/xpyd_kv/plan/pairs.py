"""What one rank of P and one rank of D are to each other. Pure.

Made once for a connection between the two. DATA on it holds, for each layer that both have, the
heads that both have of each of P's blocks: `block_bytes`, one run of P's memory, and layers are
named by their place among those that both have. With one rank on each side that is everything.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from xpyd_kv.plan.engine_layout import EngineLayout, LayoutError
from xpyd_kv.plan.frames import Area
from xpyd_kv.plan.scatter import Scatter, scatter_of
from xpyd_kv.plan.transfers import segment_between


@dataclass(frozen=True, kw_only=True)
class Pair:
    """`source_layers` and `destination_layers`: the places, ascending, of the layers that both
    have among those of the rank of P and of the rank of D."""

    source: EngineLayout
    destination: EngineLayout
    source_layers: tuple[int, ...]
    destination_layers: tuple[int, ...]
    source_head: int
    heads: int
    scatter: Scatter | None
    """None: a block of P's is a block of D's, byte for byte."""

    @property
    def layers(self) -> int:
        """Layers that both have."""
        return len(self.source_layers)

    @property
    def block_bytes(self) -> int:
        """What DATA holds of a P block of one layer."""
        return self.heads * self._head_bytes

    @property
    def source_part(self) -> slice | None:
        """Where that lies in the block; None: it is all of it."""
        if self.heads == self.source.heads_per_rank:
            return None
        first = self.source_head * self._head_bytes
        return slice(first, first + self.block_bytes)

    def area_of(self, area: Area) -> Area | None:
        """What of an area of P's rank this pair moves, in the pair's layers; None: nothing."""
        first = bisect_left(self.source_layers, area.first_layer)
        end = bisect_left(self.source_layers, area.end_layer)
        return area._replace(first_layer=first, end_layer=end) if first < end else None

    @property
    def _head_bytes(self) -> int:
        return self.source.block_size * self.source.row_bytes


def pair_of(
    source: EngineLayout, destination: EngineLayout, *, source_rank: int, destination_rank: int
) -> Pair:
    """LayoutError where nothing ever moves between the two: `rank`, or why the engines do not
    fit."""
    segment = segment_between(
        source, destination, source_rank=source_rank, destination_rank=destination_rank
    )
    if segment is None:
        raise LayoutError("rank", f"rank {source_rank} of P has nothing for D's {destination_rank}")
    ours = source.layers_of(source_rank)
    theirs = destination.layers_of(destination_rank)
    is_whole = (
        source.block_size == destination.block_size
        and segment.heads == source.heads_per_rank == destination.heads_per_rank
    )
    return Pair(
        source=source,
        destination=destination,
        source_layers=tuple(ours.index(layer) for layer in segment.layers),
        destination_layers=tuple(theirs.index(layer) for layer in segment.layers),
        source_head=segment.source_head,
        heads=segment.heads,
        scatter=None if is_whole else scatter_of(source, destination, segment),
    )
