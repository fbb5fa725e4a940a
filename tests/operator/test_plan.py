"""plan(): tables, and random rollouts and scales in virtual time."""

from __future__ import annotations

import random
from dataclasses import replace
from math import ceil

import pytest

from tests.operator.plan_world import Pool, World
from xpyd_operator.plan.fleet import plan, pool_replicas, pools_wanted
from xpyd_operator.plan.template import revision_of
from xpyd_operator.plan.values import (
    ROUTER,
    DeleteWorkload,
    DrainPool,
    Event,
    FleetSeen,
    FleetWant,
    PoolSeen,
    PoolWant,
    PutWorkload,
    SetStatus,
    Template,
    Workload,
    WorkloadSeen,
)


def pool(name: str, replicas: int | None = 1, version: str = "1") -> PoolWant:
    role = ROUTER if name == ROUTER else "Decode"
    template = Template(role, (version,))
    percents = (0, 100) if name == ROUTER else (25, 0)
    return PoolWant(name, template, revision_of(template), replicas, *percents)


class Cluster:
    """A fake of what a shell applies plans to: instances come up and go one at a time."""

    def __init__(self) -> None:
        self.seen = FleetSeen()
        self.puts: list[PutWorkload] = []
        self.deleted: list[DeleteWorkload] = []
        self.drained: list[str] = []
        self.now = 0.0

    def apply(self, want: FleetWant) -> bool:
        """Whether the plan had anything to do."""
        result = plan(want, self.seen, self.now)
        for action in result.actions:
            match action:
                case PutWorkload(workload):
                    self.puts.append(action)
                    key = (workload.pool, workload.revision)
                    rest = [w for w in self.seen.workloads if self.key(w) != key]
                    old = next((w for w in self.seen.workloads if self.key(w) == key), None)
                    new = replace(old or WorkloadSeen(workload), workload=workload)
                    self.seen = replace(self.seen, workloads=(*rest, new))
                case DrainPool(name):
                    self.drained.append(name)
                    self.change(
                        lambda w, name=name: (
                            replace(w, workload=replace(w.workload, replicas=0))
                            if w.workload.pool == name
                            else w
                        )
                    )
                case DeleteWorkload():
                    self.deleted.append(action)
                    key = (action.pool, action.revision)
                    rest = tuple(w for w in self.seen.workloads if self.key(w) != key)
                    self.seen = replace(self.seen, workloads=rest)
                case SetStatus(status):
                    pools = tuple(PoolSeen(p.name, p.replicas, p.declared) for p in status.pools)
                    self.seen = replace(self.seen, status=status, pools=pools)
                case Event():
                    pass
        again = plan(want, self.seen, self.now).actions
        assert not [a for a in again if isinstance(a, PutWorkload | DrainPool)]
        return bool(result.actions)

    @staticmethod
    def key(seen: WorkloadSeen) -> tuple[str, str]:
        return seen.workload.pool, seen.workload.revision

    def change(self, each) -> None:
        self.seen = replace(self.seen, workloads=tuple(each(w) for w in self.seen.workloads))

    def step(self, rng: random.Random) -> None:
        """One instance of one workload comes up, becomes ready, or ends."""
        self.now += rng.random()
        moves = []
        for index, w in enumerate(self.seen.workloads):
            n = w.workload.replicas
            if w.alive < n:
                moves.append((index, replace(w, alive=w.alive + 1)))
            if w.ready < min(n, w.alive):
                moves.append((index, replace(w, ready=w.ready + 1)))
            if w.alive > n:
                moves.append((index, replace(w, alive=w.alive - 1, ready=min(w.ready, n))))
        if moves:
            index, new = rng.choice(moves)
            all_ = list(self.seen.workloads)
            # A victim leaves routing when it begins to drain, not when it ends.
            all_[index] = replace(new, ready=min(new.ready, new.workload.replicas))
            self.seen = replace(self.seen, workloads=tuple(all_))

    def settle(self, want: FleetWant, rng: random.Random, check=lambda: None) -> None:
        for _ in range(2000):
            busy = self.apply(want)
            check()
            before = self.seen
            self.step(rng)
            if not busy and self.seen == before:
                return
        raise AssertionError(f"no end: {self.seen}")

    def of(self, name: str) -> dict[str, WorkloadSeen]:
        found = [w for w in self.seen.workloads if w.workload.pool == name]
        return {w.workload.revision: w for w in found}


