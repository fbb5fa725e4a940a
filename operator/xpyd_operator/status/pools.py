"""One row for each pool of a fleet and for its router: what status and conditions count. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from xpyd_operator.plan import ROUTER, FleetSeen, FleetWant, pools_wanted
from xpyd_operator.plan.values import PoolRole
from xpyd_operator.status.children import NOTHING, Children, Counts

ROLES = ("Prefill", "Decode", "Aggregated")


@dataclass(frozen=True)
class PoolRow:
    """Instances of a pool, all its revisions together.

    `revision`: the newest; "": the pool left the document or the fleet is being deleted, and it
    only ends. `updated`: ready ones of the newest revision. `staying`: not asked to leave.
    `older`: workloads of other revisions are still there.
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
    for pool in want.pools:
        found, role = counts.get(pool.name, {}), pool.template.role
        if want.stopping:
            rows[pool.name] = _row(pool.name, role, found)
            continue
        rows[pool.name] = _row(
            pool.name,
            role,
            found,
            replicas=sizes[pool.name].replicas,
            declared=None if pool.name == ROUTER else sizes[pool.name].declared,
            revision=pool.revision,
            older=bool(revisions.get(pool.name, set()) - {pool.revision}),
        )
    for workload in seen.workloads:
        name, role = workload.workload.pool, workload.workload.template.role
        rows.setdefault(name, _row(name, role, counts.get(name, {})))
    return tuple(rows.values())


def serves(instances: Mapping[str, int]) -> bool:
    """Whether engines of these roles can answer a request."""
    pair = min(instances.get("Prefill", 0), instances.get("Decode", 0))
    return bool(instances.get("Aggregated", 0) or pair)


def by_role(rows: Iterable[PoolRow]) -> tuple[Counter[str], Counter[str]]:
    """Instances wanted, and those that are ready, by role."""
    wanted, ready = Counter[str](), Counter[str]()
    for row in rows:
        wanted[row.role] += row.replicas
        ready[row.role] += row.ready
    return wanted, ready


def _row(
    name: str,
    role: PoolRole,
    found: Mapping[str, Counts],
    *,
    replicas: int = 0,
    declared: int | None = None,
    revision: str = "",
    older: bool = False,
) -> PoolRow:
    every = found.values()
    return PoolRow(
        name=name,
        role=role,
        replicas=replicas,
        declared=declared,
        revision=revision,
        ready=sum(c.ready for c in every),
        updated=found.get(revision, NOTHING).ready,
        staying=sum(c.staying for c in every),
        draining=sum(c.draining for c in every),
        older=older,
    )
