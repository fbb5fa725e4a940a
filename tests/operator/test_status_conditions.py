"""fleet_status(), pool_statuses(), invalid_status() and events(), each rule by itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.operator.observed_cluster import Cluster, settled
from tests.operator.test_status_children import group_pod, group_set
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.load import load_fleet, parse_fleet
from xpyd_operator.document.status import FleetStatus, PoolStatus
from xpyd_operator.status.children import Children, fleet_seen
from xpyd_operator.status.events import EventText, events
from xpyd_operator.status.fleet import fleet_status, invalid_status, pool_statuses
from xpyd_operator.status.problems import Problem
from xpyd_operator.status.verified import KvVerdict

EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.yaml"
TYPES = [
    *("Ready", "Available", "Progressing", "Degraded"),
    *("RouterReady", "CapacityAvailable", "Drifted", "KVTransferVerified", "RolesReady"),
]
Obj = dict[str, Any]


def fleet_of(change: Callable[[Obj], object] | None = None) -> InferenceFleet:
    """The example fleet, changed."""
    document = load_fleet(EXAMPLE).model_dump(mode="json", by_alias=True, exclude_unset=True)
    if change:
        change(document["spec"])
    return parse_fleet(json.dumps(document).encode(), source="changed")


def status_of(cluster: Cluster) -> Obj:
    assert cluster.status is not None
    return cluster.status


def found(cluster: Cluster, kind: str) -> tuple[str, str]:
    """Status and reason of a condition."""
    (one,) = [c for c in status_of(cluster)["conditions"] if c["type"] == kind]
    return one["status"], one["reason"]


def times(cluster: Cluster) -> dict[str, str]:
    return {c["type"]: c["lastTransitionTime"] for c in status_of(cluster)["conditions"]}


def pools(count: int, replicas: int) -> list[Obj]:
    """Aggregated pools."""
    return [
        {"name": f"a{n}", "role": "Aggregated", "replicas": replicas, "resources": {"gpus": 0}}
        for n in range(count)
    ]


def test_all_conditions_are_there_from_the_first_moment() -> None:
    cluster = Cluster(fleet_of())
    cluster.turn()
    assert [c["type"] for c in status_of(cluster)["conditions"]] == TYPES
    assert found(cluster, "Degraded") == ("False", "AsExpected")
    assert found(cluster, "CapacityAvailable") == ("True", "Sufficient")
    assert found(cluster, "Progressing") == ("True", "Creating")


def test_a_status_says_where_the_fleet_is_and_what_it_has() -> None:
    cluster = settled(fleet_of())
    cluster.generation = 7
    cluster.turn()
    status = status_of(cluster)
    assert status["endpoint"] == "http://chat-router.team.svc:10001"
    assert status["kvKeySecret"] == "chat-kv-5bd2bd5e"
    assert status["summary"] == {"prefill": "1/1", "decode": "2/2", "gpus": 0}
    assert status["observedGeneration"] == 7
    assert {c["observedGeneration"] for c in status["conditions"]} == {7}
    assert [p["name"] for p in status["pools"]] == ["router", "prefill", "decode"]
    assert "declaredReplicas" not in status["pools"][0]
    assert status["pools"][2] == {
        "name": "decode",
        "role": "Decode",
        "layout": "TP1xPP1",
        "replicas": 2,
        "declaredReplicas": 2,
        "readyReplicas": 2,
        "updatedReplicas": 2,
        "drainingReplicas": 0,
        "revision": cluster.want.pools[2].revision,
    }


def test_gpus_are_counted_with_all_pods_of_an_instance() -> None:
    def change(spec: Obj) -> None:
        spec["pools"][0]["resources"] = {"gpus": 1}
        spec["pools"][1]["resources"] = {"gpus": 4}
        spec["pools"][1]["parallelism"] = {"tensor": 4, "pipeline": 2}

    cluster = Cluster(fleet_of(change))
    children = Children(leader_worker_sets=(group_set(2),))
    assert _status(cluster, children)["summary"]["gpus"] == 1 + 2 * 2 * 4


def _status(cluster: Cluster, children: Children, **changes: Any) -> Obj:
    """The status of these objects for the cluster's fleet."""
    arguments: Obj = {
        "want": cluster.want,
        "seen": fleet_seen(children),
        "children": children,
        "problems": (),
        "before": None,
        "now": cluster.time,
        "generation": 1,
        "key_secret": "",
        "namespace": "team",
    }
    return fleet_status(cluster.fleet, **(arguments | changes))


LOST = KvVerdict(False, "Unreachable", "KV did not arrive from p to d: unreachable.")