def want(*pools: PoolWant, stopping: bool = False) -> FleetWant:
    return FleetWant("f", (pool(ROUTER), *pools), stopping)


def test_a_new_fleet_gets_every_workload_at_once():
    cluster = Cluster()
    cluster.apply(want(pool("p"), pool("d", 3)))
    found = {(put.workload.pool, put.workload.replicas) for put in cluster.puts}
    assert found == {("router", 1), ("p", 1), ("d", 3)}


def test_a_settled_fleet_asks_for_nothing_and_is_ready():
    cluster, wanted = Cluster(), want(pool("p"), pool("d", 3))
    cluster.settle(wanted, random.Random(1))
    result = plan(wanted, cluster.seen, 1e9)
    assert result.actions == ()
    assert result.recheck_after is None
    assert cluster.seen.status is not None
    assert (cluster.seen.status.ready, cluster.seen.status.reason) == (True, "Ready")


def test_a_status_names_what_it_waits_for_and_when_readiness_changed():
    cluster = Cluster()
    cluster.apply(want(pool("d", 3)))
    status = cluster.seen.status
    assert status is not None
    assert (status.ready, status.reason) == (False, "Progressing")
    assert status.message == "router 0/1 ready, d 0/3 ready"
    cluster.settle(want(pool("d", 3)), random.Random(1))
    assert cluster.seen.status is not None
    assert cluster.seen.status.since > 0


@pytest.mark.parametrize(
    ("declared", "seen", "replicas"),
    [
        (None, None, 1),
        (3, None, 3),
        (3, PoolSeen("d", 3, 3), 3),
        (3, PoolSeen("d", 5, 3), 5),  # scaled since: re-applying the document undoes nothing
        (2, PoolSeen("d", 5, 3), 2),  # the document speaks again
        (None, PoolSeen("d", 5, 3), 5),
        (0, PoolSeen("d", 5, None), 0),
    ],
)
def test_the_last_declared_replicas_win_once(declared, seen, replicas):
    assert pool_replicas(pool("d", declared), seen) == replicas


@pytest.mark.parametrize(
    ("declared", "seen", "replicas"),
    [
        (None, None, 2),
        (None, PoolSeen("d", 1, None), 2),
        (None, PoolSeen("d", 9, 3), 4),
        (3, PoolSeen("d", 9, 3), 4),
        (3, PoolSeen("d", 9, 2), 3),
    ],
)
def test_replicas_stay_within_the_pools_bounds(declared, seen, replicas):
    bounded = replace(pool("d", declared), least=2, most=4)
    assert pool_replicas(bounded, seen) == replicas
    found = pools_wanted(FleetWant("f", (bounded,)), [seen] if seen else [])
    assert found == (PoolSeen("d", replicas, declared),)


def put_replicas(want: FleetWant, *workloads: WorkloadSeen) -> dict[tuple[str, str], int]:
    """(pool, revision) -> replicas that the plan puts, by what is there."""
    sizes = tuple(PoolSeen(p.name, p.replicas or 0, p.replicas) for p in want.pools)
    actions = plan(want, FleetSeen(sizes, workloads), 0.0).actions
    found = [a.workload for a in actions if isinstance(a, PutWorkload)]
    return {(w.pool, w.revision): w.replicas for w in found}


def there(of: PoolWant, replicas: int, alive: int, ready: int) -> WorkloadSeen:
    return WorkloadSeen(Workload(of.name, of.revision, replicas, of.template), alive, ready)


