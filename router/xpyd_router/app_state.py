"""What one process of a router serves with, and what concerns all processes of a router.

`router` and `processes.worker` make an AppState, each with its own kind of fleet view; `request`
and `http` work with it. Knows no HTTP. `unready` decides whether new requests may be sent to this
router (ADR 0041, ADR 0121).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from xpyd_router.access_log import AccessLog
from xpyd_router.admission import Admission
from xpyd_router.config import RouterConfig
from xpyd_router.fleet.instances import Arrival, InstanceKey
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.view import FleetView
from xpyd_router.keys.ring import KeyRing
from xpyd_router.keys.watch import Audit, KeyWatch, read_proxies
from xpyd_router.metrics import RouterMetrics
from xpyd_router.policy.pairs import PairPolicy, build_policy

FOUND_AFTER_S = 30.0
"""How long engines may take to find a new router: a cluster's DNS gives answers that are so old
(CoreDNS' default)."""
_ALL_BEAT = 1.25
"""So many periods after the first beat all engines have beaten: each looks for routers once in a
period, which a busy machine makes a little longer."""
_NO_PAIR = 2
"""So many periods without a pair are no matter of beats that are still to come."""
UnreadyReason = Literal["draining", "no word of the instances", "starting"]


def unready(
    *,
    is_draining: bool,
    is_current: bool,
    had_pair: bool,
    arrival: Arrival,
    started_s: float,
    now_s: float,
) -> UnreadyReason | None:
    """Why no new request should be sent to a router; None: the router takes requests.

    Without a pair requests wait, so a router that loses its pairs stays ready. A router that starts
    is ready with its first pair; beside other routers, which serve meanwhile, when all engines have
    had time to beat since the first one did; without a pair a little later. Pure.
    """
    if is_draining:
        return "draining"
    if not is_current:
        return "no word of the instances"
    if not had_pair:
        periods = _NO_PAIR
    elif arrival.has_other_routers:
        periods = _ALL_BEAT
    else:
        return None
    has_heard_all = now_s - arrival.first_s >= periods * arrival.period_s
    return None if has_heard_all or now_s - started_s >= FOUND_AFTER_S else "starting"


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


def make_policy(
    config: RouterConfig, fleet: FleetView, loads: LoadTable, first_turn: int = 0
) -> PairPolicy:
    """The policy that `config` names; it forgets instances that leave."""
    policy = build_policy(
        config.policy,
        prefill_policy=config.prefill_policy,
        decode_policy=config.decode_policy,
        loads=loads,
        random=random.random,
        local_prefill_tokens=config.local_prefill_tokens,
        first_turn=first_turn,
    )
    fleet.on_gone(policy.forget)
    return policy


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
            arrival=self.fleet.arrival,
            started_s=self.started_s,
            now_s=self.clock(),
        )

    @property
    def new_until_s(self) -> float:
        """Until when, on `clock`, a router that starts holds also what it would refuse without a
        pair; it is over when it has had one."""
        if self.fleet.had_pair:
            return -math.inf
        return self.started_s + _NO_PAIR * self.config.heartbeat_interval_s

    @property
    def is_over(self) -> bool:
        """Whether no instance will serve what waits: the router drains, and none stays."""
        return self.is_draining and not any(i.is_staying for i in self.fleet.instances)
