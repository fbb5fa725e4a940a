"""A small world for plan(): a document, pool objects, and workloads that start and end instances.

Instances are counted, not named: starting, ready and draining ones of each workload. A workload
that asks for fewer gives up what is not ready first, as Deployments do; a draining instance is
alive until it ends. Nothing happens by itself: the walk says when an instance starts, becomes
ready, ends or dies. `World.turn` plans, applies and checks what must hold after every step.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from xpyd_operator.plan.fleet import plan, pools_wanted
from xpyd_operator.plan.template import revision_of
from xpyd_operator.plan.values import (
    ROUTER,
    DeleteWorkload,
    DrainPool,
    FleetProgress,
    FleetSeen,
    FleetWant,
    PoolRole,
    PoolSeen,
    PoolWant,
    PutWorkload,
    SetStatus,
    Template,
    Workload,
    WorkloadSeen,
)

ROLES: dict[str, PoolRole] = {
    "p": "Prefill",
    "q": "Prefill",
    "d": "Decode",
    "e": "Decode",
    "a": "Aggregated",
}
Key = tuple[str, str]


@dataclass
class Running:
    """One workload and its instances."""

    workload: Workload
    starting: int = 0
    ready: int = 0
    draining: int = 0
    unplaced: int = 0
    """Of those that start: no node has room for them."""
    cordoned: int = 0
    """Of those that are ready: their nodes take no new pods."""

    @property
    def alive(self) -> int:
        return self.starting + self.ready + self.draining

    def ask_for(self, replicas: int) -> None:
        """What a Deployment does at once when its replicas change; starting more takes time."""
        self.workload = replace(self.workload, replicas=replicas)
        over = max(0, self.starting + self.ready - replicas)
        idle = min(over, self.starting)
        self.starting -= idle
        self.unplaced = max(0, self.unplaced - idle)
        self.ready -= over - idle
        # By its cost one on a cordoned node goes before the others.
        self.cordoned = max(0, self.cordoned - (over - idle))
        # One that never was ready has nothing to finish.
        self.draining += over - idle

    def missing(self) -> int:
        return max(0, self.workload.replicas - self.starting - self.ready)


@dataclass
class Pool:
    """A pool as the document has it."""

    name: str
    role: PoolRole
    version: int = 0
    replicas: int | None = 1
    least: int = 0
    most: int = 6

    def want(self, surge: int, unavailable: int) -> PoolWant:
        template, revision = template_of(self.role, self.version)
        bounds = {"least": self.least, "most": self.most}
        percents = surge, unavailable
        return PoolWant(self.name, template, revision, self.replicas, *percents, **bounds)


@cache
def template_of(role: PoolRole, version: int) -> tuple[Template, str]:
    template = Template(role, (str(version),))
    return template, revision_of(template)


class World:
    """One fleet from its first plan to its end."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.router_surge = rng.choice((0, 25))
        self.surge = rng.choice((0, 1, 25, 50, 100))
        self.unavailable = rng.choice((0, 25, 100)) if self.surge else rng.choice((25, 100))
        self.is_tight = self.unavailable > 0 and rng.random() < 0.5
        """Whether nodes have room for no more than all pools' replicas, and at times for less."""
        most_routers = 3 if self.router_surge else 1
        self.router = Pool(ROUTER, ROUTER, replicas=rng.randint(1, most_routers), least=1)
        self.expected: dict[str, int] = {}
        """Replicas of each pool by who spoke last: the document when it changed, or a scale."""
        self.pools = {name: self.new_pool(name) for name in rng.sample(list(ROLES), 2)}
        self.sizes: dict[str, PoolSeen] = {}
        self.running: dict[Key, Running] = {}
        self.status: FleetProgress | None = None
        self.stopping = False
        self.paused = False
        self.earlier: list[dict[str, int]] = []
        """Versions of the pools before each change of a template."""
        self.now = 0.0

    def new_pool(self, name: str) -> Pool:
        declared = self.rng.choice((None, self.rng.randint(0, 4)))
        self.expected[name] = 1 if declared is None else declared
        return Pool(name, ROLES[name], self.rng.randint(0, 2), declared)

    # What plan() is given.

    def want(self) -> FleetWant:
        missing = 25 if self.router_surge else 100
        router = self.router.want(self.router_surge, missing)
        pools = (p.want(self.surge, self.unavailable) for p in self.pools.values())
        return FleetWant("f", (router, *pools), self.stopping, self.paused)

    def seen(self) -> FleetSeen:
        found = tuple(
            WorkloadSeen(r.workload, r.alive, r.ready, r.unplaced, r.cordoned)
            for r in self.running.values()
        )
        return FleetSeen(tuple(self.sizes.values()), found, self.status)

    # What happens to it.

    def turn(self) -> bool:
        """Plan, apply, check. Whether there was anything to do."""
        want, seen = self.want(), self.seen()
        before = {key: replace(one) for key, one in self.running.items()}
        planned = plan(want, seen, self.now)
        again = plan(want, applied(seen, planned.actions), self.now).actions
        # What never had an instance may be forgotten at once; nothing else is left to do.
        assert all(isinstance(action, DeleteWorkload) for action in again), again
        for action in planned.actions:
            self.apply(action)
        self.check(want, seen, before)
        return bool(planned.actions)

    def check(self, want: FleetWant, seen: FleetSeen, before: dict[Key, Running]) -> None:
        check_step(want, seen, before, self)

    def apply(self, action: object) -> None:
        match action:
            case PutWorkload(workload):
                one = self.running.setdefault(
                    (workload.pool, workload.revision), Running(replace(workload, replicas=0))
                )
                one.ask_for(workload.replicas)
            case DrainPool(name):
                for one in self.of(name):
                    one.ask_for(0)
            case DeleteWorkload(name, revision):
                one = self.running.pop((name, revision))
                assert one.alive == one.workload.replicas == 0
            case SetStatus(status):
                self.status = status
                self.sizes = {
                    p.name: PoolSeen(p.name, p.replicas, p.declared) for p in status.pools
                }
            case _:
                pass

    def of(self, name: str) -> list[Running]:
        return [one for (pool, _), one in self.running.items() if pool == name]

    def progress(self, *, all_of_it: bool = False) -> None:
        """Instances start, become ready and end: some of them, or all."""
        some = (lambda n: n) if all_of_it else (lambda n: self.rng.randint(0, n))
        free = self.room(all_of_it=all_of_it) - sum(
            one.alive - one.unplaced for one in self.running.values()
        )
        for one in self.running.values():
            started, ended = some(one.missing()), some(one.draining)
            placed = max(0, min(free, one.unplaced + started))
            one.unplaced += started - placed
            ready = some(one.starting + started - one.unplaced)
            one.ready += ready
            one.starting += started - ready
            one.draining -= ended
            free += ended - placed

    def room(self, *, all_of_it: bool) -> int:
        """Instances that the nodes have room for."""
        if not self.is_tight:
            return 1000
        sizes = pools_wanted(self.want(), self.sizes.values())
        left = {name for name, _ in self.running} - {pool.name for pool in sizes}
        leaving = sum(one.workload.replicas for name in left for one in self.of(name))
        most = leaving + sum(pool.replicas for pool in sizes)
        return most if all_of_it else self.rng.randint(0, most)

    def misfortune(self) -> None:
        """Some instances of one workload die, or are ready no more."""
        one = self.rng.choice(list(self.running.values()))
        lost = self.rng.randint(0, one.ready)
        one.ready -= lost
        one.cordoned = min(one.cordoned, one.ready)
        if self.rng.random() < 0.5:
            one.starting += lost
        one.starting = self.rng.randint(0, one.starting)
        one.unplaced = min(one.unplaced, one.starting)

    def cordon(self) -> None:
        """Somebody cordons the nodes of some instances, or uncordons them."""
        for one in self.running.values():
            one.cordoned = self.rng.randint(0, one.ready)

    def edit(self) -> None:
        """Somebody changes the document, or scales a pool."""
        edits = (
            self.change_templates,
            self.change_templates,
            self.change_bounds,
            self.declare_replicas,
            self.scale,
            self.scale,
            self.add_or_remove_a_pool,
            self.change_router,
            self.undo,
            self.pause_or_resume,
            self.cordon,
        )
        self.rng.choice(edits)()

    def undo(self) -> None:
        """All pools go back to what they were, whatever is under way."""
        for name, version in self.earlier.pop().items() if self.earlier else ():
            if name in self.pools:
                self.pools[name].version = version

    def pause_or_resume(self) -> None:
        self.paused = not self.paused

    def change_templates(self) -> None:
        self.earlier.append({name: pool.version for name, pool in self.pools.items()})
        for pool in self.rng.sample(
            list(self.pools.values()), self.rng.randint(1, len(self.pools))
        ):
            pool.version = self.rng.randint(0, 2)

    def change_bounds(self) -> None:
        pool = self.rng.choice(list(self.pools.values()))
        pool.least = self.rng.randint(0, 2)
        pool.most = self.rng.randint(max(1, pool.least), 6)
        if pool.replicas is not None:  # the API refuses a declaration out of bounds
            self.declare(pool, max(pool.least, min(pool.replicas, pool.most)))
        expected = self.expected[pool.name]
        self.expected[pool.name] = max(pool.least, min(expected, pool.most))

    def declare_replicas(self) -> None:
        pool = self.rng.choice(list(self.pools.values()))
        self.declare(pool, self.rng.choice((None, self.rng.randint(pool.least, pool.most))))

    def declare(self, pool: Pool, replicas: int | None) -> None:
        if replicas not in (None, pool.replicas):
            self.expected[pool.name] = replicas
        pool.replicas = replicas

    def scale(self) -> None:
        """Within bounds: the API refuses others."""
        pool = self.rng.choice(list(self.pools.values()))
        if pool.name in self.sizes:
            to = self.rng.randint(pool.least, pool.most)
            self.sizes[pool.name] = replace(self.sizes[pool.name], replicas=to)
            self.expected[pool.name] = to

    def add_or_remove_a_pool(self) -> None:
        name, other = self.rng.sample(list(ROLES), 2)
        if name not in self.pools:
            self.pools[name] = self.new_pool(name)
        elif len(self.pools) > 1:
            del self.pools[name]
        if other not in self.pools and self.rng.random() < 0.5:  # replaced in the same edit
            self.pools[other] = self.new_pool(other)

    def change_router(self) -> None:
        self.router.version = self.rng.randint(0, 2)
        if self.router_surge:
            self.router.replicas = self.rng.randint(1, 3)

    def settle(self) -> None:
        """Nobody interferes: everything that is wanted comes about, and then nothing more."""
        if self.paused and not self.stopping:
            self.come_to_rest()
            self.check_paused()
            self.paused = False
        self.come_to_rest()
        if self.is_tight:  # who waits for room elsewhere may stay after all
            for one in self.running.values():
                one.cordoned = 0
            self.come_to_rest()
        if self.stopping:
            assert self.running == {}
            return
        want = self.want()
        sizes = {pool.name: pool.replicas for pool in pools_wanted(want, self.sizes.values())}
        found = {
            key: (one.workload.replicas, one.ready, one.alive) for key, one in self.running.items()
        }
        assert found == {(p.name, p.revision): (sizes[p.name],) * 3 for p in want.pools}
        assert self.status is not None
        assert self.status.ready
        for pool in want.pools:  # nobody is left alone on a node that takes no new pods
            one = self.running[pool.name, pool.revision]
            moves = sizes[pool.name] == 1 and pool.surge_percent and not self.is_tight
            assert not (moves and one.cordoned)

    def check_paused(self) -> None:
        """Each pool is complete in the revisions that it has."""
        want = self.want()
        for pool, size in zip(want.pools, pools_wanted(want, self.sizes.values()), strict=True):
            have = self.of(pool.name)
            room = size.replicas + ceil(size.replicas * pool.surge_percent / 100)
            assert size.replicas <= sum(one.workload.replicas for one in have) <= room
            if not self.is_tight:
                assert all(one.ready == one.alive == one.workload.replicas for one in have)

    def come_to_rest(self) -> None:
        """Until nothing moves."""
        for _ in range(100):
            before = {key: replace(one) for key, one in self.running.items()}
            busy = self.turn()
            self.progress(all_of_it=True)
            if not busy and self.running == before:
                break
        else:
            raise AssertionError(f"no end: {self.seen()}")


