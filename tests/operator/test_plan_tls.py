"""plan() where spec.engine.tls comes, goes or changes: no router meets an engine it cannot call."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.operator.test_plan import Cluster, pool
from xpyd_operator.plan.template import revision_of
from xpyd_operator.plan.values import ROUTER, FleetWant, PoolWant


def with_tls(of: PoolWant, tls: int) -> PoolWant:
    """The pool's revision for so much of engine.tls; routers roll as in a cluster."""
    template = replace(of.template, args=(*of.template.args, str(tls)), tls=tls)
    surge, missing = (25, 25) if of.name == ROUTER else (25, 0)
    found = replace(of, template=template, revision=revision_of(template))
    return replace(found, surge_percent=surge, unavailable_percent=missing)


@pytest.mark.parametrize("seed", range(40))
def test_at_each_moment_each_router_can_call_each_engine(seed: int):
    rng, cluster = random.Random(seed), Cluster()

    def wanted(tls: int) -> FleetWant:
        pools = pool(ROUTER, 2), pool("p", rng.randint(1, 3)), pool("d", 2)
        return FleetWant("f", tuple(with_tls(one, tls) for one in pools))

    def check() -> None:
        alive = [w.workload for w in cluster.seen.workloads if w.alive]
        able = [w.template.tls for w in alive if w.pool == ROUTER]
        asked = [w.template.tls for w in alive if w.pool != ROUTER]
        assert min(able, default=2) >= max(asked, default=0)

    cluster.settle(wanted(0), rng)
    for tls in rng.choices((0, 1, 2), k=4):
        edited = wanted(tls)
        for _ in range(rng.randint(0, 30)):  # the next edit may come in the middle
            cluster.apply(edited)
            check()
            cluster.step(rng)
    cluster.settle(edited, rng, check)
    assert cluster.seen.status is not None
    assert cluster.seen.status.ready


def test_where_engines_wait_for_routers_they_stay_as_they_are_and_the_status_says_so():
    cluster, before = Cluster(), [pool(ROUTER, 2), pool("d", 4)]
    cluster.settle(FleetWant("f", tuple(before)), random.Random(1))
    edited = FleetWant("f", tuple(with_tls(one, 1) for one in before))
    cluster.apply(edited)
    (old,) = (w for w in cluster.of("d").values() if w.workload.revision == before[1].revision)
    assert (old.workload.replicas, old.ready) == (4, 4)
    assert cluster.seen.status is not None
    assert "d 0/4 ready (waits for routers that can call it)" in cluster.seen.status.message


def test_what_was_left_half_way_by_an_older_operator_comes_to_its_end():
    cluster, rng = Cluster(), random.Random(1)
    pools = pool(ROUTER, 2), pool("d", 2)
    cluster.settle(FleetWant("f", (with_tls(pools[0], 0), with_tls(pools[1], 2))), rng)
    cluster.settle(FleetWant("f", tuple(with_tls(one, 1) for one in pools)), rng)
    assert cluster.seen.status is not None
    assert cluster.seen.status.ready
