"""A buddy allocator over `total_units` equal units. Pure: it hands out numbers, not memory.

Two things differ from the textbook. The size need not be a power of two: it is a forest of powers
of two, one tree for each binary digit. And a request is not rounded up: it is served by the
blocks of its own binary decomposition, so nothing is wasted beyond the unit. A digit for which no
block is large enough is served by two halves, so a request fails only when fewer units are free.
"""

from __future__ import annotations

from typing import NamedTuple


class Extent(NamedTuple):
    """A run of units: a power of two long, aligned to its length."""

    offset: int
    units: int


class Buddy:
    """Owner of the units [0, total_units). Not thread-safe: one thread owns it."""

    def __init__(self, total_units: int) -> None:
        if total_units < 0:
            raise ValueError(f"total_units must not be negative, got {total_units}")
        self._total = total_units
        self._free_units = total_units
        self._high_water = 0
        orders = total_units.bit_length()
        # Free offsets by order. A dict is an ordered set: removal of a buddy and reuse are O(1).
        self._free: list[dict[int, None]] = [{} for _ in range(orders)]
        self._taken: set[Extent] = set()
        offset = 0
        # Larger trees first, so that each tree is aligned to its size and no buddy lies across
        # trees.
        for order in reversed(range(orders)):
            if total_units >> order & 1:
                self._free[order][offset] = None
                offset += 1 << order

    @property
    def total_units(self) -> int:
        """Units that it owns."""
        return self._total

    @property
    def free_units(self) -> int:
        """Units that are not taken."""
        return self._free_units

    @property
    def used_units(self) -> int:
        """Units that are taken."""
        return self._total - self._free_units

    @property
    def high_water_units(self) -> int:
        """The most units that were ever taken at once."""
        return self._high_water

    @property
    def largest_free_units(self) -> int:
        """Length of the largest free run that one extent can cover."""
        for order in reversed(range(len(self._free))):
            if self._free[order]:
                return 1 << order
        return 0

    @property
    def fragmentation(self) -> float:
        """1 - largest free run / free units; 0 when nothing is free."""
        free = self._free_units  # Once: metrics read it from another thread.
        return 1 - self.largest_free_units / free if free else 0.0

    def take(self, units: int) -> tuple[Extent, ...] | None:
        """Extents of `units` units in all, largest first; None when fewer are free."""
        if units <= 0:
            raise ValueError(f"units must be positive, got {units}")
        if units > self._free_units:
            return None
        self._free_units -= units
        self._high_water = max(self._high_water, self.used_units)
        wanted = [order for order in range(units.bit_length()) if units >> order & 1]
        extents: list[Extent] = []
        while wanted:
            order = wanted.pop()
            offset = self._take_order(order)
            if offset is None:
                wanted += [order - 1, order - 1]
                continue
            extents.append(Extent(offset, 1 << order))
        self._taken.update(extents)
        return tuple(extents)

    def _take_order(self, order: int) -> int | None:
        source = order
        while source < len(self._free) and not self._free[source]:
            source += 1
        if source == len(self._free):
            return None
        offset, _ = self._free[source].popitem()
        while source > order:
            source -= 1
            self._free[source][offset + (1 << source)] = None
        return offset

    def free(self, extents: tuple[Extent, ...]) -> None:
        """Give extents back. ValueError for one that is not taken; then nothing is changed."""
        if len(set(extents)) != len(extents) or not self._taken.issuperset(extents):
            raise ValueError("an extent is freed that is not taken")
        for extent in extents:
            self._taken.remove(extent)
            self._free_units += extent.units
            self._coalesce(extent.offset, extent.units.bit_length() - 1)

    def _coalesce(self, offset: int, order: int) -> None:
        while order + 1 < len(self._free):
            buddy = offset ^ (1 << order)
            if buddy not in self._free[order]:
                break
            del self._free[order][buddy]
            offset = min(offset, buddy)
            order += 1
        self._free[order][offset] = None