def applied(seen: FleetSeen, actions: Sequence[object]) -> FleetSeen:
    """What is there when the actions have been carried out and no instance has moved yet."""
    found = {(w.workload.pool, w.workload.revision): w for w in seen.workloads}
    pools, status = seen.pools, seen.status
    for action in actions:
        match action:
            case PutWorkload(workload):
                key = (workload.pool, workload.revision)
                found[key] = replace(found.get(key, WorkloadSeen(workload)), workload=workload)
            case DrainPool(name):
                for key in [key for key in found if key[0] == name]:
                    none = replace(found[key].workload, replicas=0)
                    found[key] = replace(found[key], workload=none)
            case DeleteWorkload(name, revision):
                del found[name, revision]
            case SetStatus(new):
                pools = tuple(PoolSeen(p.name, p.replicas, p.declared) for p in new.pools)
                status = new
            case _:
                pass
    return FleetSeen(pools, tuple(found.values()), status)


def check_step(want: FleetWant, seen: FleetSeen, before: dict[Key, Running], world: World) -> None:
    """What every single plan must keep, applied to `before`."""
    wanted = {pool.name: pool for pool in want.pools}
    if want.stopping:
        check_router_is_first(before, world)
        return
    sizes = {pool.name: pool.replicas for pool in pools_wanted(want, seen.pools)}
    for name, pool in wanted.items():
        assert pool.least <= sizes[name] <= pool.most
        assert name == ROUTER or sizes[name] == world.expected[name]
        check_pool(want, pool, sizes[name], before, world)
        if want.paused:
            check_held(pool, sizes[name], before, world)
    if want.paused:
        for key, one in before.items():  # a pool that left the document stays
            assert key[0] in wanted or world.running[key].workload == one.workload
    check_revisions_move_together(want, sizes, before, world)
    check_the_fleet_serves(want, sizes, before, world)


