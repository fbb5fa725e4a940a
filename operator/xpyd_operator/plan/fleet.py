"""plan(): the workloads that a fleet should have now.

A changed template is a new revision, rolled out pool by pool: the new workload grows by the pool's
surge, the old one shrinks by what is ready of the new. Pools that change together move together:
no pool gives up old instances faster than the slowest of them gains new ones, because P and D of
different revisions may be unable to exchange KV. A pool whose template did not change is not
touched.

Where no node has room for a new instance, pools that waited for each other's devices would wait for
ever. So each pool in rollout then gives up its surge, and goes ahead of the others by what may be
unavailable of it; a pool that must stay complete keeps all that it has. See docs/adr/0093.

Routers can call engines that ask less of them than they have (Template.tls), and no others. So
where spec.engine.tls comes, engines wait until no router is without it; where it goes, routers wait
until no engine has it. See docs/adr/0102. A revision on trial stands beside the one that runs: see
plan.canary.

A fleet that is paused takes none of these steps: each pool keeps the revisions that it has, and
grows or shrinks in them when it is scaled. What has no instance yet starts. See docs/adr/0095.

Where the only instance of a pool is on a node that takes no new pods, another one starts first, and
the old one goes when that one serves. See docs/adr/0107.

What holds after every step: a pool declares at most `replicas + surge` instances; an instance that
is ready goes only if the ready ones that remain are `replicas - unavailable`; a pool that left the
document stays while it is all that makes the fleet serve and its successors are on their way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil

from xpyd_operator.plan.canary import CanaryPool, canary_actions, divide
from xpyd_operator.plan.values import (
    MOST_REPLICAS,
    ROUTER,
    Action,
    CanaryStage,
    DeleteWorkload,
    DrainPool,
    Event,
    FleetProgress,
    FleetSeen,
    FleetWant,
    Plan,
    PoolProgress,
    PoolSeen,
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
    pools = [] if want.stopping else _pools(want, seen)
    share = _rollout_share(pools)
    for pool in pools:
        if pool.canary is not None:
            actions += canary_actions(pool.canary)
            if pool.new is None:
                continue
        is_held = want.paused and pool.is_mixed
        held_share = Fraction(0) if pool.waits else share
        actions += (_held_actions if is_held else _pool_actions)(pool, held_share)
    names = {pool.want.name for pool in pools}
    leaving = [w for w in seen.workloads if w.workload.pool not in names]
    # Sorted, because shells list workloads in different orders.
    leaving.sort(key=lambda w: (w.workload.pool, w.workload.revision))
    needed = not want.stopping and bool(leaving)
    stays = want.paused or want.canary is not None
    needed = needed and (stays or _is_needed(leaving, pools, share))
    if want.stopping:
        actions += _stop(leaving)
    elif not needed:
        actions += _leave(leaving)
    going = "leave when others serve" if needed else "leaving"
    going = "stay while paused" if needed and want.paused else going
    going = "stay with the old revision" if needed and want.canary else going
    waits = [f"{w.workload.pool} {w.alive} {going}" for w in leaving if w.alive]
    status = _status(want, pools, waits, seen.status, now)
    if status != seen.status:
        actions.append(SetStatus(status))
    settled = status.ready or (want.stopping and not seen.workloads)
    return Plan(tuple(actions), None if settled else RECHECK_S)


def as_it_runs(
    want: FleetWant, seen: FleetSeen, admitted: Mapping[str, tuple[str, int]]
) -> FleetWant:
    """What a fleet goes on with while its document has mistakes: `want` itself where all of it runs
    already, else the document is held back.

    `admitted`: pool -> its revision in the last document that was obeyed, and its size. Held back,
    each pool keeps its revision, and the size that it was scaled to; a new pool does not begin, and
    one that left the document does not leave.
    """
    by_pool: dict[str, list[WorkloadSeen]] = {}
    for workload in seen.workloads:
        by_pool.setdefault(workload.workload.pool, []).append(workload)
    found: list[PoolWant] = []
    pools = {pool.name: pool for pool in want.pools}
    is_all = True
    for name in (*pools, *(name for name in admitted if name not in pools)):
        pool, have = pools.get(name), by_pool.get(name, [])
        last, size = admitted.get(name, ("", pool.replicas if pool else None))
        # The router has no object that remembers its size.
        replicas = size if name == ROUTER else None
        if pool and pool.revision in (last, *(w.workload.revision for w in have)):
            found.append(replace(pool, replicas=replicas))
            continue
        is_all = False
        if have:
            # Where the last document's workload is gone: what serves.
            have.sort(key=lambda w: (w.workload.revision != last, -w.ready, w.workload.revision))
            runs = have[0].workload
            pool = pool or PoolWant(name, runs.template, runs.revision)
            pool = replace(pool, template=runs.template, revision=runs.revision)
            found.append(replace(pool, replicas=replicas))
    if is_all:
        return want
    # Bounds are the document's, too: they would move the sizes.
    return replace(want, pools=tuple(replace(pool, least=0, most=MOST_REPLICAS) for pool in found))


def pools_wanted(want: FleetWant, seen: Iterable[PoolSeen]) -> tuple[PoolSeen, ...]:
    """What the shell remembers of each pool: its replicas now, and what the document declares."""
    known = {pool.name: pool for pool in seen}
    return tuple(
        PoolSeen(pool.name, pool_replicas(pool, known.get(pool.name)), pool.replicas)
        for pool in want.pools
    )


def pools_waiting(want: FleetWant, seen: FleetSeen) -> dict[str, str]:
    """The pools whose new revision waits for other pools, with what it waits for."""
    pools = [] if want.stopping else _pools(want, seen)
    return {pool.want.name: pool.waits for pool in pools if pool.waits}


def canary_pools(want: FleetWant, seen: FleetSeen) -> tuple[CanaryPool, ...]:
    """The pools of which the document's revision is on trial."""
    return tuple(pool.canary for pool in _pools(want, seen) if pool.canary is not None)


