"""The frozen values that plan() and keep() take and return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ROUTER = "router"
"""Pool name and role of the router's workload."""
MOST_REPLICAS = 1024
"""The bound of a pool whose document names none; the API's own."""

PoolRole = Literal["Prefill", "Decode", "Aggregated", "router"]


@dataclass(frozen=True)
class Template:
    """What one instance is, whatever its number or place: another template is another revision.

    `image`: of its container, "" where there is none. `pod`: canonical JSON of what else the
    document says about the pod; only its equality matters here, xpyd_operator.manifests renders it.
    `is_vllm`: `args` are the flags of `vllm serve`. `beats`: those of `xpyd vllm-beats` beside it;
    () where an engine sends its heartbeats itself. `tls`: what an engine asks of routers, and what
    a router can: 0 nothing, 1 HTTPS, 2 HTTPS with a certificate of its own.
    `fleet_revision`: see plan.template; it changes only together with the rest. "" where instances
    are no part of pairs. `gated`: its pods have a readiness gate, which routers open.
    """

    role: PoolRole
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    image: str = ""
    pod: str = ""
    beats: tuple[str, ...] = ()
    is_vllm: bool = False
    tls: int = 0
    fleet_revision: str = ""
    gated: bool = False


@dataclass(frozen=True)
class Workload:
    """Equal instances of one pool and one revision.

    Of a revision that is not the newest, only the template's `role`, `tls` and `fleet_revision` are
    certain: a shell that observes workloads may know no more, and never renders one.
    """

    pool: str
    revision: str
    replicas: int
    template: Template


# What is wanted


@dataclass(frozen=True)
class PoolWant:
    """One pool of the document. `replicas` None: not declared. `least`, `most`: its bounds.

    `surge_percent` of `replicas` are instances above them that a rollout may run; 0: an old one
    goes first. `unavailable_percent` of them may be missing where a new one has no room otherwise;
    100 with no surge: all old ones go first, as the local router must, which has one address.
    """

    name: str
    template: Template
    revision: str
    replicas: int | None = None
    surge_percent: int = 25
    unavailable_percent: int = 0
    least: int = 0
    most: int = MOST_REPLICAS


@dataclass(frozen=True)
class CanaryStage:
    """The document's revision is on trial, or failed it (`weight_percent` 0).

    `stable`: pools and the revisions that stay. `may_begin`: routers know of it, so that its first
    instances get no more than their share.
    """

    stable: tuple[tuple[str, str], ...]
    weight_percent: int
    may_begin: bool = True


@dataclass(frozen=True)
class FleetWant:
    """One fleet. `stopping`: everything is to be drained and deleted, the router first. `paused`:
    no instance takes the place of another one. `canary`: see plan.canary; None: the document's
    revision takes the place of what runs."""

    name: str
    pools: tuple[PoolWant, ...]
    stopping: bool = False
    paused: bool = False
    canary: CanaryStage | None = None


# What is there


@dataclass(frozen=True)
class PoolSeen:
    """A pool's own state: what `scale` writes, and what the document last declared.

    The last declared value wins once: `declared` changes `replicas` only when it changes itself.
    """

    name: str
    replicas: int
    declared: int | None


@dataclass(frozen=True)
class WorkloadSeen:
    """A workload as it was last put, and how many of its instances are alive and are routable.

    `unplaced`: of those alive, the ones for which no node has room. `cordoned`: of those ready, the
    ones whose nodes take no new pods, where one of them can be chosen to go.
    """

    workload: Workload
    alive: int = 0
    ready: int = 0
    unplaced: int = 0
    cordoned: int = 0


@dataclass(frozen=True)
class PoolProgress:
    """How far one pool is: instances wanted, routable, and of the newest revision."""

    name: str
    role: str
    replicas: int
    declared: int | None
    ready: int
    revision: str
    updated: int


@dataclass(frozen=True)
class FleetProgress:
    """How far the fleet is. `reason` is one CamelCase word; `message` names what the fleet waits
    for.

    `since`: when `ready` last changed, in the clock of plan()'s `now`.
    """

    ready: bool
    reason: str
    message: str
    since: float
    pools: tuple[PoolProgress, ...] = ()


@dataclass(frozen=True)
class FleetSeen:
    """Everything that plan() may look at."""

    pools: tuple[PoolSeen, ...] = ()
    workloads: tuple[WorkloadSeen, ...] = ()
    status: FleetProgress | None = None