def check_pool(
    want: FleetWant, pool: PoolWant, size: int, before: dict[Key, Running], world: World
) -> None:
    """Bounds and capacity of one pool."""
    old = [one for (name, _), one in before.items() if name == pool.name]
    new = world.of(pool.name)
    room = size + ceil(size * pool.surge_percent / 100)
    assert sum(one.workload.replicas for one in new) <= room
    assert sum(one.alive - one.draining for one in new) <= room
    grown = [
        one
        for one in new
        if one.workload.replicas
        > (before[key].workload.replicas if (key := key_of(one)) in before else 0)
    ]
    for one in grown:
        assert want.paused or one.workload.revision == pool.revision
        others = [other for other in new if other is not one]
        # Only what is free is taken: an instance that still drains has its device yet.
        assert one.workload.replicas + sum(other.alive for other in others) <= room or not others
    had, has = sum(one.ready for one in old), sum(one.ready for one in new)
    assert has >= min(had, size - unavailable(want, pool, size, before))


def check_held(pool: PoolWant, size: int, before: dict[Key, Running], world: World) -> None:
    """No revision begins beside an older one, and none gives way: sizes follow a scale alone."""
    had = [one for one in before.values() if one.workload.pool == pool.name]
    if not any(o.workload.replicas for o in had if o.workload.revision != pool.revision):
        return
    assert {key_of(one) for one in world.of(pool.name)} == {key_of(one) for one in had}
    sizes = [one.workload.replicas for one in had]
    room = size + (ceil(size * pool.surge_percent / 100) if sum(map(bool, sizes)) > 1 else 0)
    if size <= sum(sizes) <= room:
        assert [one.workload.replicas for one in world.of(pool.name)] == sizes


