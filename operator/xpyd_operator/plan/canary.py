"""A revision on trial: which revision the fleet stays on meanwhile, and how large both are.

The new revision gets instances within the surge, at least one of each pool that changed; the rest
of the fleet stays, and is scaled as ever. A pool without a surge gives up what may be unavailable,
but for its last instance.
When the canary failed, its instances go and nothing else. See docs/adr/0105.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from xpyd_operator.plan.values import (
    ROUTER,
    Action,
    CanaryStage,
    DeleteWorkload,
    Event,
    FleetSeen,
    FleetWant,
    PoolWant,
    PutWorkload,
    Workload,
    WorkloadSeen,
)


@dataclass(frozen=True)
class CanaryPool:
    """A pool of which a new revision is on trial. `replicas`: of the pool; `target`: instances of
    the new revision, `stable` of the one that stays."""

    want: PoolWant
    replicas: int
    seen: WorkloadSeen | None
    target: int
    stable: int


def stable_revisions(want: FleetWant, seen: FleetSeen) -> dict[str, str]:
    """The revision of each pool that a fleet falls back to; empty where none runs but that of its
    document, or nothing.

    Pools must fit together, so that their P and D are pairs: of the fleet revisions that run, all
    pools take the one of which the scarcest role has most instances.
    """
    pools = {pool.name: pool for pool in want.pools if pool.name != ROUTER}
    runs: dict[str, list[WorkloadSeen]] = {}
    for one in seen.workloads:
        if one.workload.pool in pools and (one.workload.replicas or one.alive):
            runs.setdefault(one.workload.pool, []).append(one)
    mark = _common(runs)
    found: dict[str, str] = {}
    for name, have in runs.items():
        fits = [one for one in have if one.workload.template.fleet_revision == mark]
        found[name] = max(fits or have, key=_size).workload.revision
    return (
        {} if all(pools[name].revision == revision for name, revision in found.items()) else found
    )


def _common(runs: Mapping[str, Sequence[WorkloadSeen]]) -> str:
    """The fleet revision of which most pairs run."""
    by_mark: dict[str, dict[str, Counter[str]]] = {}
    for one in (one for have in runs.values() for one in have):
        of = by_mark.setdefault(one.workload.template.fleet_revision, {})
        counts = of.setdefault(one.workload.template.role, Counter())
        counts.update(ready=one.ready, asked=one.workload.replicas)
    roles = {one.workload.template.role for have in runs.values() for one in have}

    def least(mark: str) -> tuple[int, int, str]:
        have = [by_mark[mark].get(role, Counter[str]()) for role in roles]
        return min(c["ready"] for c in have), min(c["asked"] for c in have), mark

    return max(by_mark, key=least, default="")


def _size(one: WorkloadSeen) -> tuple[int, int, str]:
    return one.ready, one.workload.replicas, one.workload.revision


def divide(
    want: PoolWant,
    replicas: int,
    *,
    new: WorkloadSeen | None,
    main: WorkloadSeen | None,
    others: Sequence[WorkloadSeen],
    stage: CanaryStage,
    is_tight: bool,
    is_held: bool,
) -> CanaryPool:
    """The sizes of a pool's revisions. `main`: the one that stays; None: a pool that is new.

    `is_tight`: no node has room for all that is on trial. `is_held`: it does not grow now.
    """
    surge = ceil(replicas * want.surge_percent / 100)
    allowed = 0
    if want.unavailable_percent and (is_tight or not surge):
        allowed = max(1, replicas * want.unavailable_percent // 100)
    room = replicas + surge
    size = 0
    if stage.weight_percent:
        size = max(1, ceil(replicas * stage.weight_percent / 100))
        # Without `main` nothing of the pool serves yet.
        size = min(size, replicas, (surge or allowed) if main else replicas)
    before = new.workload.replicas if new else 0
    taken = sum(one.alive for one in others)
    stable = 0
    if main is not None:
        # One stays: else nothing is left to compare with, nor to go back to.
        given = min(size, allowed, max(0, replicas - 1)) if is_tight or not surge else 0
        stable = replicas - given
        if stable > (now := main.workload.replicas):
            # Grown only into what is free: an instance on trial that ends has its device yet.
            holds = max(new.alive, min(before, size)) if new else 0
            stable = max(now, min(stable, room - holds - taken))
    taken += max(main.alive if main else 0, stable)
    most = replicas + (0 if allowed else surge)
    target = max(min(before, size), min(size, most - taken))
    if is_held or (not before and not stage.may_begin):
        target = min(target, before)
    return CanaryPool(want, replicas, new, max(0, target), stable)


def canary_actions(canary: CanaryPool) -> list[Action]:
    """What is on trial grows, or goes."""
    pool, seen, target = canary.want, canary.seen, canary.target
    put = PutWorkload(Workload(pool.name, pool.revision, target, pool.template))
    text = f"pool {pool.name}: {target} instances of revision {pool.revision} on trial"
    if seen is None:
        return [put, Event("Canary", text)] if target else []
    if target != seen.workload.replicas:
        return [put, Event("Canary", text)]
    is_over = not target and not seen.alive
    return [DeleteWorkload(pool.name, pool.revision)] if is_over else []
