"""plan(): the workloads that a fleet should have now. Pure.

A changed template is a new revision, rolled out pool by pool: the new workload grows by the pool's
surge, the old one shrinks by what is ready of the new. Pools that change together move together:
no pool gives up old instances faster than the slowest of them gains new ones, because P and D of
different revisions may be unable to exchange KV. A pool whose template did not change is not
touched.

What holds after every step: a pool declares at most `replicas + surge` instances; an instance that
is ready goes only if the ready ones that remain are `replicas`; a pool that left the document stays
while it is all that makes the fleet serve and its successors are on their way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
    sizes = {pool.name: pool.replicas for pool in pools_wanted(want, seen.pools)}
    pools = [(pool, sizes[pool.name]) for pool in wanted]
    by_pool = {pool.name: _of_pool(pool.name, seen) for pool, _ in pools}
    share = _rollout_share(pools, by_pool)
    for pool, replicas in pools:
        actions += _pool_actions(pool, replicas, by_pool[pool.name], share)
    leaving = [w for w in seen.workloads if w.workload.pool not in by_pool]
    if want.stopping:
        actions += _stop(leaving)
    elif not _is_needed(leaving, pools, by_pool):
        actions += _leave(leaving)
    status = _status(want, pools, by_pool, seen, now)
    if status != seen.status:
        actions.append(SetStatus(status))
    settled = status.ready or (want.stopping and not seen.workloads)
    return Plan(tuple(actions), None if settled else RECHECK_S)


def pools_wanted(want: FleetWant, seen: Iterable[PoolSeen]) -> tuple[PoolSeen, ...]:
    """What is to be remembered of each pool: its replicas now, and what the document declares."""
    known = {pool.name: pool for pool in seen}
    return tuple(
        PoolSeen(pool.name, pool_replicas(pool, known.get(pool.name)), pool.replicas)
        for pool in want.pools
    )


def pool_replicas(pool: PoolWant, seen: PoolSeen | None) -> int:
    """The pool's replicas: the last declared value wins once, then `scale` does, within bounds."""
    if pool.replicas is not None and (seen is None or pool.replicas != seen.declared):
        found = pool.replicas
    else:
        found = 1 if seen is None else seen.replicas
    return max(pool.least, min(found, pool.most))


def _of_pool(name: str, seen: FleetSeen) -> list[WorkloadSeen]:
    return [w for w in seen.workloads if w.workload.pool == name]


def _split(
    pool: PoolWant, workloads: Sequence[WorkloadSeen]
) -> tuple[WorkloadSeen | None, list[WorkloadSeen]]:
    """The newest revision's workload, and the others, those with most ready instances first."""
    new = next((w for w in workloads if w.workload.revision == pool.revision), None)
    old = [w for w in workloads if w.workload.revision != pool.revision]
    return new, sorted(old, key=lambda w: (-w.ready, w.workload.revision))


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


def _old_targets(
    pool: PoolWant, replicas: int, old: Sequence[WorkloadSeen], new_replicas: int, share: Fraction
) -> list[int]:
    """How much of each old revision stays, by what is ready of the new one; ready ones first."""
    kept = 0 if pool.surge == 0 else replicas - int(replicas * share)
    # After a scale-down in the middle of a rollout both revisions are too large: then only what is
    # ready stays of the old ones.
    idle = min(kept, max(0, replicas + pool.surge - new_replicas))
    targets: list[int] = []
    for workload in old:
        targets.append(min(workload.workload.replicas, workload.ready, kept))
        kept -= targets[-1]
        idle -= targets[-1]
    for index, workload in enumerate(old):
        more = max(0, min(workload.workload.replicas - targets[index], idle))
        targets[index] += more
        idle -= more
    return targets


def _pool_actions(
    pool: PoolWant, replicas: int, workloads: Sequence[WorkloadSeen], share: Fraction
) -> list[Action]:
    actions: list[Action] = []
    new, old = _split(pool, workloads)
    before = new.workload.replicas if new else 0
    targets = _old_targets(pool, replicas, old, min(before, replicas), share)
    target = replicas
    if old:
        most = replicas + pool.surge
        occupied = sum(max(w.alive, t) for w, t in zip(old, targets, strict=True))
        # Grown only into what is really free; held where it is while old instances end.
        room = max(min(before, most - sum(targets)), most - occupied)
        target = max(0, min(replicas, room))
    for workload, left in zip(old, targets, strict=True):
        if left != workload.workload.replicas:
            actions.append(PutWorkload(replace(workload.workload, replicas=left)))
        elif left == 0 and workload.alive == 0:
            actions.append(DeleteWorkload(pool.name, workload.workload.revision))
    put = PutWorkload(Workload(pool.name, pool.revision, target, pool.template))
    if new is None:
        came_from = f" in place of {old[0].workload.revision}" if old else ""
        text = f"pool {pool.name}: {target} of {replicas} instances of revision {pool.revision}"
        actions += [put, Event("Rollout" if old else "Created", text + came_from)]
    elif target != before:
        actions += [put, Event("Scaled", f"pool {pool.name}: {before} -> {target} instances")]
    return actions


def _stop(leaving: Sequence[WorkloadSeen]) -> list[Action]:
    """Everything goes, the router last: it still carries the engines' answers."""
    engines = [w for w in leaving if w.workload.pool != ROUTER]
    busy = any(w.alive or w.workload.replicas for w in engines)
    return _leave(engines if busy else leaving)


def _leave(leaving: Sequence[WorkloadSeen]) -> list[Action]:
    """Drain pools, then forget them."""
    actions: list[Action] = []
    for name in dict.fromkeys(w.workload.pool for w in leaving):
        workloads = [w for w in leaving if w.workload.pool == name]
        replicas = sum(w.workload.replicas for w in workloads)
        if replicas:
            actions += [DrainPool(name), Event("Draining", f"pool {name}: {replicas} instances")]
            continue
        actions += [DeleteWorkload(name, w.workload.revision) for w in workloads if w.alive == 0]
    return actions


def _is_needed(
    leaving: Sequence[WorkloadSeen],
    pools: Sequence[tuple[PoolWant, int]],
    by_pool: Mapping[str, Sequence[WorkloadSeen]],
) -> bool:
    """Whether the fleet serves with the pools that leave, not yet without, and will do so."""
    wanted, ready = Counter[str](), Counter[str]()
    for pool, replicas in pools:
        wanted[pool.template.role] += replicas
        ready[pool.template.role] += sum(w.ready for w in by_pool[pool.name])
    with_leaving = Counter(ready)
    for workload in leaving:
        with_leaving[workload.workload.template.role] += workload.ready
    return _serves(wanted) and _serves(with_leaving) and not _serves(ready)


def _serves(instances: Counter[str]) -> bool:
    """Whether one request can be answered by so many instances of each role."""
    return bool(instances["Aggregated"] or min(instances["Prefill"], instances["Decode"]))


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
