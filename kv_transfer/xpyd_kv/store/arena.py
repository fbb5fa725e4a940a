"""Memory taken once and handed out in units of one block of all layers, by a buddy allocator.

The host pool is one; on a GPU the device buffer is another. Engine thread only.
"""

from __future__ import annotations

from xpyd_kv.device.api import View
from xpyd_kv.store.buddy import Buddy, Extent


class Arena:
    """`memory` in units of `unit_bytes`; what is left over is not used."""

    def __init__(self, memory: View, unit_bytes: int) -> None:
        self.memory = memory
        self.buddy = Buddy(len(memory) // unit_bytes)
        self._unit_bytes = unit_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes that can be handed out."""
        return self.buddy.total_units * self._unit_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that are handed out."""
        return self.buddy.used_units * self._unit_bytes

    @property
    def high_water_bytes(self) -> int:
        """The most that ever was."""
        return self.buddy.high_water_units * self._unit_bytes

    def take(self, units: int) -> tuple[Extent, ...] | None:
        """Extents of `units` in all; None when fewer are free."""
        return self.buddy.take(units)

    def view(self, extent: Extent) -> View:
        """The bytes of one extent."""
        first, size = extent.offset * self._unit_bytes, extent.units * self._unit_bytes
        return self.memory[first : first + size]

    def free(self, extents: tuple[Extent, ...]) -> None:
        """Give extents back."""
        self.buddy.free(extents)
