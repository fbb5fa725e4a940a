"""`kubectl xpyd drain`: what proves that an instance left with nothing lost.

A pod that is to go drains by itself: routers acknowledge that they pick it no more, its requests
end, others take the KV that it holds. Routers say it at GET /instances while it lasts, and its own
log says at the end whether something was cut. See docs/adr/0098.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from xpyd_core.errors import UserError
from xpyd_operator.manifests.names import ENGINE_CONTAINER, LABEL_FLEET, LABEL_POOL, LABEL_ROLE
from xpyd_operator.plan.values import ROUTER
from xpyd_operator.status.children import (
    Raw,
    count,
    is_grouped,
    name_of,
    rows,
    text,
)
from xpyd_operator.status.drains import InstanceLoad, load_text
from xpyd_operator.status.instances import read_rows

Json = dict[str, Any]

EXITS = {"Drained": 0, "Begun": 0, "Cut": 1, "Unproven": 1, "Draining": 3, "Refused": 4}
"""The exit status; 2 is for wrong input."""
Outcome = Literal["Drained", "Begun", "Cut", "Unproven", "Draining", "Refused"]
_CUT = re.compile(r"\d+ requests and KV of \d+ prompts are cut")
_DRAINED = re.compile(r"xpyd_worker\.main: drained|\"message\": ?\"drained\"")


@dataclass(frozen=True)
class Target:
    """The pod that leaves."""

    name: str
    namespace: str
    uid: str
    fleet: str
    pool: str
    container: str = ENGINE_CONTAINER


def target_of(pod: Raw) -> Target:
    """UserError where it is no instance of a fleet that may be drained alone."""
    name, labels = name_of(pod), ("metadata", "labels")
    fleet, pool = text(pod, *labels, LABEL_FLEET), text(pod, *labels, LABEL_POOL)
    if not fleet or not pool:
        raise UserError(f"pod {name} is of no fleet: it has no label {LABEL_FLEET}")
    if text(pod, *labels, LABEL_ROLE) == ROUTER:
        raise UserError(f"pod {name} is a router: `kubectl delete pod {name}` drains it")
    if is_grouped(pod):
        raise UserError(
            f"pod {name} is one of an instance of several pods: `kubectl delete pod {name}` ends"
            " and replaces the whole instance, which drains first"
        )
    space, uid = text(pod, "metadata", "namespace"), text(pod, "metadata", "uid")
    return Target(name, space, uid, fleet, pool)


def eviction(target: Target) -> Json:
    """What the API server is asked for: it heeds PodDisruptionBudgets, a plain delete does not."""
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": target.name, "namespace": target.namespace},
        "deleteOptions": {"preconditions": {"uid": target.uid}},
    }


def is_refused_by_budget(words: str) -> bool:
    """Whether kubectl's error is a PodDisruptionBudget's."""
    return "disruption budget" in words or "TooManyRequests" in words


@dataclass(frozen=True)
class Look:
    """What is known of the instance at a moment. `routers`: those that answered; `listing`: those
    of them that have it; `acknowledged`: those that pick it no more. `load` None: neither routers
    nor the operator have said."""

    routers: int = 0
    acknowledged: int = 0
    load: InstanceLoad | None = None
    is_begun: bool = False
    listing: int = 0

    @property
    def is_proof(self) -> bool:
        """Whether nothing was left, and nothing more could come. Routers forget one that was killed
        as they forget one that left: where none lists it, that proves nothing."""
        is_empty = self.load is not None and not any(self.load)
        return self.listing > 0 and self.acknowledged == self.routers and is_empty

    def behind(self, before: Look) -> Look:
        """What is known at last: the look before, where routers had the instance then and none has
        it now."""
        return before if before.listing and not self.listing else self


def look_of(target: Target, bodies: Iterable[bytes | None], fleet: Raw) -> Look:
    """`bodies`: what routers answered to GET /instances; `fleet` knows what its status says."""
    routers = acknowledged = listing = 0
    in_flight = own = leases = 0
    for body in bodies:
        found = None if body is None else read_rows(body)
        if found is None:
            continue
        routers += 1
        mine = [one for one in found if one.instance == target.name]
        listing += bool(mine)
        acknowledged += not any(one.state not in ("Draining", "Gone") for one in mine)
        for one in mine:
            in_flight += max(0, one.in_flight)
            own = max(own, one.load.running + one.load.waiting)
            leases = max(leases, one.load.kv_leases)
    load = InstanceLoad(max(in_flight, own), leases) if routers else _told(target, fleet)
    return Look(routers, acknowledged, load, is_begun=True, listing=listing)


def _told(target: Target, fleet: Raw) -> InstanceLoad | None:
    """What the operator wrote of the pool's instances that leave."""
    for row in rows(fleet, "status", "pools"):
        if text(row, "name") == target.pool and isinstance(row.get("drainingRequests"), int):
            return InstanceLoad(count(row, "drainingRequests"), count(row, "drainingKvLeases"))
    return None


def look_text(look: Look) -> str:
    """One line for people."""
    if not look.is_begun:
        return "not asked to leave yet"
    has = "no router says what it has" if look.load is None else f"{load_text(look.load)} left"
    if not look.routers:
        return has
    if not look.listing:
        return f"none of {look.routers} routers knows it"
    return f"{look.acknowledged} of {look.routers} routers pick it no more; {has}"


def outcome_of(log: Sequence[str], last: Look) -> tuple[Outcome, str]:
    """How an instance that is gone left, and in words why that is known."""
    cut = next((found[0] for line in reversed(log) if (found := _CUT.search(line))), None)
    if cut is not None:
        return "Cut", f"its drain timeout came: {cut}; routers try those requests elsewhere"
    if any(_DRAINED.search(line) for line in log):
        return "Drained", "its log says so: routers let it go, nothing was left"
    if last.is_proof:
        return "Drained", f"at the last look {look_text(last)}"
    return (
        "Unproven",
        f"at the last look {look_text(last)}, and its log does not say that it drained",
    )


def pool_is_whole(fleet: Raw, pool: str) -> tuple[bool, str]:
    """Whether the pool has its instances again, and in words."""
    for row in rows(fleet, "status", "pools"):
        if text(row, "name") == pool:
            ready, wanted = count(row, "readyReplicas"), count(row, "replicas")
            return ready >= wanted, f"pool {pool} has {ready} of {wanted} instances ready"
    return False, f"the status has no pool {pool}"
