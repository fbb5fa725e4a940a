"""What concerns the whole router, however many processes it has: its metrics, and cordons.

With one process `OneProcess` does it; with several `processes.asking` asks their owner.
"""

from __future__ import annotations

from typing import Protocol

from xpyd_router.fleet.registry import InstanceKey
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics


class Whole(Protocol):
    """The router as its clients see it."""

    @property
    def is_current(self) -> bool:
        """Whether this process knows how the fleet stands now, not only how it stood."""
        ...

    async def metrics(self) -> bytes:
        """The text exposition. Raises ApiError 503 where it cannot be had."""
        ...

    async def cordon(self, key: InstanceKey, *, is_cordoned: bool) -> None:
        """Keep new requests from an instance, or let them come again; returns when every process
        has been told. Raises ApiError 503 where they cannot be.
        """
        ...


class OneProcess:
    """A router of one process."""

    is_current = True

    def __init__(self, fleet: FleetView, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics

    async def metrics(self) -> bytes:
        """See Whole."""
        return self._metrics.render(self._fleet.instances)

    async def cordon(self, key: InstanceKey, *, is_cordoned: bool) -> None:
        """See Whole."""
        self._fleet.cordon(key, is_cordoned=is_cordoned)
