"""Memory taken once and handed out in units of one block of all layers, as a store's books say.

The host pool is one; on a GPU the device buffer is another.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

from xpyd_core.errors import UserError
from xpyd_core.sizes import format_bytes
from xpyd_kv.device.api import Device, View
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


def buffer_memory(size_bytes: int, device: Device | None) -> View:
    """Of the device, or of the host. UserError, naming the flag, when there is less."""
    take = _map if device is None else device.allocate
    return _taken("--kv-buffer-size", size_bytes, take)


def pool_memory(size_bytes: int, device: Device | None) -> View:
    """Of the host, pinned where there is a device. UserError, naming the flag, when there is
    less."""
    take = _map if device is None else device.allocate_pinned
    return _taken("--kv-host-pool-size", size_bytes, take)


def _taken(flag: str, size_bytes: int, take: Callable[[int], View]) -> View:
    try:
        return take(size_bytes)
    except (UserError, OSError, OverflowError) as error:
        raise UserError(
            f"{flag}: the system does not give {format_bytes(size_bytes)} ({error}); "
            "give a smaller size"
        ) from error


def _map(size_bytes: int) -> memoryview:
    """Its pages come from the system when they are first touched."""
    return memoryview(mmap.mmap(-1, size_bytes))
