"""What one process of a router serves with, and what concerns all processes of a router.

`router` and `processes.worker` make an AppState, each with its own kind of fleet view; `request`
and `http` work with it. Knows no HTTP. `unready` decides whether new requests may be sent to this
router (ADR 0041).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from xpyd_router.access_log import AccessLog
from xpyd_router.admission import Admission
from xpyd_router.config import RouterConfig
from xpyd_router.fleet.instances import InstanceKey
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.view import FleetView
from xpyd_router.keys.ring import KeyRing
from xpyd_router.keys.watch import Audit, KeyWatch, read_proxies
from xpyd_router.metrics import RouterMetrics
from xpyd_router.policy.pairs import PairPolicy

FOUND_AFTER_S = 30.0
"""How long engines may take to find a new router: a cluster's DNS gives answers that are so old
(CoreDNS' default)."""
_FIRST_BEATS = 2
"""Of the engines that have found a router, all have beaten after so many periods."""
UnreadyReason = Literal["draining", "no word of the instances", "starting"]


def unready(
    *,
    is_draining: bool,
    is_current: bool,
    had_pair: bool,
    knows_instances: bool,
    age_s: float,
    beat_period_s: float,
) -> UnreadyReason | None:
    """Why no new request should be sent to a router; None: the router takes requests.

    Without a pair requests wait, so a router that loses its pairs stays ready. A router that starts
    (`age_s` ago) is ready with its first pair, so that a rollout keeps the routers before it until
    then; where no pair comes, once engines have had time to find the router and to beat. Pure.
    """
    if is_draining:
        return "draining"
    if not is_current:
        return "no word of the instances"
    is_found = knows_instances and age_s >= _FIRST_BEATS * beat_period_s
    return None if had_pair or is_found or age_s >= FOUND_AFTER_S else "starting"


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
        return self._metrics.render(self._fleet.instances, has_pair=self._fleet.has_pair)

    async def cordon(self, key: InstanceKey, *, is_cordoned: bool) -> None:
        """See RouterControl."""
        self._fleet.cordon(key, is_cordoned=is_cordoned)


@dataclass
class Keys:
    """The client keys of one process."""

    ring: KeyRing
    watch: KeyWatch
    audit: Audit


def open_keys(
    config: RouterConfig,
    metrics: RouterMetrics,
    clock: Callable[[], float],
    rows: tuple[memoryview, Sequence[memoryview]] | None = None,
) -> Keys | None:
    """The client keys, not read yet; None where clients need none. `rows`: see KeyRing."""
    if not config.needs_keys:
        return None
    ring = KeyRing(clock, rows)
    watch = KeyWatch(
        ring,
        metrics.keys,
        path=config.api_key_file,
        api_keys=config.api_keys,
        peers=config.peers,
    )
    return Keys(ring, watch, Audit(metrics.keys, clock, read_proxies(config.proxies)))


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
    keys: Sequence[bytes] = field(repr=False)
    """The fleet's keys; the first one signs."""
    admin_keys: Sequence[bytes] = field(repr=False)
    """Keys that open /admin; none: /admin is closed."""
    client_keys: Keys | None
    """What clients need; None: they need no key."""
    created: int
    """Unix time of the start: `created` of the models."""
    started_s: float
    """When the router started, on `clock`; the processes of a router have the same."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""
    http_port: int = 0
    """Where clients connect; set when the ports are bound, like the next."""
    admin_port: int = 0
    is_draining: bool = False

    @property
    def unready(self) -> UnreadyReason | None:
        """Why no new request should be sent to this router; None: it takes requests."""
        return unready(
            is_draining=self.is_draining,
            is_current=self.control.is_current,
            had_pair=self.fleet.had_pair,
            knows_instances=not self.fleet.snapshot.is_empty,
            age_s=self.clock() - self.started_s,
            beat_period_s=self.config.heartbeat_interval_s,
        )

    @property
    def new_until_s(self) -> float:
        """Until when, on `clock`, a router that starts holds also what it would refuse without a
        pair; it is over when it has had one."""
        if self.fleet.had_pair:
            return -math.inf
        return self.started_s + _FIRST_BEATS * self.config.heartbeat_interval_s

    @property
    def is_over(self) -> bool:
        """Whether no instance will serve what waits: the router drains, and none stays."""
        return self.is_draining and not any(i.is_staying for i in self.fleet.instances)