def is_rolling(pool: PoolWant, before: dict[Key, Running]) -> bool:
    return any(o.alive for (n, r), o in before.items() if n == pool.name and r != pool.revision)


def unavailable(want: FleetWant, pool: PoolWant, size: int, before: dict[Key, Running]) -> int:
    """Instances that may be missing: none while new ones have room."""
    rolling = [(p.name, p.revision) for p in want.pools if is_rolling(p, before)]
    is_tight = any(before[key].unplaced for key in rolling if key in before)
    if pool.surge_percent and size and not (is_tight and is_rolling(pool, before)):
        return 0
    return max(1, size * pool.unavailable_percent // 100) if pool.unavailable_percent else 0


def key_of(one: Running) -> Key:
    return one.workload.pool, one.workload.revision


def check_revisions_move_together(
    want: FleetWant, sizes: dict[str, int], before: dict[Key, Running], world: World
) -> None:
    """No pool keeps less of its old revisions than the slowest of the pools in rollout needs."""
    rolling = [
        pool
        for pool in want.pools
        if sizes[pool.name]
        and unavailable(want, pool, sizes[pool.name], before) < sizes[pool.name]
        and is_rolling(pool, before)
    ]
    for pool in rolling:
        size = sizes[pool.name]
        old = sum(o.ready for (n, r), o in before.items() if n == pool.name and r != pool.revision)
        kept = sum(o.ready for o in world.of(pool.name) if o.workload.revision != pool.revision)
        for other in rolling:
            new = before.get((other.name, other.revision))
            ready = min(new.ready, sizes[other.name]) if new else 0
            fewer = unavailable(want, pool, size, before)
            assert kept >= min(old, size - size * ready // sizes[other.name] - fewer)


def check_the_fleet_serves(
    want: FleetWant, sizes: dict[str, int], before: dict[Key, Running], world: World
) -> None:
    """A fleet that answers goes on to, unless its own sizes forbid it."""
    wanted = {pool.name: pool for pool in want.pools}
    could, does, will = Counter[str](), Counter[str](), Counter[str]()
    for name in {name for name, _ in before}:
        had = sum(one.ready for (pool, _), one in before.items() if pool == name)
        role = ROLES.get(name, ROUTER)
        fewer = unavailable(want, wanted[name], sizes[name], before) if name in sizes else 0
        could[role] += max(0, min(had, sizes[name] - fewer)) if name in sizes else had
        does[role] += sum(one.ready for one in world.of(name))
    for name, size in sizes.items():
        will[wanted[name].template.role] += size
    if serves(could) and serves(will):
        assert serves(does)


def serves(instances: Counter[str]) -> bool:
    return bool(instances["Aggregated"] or (instances["Prefill"] and instances["Decode"]))


def check_router_is_first(before: dict[Key, Running], world: World) -> None:
    """The router finishes its requests while all engines serve."""
    if any(o.alive for (name, _), o in before.items() if name == ROUTER):
        for key, one in before.items():
            if key[0] != ROUTER:
                assert world.running[key].workload.replicas == one.workload.replicas