def test_lost_kv_is_a_condition_and_an_event_and_the_fleet_serves_on() -> None:
    cluster = settled(fleet_of())
    before = status_of(cluster)
    arguments: Obj = {"want": cluster.want, "seen": fleet_seen(cluster.children)}
    after = _status(cluster, cluster.children, kv=LOST, before=before, **arguments)
    shown = {c["type"]: (c["status"], c["reason"], c["message"]) for c in after["conditions"]}
    assert shown["KVTransferVerified"] == ("False", *LOST[1:])
    assert shown["Ready"][0] == shown["Available"][0] == "True"
    assert shown["Degraded"][0] == "False"
    words = f"Unreachable: {LOST.message}"
    assert EventText("Warning", "KVNotVerified", words) in events(before, after)
    assert all(event.reason != "KVNotVerified" for event in events(after, after))


def test_a_fleet_without_pairs_has_no_kv_to_verify() -> None:
    cluster = settled(fleet_of(lambda spec: spec.update(pools=pools(1, 1))))
    assert found(cluster, "KVTransferVerified") == ("Unknown", "NoPairs")


def test_the_same_inputs_give_the_same_status() -> None:
    cluster = settled(fleet_of())
    before = copy.deepcopy(status_of(cluster))
    cluster.wait(100)
    assert cluster.turn() == ()
    assert json.dumps(cluster.status) == json.dumps(before)
    c = cluster.children
    turned = Children(c.deployments[::-1], (), c.pods[::-1], c.pools[::-1])
    assert json.dumps(
        _status(cluster, turned, before=before, key_secret="chat-kv-5bd2bd5e")
    ) == json.dumps(before)


def test_a_conditions_time_changes_with_its_status_and_not_with_its_message() -> None:
    cluster = settled(fleet_of())
    before = times(cluster)
    cluster.wait(60)
    cluster.running(cluster.pods_of("decode")[:1], ready=False)
    cluster.turn()
    after = times(cluster)
    changed = {kind for kind in TYPES if after[kind] != before[kind]}
    assert changed == {"Ready", "Progressing", "RolesReady"}
    assert after["Ready"] == cluster.time


@pytest.mark.parametrize("since", ["", "junk", None, 5])
def test_a_time_that_is_none_is_made_anew(since: object) -> None:
    cluster = settled(fleet_of())
    for condition in status_of(cluster)["conditions"]:
        condition["lastTransitionTime"] = since
    cluster.turn()
    assert set(times(cluster).values()) == {cluster.time}


@pytest.mark.parametrize(
    ("lost", "reason"),
    [("prefill", "NoEngines"), ("decode", "NoEngines"), ("router", "NoRouter")],
)
def test_a_fleet_is_available_while_a_pair_and_a_router_are_ready(lost: str, reason: str) -> None:
    cluster = settled(fleet_of())
    cluster.running(cluster.pods_of(lost)[1:], ready=False)
    cluster.turn()
    assert found(cluster, "Available") == ("True", "Serving")
    cluster.running(cluster.pods_of(lost), ready=False)
    (event,) = [e for e in cluster.turn() if e.reason == "Unavailable"]
    assert event.type == "Warning"
    assert found(cluster, "Available") == ("False", reason)
    assert found(cluster, "RouterReady")[0] == ("False" if lost == "router" else "True")


@pytest.mark.parametrize("on_no_prefill", ["Queue", "PrefillOnDecode"])
def test_a_fleet_whose_routers_have_no_pair_of_its_ready_instances_is_not_available(
    on_no_prefill: str,
) -> None:
    """Routers are ready without a pair: heartbeats may not reach them, or P and D may not fit."""
    cluster = settled(fleet_of(lambda spec: spec.update(router={"onNoPrefill": on_no_prefill})))
    cluster.has_pair = False
    (event,) = [e for e in cluster.turn() if e.reason == "Unavailable"]
    assert "no router has a pair of them: requests wait" in event.message
    assert found(cluster, "Available") == ("False", "NoPair")
    assert found(cluster, "RouterReady") == ("True", "RouterReady")
    cluster.running(cluster.pods_of("decode"), ready=False)
    cluster.turn()
    assert found(cluster, "Available") == ("False", "NoEngines"), "what is missing is named first"
    cluster.running(cluster.pods_of("decode"), ready=True)
    cluster.has_pair = True
    cluster.turn()
    assert found(cluster, "Available") == ("True", "Serving")