@pytest.mark.parametrize(
    ("old", "new", "put"),
    [
        # (replicas, alive, ready) of the old and the new revision; what they are given. Another
        # pool's new revision is not ready, so this one gives up nothing that is ready, but for
        # more than its 2 replicas and 1 surge.
        ((3, 3, 3), (2, 2, 2), (2, 1)),
        ((3, 3, 0), (2, 2, 2), (1, None)),
        ((3, 3, 1), (2, 2, 1), (1, None)),
        ((5, 5, 5), (0, 0, 0), (2, None)),
        ((2, 2, 2), (0, 0, 0), (None, 1)),
        ((2, 4, 2), (1, 1, 0), (None, None)),
    ],
)
def test_after_a_scale_down_in_a_rollout_both_revisions_fit_and_what_is_ready_stays(old, new, put):
    before, after = pool("d", 2, "1"), pool("d", 2, "2")
    other = (there(pool("p", 1, "1"), 1, 1, 1), there(pool("p", 1, "2"), 1, 1, 0))
    wanted = FleetWant("f", (after, pool("p", 1, "2")))
    found = put_replicas(wanted, there(before, *old), there(after, *new), *other)
    assert (found.get(("d", before.revision)), found.get(("d", after.revision))) == put


def test_ready_instances_of_an_older_revision_stay_before_idle_ones_of_a_newer():
    first, second, third = (pool("d", 3, version) for version in "123")
    found = put_replicas(
        FleetWant("f", (third,)),
        there(first, 1, 1, 1), there(second, 2, 2, 1), there(third, 1, 1, 1),
    )  # fmt: skip
    assert found == {("d", second.revision): 1}


def of_role(name: str, role: str, replicas: int = 1) -> PoolWant:
    template = Template(role, ("1",))  # type: ignore[arg-type]
    return PoolWant(name, template, revision_of(template), replicas)


P, D, A = (of_role(*each) for each in (("p", "Prefill"), ("d", "Decode"), ("a", "Aggregated")))
D2 = replace(D, name="d2")


@pytest.mark.parametrize(
    ("pools", "gone", "drained"),
    [
        # (pool, ready) of the document's pools and of those that left it; whether they go now.
        ([(P, 1), (D2, 0)], [(D, 1)], False),  # nothing else decodes, and D2 is on its way
        ([(P, 1), (D2, 1)], [(D, 1)], True),
        ([(P, 1), (D2, 0)], [(D, 0)], True),  # it serves nothing itself
        ([(P, 0), (D2, 0)], [(D, 1)], True),  # nor does it here
        ([(A, 0)], [(P, 1), (D, 1)], False),
        ([(A, 1)], [(P, 1), (D, 1)], True),
        ([(P, 1), (D, 0)], [(A, 2)], False),
        ([(P, 1), (replace(D2, replicas=0), 0)], [(D, 1)], True),  # nobody wants it to serve
    ],
)
def test_a_pool_that_left_the_document_stays_while_its_successor_is_not_ready(pools, gone, drained):
    wanted = FleetWant("f", tuple(p for p, _ in pools))
    found = [there(p, p.replicas or 0, ready, ready) for p, ready in (*pools, *gone)]
    sizes = tuple(PoolSeen(p.name, p.replicas or 0, p.replicas) for p, _ in pools)
    actions = plan(wanted, FleetSeen(sizes, tuple(found)), 0.0).actions
    assert {a.pool for a in actions if isinstance(a, DrainPool)} == (
        {p.name for p, _ in gone} if drained else set()
    )
    (status,) = [a.status for a in actions if isinstance(a, SetStatus)]
    assert ("leave when others serve" in status.message) is not drained
    stopping = plan(replace(wanted, stopping=True), FleetSeen(sizes, tuple(found)), 0.0).actions
    assert {p.name for p, _ in gone} <= {a.pool for a in stopping if isinstance(a, DrainPool)}


def test_routers_with_a_surge_are_replaced_one_after_the_other():
    def routers(version: str) -> PoolWant:
        return replace(pool(ROUTER, 2, version), surge_percent=25, unavailable_percent=0)

    cluster, rng = Cluster(), random.Random(5)
    cluster.settle(FleetWant("f", (routers("1"), pool("d"))), rng)

    def check():
        assert ready(cluster, ROUTER) >= 2
        assert alive(cluster, ROUTER) <= 3

    cluster.settle(FleetWant("f", (routers("2"), pool("d"))), rng, check)
    assert list(cluster.of(ROUTER)) == [routers("2").revision]


