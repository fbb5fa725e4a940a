"""What a rank of P and a rank of D have in common, and where D's blocks take the bytes. Pure.

Made once for a connection between the two. DATA on it holds, for each layer that both have, the
heads that both have of each of P's blocks: `block_bytes`, one run of P's memory, and layers are
named by their place among those that both have. With one rank on each side that is everything.

P sends of each of its blocks the heads that D's rank has, and D reads them in parts. Block sizes
may differ, one dividing the other. A block of either side is [heads, tokens, row], so a P block
within a larger D block has one run for each head, and so has each D block that a larger P block
reaches over. What P's last block has behind D's last one, past the prompt's end, is surplus: it
belongs nowhere.

See docs/adr/0019.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from xpyd_kv.plan.engine_layout import EngineLayout, LayoutError
from xpyd_kv.plan.frames import Area
from xpyd_kv.plan.transfers import Segment, runs, segment_between, units
from xpyd_kv.spans import copy_runs


class Part(NamedTuple):
    """The next `length_bytes` of what is sent of a P block: at `offset_bytes` of the `block`-th D
    block, counted from the one in which the P block begins."""

    block: int
    offset_bytes: int
    length_bytes: int


class ScatterSpan(NamedTuple):
    """The next `length_bytes` of one layer of a DATA body: at `offset_bytes` of D's blocks of that
    layer, laid end to end. None: surplus."""

    offset_bytes: int | None
    length_bytes: int


@dataclass(frozen=True)
class Scatter:
    """Made once for a pair of ranks; `parts[i % len(parts)]` are those of the prompt's i-th P
    block, in the order of its bytes."""

    source_size: int
    """Tokens of a P block."""
    destination_size: int
    """Tokens of a D block."""
    block_bytes: int
    """The bytes of a D block of one layer."""
    parts: tuple[tuple[Part, ...], ...]

    def destination_blocks(self, first_block: int, end_block: int) -> tuple[int, int]:
        """The range of the prompt's D blocks that P's [first_block, end_block) reach."""
        first = first_block * self.source_size // self.destination_size
        return first, -(-end_block * self.source_size // self.destination_size)

    def spans(self, first_block: int, end_block: int, *, last_block: int) -> list[ScatterSpan]:
        """Where one layer of P's blocks [first_block, end_block) belongs. Offsets count from the
        first D block that they reach, and D has none from `last_block` on. Neighbours are one span
        where their bytes join."""
        first = first_block * self.source_size // self.destination_size
        places: list[ScatterSpan] = []
        for index in range(first_block, end_block):
            begin = index * self.source_size // self.destination_size
            for block, offset, length in self.parts[index % len(self.parts)]:
                at = (begin + block - first) * self.block_bytes + offset
                where = at if begin + block < last_block else None
                if places and _joins(places[-1], where):
                    places[-1] = ScatterSpan(
                        places[-1].offset_bytes, places[-1].length_bytes + length
                    )
                else:
                    places.append(ScatterSpan(where, length))
        return places


def scatter_of(source: EngineLayout, destination: EngineLayout, segment: Segment) -> Scatter:
    """Return the Scatter between the blocks of the two ranks of `segment`."""
    period = max(1, destination.block_size // source.block_size)
    return Scatter(
        source.block_size,
        destination.block_size,
        destination.block_bytes,
        tuple(tuple(_parts(source, destination, segment, index)) for index in range(period)),
    )


def _parts(
    source: EngineLayout, destination: EngineLayout, segment: Segment, index: int
) -> list[Part]:
    """The parts of the `index`-th P block, which are its units' runs on D in the order in which
    their bytes lie on P."""
    size = source.block_size
    pieces = units(
        (index + 1) * size,
        skip_tokens=index * size,
        source_block_size=size,
        destination_block_size=destination.block_size,
    )
    begin = pieces[0].destination_block
    found: list[tuple[int, Part]] = []
    for unit in pieces:
        reads = runs(
            source,
            first_head=segment.source_head,
            heads=segment.heads,
            first_token=unit.source_token,
            tokens=unit.tokens,
        )
        writes = runs(
            destination,
            first_head=segment.destination_head,
            heads=segment.heads,
            first_token=unit.destination_token,
            tokens=unit.tokens,
        )
        for piece in copy_runs(writes, reads):
            part = Part(unit.destination_block - begin, piece.target, piece.length)
            found.append((piece.source, part))
    return [part for _, part in sorted(found)]


def _joins(before: ScatterSpan, offset: int | None) -> bool:
    if before.offset_bytes is None or offset is None:
        return before.offset_bytes is offset
    return before.offset_bytes + before.length_bytes == offset


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
    """The Scatter between the blocks of both sides; None where a block of P is a block of D, byte
    for byte."""

    @property
    def layers(self) -> int:
        """Layers that both have."""
        return len(self.source_layers)

    @property
    def block_bytes(self) -> int:
        """The bytes of one P block of one layer in DATA."""
        return self.heads * self._head_bytes

    @property
    def source_part(self) -> slice | None:
        """Where that lies in the block; None: it is all of it."""
        if self.heads == self.source.heads_per_rank:
            return None
        first = self.source_head * self._head_bytes
        return slice(first, first + self.block_bytes)

    def area_of(self, area: Area) -> Area | None:
        """Return the share of an area of P's rank that this pair moves, in the pair's layers; None
        where it moves none."""
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
