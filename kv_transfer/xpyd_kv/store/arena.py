"""Memory taken once and handed out in units of one block of all layers, as a store's books say.

The host pool is one; on a GPU the device buffer is another.
"""

from __future__ import annotations

from xpyd_kv.device.api import View
from xpyd_kv.store.buddy import Extent


class Arena:
    """`memory` in units of `unit_bytes`."""

    def __init__(self, memory: View, unit_bytes: int) -> None:
        self.memory = memory
        self._unit_bytes = unit_bytes

    def view(self, extent: Extent) -> View:
        """The bytes of one extent."""
        first, size = extent.offset * self._unit_bytes, extent.units * self._unit_bytes
        return self.memory[first : first + size]