@pytest.mark.parametrize(
    ("lost", "expected"),
    [("prefill", ("True", "PrefillOnDecode")), ("decode", ("False", "NoEngines"))],
)
def test_decode_instances_that_compute_prompts_make_a_fleet_available(
    lost: str, expected: tuple[str, str]
) -> None:
    cluster = settled(fleet_of(lambda spec: spec.update(router={"onNoPrefill": "PrefillOnDecode"})))
    assert found(cluster, "Available") == ("True", "Serving")
    cluster.running(cluster.pods_of(lost), ready=False)
    cluster.turn()
    assert found(cluster, "Available") == expected
    assert found(cluster, "Ready")[0] == "False"


def test_aggregated_instances_alone_make_a_fleet_available() -> None:
    cluster = Cluster(fleet_of(lambda spec: spec.update(pools=pools(2, 1))))
    cluster.turn()
    cluster.running([*cluster.pods_of("router"), *cluster.pods_of("a1")], ready=True)
    cluster.turn()
    assert found(cluster, "Available") == ("True", "Serving")
    assert found(cluster, "Ready")[0] == "False"
    assert status_of(cluster)["summary"] == {"aggregated": "1/2", "gpus": 0}


def test_a_fleet_scaled_to_zero_says_so_and_is_not_ready() -> None:
    cluster = settled(fleet_of())
    cluster.scale("decode", 0)
    cluster.turn()
    cluster.running(cluster.pods_of("router"), ready=False)
    cluster.turn()
    assert found(cluster, "Ready") == ("False", "ScaledToZero")
    (ready, *_) = status_of(cluster)["conditions"]
    assert ready["message"] == "no request can be answered with 0 replicas of decode"


def test_a_pool_of_zero_beside_others_does_not_keep_a_fleet_from_being_ready() -> None:
    def change(spec: Obj) -> None:
        spec["pools"].append({**spec["pools"][1], "name": "spare", "replicas": 0})

    cluster = settled(fleet_of(change))
    assert found(cluster, "Ready") == ("True", "Ready")


def test_a_deleted_pod_that_was_replaced_is_told_as_recovery() -> None:
    cluster = settled(fleet_of())
    cluster.delete(cluster.pods_of("decode")[0])
    cluster.turn()
    assert found(cluster, "Progressing") == ("True", "Recovering")
    cluster.wait(30)
    cluster.running(cluster.living("decode"), ready=True)
    (event,) = cluster.turn()
    assert (event.type, event.reason) == ("Normal", "Ready")
    assert event.message == "prefill 1/1, decode 2/2, router 2/2 ready after 30 s"
    assert found(cluster, "Progressing") == ("True", "Draining")


def test_a_scale_is_one_event_and_creation_and_readiness_are_two() -> None:
    cluster = Cluster(fleet_of())
    told = [*cluster.turn()]
    for pool in ("prefill", "decode", "router"):
        for pod in cluster.pods_of(pool):
            cluster.wait(1)
            cluster.running([pod], ready=True)
            told += cluster.turn()
    assert [e.reason for e in told] == ["Created", "Ready"]
    cluster.scale("decode", 4)
    told = [*cluster.turn()]
    for pod in cluster.pods_of("decode"):
        cluster.running([pod], ready=True)
        told += cluster.turn()
    assert [(e.reason, e.message) for e in told] == [("Scaled", "pool decode: 2 -> 4 instances")]


def test_pools_that_come_and_go_are_told_and_counted_until_they_are_gone() -> None:
    cluster = settled(fleet_of())
    cluster.edit(fleet_of(lambda spec: spec["pools"][1].update(name="decode2")))
    told = {e.reason: e.message for e in cluster.turn()}
    assert told["Created"] == "pool decode2: 2 instances"
    assert told["Draining"] == "pool decode left the document: 2 instances to leave"
    assert found(cluster, "Available") == ("True", "Serving")
    row = next(p for p in status_of(cluster)["pools"] if p["name"] == "decode")
    assert row["replicas"] == 0
    assert "revision" not in row
    cluster.running(cluster.pods_of("decode2"), ready=True)
    (event,) = cluster.turn()
    assert event.reason == "Ready"
    row = next(p for p in status_of(cluster)["pools"] if p["name"] == "decode")
    assert row["drainingReplicas"] == 2
    assert found(cluster, "Progressing") == ("True", "Draining")
    cluster.end_leaving()
    assert cluster.turn() == ()
    assert "decode" not in [p["name"] for p in status_of(cluster)["pools"]]


def test_what_only_the_caller_knows_is_told_with_the_rest() -> None:
    cluster = settled(fleet_of())
    missing = Problem("Degraded", "LeaderWorkerSetMissing", "decode", "decode: no such API")
    cluster.others = (missing, missing)
    (event,) = cluster.turn()
    assert (event.type, event.reason) == ("Warning", "Degraded")
    assert event.message == "LeaderWorkerSetMissing: decode: no such API"
    assert found(cluster, "Degraded") == ("True", "LeaderWorkerSetMissing")
    assert found(cluster, "Ready") == ("True", "Ready")
    assert cluster.turn() == ()


