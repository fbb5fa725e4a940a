"""plan() where spec.engine.tls comes, goes or changes: no router meets an engine it cannot call."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.operator.fleets import parsed
from tests.operator.observed_cluster import Cluster as Observed
from tests.operator.observed_cluster import settled
from tests.operator.test_plan import Cluster, pool
from xpyd_operator.plan.template import revision_of
from xpyd_operator.plan.values import ROUTER, FleetWant, PoolWant
from xpyd_operator.status.children import condition, text


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
    assert (
        "d 0/4 ready (waits for routers that can call its engines)" in cluster.seen.status.message
    )


def test_what_was_left_half_way_by_an_older_operator_comes_to_its_end():
    cluster, rng = Cluster(), random.Random(1)
    pools = pool(ROUTER, 2), pool("d", 2)
    cluster.settle(FleetWant("f", (with_tls(pools[0], 0), with_tls(pools[1], 2))), rng)
    cluster.settle(FleetWant("f", tuple(with_tls(one, 1) for one in pools)), rng)
    assert cluster.seen.status is not None
    assert cluster.seen.status.ready


def revisions(cluster: Observed, *pools: str) -> set[str]:
    """The revisions of these pools' living pods, old or new."""
    new = {(p.name, p.revision) for p in cluster.want.pools}
    return {
        "new" if (pool, pod["metadata"]["labels"]["xpyd.dev/revision"]) in new else "old"
        for pool in pools
        for pod in cluster.pods_of(pool)
    }


def until_quiet(cluster: Observed) -> list[tuple[set[str], set[str], str]]:
    """What routers and engines are, and what Progressing says, turn by turn."""
    found: list[tuple[set[str], set[str], str]] = []
    for _ in range(20):
        cluster.turn()
        said = text(condition({"status": cluster.status}, "Progressing"), "message")
        engines = revisions(cluster, "prefill", "decode")
        found.append((revisions(cluster, ROUTER), engines, said))
        cluster.wait(5)
        cluster.running(cluster.pods.values(), ready=True)
        cluster.end_leaving()
    return found


def test_the_objects_of_a_cluster_are_replaced_in_this_order_and_the_status_says_why() -> None:
    cluster = settled(parsed(router={"replicas": 2}))
    tls = {"tls": {"secretName": "e", "routerSecretName": "r"}}
    cluster.edit(parsed(router={"replicas": 2}, engine=tls))
    seen = until_quiet(cluster)
    assert all(engines == {"old"} for routers, engines, _ in seen if "old" in routers)
    assert seen[-1][:2] == ({"new"}, {"new"})
    assert "prefill waits for routers that can call its engines" in seen[0][2]
    cluster.edit(parsed(router={"replicas": 2}))
    seen = until_quiet(cluster)
    assert all(routers == {"old"} for routers, engines, _ in seen if "old" in engines)
    assert seen[-1][:2] == ({"new"}, {"new"})
    assert "router waits for engines that it could not call to leave" in seen[0][2]
    assert seen[-1][2] == "every pool is as wanted"
