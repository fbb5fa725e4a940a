"""fleet_seen(): instances are counted from pods, groups as one, whatever order things come in."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.operator.fleets import parsed
from tests.operator.observed_cluster import Cluster, settled
from xpyd_operator.document.load import load_fleet
from xpyd_operator.manifests.names import workload_labels
from xpyd_operator.plan.values import ROUTER, PoolSeen, Template, Workload, WorkloadSeen
from xpyd_operator.status.children import Children, fleet_seen

EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.yaml"
GROUP = "leaderworkerset.sigs.k8s.io/"
Obj = dict[str, Any]


def ready_fleet() -> Cluster:
    return settled(load_fleet(EXAMPLE))


def of_pool(children: Children, pool: str) -> WorkloadSeen:
    (found,) = [w for w in fleet_seen(children).workloads if w.workload.pool == pool]
    return found


def counts(children: Children, pool: str = "decode") -> tuple[int, int, int]:
    """Replicas, alive and ready."""
    found = of_pool(children, pool)
    return found.workload.replicas, found.alive, found.ready


def test_nothing_is_there_before_anything_was_made() -> None:
    seen = fleet_seen(Children())
    assert (seen.workloads, seen.pools, seen.status) == ((), (), None)


def test_workloads_are_known_by_their_labels_with_no_more_than_the_role_and_mark() -> None:
    cluster = ready_fleet()
    seen = fleet_seen(cluster.children)
    mark = cluster.want.pools[-1].template.fleet_revision
    roles = {w.workload.pool: w.workload.template for w in seen.workloads}
    assert roles == {
        ROUTER: Template(ROUTER),
        "prefill": Template("Prefill", fleet_revision=mark),
        "decode": Template("Decode", fleet_revision=mark),
    }
    wanted = {p.name: p.revision for p in cluster.want.pools}
    assert {w.workload.pool: w.workload.revision for w in seen.workloads} == wanted
    assert [counts(cluster.children, p) for p in ("router", "prefill", "decode")] == [
        (2, 2, 2),
        (1, 1, 1),
        (2, 2, 2),
    ]


@pytest.mark.parametrize(
    ("tls", "level"),
    [(None, 0), ({"secretName": "e"}, 1), ({"secretName": "e", "routerSecretName": "r"}, 2)],
)
def test_a_workload_shows_what_engines_ask_of_routers(
    tls: dict[str, str] | None, level: int
) -> None:
    # Of a router's own port, which says nothing of engines.
    router = {"tls": {"secretName": "s", "clientCaSecretName": "c"}}
    cluster = settled(parsed(engine={"tls": tls} if tls else {}, router=router))
    assert {w.workload.template.tls for w in fleet_seen(cluster.children).workloads} == {level}
    assert {p.template.tls for p in cluster.want.pools} == {level}


def test_a_pod_that_leaves_is_alive_and_not_ready() -> None:
    cluster = ready_fleet()
    cluster.delete(cluster.living("decode")[0])
    assert counts(cluster.children) == (2, 2, 1)


@pytest.mark.parametrize("phase", ["Failed", "Succeeded"])
def test_a_pod_that_ended_holds_no_place(phase: str) -> None:
    cluster = ready_fleet()
    cluster.living("decode")[0]["status"]["phase"] = phase
    for workload in cluster.workloads.values():
        workload["status"]["replicas"] = 1
    assert counts(cluster.children) == (2, 1, 1)


def test_pods_that_are_not_seen_yet_count_where_their_deployment_has_counted_them() -> None:
    cluster = ready_fleet()
    cluster.pods = {}
    assert counts(cluster.children) == (2, 2, 0)


def test_replicas_that_are_not_written_are_one() -> None:
    cluster = ready_fleet()
    for workload in cluster.workloads.values():
        del workload["spec"]["replicas"]
    assert of_pool(cluster.children, "decode").workload.replicas == 1


def test_pods_whose_workload_is_gone_are_a_workload_of_none_until_they_end() -> None:
    cluster = ready_fleet()
    revision = of_pool(cluster.children, "decode").workload.revision
    del cluster.workloads["decode", revision]
    assert of_pool(cluster.children, "decode") == WorkloadSeen(
        Workload("decode", revision, 0, Template("Decode")), alive=2, ready=2
    )
    for pod in cluster.pods_of("decode"):
        del pod["metadata"]["ownerReferences"]  # somebody made these by hand
    assert "decode" not in {w.workload.pool for w in fleet_seen(cluster.children).workloads}


def test_a_workload_that_says_no_pool_revision_or_role_is_none_of_ours() -> None:
    cluster = ready_fleet()
    for workload, label in zip(
        cluster.workloads.values(), ("pool", "revision", "role"), strict=True
    ):
        del workload["metadata"]["labels"][f"xpyd.dev/{label}"]
        workload["spec"]["replicas"] = 0
    seen = fleet_seen(Children(deployments=cluster.children.deployments))
    assert seen.workloads == ()


@pytest.mark.parametrize("value", ["", "p" * 17, "-p", "P", "p\n", 5, None])
@pytest.mark.parametrize("label", ["pool", "revision"])
def test_labels_that_no_fleet_can_have_are_none_of_ours(label: str, value: object) -> None:
    cluster = ready_fleet()
    for obj in (*cluster.workloads.values(), *cluster.pods.values()):
        obj["metadata"]["labels"][f"xpyd.dev/{label}"] = value
    assert fleet_seen(cluster.children).workloads == ()


def test_of_two_workloads_of_a_revision_the_first_by_name_counts() -> None:
    cluster = ready_fleet()
    (one,) = [w for (pool, _), w in cluster.workloads.items() if pool == "decode"]
    other = copy.deepcopy(one)
    other["metadata"]["name"] += "-2"
    other["spec"]["replicas"] = 7
    for both in ((one, other), (other, one)):
        assert of_pool(Children(deployments=both), "decode").workload.replicas == 2


def test_the_order_of_objects_does_not_matter() -> None:
    cluster = ready_fleet()
    c = cluster.children
    turned = Children(c.deployments[::-1], (), c.pods[::-1], c.pools[::-1], c.others)
    assert fleet_seen(turned) == fleet_seen(c)


@pytest.mark.parametrize(
    ("spec", "seen"),
    [
        ({"replicas": 3, "declaredReplicas": 2}, PoolSeen("decode", 3, 2)),
        ({"replicas": 0}, PoolSeen("decode", 0, None)),
        ({"declaredReplicas": 0}, PoolSeen("decode", 1, 0)),
    ],
)
def test_a_pools_replicas_are_its_own_objects(spec: Obj, seen: PoolSeen) -> None:
    labels = {"xpyd.dev/fleet": "chat"}
    named = {"name": "chat-decode", "labels": labels}
    pool = {"metadata": named, "spec": {"poolName": "decode", **spec}}
    junk = {"metadata": {"name": "chat-x", "labels": labels}, "spec": {"replicas": 4}}
    assert fleet_seen(Children(pools=(pool, junk))).pools == (seen,)


def test_an_object_of_another_name_does_not_stand_for_a_pool() -> None:
    labels = {"xpyd.dev/fleet": "chat"}
    ours, other = (
        {
            "metadata": {"name": name, "labels": labels},
            "spec": {"poolName": "decode", "replicas": replicas},
        }
        for name, replicas in (("chat-decode", 2), ("aaa", 900))
    )
    assert fleet_seen(Children(pools=(other, ours))).pools == (PoolSeen("decode", 2, None),)
    assert fleet_seen(Children(pools=(other,))).pools == ()


@pytest.mark.parametrize(
    ("each", "row", "seen"),
    [
        # One revision: its Deployment has the size, whatever an older status says.
        ([6], {"replicas": 5, "revision": "a", "declaredReplicas": 2}, PoolSeen("decode", 6, 2)),
        ([6], {}, PoolSeen("decode", 6, None)),
        ([0], {"replicas": 0, "revision": "a"}, PoolSeen("decode", 0, None)),
        # In a rollout of six one may be too many.
        ([5, 2], {"replicas": 6, "revision": "a"}, PoolSeen("decode", 6, None)),
        ([6, 1], {"replicas": 1, "revision": "a"}, PoolSeen("decode", 6, None)),
        ([2, 2], {"replicas": 9, "revision": "a"}, PoolSeen("decode", 4, None)),
        # The pool had left the document, and came back.
        ([0], {"replicas": 0}, None),
    ],
)
def test_a_pool_without_its_object_has_the_size_of_its_workloads(
    each: list[int], row: Obj, seen: PoolSeen | None
) -> None:
    cluster = ready_fleet()
    (one,) = [w for (pool, _), w in cluster.workloads.items() if pool == "decode"]
    made: list[Obj] = []
    for number, replicas in enumerate(each):
        made.append(copy.deepcopy(one))
        made[-1]["spec"]["replicas"] = replicas
        made[-1]["metadata"]["labels"]["xpyd.dev/revision"] = f"r{number}"
    before = {"pools": [{"name": "decode", **row}]} if row else {}
    assert fleet_seen(Children(deployments=tuple(made)), before).pools == ((seen,) if seen else ())


def group_set(replicas: int, size: int = 2) -> Obj:
    labels = workload_labels("chat", "decode", "Decode", "0123abcd")
    return {
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "chat-decode-0123abcd", "labels": labels},
        "spec": {"replicas": replicas, "leaderWorkerTemplate": {"size": size}},
        "status": {"replicas": replicas},
    }


def group_pod(group: int, worker: int, *, ready: bool = True, leaves: bool = False) -> Obj:
    name = f"chat-decode-0123abcd-{group}" + (f"-{worker}" if worker else "")
    labels = {
        **workload_labels("chat", "decode", "Decode", "0123abcd"),
        f"{GROUP}name": "chat-decode-0123abcd",
        f"{GROUP}group-index": str(group),
        f"{GROUP}worker-index": str(worker),
    }
    metadata: Obj = {
        "name": name,
        "labels": labels,
        "annotations": {f"{GROUP}size": "2"},
        "ownerReferences": [
            {"kind": "StatefulSet", "name": "chat-decode-0123abcd", "controller": True}
        ],
    }
    if leaves:
        metadata["deletionTimestamp"] = "2026-11-21T10:01:00Z"
    condition = {"type": "Ready", "status": str(ready)}
    return {"metadata": metadata, "status": {"phase": "Running", "conditions": [condition]}}


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([group_pod(0, 0), group_pod(0, 1), group_pod(1, 0), group_pod(1, 1)], (2, 2, 2)),
        ([group_pod(0, 0), group_pod(0, 1), group_pod(1, 0)], (2, 2, 1)),
        ([group_pod(0, 0), group_pod(0, 1, ready=False)], (2, 2, 0)),
        ([group_pod(0, 0), group_pod(0, 1, leaves=True)], (2, 2, 0)),
        ([], (2, 2, 0)),
        ([group_pod(n, w) for n in range(3) for w in range(2)], (2, 3, 3)),
    ],
)
def test_an_instance_of_several_pods_counts_once_and_serves_when_all_are_ready(
    pods: list[Obj], expected: tuple[int, int, int]
) -> None:
    children = Children(leader_worker_sets=(group_set(2),), pods=tuple(pods))
    assert counts(children) == expected


def test_groups_whose_set_is_gone_know_their_size_themselves() -> None:
    pods = (group_pod(0, 0), group_pod(0, 1), group_pod(1, 0))
    assert counts(Children(pods=pods)) == (0, 2, 1)


def test_what_is_seen_does_not_change_what_it_was_seen_in() -> None:
    cluster = ready_fleet()
    before = copy.deepcopy(cluster.children)
    fleet_seen(cluster.children)
    assert cluster.children == before
