"""Gives the memory of a burst back to the system once the burst is over.

The C library keeps what was freed in the middle of its heap: after 256 clients with prompts of
32 KiB a router would stay at twice the size that it needs. `server` runs this beside each server.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

_LOOK_S = 1.0
_LEAST_REQUESTS = 32
"""Fewer in flight leave nothing that is worth a look at the whole heap."""
_FALLEN_TO = 8
"""A burst is over when this part of it is left."""


class Tide:
    """Tells when the requests in flight have fallen. Pure."""

    def __init__(self) -> None:
        self._most = 0

    def has_fallen(self, in_flight: int) -> bool:
        """Whether a burst that was seen before is over, which is said once."""
        self._most = max(self._most, in_flight)
        if self._most < _LEAST_REQUESTS or in_flight * _FALLEN_TO > self._most:
            return False
        self._most = in_flight
        return True


def trimmer() -> Callable[[], None] | None:
    """Gives free pages back, in some milliseconds; None where the C library cannot (only glibc has
    malloc_trim).
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int

    def run() -> None:
        trim(0)

    return run


async def trim_after_bursts(
    in_flight: Callable[[], int], trim: Callable[[], None], look_s: float = _LOOK_S
) -> None:
    """Call `trim` after each burst, for ever."""
    tide = Tide()
    while True:
        await asyncio.sleep(look_s)
        if tide.has_fallen(in_flight()):
            trim()
