"""plan(): the workloads that a fleet should have now. Pure.

A changed template is a new revision, rolled out pool by pool: the new workload grows by the pool's
surge, the old one shrinks by what is ready of the new. Pools that change together move together:
no pool gives up old instances faster than the slowest of them gains new ones, because P and D of
different revisions may be unable to exchange KV. A pool whose template did not change is not
touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from xpyd_operator.plan.values import (
    ROUTER,
    Action,
    DeleteWorkload,
    DrainPool,
    Event,
    FleetSeen,
    FleetStatus,
    FleetWant,
    Plan,
    PoolSeen,
    PoolStatus,
    PoolWant,
    PutWorkload,
    SetStatus,
    Workload,
    WorkloadSeen,
)

RECHECK_S = 1.0


def plan(want: FleetWant, seen: FleetSeen, now: float) -> Plan:
    """Actions that move the fleet from `seen` towards `want`; none when it is there."""
    actions: list[Action] = []
    wanted = () if want.stopping else want.pools
    pools = [_with_replicas(pool, seen.pools) for pool in wanted]
    by_pool = {pool.name: _of_pool(pool.name, seen) for pool, _ in pools}
    share = _rollout_share(pools, by_pool)
    for pool, replicas in pools:
        actions += _pool_actions(pool, replicas, by_pool[pool.name], share)
    actions += _leave(seen, {pool.name for pool in wanted}, stopping=want.stopping)
    status = _status(want, pools, by_pool, seen, now)
    if status != seen.status:
        actions.append(SetStatus(status))
    settled = status.ready or (want.stopping and not seen.workloads)
    return Plan(tuple(actions), None if settled else RECHECK_S)


def pool_replicas(declared: int | None, seen: PoolSeen | None) -> int:
    """The pool's replicas: the last declared value wins once, then `scale` does."""
    if seen is None:
        return 1 if declared is None else declared
    return seen.replicas if declared is None or declared == seen.declared else declared


def _with_replicas(pool: PoolWant, seen: Sequence[PoolSeen]) -> tuple[PoolWant, int]:
    before = next((p for p in seen if p.name == pool.name), None)
    return pool, pool_replicas(pool.replicas, before)


def _of_pool(name: str, seen: FleetSeen) -> list[WorkloadSeen]:
    return [w for w in seen.workloads if w.workload.pool == name]


def _split(
    pool: PoolWant, workloads: Sequence[WorkloadSeen]
) -> tuple[WorkloadSeen | None, list[WorkloadSeen]]:
    new = next((w for w in workloads if w.workload.revision == pool.revision), None)
    return new, [w for w in workloads if w.workload.revision != pool.revision]


def _rollout_share(
    pools: Sequence[tuple[PoolWant, int]], by_pool: Mapping[str, Sequence[WorkloadSeen]]
) -> Fraction:
    """What part of every pool in rollout is ready in its new revision: the least of them."""
    share = Fraction(1)
    for pool, replicas in pools:
        new, old = _split(pool, by_pool[pool.name])
        if old and pool.surge and replicas:
            ready = min(new.ready, replicas) if new else 0
            share = min(share, Fraction(ready, replicas))
    return share


def _pool_actions(
    pool: PoolWant, replicas: int, workloads: Sequence[WorkloadSeen], share: Fraction
) -> list[Action]:
    actions: list[Action] = []
    new, old = _split(pool, workloads)
    kept = 0 if pool.surge == 0 else replicas - int(replicas * share)
    occupied = 0
    # The least ready of the old revisions gives way first.
    for workload in sorted(old, key=lambda w: (-w.ready, w.workload.revision)):
        target = min(workload.workload.replicas, kept)
        kept -= target
        occupied += max(workload.alive, target)
        if target != workload.workload.replicas:
            actions.append(PutWorkload(replace(workload.workload, replicas=target)))
        elif target == 0 and workload.alive == 0:
            actions.append(DeleteWorkload(pool.name, workload.workload.revision))
    before = new.workload.replicas if new else 0
    room = max(before, replicas + pool.surge - occupied) if old else replicas
    target = max(0, min(replicas, room))
    put = PutWorkload(Workload(pool.name, pool.revision, target, pool.template))
    if new is None:
        came_from = f" in place of {old[0].workload.revision}" if old else ""
        text = f"pool {pool.name}: {target} of {replicas} instances of revision {pool.revision}"
        actions += [put, Event("Rollout" if old else "Created", text + came_from)]
    elif target != before:
        actions += [put, Event("Scaled", f"pool {pool.name}: {before} -> {target} instances")]
    return actions


def _leave(seen: FleetSeen, wanted: set[str], *, stopping: bool) -> list[Action]:
    """Pools that are wanted no more. The router goes last: it still carries the others' answers."""
    actions: list[Action] = []
    gone = [w for w in seen.workloads if w.workload.pool not in wanted]
    engines = any(w.alive for w in gone if w.workload.pool != ROUTER)
    for name in dict.fromkeys(w.workload.pool for w in gone):
        if name == ROUTER and stopping and engines:
            continue
        workloads = [w for w in gone if w.workload.pool == name]
        replicas = sum(w.workload.replicas for w in workloads)
        if replicas:
            actions += [DrainPool(name), Event("Draining", f"pool {name}: {replicas} instances")]
            continue
        actions += [DeleteWorkload(name, w.workload.revision) for w in workloads if w.alive == 0]
    return actions


def _status(
    want: FleetWant,
    pools: Sequence[tuple[PoolWant, int]],
    by_pool: Mapping[str, Sequence[WorkloadSeen]],
    seen: FleetSeen,
    now: float,
) -> FleetStatus:
    rows: list[PoolStatus] = []
    waits: list[str] = []
    for pool, replicas in pools:
        new, old = _split(pool, by_pool[pool.name])
        updated = new.ready if new else 0
        ready = updated + sum(w.ready for w in old)
        rows.append(
            PoolStatus(
                name=pool.name,
                role=pool.template.role,
                replicas=replicas,
                declared=pool.replicas,
                ready=ready,
                revision=pool.revision,
                updated=updated,
            )
        )
        if updated < replicas:
            waits.append(f"{pool.name} {updated}/{replicas} ready")
        leaving = sum(w.alive for w in old) + max(0, (new.alive if new else 0) - replicas)
        if leaving:
            waits.append(f"{pool.name} {leaving} leaving")
    waits += [
        f"{w.workload.pool} {w.alive} leaving"
        for w in seen.workloads
        if w.workload.pool not in by_pool and w.alive
    ]
    if want.stopping:
        reason = "Draining" if waits else "Stopped"
    else:
        reason = "Progressing" if waits else "Ready"
    ready = reason == "Ready"
    before = seen.status
    since = before.since if before and before.ready == ready else now
    return FleetStatus(ready, reason, ", ".join(waits), since, tuple(rows))