@pytest.mark.parametrize(
    ("kind", "reason", "degraded", "capacity"),
    [
        ("Degraded", "QuotaExceeded", "True", "False"),
        ("Degraded", "ImagePullBackOff", "True", "True"),
        ("Capacity", "Unschedulable", "False", "False"),
        ("Waiting", "ModelLoading", "False", "True"),
    ],
)
def test_a_problems_kind_decides_which_conditions_tell_it(
    kind: Any, reason: str, degraded: str, capacity: str
) -> None:
    cluster = settled(fleet_of())
    cluster.others = (Problem(kind, reason, "decode", "decode: so it is"),)
    told = cluster.turn()
    assert found(cluster, "Degraded")[0] == degraded
    assert found(cluster, "CapacityAvailable")[0] == capacity
    assert len(told) == (kind != "Waiting")


def test_many_problems_are_cut_and_counted() -> None:
    cluster = settled(fleet_of())
    cluster.others = tuple(
        Problem("Degraded", "X", f"p{n}", f"p{n}: " + "x" * 500) for n in range(9)
    )
    told = cluster.turn()
    (one,) = [c for c in status_of(cluster)["conditions"] if c["type"] == "Degraded"]
    assert one["message"].endswith("; and 5 more")
    assert all(len(e.message) <= 1000 for e in told)


def _invalid(cluster: Cluster, before: Obj | None, *messages: str, now: str) -> dict[str, Any]:
    seen = fleet_seen(children := cluster.children)
    return invalid_status(before, messages, seen=seen, children=children, now=now, generation=9)


def test_an_invalid_document_keeps_the_pools_and_says_nothing_of_what_nobody_looks_at() -> None:
    cluster = settled(fleet_of())
    before = copy.deepcopy(status_of(cluster))
    after = _invalid(cluster, before, "a: bad", "b: worse", now=cluster.time)
    assert after["pools"] == before["pools"]
    assert after["summary"] == before["summary"]
    assert after["observedGeneration"] == 9
    told = {c["type"]: (c["status"], c["reason"], c["message"]) for c in after["conditions"]}
    assert told["Ready"] == ("False", "InvalidSpec", "a: bad; b: worse")
    assert told["Degraded"] == ("True", "InvalidSpec", "a: bad; b: worse")
    unseen = ("Unknown", "InvalidSpec", "not looked at until the document is mended")
    for kind in ("RouterReady", "CapacityAvailable"):
        assert told[kind] == unseen
    assert told["Available"][:2] == ("True", "Serving")
    assert [(e.type, e.reason) for e in events(before, after)] == [("Warning", "Degraded")]
    again = _invalid(cluster, after, "a: bad", "b: worse", now="2027-01-01T00:00:00Z")
    assert again == after
    cluster.status = after
    told_after = cluster.turn()
    assert [e.reason for e in told_after] == ["Ready"]
    assert found(cluster, "Progressing") == ("False", "Settled")


def test_an_invalid_document_keeps_a_fleets_turn_among_upgrades() -> None:
    cluster = settled(fleet_of())
    row = {"type": "UpToDate", "status": "False", "reason": "Undone", "message": "as before"}
    before = {"conditions": [row | {"lastTransitionTime": cluster.time}]}
    after = _invalid(cluster, before, "a: bad", now="2027-01-01T00:00:00Z")
    assert any(row.items() <= one.items() for one in after["conditions"])


def test_instances_are_counted_while_the_document_is_invalid() -> None:
    cluster = settled(fleet_of())
    before = copy.deepcopy(status_of(cluster))
    ((name, _),) = [item for item in cluster.pods.items() if "prefill" in item[0]]
    del cluster.pods[name]
    after = _invalid(cluster, before, "a: bad", now=cluster.time)
    pools = {pool["name"]: pool for pool in after["pools"]}
    assert (pools["prefill"]["replicas"], pools["prefill"]["readyReplicas"]) == (1, 0)
    assert pools["prefill"]["updatedReplicas"] == 0
    assert pools["decode"]["readyReplicas"] == 2
    assert (after["summary"]["prefill"], after["summary"]["decode"]) == ("0/1", "2/2")
    told = {c["type"]: (c["status"], c["reason"]) for c in after["conditions"]}
    assert told["Available"] == ("False", "NoEngines")


