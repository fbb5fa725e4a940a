"""What one process of a router serves with, and what concerns all processes of a router.

`router` and `processes.worker` make an AppState, each with its own kind of fleet view; `request`
and `http` work with it. Knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from xpyd_router.access_log import AccessLog
from xpyd_router.admission import Admission
from xpyd_router.config import RouterConfig
from xpyd_router.fleet.instances import InstanceKey
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics
from xpyd_router.policy.pairs import PairPolicy


class RouterControl(Protocol):
    """The router as its clients see it."""

    @property
    def is_current(self) -> bool:
        """Whether this process knows the present state of the fleet, not only an earlier one."""
        ...

    async def metrics(self) -> bytes:
        """The text exposition. Raises ApiError 503 where it cannot be had."""
        ...

    async def cordon(self, key: InstanceKey, *, is_cordoned: bool) -> None:
        """Keep new requests from an instance, or let them come again; returns when every process
        has got it. Raises ApiError 503 where a process cannot be reached.
        """
        ...


class LocalControl:
    """A router of one process."""

    is_current = True

    def __init__(self, fleet: FleetView, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics

    async def metrics(self) -> bytes:
        """See RouterControl."""
        return self._metrics.render(self._fleet.instances)

    async def cordon(self, key: InstanceKey, *, is_cordoned: bool) -> None:
        """See RouterControl."""
        self._fleet.cordon(key, is_cordoned=is_cordoned)


@dataclass
class AppState:
    """See the module. `is_draining` is set at SIGTERM."""

    config: RouterConfig
    fleet: FleetView
    loads: LoadTable
    policy: PairPolicy
    metrics: RouterMetrics
    """The metrics of this process."""
    control: RouterControl
    admission: Admission
    access_log: AccessLog
    keys: tuple[bytes, ...] = field(repr=False)
    """The fleet's keys; the first one signs."""
    admin_keys: tuple[bytes, ...] = field(repr=False)
    """Keys that open /admin; none: /admin is closed."""
    created: int
    """Unix time of the start: `created` of the models."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""
    is_draining: bool = False
