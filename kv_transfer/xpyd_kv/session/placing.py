"""Where the bytes of a DATA frame go on D: a landing's views, whole or in parts.

DATA holds of P's blocks what both ranks have. Where that is a whole block on both sides it goes
block for block into the landing; else each is cut as the plan between the two caches says. Made
once for a peer; no I/O, no clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from xpyd_core.blocks import blocks_for
from xpyd_kv.device.api import View
from xpyd_kv.plan.engine_layout import LayoutError
from xpyd_kv.plan.frames import Area
from xpyd_kv.plan.pairs import Pair
from xpyd_kv.plan.scatter import Span
from xpyd_kv.store.api import Room

# Of one peer: frames of a transfer differ in their layers, seldom in their blocks. Those of a frame
# of 32 MiB take half a megabyte.
_KEPT_CUTS = 4


class _Cut(NamedTuple):
    """Bytes [begin, end) of a layer's `view`-th view; the one behind the last is spare memory."""

    view: int
    begin: int
    end: int


class Placing:
    """How what comes of a pair's P blocks goes into D's. `layers`: that both ranks have;
    `source_size`: tokens of a P block; `source_bytes`: what comes of one of one layer."""

    def __init__(self, pair: Pair) -> None:
        self.layers = pair.layers
        self.source_size = pair.source.block_size
        self.source_bytes = pair.block_bytes
        self._size = pair.destination.block_size
        self._scatter = pair.scatter
        self._layers = pair.destination_layers
        self._cuts: dict[object, tuple[list[_Cut], int]] = {}

    def views(self, room: Room, area: Area, *, skip_tokens: int, tokens: int) -> Sequence[View]:
        """Room for the area's bytes (its layers are the pair's, its blocks P's) in that of what
        follows the first `skip_tokens` of a prompt of `tokens`."""
        skip = skip_tokens // self._size
        first_layer, end_layer, first_block, end_block = area
        layers = self._layers[first_layer:end_layer]
        found: list[View] = []
        if self._scatter is None:
            blocks = first_block - skip, end_block - skip
            for begin, end in _runs(layers):
                found += room.views(begin, end, *blocks)
            return found
        last = blocks_for(tokens, self._size)
        first, end = self._scatter.destination_blocks(first_block, end_block)
        for layer in layers:
            blocks = room.views(layer, layer + 1, first - skip, min(end, last) - skip)
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


def placing_of(pair: Pair, *, on_device: bool) -> Placing:
    """LayoutError when surplus could come to a GPU's memory, where there is nothing to put it."""
    check_surplus(pair.source.block_size, pair.destination.block_size, on_device=on_device)
    return Placing(pair)


def check_surplus(theirs: int, ours: int, *, on_device: bool) -> None:
    """LayoutError as in `placing_of`, for P's block size and D's."""
    if on_device and theirs > ours:
        raise LayoutError("block_size", "P's must not be larger where D's cache is on a GPU")


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The ranges that ascending places make."""
    begin = at = places[0]
    for place in places[1:]:
        if place != at + 1:
            yield begin, at + 1
            begin = place
        at = place
    yield begin, at + 1


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