# What is to be done to workloads


@dataclass(frozen=True)
class PutWorkload:
    """Create the workload or give it these replicas."""

    workload: Workload


@dataclass(frozen=True)
class DrainPool:
    """Take every instance of the pool out of routing, let it finish, keep none."""

    pool: str


@dataclass(frozen=True)
class DeleteWorkload:
    """Forget a workload of which nothing lives."""

    pool: str
    revision: str


@dataclass(frozen=True)
class SetStatus:
    """Publish the status; the shell remembers the pools' `replicas` and `declared` from it."""

    status: FleetProgress


@dataclass(frozen=True)
class Event:
    """A decision as text, with its numbers."""

    reason: str
    message: str


Action = PutWorkload | DrainPool | DeleteWorkload | SetStatus | Event


@dataclass(frozen=True)
class Plan:
    """What to do now; ask again after `recheck_after` seconds, None: when something changed."""

    actions: tuple[Action, ...]
    recheck_after: float | None = None


# One workload's processes (local mode)


@dataclass(frozen=True)
class Probe:
    """A kubelet's GET of `path`, every `period_s`: so many failures in a row are too many. Also the
    supervisor of a local fleet asks it."""

    path: str
    period_s: float
    failures: int
    timeout_s: float


@dataclass(frozen=True)
class Probes:
    """Whether an instance is alive: `startup` is asked until it succeeds once, then `liveness`."""

    startup: Probe
    liveness: Probe

    def now(self, instance: InstanceSeen) -> Probe:
        """The one that is asked."""
        return self.startup if instance.lived_at is None else self.liveness


ENGINE_PROBES = Probes(
    # An engine answers /live before it loads its model; this time is for slow images and imports.
    startup=Probe("/live", 1, 600, 2),
    liveness=Probe("/live", 10, 6, 5),
)
VLLM_PROBES = Probes(
    # Nothing answers before the model is loaded: an hour, for a large one and a first download.
    startup=Probe("/health", 5, 720, 5),
    liveness=Probe("/health", 10, 6, 5),
)
ROUTER_PROBES = Probes(startup=Probe("/health", 1, 120, 2), liveness=Probe("/health", 10, 3, 5))


def probes_of(template: Template) -> Probes:
    """The probes of an instance of a template."""
    if template.role == ROUTER:
        return ROUTER_PROBES
    return VLLM_PROBES if template.is_vllm else ENGINE_PROBES


@dataclass(frozen=True)
class InstanceSeen:
    """One instance of a workload. Times are seconds in the clock of keep()'s `now`.

    `failures`: exits in a row before this start. `exited_at` None: it runs. `draining_since` None:
    it was not asked to leave. `killed`: SIGKILL was sent. `lived_at`: when its startup probe
    succeeded, None before; `failed_probes`: failures in a row of the probe that is asked now.
    `load`: requests that are there, and prompts whose KV it has for others, as routers say.
    """

    ordinal: int
    started_at: float
    failures: int = 0
    exited_at: float | None = None
    draining_since: float | None = None
    killed: bool = False
    lived_at: float | None = None
    failed_probes: int = 0
    load: int = 0


@dataclass(frozen=True)
class StartInstance:
    """Start a process for the ordinal, new or after an exit; `failures` goes into its record."""

    ordinal: int
    failures: int = 0


@dataclass(frozen=True)
class DrainInstance:
    """Ask the instance to finish and exit (SIGTERM)."""

    ordinal: int


@dataclass(frozen=True)
class KillInstance:
    """End the instance now (SIGKILL): it did not drain in time."""

    ordinal: int


@dataclass(frozen=True)
class RestartInstance:
    """End the instance now (SIGKILL): it does not answer `probe`. Its exit brings a new start."""

    ordinal: int
    probe: Probe


@dataclass(frozen=True)
class ForgetInstance:
    """Drop the record of an instance that is gone for good; its ordinal and address are free."""

    ordinal: int


KeepAction = StartInstance | DrainInstance | KillInstance | RestartInstance | ForgetInstance


@dataclass(frozen=True)
class KeepPlan:
    """What to do now to the instances of one workload; `recheck_after` as in Plan."""

    actions: tuple[KeepAction, ...]
    recheck_after: float | None = None