def test_scaling_one_pool_puts_only_that_pools_workload():
    cluster, wanted = Cluster(), want(pool("p"), pool("d", 3))
    cluster.settle(wanted, random.Random(1))
    cluster.puts.clear()
    pools = tuple(replace(p, replicas=2) if p.name == "d" else p for p in cluster.seen.pools)
    cluster.seen = replace(cluster.seen, pools=pools)
    cluster.settle(wanted, random.Random(1))
    assert [(p.workload.pool, p.workload.replicas) for p in cluster.puts] == [("d", 2)]
    cluster.settle(want(pool("p"), pool("d", 3)), random.Random(1))
    assert cluster.of("d")[pool("d").revision].alive == 2


def test_adding_and_removing_a_pool_touches_no_other():
    cluster = Cluster()
    cluster.settle(want(pool("p"), pool("d", 3)), random.Random(1))
    cluster.puts.clear()
    cluster.settle(want(pool("p"), pool("d", 3), pool("e", 2)), random.Random(1))
    assert {p.workload.pool for p in cluster.puts} == {"e"}
    cluster.puts.clear()
    cluster.settle(want(pool("p"), pool("d", 3)), random.Random(1))
    assert cluster.puts == []
    assert cluster.drained == ["e"]
    assert [a.pool for a in cluster.deleted] == ["e"]


def test_engines_are_drained_after_the_last_router_has_gone():
    cluster, rng = Cluster(), random.Random(1)
    cluster.settle(want(pool("p"), pool("d", 3)), rng)

    def check():
        if {"p", "d"} & set(cluster.drained):
            assert all(w.alive == 0 for w in cluster.seen.workloads if w.workload.pool == ROUTER)

    cluster.settle(want(pool("p"), pool("d", 3), stopping=True), rng, check)
    assert cluster.seen.workloads == ()
    assert cluster.seen.status is not None
    assert cluster.seen.status.reason == "Stopped"


def test_a_new_router_waits_until_the_old_one_left_its_address():
    cluster, rng = Cluster(), random.Random(1)
    cluster.settle(want(pool("d")), rng)
    changed = FleetWant("f", (pool(ROUTER, 1, "2"), pool("d")))
    cluster.settle(changed, rng, lambda: alive_at_most(cluster, ROUTER, 1))
    assert list(cluster.of(ROUTER)) == [pool(ROUTER, 1, "2").revision]


def alive_at_most(cluster: Cluster, name: str, most: int) -> None:
    assert sum(w.alive for w in cluster.of(name).values()) <= most
    assert sum(w.workload.replicas for w in cluster.of(name).values()) <= most


def test_pools_that_change_together_give_up_old_instances_together():
    """Each revision keeps both sides while the other one still carries load."""
    cluster, rng = Cluster(), random.Random(3)
    cluster.settle(want(pool("p"), pool("d", 3)), rng)
    changed = want(pool("p", 1, "2"), pool("d", 3, "2"))
    old_p, old_d = pool("p").revision, pool("d").revision

    def check():
        olds = cluster.of("d").get(old_d), cluster.of("p").get(old_p)
        if olds[0] and olds[0].ready:
            assert olds[1] is not None
            assert olds[1].ready

    cluster.settle(changed, rng, check)
    assert list(cluster.of("p")) == [pool("p", 1, "2").revision]
    assert cluster.of("d")[pool("d", 3, "2").revision].ready == 3


ROOM = 9


def roll_4p4d(unavailable: int) -> tuple[World, set[str]]:
    """A rollout of 4P4D on nodes with room for 9 engines, to its end or where it stops; and the
    pools that were ever short of what they may have."""
    world = World(random.Random(1))
    world.pools = {"p": Pool("p", "Prefill", 0, 4), "d": Pool("d", "Decode", 0, 4)}
    world.expected = {"p": 4, "d": 4}
    world.surge, world.unavailable, world.is_tight = 25, 0, False
    world.router = Pool(ROUTER, ROUTER, replicas=1, least=1)
    world.settle()
    world.unavailable = unavailable
    world.room = lambda *, all_of_it: ROOM + 1  # and the router
    world.is_tight = True
    for pool_ in world.pools.values():
        pool_.version = 1
    short: set[str] = set()
    for _ in range(60):
        world.turn()
        world.progress(all_of_it=True)
        short |= {n for n in "pd" if sum(o.ready for o in world.of(n)) < 4 - (unavailable > 0)}
    return world, short


