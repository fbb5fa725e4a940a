"""Decides what a fleet's workloads should be and, for local mode, its processes. Pure.

    InferenceFleet --fleet_want--> FleetWant --plan(want, seen, now)--> actions on workloads
                                   Workload  --keep(workload, seen, now)--> actions on instances

A shell observes, calls these, applies the actions and calls again. No I/O, no clock, no randomness:
time comes in as an argument. Applying a plan twice changes nothing the second time.

See docs/adr/0004.
"""

from xpyd_operator.plan.fleet import plan, pool_replicas, pools_wanted
from xpyd_operator.plan.keep import keep
from xpyd_operator.plan.template import INSECURE_FLAG, fleet_want, layout_of, revision_of
from xpyd_operator.plan.values import (
    MOST_REPLICAS,
    ROUTER,
    DeleteWorkload,
    Drain,
    DrainPool,
    Event,
    FleetSeen,
    FleetStatus,
    FleetWant,
    Forget,
    InstanceSeen,
    KeepPlan,
    Kill,
    Plan,
    PoolSeen,
    PoolStatus,
    PoolWant,
    PutWorkload,
    SetStatus,
    Start,
    Template,
    Workload,
    WorkloadSeen,
)

__all__ = [
    "INSECURE_FLAG",
    "MOST_REPLICAS",
    "ROUTER",
    "DeleteWorkload",
    "Drain",
    "DrainPool",
    "Event",
    "FleetSeen",
    "FleetStatus",
    "FleetWant",
    "Forget",
    "InstanceSeen",
    "KeepPlan",
    "Kill",
    "Plan",
    "PoolSeen",
    "PoolStatus",
    "PoolWant",
    "PutWorkload",
    "SetStatus",
    "Start",
    "Template",
    "Workload",
    "WorkloadSeen",
    "fleet_want",
    "keep",
    "layout_of",
    "plan",
    "pool_replicas",
    "pools_wanted",
    "revision_of",
]
