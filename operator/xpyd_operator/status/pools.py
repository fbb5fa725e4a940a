"""A fleet's pools as rows: the instances of each, all its revisions together. Pure.

Also by their roles: which instances serve, and what requests do where a role is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from xpyd_operator.plan.fleet import pools_moving, pools_waiting, pools_wanted
from xpyd_operator.plan.values import ROUTER, FleetSeen, FleetWant, PoolRole
from xpyd_operator.status.children import NOTHING, Children, Counts

ROLES = ("Prefill", "Decode", "Aggregated")


class RoleChoice(NamedTuple):
    """What the document wants of requests where the fleet has no Prefill, or no Decode instance."""

    on_no_prefill: str = "Queue"
    on_no_decode: str | None = None

    def of(self, role: str) -> str:
        """The word for a fleet without this role."""
        usual = "Reject" if self.on_no_prefill == "Reject" else "Queue"
        return self.on_no_prefill if role == "Prefill" else self.on_no_decode or usual

    def stands_in(self, ready: Mapping[str, int]) -> str:
        """The word by which instances of the other role serve alone; "" where none does."""
        for role, other in (("Prefill", "Decode"), ("Decode", "Prefill")):
            if not ready.get(role, 0) and ready.get(other, 0):
                return self.of(role) if self.of(role) in _STAND_INS else ""
        return ""


_STAND_INS = ("PrefillOnDecode", "DecodeOnPrefill")
DONE = {
    "PrefillOnDecode": "Decode instances compute the prompts",
    "DecodeOnPrefill": "Prefill instances make the whole answers",
    "Queue": "requests wait",
    "Reject": "requests get status 503",
}
"""What requests do where a role is lost."""


USUAL_CHOICE = RoleChoice()
"""Of a document that says nothing."""


def serves(instances: Mapping[str, int]) -> bool:
    """Whether engines of these roles can answer a request."""
    pair = min(instances.get("Prefill", 0), instances.get("Decode", 0))
    return bool(instances.get("Aggregated", 0) or pair)


@dataclass(frozen=True)
class PoolRow:
    """Instances of a pool, all its revisions together.

    `revision`: the newest; "": the pool left the document or the fleet is being deleted, and it
    only ends. `updated`: ready ones of the newest revision. `staying`: not asked to leave.
    `older`: workloads of other revisions are still there. `given_up`: wanted ones that a rollout
    which is under way may do without. `waits`: for whom the newest one waits.
    `moves`: its only instance is on a cordoned node, and another one starts.
    """

    name: str
    role: PoolRole
    replicas: int = 0
    declared: int | None = None
    revision: str = ""
    ready: int = 0
    updated: int = 0
    staying: int = 0
    draining: int = 0
    older: bool = False
    given_up: int = 0
    waits: str = ""
    moves: bool = False

    @property
    def missing(self) -> int:
        """Instances of the newest revision that are wanted and not ready."""
        return max(0, self.replicas - self.updated)

    @property
    def alive(self) -> int:
        """Instances that hold a place."""
        return self.staying + self.draining

    @property
    def progress(self) -> str:
        """How far the pool is, in words."""
        return f"{self.name} {self.updated}/{self.replicas}"


def by_role(rows: Iterable[PoolRow]) -> tuple[Counter[str], Counter[str]]:
    """Instances wanted, and those that are ready, by role."""
    wanted, ready = Counter[str](), Counter[str]()
    for row in rows:
        wanted[row.role] += row.replicas
        ready[row.role] += row.ready
    return wanted, ready


def pool_rows(want: FleetWant, seen: FleetSeen, children: Children) -> tuple[PoolRow, ...]:
    """The router, the pools of the document in its order, then those that still leave."""
    counts: dict[str, dict[str, Counts]] = {}
    for (pool, revision), have in children.counts.items():
        counts.setdefault(pool, {})[revision] = have
    revisions: dict[str, set[str]] = {}
    for workload in seen.workloads:
        revisions.setdefault(workload.workload.pool, set()).add(workload.workload.revision)
    rows: dict[str, PoolRow] = {}
    sizes = {size.name: size for size in pools_wanted(want, seen.pools)}
    waiting, moving = pools_waiting(want, seen), pools_moving(want, seen)
    for pool in want.pools:
        found, role = counts.get(pool.name, {}), pool.template.role
        if want.stopping:
            rows[pool.name] = _row(pool.name, role, found)
            continue
        replicas = sizes[pool.name].replicas
        is_older = bool(revisions.get(pool.name, set()) - {pool.revision})
        least = 1 if pool.unavailable_percent else 0
        rows[pool.name] = replace(
            _row(pool.name, role, found, pool.revision),
            replicas=replicas,
            declared=None if pool.name == ROUTER else sizes[pool.name].declared,
            older=is_older,
            given_up=max(least, replicas * pool.unavailable_percent // 100) if is_older else 0,
            waits=waiting.get(pool.name, ""),
            moves=pool.name in moving,
        )
    for workload in seen.workloads:
        name, role = workload.workload.pool, workload.workload.template.role
        rows.setdefault(name, _row(name, role, counts.get(name, {})))
    return tuple(rows.values())


def _row(name: str, role: PoolRole, found: Mapping[str, Counts], revision: str = "") -> PoolRow:
    every = found.values()
    return PoolRow(
        name=name,
        role=role,
        revision=revision,
        ready=sum(c.ready for c in every),
        updated=found.get(revision, NOTHING).ready,
        staying=sum(c.staying for c in every),
        draining=sum(c.draining for c in every),
    )