def test_a_fleet_with_host_paths_says_what_it_asks_of_its_namespace() -> None:
    def with_host_path(spec: Obj) -> None:
        spec["model"]["cache"] = {"type": "HostPath", "path": "/var/models"}

    cluster = settled(fleet_of(with_host_path))
    (one,) = [c for c in status_of(cluster)["conditions"] if c["type"] == "Degraded"]
    assert (one["status"], one["reason"]) == ("False", "AsExpected")
    assert "hostPath" in one["message"]
    cluster.others = (Problem("Degraded", "X", "decode", "decode: broken"),)
    cluster.turn()
    (one,) = [c for c in status_of(cluster)["conditions"] if c["type"] == "Degraded"]
    assert one["message"].startswith("decode: broken; note: pods mount folders of their nodes")
    plain = settled(fleet_of())
    assert "hostPath" not in json.dumps(status_of(plain))


def test_a_fleet_without_key_says_so_as_long_as_it_has_none() -> None:
    def without_key(spec: Obj) -> None:
        spec["kvTransfer"] = {"insecure": True}

    cluster = settled(fleet_of(without_key))
    (one,) = [c for c in status_of(cluster)["conditions"] if c["type"] == "Degraded"]
    assert (one["status"], one["reason"]) == ("False", "AsExpected")
    assert "no KV key (spec.kvTransfer.insecure)" in one["message"]
    assert "insecure" not in json.dumps(status_of(settled(fleet_of())))


def test_a_fleet_that_was_never_valid_has_unknown_conditions_and_is_created_later() -> None:
    nothing = Cluster(fleet_of())
    after = _invalid(nothing, None, *["x" * 1000] * 50, now="2026-11-21T10:00:00Z")
    assert FleetStatus.model_validate(after, strict=False)
    told = {c["type"]: c["status"] for c in after["conditions"]}
    assert told == {
        "Ready": "False",
        "Available": "False",
        "Progressing": "False",
        "Degraded": "True",
        "RouterReady": "Unknown",
        "CapacityAvailable": "Unknown",
        "Drifted": "Unknown",
        "KVTransferVerified": "Unknown",
        "RolesReady": "Unknown",
    }
    assert after["conditions"][0]["message"].endswith("; and 40 more")
    cluster = Cluster(fleet_of())
    cluster.status = after
    assert [e.reason for e in cluster.turn()] == ["Created"]
    assert found(cluster, "Progressing") == ("True", "Creating")


def test_pool_objects_get_their_counts_generation_and_selector() -> None:
    cluster = settled(fleet_of())
    cluster.delete(cluster.pods_of("decode")[0])
    children = cluster.children
    statuses = pool_statuses(
        cluster.fleet, want=cluster.want, seen=fleet_seen(children), children=children
    )
    assert statuses.keys() == {"prefill", "decode"}
    assert statuses["decode"] == {
        "observedGeneration": 3,
        "layout": "TP1xPP1",
        "replicas": 1,
        "readyReplicas": 1,
        "updatedReplicas": 1,
        "drainingReplicas": 1,
        "drainingSince": "2026-11-21T10:00:05Z",
        "selector": "xpyd.dev/fleet=chat,xpyd.dev/pool=decode",
    }
    assert PoolStatus.model_validate(statuses["decode"])


def test_an_autoscaler_counts_one_pod_of_each_instance() -> None:
    layout = {"resources": {"gpus": 1}, "parallelism": {"tensor": 1, "pipeline": 2}}
    fleet = fleet_of(lambda spec: spec["pools"][1].update(layout))
    cluster = Cluster(fleet)
    named = {"name": "chat-decode", "labels": {"xpyd.dev/fleet": "chat"}}
    pool = {"metadata": named, "spec": {"poolName": "decode", "replicas": 2}}
    children = Children(
        leader_worker_sets=(group_set(2),),
        pods=tuple(group_pod(n, w) for n in range(2) for w in range(2)),
        pools=(pool,),
    )
    statuses = pool_statuses(fleet, want=cluster.want, seen=fleet_seen(children), children=children)
    assert statuses["decode"]["replicas"] == 2
    assert statuses["decode"]["selector"].endswith(",leaderworkerset.sigs.k8s.io/worker-index=0")


def test_a_pool_that_left_the_document_has_a_status_while_its_object_is_there() -> None:
    cluster = settled(fleet_of())
    cluster.edit(fleet_of(lambda spec: spec["pools"][1].update(name="decode2")))
    cluster.turn()
    children = cluster.children
    seen = fleet_seen(children)
    statuses = pool_statuses(cluster.fleet, want=cluster.want, seen=seen, children=children)
    assert statuses["decode"]["readyReplicas"] == 2
    assert statuses["decode"]["updatedReplicas"] == 0