def test_pools_on_full_nodes_replace_each_other_by_what_may_be_unavailable():
    world, short = roll_4p4d(unavailable=25)
    assert {(o.workload.pool, o.ready) for o in world.running.values()} >= {("p", 4), ("d", 4)}
    assert all(len(world.of(name)) == 1 for name in "pd")
    assert not short


def test_pools_that_must_stay_complete_wait_for_room_and_lose_nothing():
    world, short = roll_4p4d(unavailable=0)
    assert any(one.unplaced for one in world.running.values())
    assert not short
    assert world.status is not None
    assert world.status.reason == "Progressing"


def test_a_large_fleet_is_rolled_out_in_steps_of_its_surge():
    world = World(random.Random(1))
    world.pools = {
        "p": Pool("p", "Prefill", 0, 8, most=16),
        "d": Pool("d", "Decode", 0, 16, most=16),
    }
    world.expected = {"p": 8, "d": 16}
    world.surge, world.unavailable, world.is_tight = 25, 0, False
    world.settle()
    for pool_ in world.pools.values():
        pool_.version = 1
    starts = 0
    while any(len(world.of(name)) > 1 for name in "pd") or not starts:
        world.turn()
        starts += any(one.missing() for one in world.running.values())
        world.progress(all_of_it=True)
    assert starts <= 6, "one by one, it would be 16"


def test_events_carry_the_numbers():
    cluster = Cluster()
    cluster.settle(want(pool("d", 3)), random.Random(1))
    actions = plan(want(pool("d", 2)), cluster.seen, 0).actions
    assert Event("Scaled", "pool d: 3 -> 2 instances") in actions


def mutate(pools: dict[str, PoolWant], rng: random.Random) -> None:
    """Add, remove, change and resize pools, each with some chance."""
    for name in ("p", "d", "e"):
        roll = rng.random()
        if name not in pools:
            if roll < 0.3:
                pools[name] = pool(name, rng.randint(0, 4))
        elif roll < 0.15 and len(pools) > 1:
            del pools[name]
        elif roll < 0.4:
            pools[name] = pool(name, pools[name].replicas, rng.choice("123"))
        elif roll < 0.6:
            pools[name] = replace(pools[name], replicas=rng.randint(0, 5))


@pytest.mark.parametrize("seed", range(150))
def test_random_rollouts_and_scales_converge_and_keep_their_capacity(seed):
    rng, cluster = random.Random(seed), Cluster()
    pools = {name: pool(name, rng.randint(0, 4)) for name in "pde"[: rng.randint(1, 3)]}
    cluster.settle(want(*pools.values()), rng)
    for _ in range(4):
        old = dict(pools)
        mutate(pools, rng)
        wanted = want(*pools.values())
        same = {n: cluster.of(n) for n in pools if pools[n] == old.get(n)}
        untouched = {n: w for n, w in same.items() if len(w) == 1 and settled(w)}
        sizes = {n: (ready(cluster, n), pools[n].replicas or 0) for n in pools}
        cluster.puts.clear()

        def check(sizes=sizes):
            for name, (had, replicas) in sizes.items():
                assert ready(cluster, name) >= min(had, replicas)
                assert alive(cluster, name) <= max(had, replicas) + ceil(replicas / 4)

        if rng.random() < 0.3:  # overtaken half-way by the next change
            for _ in range(rng.randint(1, 12)):
                cluster.apply(wanted)
                cluster.step(rng)
        else:
            if len(old) == len(pools) and all(settled(cluster.of(n)) for n in pools):
                cluster.settle(wanted, rng, check)
            cluster.settle(wanted, rng)
        assert not [p for p in cluster.puts if p.workload.pool in untouched]
        assert all(cluster.of(n) == w for n, w in untouched.items())
    cluster.settle(want(*pools.values()), rng)
    for name, last in pools.items():
        assert list(cluster.of(name)) == [last.revision]
        assert cluster.of(name)[last.revision].ready == last.replicas
    assert cluster.seen.status is not None
    assert cluster.seen.status.ready


def ready(cluster: Cluster, name: str) -> int:
    return sum(w.ready for w in cluster.of(name).values())


def alive(cluster: Cluster, name: str) -> int:
    return sum(w.alive for w in cluster.of(name).values())


def settled(workloads: dict[str, WorkloadSeen]) -> bool:
    return all(w.ready == w.alive == w.workload.replicas for w in workloads.values())
