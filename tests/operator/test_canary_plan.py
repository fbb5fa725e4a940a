"""A revision on trial beside the one that runs: plan() as a pure function, and random walks."""

from __future__ import annotations

import random
from dataclasses import replace
from math import ceil

import pytest

from tests.operator.plan_world import Key, Running, World, key_of
from tests.operator.test_canary import Cluster, all_at, begun, fleet
from xpyd_operator.controller.decision.kinds import DEPLOYMENT
from xpyd_operator.document.rollout import Canary, CanaryAnalysis
from xpyd_operator.plan.canary import stable_revisions
from xpyd_operator.plan.fleet import plan, pools_wanted
from xpyd_operator.plan.values import (
    ROUTER,
    CanaryStage,
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
from xpyd_operator.status.canary import CanaryReport, CanaryState, Phase, advance
from xpyd_operator.status.children import condition
from xpyd_operator.status.children import key_of as key_of_object

P, D = Template("Prefill"), Template("Decode")
STABLE = (("p", "old"), ("d", "old"))
SIZES = (PoolSeen("p", 4, 4), PoolSeen("d", 8, 8))


def seen(*found: tuple[str, str, int, int], sizes: tuple[PoolSeen, ...] = SIZES) -> FleetSeen:
    """Workloads as pool, revision, replicas and ready instances."""
    roles = {"p": P, "d": D}
    return FleetSeen(
        sizes,
        tuple(
            WorkloadSeen(Workload(pool, revision, size, roles[pool]), size, ready)
            for pool, revision, size, ready in found
        ),
    )


def wanted(weight: int = 10, *, may_begin: bool = True, **fields: int) -> FleetWant:
    pools = PoolWant("p", P, "new", 4, **fields), PoolWant("d", D, "new", 8, **fields)
    return FleetWant("f", pools, canary=CanaryStage(STABLE, weight, may_begin))


def puts(want: FleetWant, found: FleetSeen) -> list[tuple[str, str, int]]:
    actions = plan(want, found, 0.0).actions
    made = [a.workload for a in actions if isinstance(a, PutWorkload)]
    return [(one.pool, one.revision, one.replicas) for one in made]


OLD = (("p", "old", 4, 4), ("d", "old", 8, 8))


@pytest.mark.parametrize(
    ("weight", "surge", "sizes"),
    [(1, 25, (1, 1)), (10, 25, (1, 1)), (20, 25, (1, 2)), (90, 25, (1, 2)), (50, 100, (2, 4))],
)
def test_a_canary_has_what_its_weight_asks_for_within_the_surge(
    weight: int, surge: int, sizes: tuple[int, int]
) -> None:
    made = puts(wanted(weight, surge_percent=surge), seen(*OLD))
    assert made == [("p", "new", sizes[0]), ("d", "new", sizes[1])]


def test_a_pool_without_a_surge_gives_up_what_may_be_unavailable() -> None:
    want = wanted(50, surge_percent=0, unavailable_percent=25)
    assert puts(want, seen(*OLD)) == [("p", "old", 3), ("d", "old", 6)]
    gone = seen(("p", "old", 3, 3), ("d", "old", 6, 6))
    assert puts(want, gone) == [("p", "new", 1), ("d", "new", 2)]


@pytest.mark.parametrize(
    ("rollout", "is_tight"),
    [({"surge_percent": 0}, False), ({}, True)],
    ids=["no surge", "no node has room"],
)
def test_the_only_instance_of_a_pool_stays_beside_one_on_trial(
    rollout: dict[str, int], *, is_tight: bool
) -> None:
    want = wanted(50, unavailable_percent=25, **rollout)
    alone = (PoolSeen("p", 1, 4), PoolSeen("d", 1, 8))
    found = seen(("p", "old", 1, 1), ("d", "old", 1, 1), sizes=alone)
    if is_tight:
        waits = [
            WorkloadSeen(Workload(pool, "new", 1, role), 1, 0, unplaced=1)
            for pool, role in (("p", P), ("d", D))
        ]
        found = replace(found, workloads=(*found.workloads, *waits))
    assert puts(want, found) == []


def test_a_canary_without_room_for_its_instances_says_so_and_is_not_promoted() -> None:
    rules = {"maxSurgePercent": 0, "maxUnavailablePercent": 25}
    before, after = fleet(**rules), fleet("image:1", **rules)
    for pool in (*before["spec"]["pools"], *after["spec"]["pools"]):
        pool["replicas"] = 1
    cluster = Cluster(before)
    cluster.settle()
    cluster.edit(after)
    cluster.settle()
    cluster.say()
    cluster.settle()
    assert (cluster.canary.phase, cluster.sizes()) == ("Running", all_at(1, 0))
    reason, message = cluster.progressing()
    assert reason == "Canary"
    assert "prefill, decode: one instance, and no surge" in message


@pytest.mark.parametrize("phase", ["Running", "Failed"])
def test_an_edit_with_mistakes_in_a_canary_changes_nothing_but_the_status(phase: Phase) -> None:
    cluster, wrong = begun(), fleet("image:2")
    wrong["spec"]["pools"][0]["template"] = {"spec": {"restartPolicy": "Never"}}
    if phase == "Failed":
        cluster.say(failed=100)
        cluster.turn()  # what was on trial is asked to go, and its workload is still there
    before, file = instances(cluster), cluster.file
    assert len(before) == (5 if phase == "Running" else 3)
    assert cluster.canary.phase == phase
    cluster.edit(wrong)
    for _ in range(4):
        cluster.turn()
        assert condition(cluster.found, "Degraded")["reason"] == "InvalidTemplate"
        assert (instances(cluster), cluster.file) == (before, file)
    cluster.edit(fleet("image:1"))
    cluster.settle()
    assert (instances(cluster), cluster.canary.phase) == (before, phase)


def instances(cluster: Cluster) -> dict[object, int]:
    """By pool and revision, of those that are asked for."""
    found = cluster.children[DEPLOYMENT].values()
    return {key_of_object(one): size for one in found if (size := one["spec"]["replicas"])}


def test_no_instance_of_a_canary_begins_before_routers_know_of_it() -> None:
    assert puts(wanted(may_begin=False), seen(*OLD)) == []
    begun = seen(*OLD, ("p", "new", 1, 0), ("d", "new", 1, 1))
    assert puts(wanted(may_begin=False), begun) == []


def test_a_canary_that_failed_goes_and_the_old_revision_is_scaled_as_ever() -> None:
    found = seen(*OLD, ("p", "new", 1, 1), ("d", "new", 1, 0))
    assert puts(wanted(0), found) == [("p", "new", 0), ("d", "new", 0)]
    grown = (PoolSeen("p", 6, 4), PoolSeen("d", 8, 8))
    assert puts(wanted(0), seen(*OLD, sizes=grown)) == [("p", "old", 6)]
    made = plan(wanted(0), seen(*OLD), 0.0).actions
    (status,) = [one.status for one in made if isinstance(one, SetStatus)]
    assert (status.reason, status.ready) == ("CanaryFailed", False)


def test_a_scale_during_a_canary_moves_the_old_revision() -> None:
    begun = (("p", "new", 1, 1), ("d", "new", 1, 1))
    more = (PoolSeen("p", 7, 4), PoolSeen("d", 2, 8))
    assert puts(wanted(), seen(*OLD, *begun, sizes=more)) == [("p", "old", 7), ("d", "old", 2)]


def test_a_pause_keeps_a_canary_from_growing() -> None:
    begun = seen(*OLD, ("p", "new", 1, 1), ("d", "new", 1, 1))
    assert puts(replace(wanted(90), paused=True), begun) == []
    assert puts(wanted(90), begun) == [("d", "new", 2)]


def test_pools_that_left_the_document_stay_with_the_old_revision() -> None:
    want = FleetWant("f", (wanted().pools[0],), canary=CanaryStage(STABLE, 10))
    left = seen(*OLD)
    assert puts(want, left) == [("p", "new", 1)]
    text = next(a.status.message for a in plan(want, left, 0.0).actions if isinstance(a, SetStatus))
    assert "d 8 stay with the old revision" in text


@pytest.mark.parametrize("phase", ["Running", "Failed", "Promoted"])
def test_what_stays_is_kept_over_edits_until_a_canary_is_promoted(phase: Phase) -> None:
    # More instances of what was on trial run than of what stays: those may be lost now.
    found = seen(("p", "old", 4, 0), ("d", "old", 8, 0), ("p", "mid", 4, 4), ("d", "mid", 8, 8))
    state = CanaryState("another", phase, stable=STABLE)
    rules = Canary(weight_percent=10, analysis=CanaryAnalysis())
    after = advance(
        state,
        rules=rules,
        want=wanted(),
        seen=found,
        report=CanaryReport(),
        promote="",
        now="2026-01-01T00:00:00Z",
    )
    assert after.phase == "Running"
    stays = "mid" if phase == "Promoted" else "old"
    assert dict(after.stable) == {"p": stays, "d": stays}


def marked(*found: tuple[str, str, str, int]) -> FleetSeen:
    """Workloads as pool, revision, fleet revision and instances."""
    roles = {"p": P, "d": D, "q": P}
    return FleetSeen(
        (),
        tuple(
            WorkloadSeen(
                Workload(pool, revision, size, replace(roles[pool], fleet_revision=mark)),
                size,
                size,
            )
            for pool, revision, mark, size in found
        ),
    )


@pytest.mark.parametrize(
    ("found", "stable"),
    [
        ((), {}),
        ((("p", "new", "n", 4), ("d", "new", "n", 4)), {}),
        ((("p", "a", "m", 4), ("d", "a", "m", 4)), {"p": "a", "d": "a"}),
        # One pool changed: the other one stays as it is.
        ((("p", "new", "m", 4), ("d", "a", "m", 4)), {"p": "new", "d": "a"}),
        # In the middle of a rollout: no pool may fall back to what the others cannot pair with.
        (
            (("p", "a", "m", 2), ("p", "b", "n", 3), ("d", "a", "m", 5), ("d", "b", "n", 1)),
            {"p": "a", "d": "a"},
        ),
        ((("p", "a", "m", 0), ("d", "a", "m", 0)), {}),
    ],
)
def test_all_pools_fall_back_to_revisions_that_are_pairs(
    found: tuple[tuple[str, str, str, int], ...], stable: dict[str, str]
) -> None:
    assert stable_revisions(wanted(), marked(*found)) == stable


class Trials(World):
    """A fleet whose edits are tried on a share of the requests first."""

    stage: CanaryStage | None = None

    def want(self) -> FleetWant:
        return replace(super().want(), canary=None if self.stopping else self.stage)

    def change_templates(self) -> None:
        super().change_templates()
        self.begin()

    def undo(self) -> None:
        super().undo()
        self.begin()

    def begin(self) -> None:
        """As the operator: what stays is what stayed, while that is there."""
        want = replace(super().want(), canary=None)
        found = stable_revisions(want, self.seen())
        if self.stage is not None:
            found = dict(self.stage.stable)
            runs = {key for key, one in self.running.items() if one.alive}
            found = {n: r for n, r in found.items() if (n, r) in runs} or stable_revisions(
                want, self.seen()
            )
            revisions = {pool.name: pool.revision for pool in want.pools}
            if all(revisions.get(name, revision) == revision for name, revision in found.items()):
                found = {}
        weight = self.rng.choice((1, 10, 50, 99))
        may_begin = self.rng.random() < 0.8
        self.stage = CanaryStage(tuple(found.items()), weight, may_begin) if found else None

    def decide(self) -> None:
        """The operator comes to a verdict."""
        if self.stage is not None and not self.paused:
            weights = (0, self.stage.weight_percent, 30, 99)
            weight = self.rng.choice(weights) if self.stage.weight_percent else 0
            self.stage = replace(self.stage, weight_percent=weight, may_begin=True)
            if self.rng.random() < 0.2:
                self.stage = None

    def check(self, want: FleetWant, seen: FleetSeen, before: dict[Key, Running]) -> None:
        if want.canary is None or want.stopping:
            return
        stable = dict(want.canary.stable)
        sizes = {pool.name: pool.replicas for pool in pools_wanted(want, seen.pools)}
        tight = any(
            before[key].unplaced
            for key in ((p.name, p.revision) for p in want.pools if p.name != ROUTER)
            if key in before and stable.get(key[0]) != key[1]
        )
        for pool in want.pools:
            assert pool.name == ROUTER or sizes[pool.name] == self.expected[pool.name]
            stays = stable.get(pool.name)
            if stays not in (None, pool.revision) and (pool.name, stays) in before:
                self.check_trial(pool, sizes[pool.name], before, str(stays), tight=tight)

    def check_trial(
        self, pool: PoolWant, size: int, before: dict[Key, Running], stays: str, *, tight: bool
    ) -> None:
        assert self.stage is not None
        surge = ceil(size * pool.surge_percent / 100)
        missing = 0
        if pool.unavailable_percent and (tight or not surge):
            missing = max(1, size * pool.unavailable_percent // 100)
        main, was = self.running[pool.name, stays], before[pool.name, stays]
        assert main.ready >= min(was.ready, size - missing)
        new = self.running.get((pool.name, pool.revision))
        asked = new.workload.replicas if new else 0
        weight = self.stage.weight_percent
        assert asked <= (max(1, ceil(size * weight / 100)) if weight else 0)
        if (pool.name, pool.revision) not in before and not self.stage.may_begin:
            assert not asked
        room = size + surge
        assert sum(one.workload.replicas for one in self.of(pool.name)) <= max(room, size)
        for one in self.of(pool.name):
            had = before.get(key_of(one))
            if one.workload.replicas > (had.workload.replicas if had else 0):
                others = [other for other in self.of(pool.name) if other is not one]
                assert one.workload.replicas + sum(o.alive for o in others) <= room or not others
                assert one.workload.revision in (stays, pool.revision)

    def check_fallen_back(self) -> None:
        """Nothing of what failed is left, and the rest is complete."""
        assert self.stage is not None
        stable = dict(self.stage.stable)
        want = self.want()
        for pool, size in zip(want.pools, pools_wanted(want, self.sizes.values()), strict=True):
            stays = stable.get(pool.name)
            if stays is not None and (pool.name, stays) in self.running:
                found = {
                    key_of(o)[1]: (o.workload.replicas, o.ready, o.alive)
                    for o in self.of(pool.name)
                }
                assert found == {stays: (size.replicas,) * 3}


@pytest.mark.parametrize("seed", range(300))
def test_whatever_happens_during_a_canary_the_old_revision_keeps_its_capacity(seed: int) -> None:
    world = Trials(random.Random(seed))
    world.settle()
    for _ in range(40):
        chance = world.rng.random()
        if chance < 0.2:
            world.edit()
        elif chance < 0.35:
            world.decide()
        elif chance < 0.4 and world.running:
            world.misfortune()
        else:
            world.progress()
        world.turn()
    world.paused = False
    if world.stage is not None and world.rng.random() < 0.7:
        world.stage = replace(world.stage, weight_percent=0)
        world.come_to_rest()
        world.check_fallen_back()
    world.stage = None  # promoted, or a newer document
    world.settle()
