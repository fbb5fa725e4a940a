"""The memory of the store of an engine whose ranks have it: it says where, and the ranks hold it.

A unit is one block of all layers of all ranks: the same place in each rank's arena, as a block is
in each rank's cache. Engine thread only. Fills the seam Space of `memory.api`; the ranks' half is
`rooms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from xpyd_core.errors import XpydError
from xpyd_kv.memory.api import Place, Room, StashKind
from xpyd_kv.memory.buddy import Extent
from xpyd_kv.memory.device import Event, View
from xpyd_kv.memory.store import DirectLanding, StagedLanding


class Copies(Protocol):
    """Copies on every rank."""

    def begin(self, place: Place, block_ids: Sequence[int], *, into_cache: bool) -> Event:
        """Between the place and these blocks; all ranks are through when the Event is done."""
        ...


def place_of(room: Room) -> Place:
    """What the ranks are told of a lease of this store."""
    leased = room.room if isinstance(room, DirectLanding | StagedLanding) else room
    if not isinstance(leased, _RankedRoom):
        raise XpydError("a room that ranks know nothing of")
    return leased.place


class _RankedRoom:
    """See StagingRoom: the same place on each rank."""

    def __init__(self, place: Place, copies: Copies) -> None:
        self.place = place
        self._copies = copies

    def views(
        self, first_layer: int, end_layer: int, first_block: int, end_block: int
    ) -> Sequence[View]:
        """Not in this process."""
        raise XpydError("the bytes stand on the ranks")

    def copy(self, block_ids: Sequence[int], *, into_cache: bool) -> Event:
        """See StagingRoom."""
        return self._copies.begin(self.place, block_ids, into_cache=into_cache)


class RankedSpace:
    """See Space."""

    def __init__(self, unit_bytes: int, copies: Copies) -> None:
        self.unit_bytes = unit_bytes
        self._copies = copies

    def blocks(self, block_ids: Sequence[int]) -> Room:
        """See Space."""
        return _RankedRoom(Place("blocks", blocks=tuple(block_ids)), self._copies)

    def beside(self, kind: StashKind, extents: Sequence[Extent]) -> _RankedRoom:
        """See Space."""
        place = Place(kind, extents=tuple((e.offset, e.units) for e in extents))
        return _RankedRoom(place, self._copies)

    @property
    def regions(self) -> Sequence[View]:
        """None in this process."""
        return ()

    def close(self, deadline_s: float) -> None:
        """Nothing here is memory."""