def pool_replicas(pool: PoolWant, seen: PoolSeen | None) -> int:
    """The pool's replicas: the last declared value wins once, then `scale` does, within bounds."""
    if pool.replicas is not None and (seen is None or pool.replicas != seen.declared):
        found = pool.replicas
    else:
        found = 1 if seen is None else seen.replicas
    return max(pool.least, min(found, pool.most))


def pools_guarded(want: FleetWant, seen: FleetSeen) -> frozenset[str]:
    """The pools whose only instance may go only when another one serves, as a surge allows."""
    pools = [] if want.stopping else _pools(want, seen)
    return frozenset(pool.want.name for pool in pools if pool.replicas == 1 < pool.most)


def pools_moving(want: FleetWant, seen: FleetSeen) -> frozenset[str]:
    """The pools whose only instance waits on a cordoned node for one that takes its place."""
    pools = [] if want.stopping else _pools(want, seen)
    return frozenset(pool.want.name for pool in pools if pool.moves)


@dataclass(frozen=True)
class _Pool:
    """A pool that is wanted: its replicas, its newest revision's workload, and the others, those
    with most ready instances first."""

    want: PoolWant
    replicas: int
    new: WorkloadSeen | None
    old: tuple[WorkloadSeen, ...]
    is_tight: bool = False
    """Nodes have no room for all of the rollout's new instances, and it may go on with fewer."""
    waits: str = ""
    """For whom its new revision waits before it begins or grows; "": it need not."""
    canary: CanaryPool | None = None
    """The document's revision, on trial: then `want` and `new` are of the one that stays."""

    @property
    def is_rolling(self) -> bool:
        return any(w.alive for w in self.old)

    @property
    def is_mixed(self) -> bool:
        """Whether older revisions are asked for, or would be if the pool had replicas."""
        is_idle = self.new is None and not self.replicas
        return any(w.workload.replicas or is_idle for w in self.old)

    @property
    def moves(self) -> bool:
        """Whether the only instance that serves is on a node that takes no new pods."""
        if self.new is None or self.waits or self.is_rolling or self.canary is not None:
            return False
        return self.new.ready == self.new.cordoned == 1 == self.replicas < self.most

    @property
    def most(self) -> int:
        """Instances that may run where all have room."""
        return self.replicas + ceil(self.replicas * self.want.surge_percent / 100)

    @property
    def surge(self) -> int:
        """Instances above `replicas` that may run."""
        return 0 if self.is_tight else self.most - self.replicas

    @property
    def unavailable(self) -> int:
        """Ready instances that may be missing now: none while new ones have room beside them."""
        if self.surge or not self.want.unavailable_percent or self.waits:
            return 0
        return max(1, self.replicas * self.want.unavailable_percent // 100)


def _pools(want: FleetWant, seen: FleetSeen) -> list[_Pool]:
    found: list[_Pool] = []
    for pool, size in zip(want.pools, pools_wanted(want, seen.pools), strict=True):
        all_ = [w for w in seen.workloads if w.workload.pool == pool.name]
        new = next((w for w in all_ if w.workload.revision == pool.revision), None)
        old = [w for w in all_ if w is not new]
        old.sort(key=lambda w: (-w.ready, w.workload.revision))
        found.append(_Pool(pool, size.replicas, new, tuple(old)))
    found = _ordered_by_tls(found, seen.workloads)
    if want.canary is not None:
        found = _divided(found, want.canary, is_paused=want.paused)
    if not any(pool.is_rolling and pool.new and pool.new.unplaced for pool in found):
        return found
    return [replace(p, is_tight=p.is_rolling and p.want.unavailable_percent > 0) for p in found]


def _divided(pools: Sequence[_Pool], stage: CanaryStage, *, is_paused: bool) -> list[_Pool]:
    """The pools with what is on trial beside what stays."""
    revisions = dict(stage.stable)
    found: list[_Pool] = []
    same = {p.want.name for p in pools if revisions.get(p.want.name) == p.want.revision}
    same.add(ROUTER)
    is_tight = any(p.new and p.new.unplaced for p in pools if p.want.name not in same)
    for pool in pools:
        name, stays = pool.want.name, revisions.get(pool.want.name, "")
        if name in same:
            found.append(pool)
            continue
        main = next((w for w in pool.old if w.workload.revision == stays), None)
        if main is None and pool.old:  # somebody deleted what stays
            main, stays = pool.old[0], pool.old[0].workload.revision
        others = tuple(w for w in pool.old if w is not main)
        canary = divide(
            pool.want,
            pool.replicas,
            new=pool.new,
            main=main,
            others=others,
            stage=stage,
            is_tight=is_tight and pool.want.unavailable_percent > 0,
            is_held=is_paused or bool(pool.waits),
        )
        template = main.workload.template if main else pool.want.template
        want = replace(pool.want, revision=stays, template=template)
        size = canary.stable
        found.append(replace(pool, want=want, replicas=size, new=main, old=others, canary=canary))
    return found


def _ordered_by_tls(pools: Sequence[_Pool], seen: Sequence[WorkloadSeen]) -> list[_Pool]:
    """Routers or engines wait while the others that are there could not be called or call."""
    alive = [w.workload for w in seen if w.alive]
    able = min((w.template.tls for w in alive if w.pool == ROUTER), default=2)
    asked = max((w.template.tls for w in alive if w.pool != ROUTER), default=0)
    engines_wait = any(p.want.template.tls > able for p in pools if p.want.name != ROUTER)
    found: list[_Pool] = []
    for pool in pools:
        tls, waits = pool.want.template.tls, ""
        if pool.want.name != ROUTER and tls > able:
            waits = "routers that can call its engines"
        elif pool.want.name == ROUTER and tls < asked and not engines_wait:
            waits = "engines that it could not call to leave"
        found.append(replace(pool, waits=waits))
    return found


def _rollout_share(pools: Sequence[_Pool]) -> Fraction:
    """What part of every pool in rollout is ready in its new revision: the least of them."""
    share = Fraction(1)
    for pool in pools:
        if pool.unavailable < pool.replicas and pool.is_rolling and not pool.waits:
            ready = min(pool.new.ready, pool.replicas) if pool.new else 0
            share = min(share, Fraction(ready, pool.replicas))
    return share


def _old_targets(pool: _Pool, share: Fraction) -> list[int]:
    """How much of each old revision stays, by what is ready of the new one; ready ones first."""
    kept = max(0, pool.replicas - int(pool.replicas * share) - pool.unavailable)
    # After a scale-down in the middle of a rollout both revisions are too large: then only what is
    # ready stays of the old ones.
    declared = min(pool.new.workload.replicas, pool.replicas) if pool.new else 0
    idle = min(kept, pool.replicas + pool.surge - declared)
    targets: list[int] = []
    for workload in pool.old:
        targets.append(min(workload.workload.replicas, workload.ready, kept))
        kept -= targets[-1]
        idle -= targets[-1]
    for index, workload in enumerate(pool.old):
        asked = workload.workload.replicas
        if pool.canary is not None:  # a third revision starts nothing
            asked = min(asked, workload.alive)
        more = max(0, min(asked - targets[index], idle))
        targets[index] += more
        idle -= more
    return targets


def _new_target(pool: _Pool, targets: Sequence[int]) -> int:
    """How many instances the newest revision gets next to so many of the old ones."""
    before = pool.new.workload.replicas if pool.new else 0
    if pool.moves and not any(targets):
        return pool.replicas + 1
    if not pool.old:
        return min(before, pool.replicas) if pool.waits else pool.replicas
    most = pool.replicas + pool.surge
    occupied = sum(max(w.alive, t) for w, t in zip(pool.old, targets, strict=True))
    # Grown only into what is really free; held where it is while old instances end, but for a surge
    # that is given up.
    room = max(min(before, most - sum(targets)), most - occupied)
    return max(0, min(pool.replicas, room, before if pool.waits else room))


def _pool_actions(pool: _Pool, share: Fraction) -> list[Action]:
    actions: list[Action] = []
    name, revision = pool.want.name, pool.want.revision
    targets = _old_targets(pool, share)
    for old, left in zip(pool.old, targets, strict=True):
        if left != old.workload.replicas:
            actions.append(PutWorkload(replace(old.workload, replicas=left)))
        elif left == 0 and old.alive == 0:
            actions.append(DeleteWorkload(name, old.workload.revision))
    target = _new_target(pool, targets)
    put = PutWorkload(Workload(name, revision, target, pool.want.template))
    if pool.new is None:
        came_from = f" in place of {pool.old[0].workload.revision}" if pool.old else ""
        text = f"pool {name}: {target} of {pool.replicas} instances of revision {revision}"
        actions += [put, Event("Rollout" if pool.old else "Created", text + came_from)]
    elif target != (before := pool.new.workload.replicas):
        actions += [put, Event("Scaled", f"pool {name}: {before} -> {target} instances")]
    return actions


def _held_actions(pool: _Pool, share: Fraction) -> list[Action]:
    """A scale of what runs of a pool whose rollout is paused."""
    workloads = _workloads(pool)
    actions: list[Action] = []
    for one, target in zip(workloads, _held_targets(pool, workloads, share), strict=True):
        before = one.workload.replicas
        if target != before:
            text = f"pool {pool.want.name}: {before} -> {target} instances of a paused rollout"
            put = PutWorkload(replace(one.workload, replicas=target))
            actions += [put, Event("Scaled", text)]
    return actions


def _held_targets(pool: _Pool, workloads: Sequence[WorkloadSeen], share: Fraction) -> list[int]:
    """Sizes of the revisions that are there; the newest is the last one where it has begun.

    A surge that was begun stays, so a mixed pool may have more than its replicas. What is not ready
    goes first, then what a rollout would have taken: see _old_targets.
    """
    targets = [one.workload.replicas for one in workloads]
    over = sum(targets) - (pool.most if sum(map(bool, targets)) > 1 else pool.replicas)
    floor = max(0, pool.replicas - int(pool.replicas * share))
    olds = range(len(pool.old) - 1, -1, -1)
    for index in (*range(len(pool.old), len(targets)), *olds):
        idle = targets[index] - min(targets[index], workloads[index].ready)
        taken = max(0, min(over, idle))
        targets[index] -= taken
        over -= taken
    for least in (floor, 0):
        for index in olds:
            spare = sum(targets[i] for i in olds) - least
            taken = max(0, min(over, targets[index], spare))
            targets[index] -= taken
            over -= taken
        if pool.new is not None and least == floor:
            taken = max(0, min(over, targets[-1]))
            targets[-1] -= taken
            over -= taken
    if sum(map(bool, targets)) == 1:
        targets = [min(target, pool.replicas) for target in targets]
    missing = pool.replicas - sum(targets)
    if missing > 0:
        best = max(range(len(targets)), key=lambda i: (targets[i], workloads[i].ready, i))
        others = (max(one.alive, t) for one, t in zip(workloads, targets, strict=True))
        room = pool.most - sum(others) + max(workloads[best].alive, targets[best])
        targets[best] = max(targets[best], min(targets[best] + missing, room))
    return targets


def _stop(leaving: Sequence[WorkloadSeen]) -> list[Action]:
    """Everything leaves, the router first: it finishes what it has while all engines serve, and a
    request that P has computed still finds its D. See docs/adr/0061."""
    routers = [w for w in leaving if w.workload.pool == ROUTER]
    return _leave(routers if any(w.alive for w in routers) else leaving)


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


def _is_needed(leaving: Sequence[WorkloadSeen], pools: Sequence[_Pool], share: Fraction) -> bool:
    """Whether the fleet serves with the pools that leave, not yet without, and will do so."""
    wanted, ready = Counter[str](), Counter[str]()
    for pool in pools:
        wanted[pool.want.template.role] += pool.replicas
        left = zip(pool.old, _old_targets(pool, share), strict=True)
        stays = sum(min(old.ready, target) for old, target in left)
        ready[pool.want.template.role] += stays + (pool.new.ready if pool.new else 0)
    with_leaving = Counter(ready)
    for workload in leaving:
        with_leaving[workload.workload.template.role] += workload.ready
    return _serves(wanted) and _serves(with_leaving) and not _serves(ready)


def _workloads(pool: _Pool) -> tuple[WorkloadSeen, ...]:
    return (*pool.old, pool.new) if pool.new else pool.old


def _on_trial(pool: _Pool) -> tuple[WorkloadSeen, ...]:
    return (pool.canary.seen,) if pool.canary and pool.canary.seen else ()


def _serves(instances: Counter[str]) -> bool:
    """Whether one request can be answered by so many instances of each role."""
    return bool(instances["Aggregated"] or min(instances["Prefill"], instances["Decode"]))


def _status(
    want: FleetWant,
    pools: Sequence[_Pool],
    leaving: Sequence[str],
    before: FleetProgress | None,
    now: float,
) -> FleetProgress:
    """`leaving`: a text for each pool that is wanted no more."""
    rows: list[PoolProgress] = []
    waits: list[str] = []
    for pool in pools:
        name, replicas, new = pool.want.name, pool.replicas, pool.new
        if pool.canary is not None:
            replicas, new = pool.canary.replicas, pool.canary.seen
        updated = new.ready if new else 0
        rows.append(
            PoolProgress(
                name=name,
                role=pool.want.template.role,
                replicas=replicas,
                declared=pool.want.replicas,
                ready=sum(w.ready for w in (*_workloads(pool), *_on_trial(pool))),
                revision=(pool.canary.want if pool.canary else pool.want).revision,
                updated=updated,
            )
        )
        if pool.canary is not None:
            waits.append(f"{name} {updated}/{pool.canary.target} on trial")
        elif updated < replicas:
            behind = f" (waits for {pool.waits})" if pool.waits else ""
            waits.append(f"{name} {updated}/{replicas} ready{behind}")
        going = sum(w.alive for w in pool.old) + max(0, (new.alive if new else 0) - replicas)
        if going:
            waits.append(f"{name} {going} leaving")
    waits += leaving
    if want.stopping:
        reason = "Draining" if waits else "Stopped"
    else:
        is_held = want.paused and (leaving or any(pool.is_rolling for pool in pools))
        reason = "Paused" if is_held else "Progressing" if waits else "Ready"
        if want.canary is not None and not want.paused:
            reason = "Canary" if want.canary.weight_percent else "CanaryFailed"
    ready = reason == "Ready"
    since = before.since if before and before.ready == ready else now
    return FleetProgress(ready, reason, ", ".join(waits), since, tuple(rows))
