"""find_problems(): what kubelet, scheduler and controllers write, and what people read of it."""

from __future__ import annotations

import copy
import json

import pytest

from tests.operator.observed_cluster import (
    EXAMPLE,
    NODE,
    Cluster,
    decodes,
    first,
    new_cluster,
    rfc3339,
    settled,
    told,
)
from xpyd_operator.document.load import load_fleet, parse_fleet
from xpyd_operator.status.children import MOST_TEXT, Children, count, moment, short, tail
from xpyd_operator.status.problems import find_problems

NODES = "0/1 nodes are available: "


NO_ROOM: dict[str, tuple[str, str, str, str]] = {
    "no GPU": (
        NODES + "1 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/1 nodes "
        "are available: 1 Preemption is not helpful for scheduling.",
        "Capacity",
        "Unschedulable",
        NODES + "1 Insufficient nvidia.com/gpu",
    ),
    "no GPU of a class": (
        NODES + "1 cannot allocate all claims. still not schedulable, preemption: not helpful.",
        "Capacity",
        "Unschedulable",
        NODES + "1 cannot allocate all claims",
    ),
    "no node at all": (
        "no nodes available to schedule pods",
        "Capacity",
        "Unschedulable",
        "no nodes available to schedule pods",
    ),
    "no volume of that name": (
        NODES + 'persistentvolumeclaim "models" not found. preemption: not helpful.',
        "Degraded",
        "VolumeUnavailable",
        NODES + 'persistentvolumeclaim "models" not found',
    ),
    "a volume that comes later": (
        NODES + "pod has unbound immediate PersistentVolumeClaims. preemption: not helpful.",
        "Waiting",
        "VolumeUnavailable",
        NODES + "pod has unbound immediate PersistentVolumeClaims",
    ),
}


@pytest.mark.parametrize("name", NO_ROOM)
def test_the_schedulers_words_are_kept_but_for_preemption(name: str) -> None:
    words, kind, reason, detail = NO_ROOM[name]
    cluster = new_cluster()
    cluster.unschedulable(decodes(cluster)[1:], words)
    cluster.running(decodes(cluster)[:1], ready=True)
    message = f"decode: no node fits (1 of 2 pods, POD2): {detail}"
    assert told(cluster) == [(kind, reason, message)]


def test_a_pod_held_back_by_gates_is_waited_for() -> None:
    cluster = new_cluster()
    cluster.unschedulable(decodes(cluster), "Scheduling is blocked due to non-empty gates")
    for pod in decodes(cluster):
        pod["status"]["conditions"][0]["reason"] = "SchedulingGated"
    gated = "decode: held back by scheduling gates (2 of 2 pods, POD1)"
    assert told(cluster) == [("Waiting", "SchedulingGated", gated)]


@pytest.mark.parametrize(
    ("waited_s", "expected"),
    [
        (10, ("Waiting", "ContainerCreating", "decode: being created (2 of 2 pods, POD1)")),
        (
            60,
            (
                "Waiting",
                "VolumesNotMounted",
                "decode: not created since 10:00:00Z (2 of 2 pods, POD1): node node-1 may lack "
                "ConfigMap chat-kv-5bd2bd5e or the pod's network",
            ),
        ),
        (
            200,
            (
                "Degraded",
                "VolumesNotMounted",
                "decode: not created since 10:00:00Z (2 of 2 pods, POD1): node node-1 may lack "
                "ConfigMap chat-kv-5bd2bd5e or the pod's network",
            ),
        ),
    ],
)
def test_volumes_that_do_not_come_are_named_and_then_a_problem(
    waited_s: float, expected: tuple[str, str, str]
) -> None:
    cluster = new_cluster()
    cluster.bind(decodes(cluster))
    cluster.wait(waited_s)
    assert told(cluster) == [expected]


def test_all_that_a_node_must_have_is_named() -> None:
    document = json.loads(
        load_fleet(EXAMPLE).model_dump_json(by_alias=True, exclude_unset=True),
    )
    document["spec"]["model"]["cache"] = {"type": "PersistentVolumeClaim", "claimName": "weights"}
    document["spec"]["pools"][1]["template"] = {
        "spec": {"volumes": [{"name": "extra", "configMap": {"name": "extra"}}]}
    }
    cluster = Cluster(parse_fleet(json.dumps(document).encode(), source="edited"))
    cluster.turn()
    cluster.bind(decodes(cluster))
    cluster.wait(60)
    (problem,) = [p for p in cluster.problems() if p.pool == "decode"]
    for name in ("ConfigMap chat-kv-5bd2bd5e", "PersistentVolumeClaim weights", "ConfigMap extra"):
        assert name in problem.message


def test_a_sandbox_that_is_there_means_that_the_image_comes() -> None:
    cluster = new_cluster()
    cluster.bind(decodes(cluster), sandbox=True)
    cluster.wait(600)
    pulling = "the image is being pulled or the container is starting"
    message = f"decode: {pulling} (2 of 2 pods, POD1): xpyd-worker:1"
    assert told(cluster) == [("Waiting", "ContainerCreating", message)]


def test_running_pods_that_are_not_ready_load_the_model_or_wait_for_engines() -> None:
    cluster = new_cluster()
    cluster.running(cluster.pods.values(), ready=False)
    loading = "decode: the model is loading since 10:00:00Z (2 of 2 pods, POD1)"
    assert told(cluster) == [("Waiting", "ModelLoading", loading)]
    found = cluster.problems()
    assert [(p.pool, p.reason) for p in found] == [
        ("decode", "ModelLoading"),
        ("prefill", "ModelLoading"),
        ("router", "WaitingForEngines"),
    ]


def test_a_node_that_does_not_answer_is_named() -> None:
    cluster = settled(load_fleet(EXAMPLE))
    for pod in decodes(cluster)[:1]:
        for condition in pod["status"]["conditions"]:
            condition["status"] = "False" if condition["type"] == "Ready" else condition["status"]
    message = f"decode: was ready, its node does not answer (1 of 2 pods, POD1): {NODE}"
    assert told(cluster) == [("Waiting", "NodeNotReady", message)]


def test_a_pod_whose_containers_are_ready_but_that_kubelet_does_not_call_so_is_waited_for() -> None:
    cluster = settled(load_fleet(EXAMPLE))
    for condition in decodes(cluster)[0]["status"]["conditions"]:
        if condition["type"] in ("Ready", "ContainersReady"):
            condition["status"] = "False"
    message = "decode: not ready yet (1 of 2 pods, POD1)"
    assert told(cluster) == [("Waiting", "NotReady", message)]


def test_readiness_gates_that_nobody_set_are_named() -> None:
    cluster = settled(load_fleet(EXAMPLE))
    for workload in cluster.workloads.values():
        gates = [{"conditionType": "example.com/seen"}]
        workload["spec"]["template"]["spec"]["readinessGates"] = gates
    for condition in decodes(cluster)[0]["status"]["conditions"]:
        condition["status"] = "False" if condition["type"] == "Ready" else condition["status"]
    message = "decode: readiness gates (1 of 2 pods, POD1): example.com/seen"
    assert told(cluster) == [("Waiting", "ReadinessGates", message)]


QUOTA = (
    'pods "chat-decode-6251845a-5d9c7b8f4d-x" is forbidden: exceeded quota: gpus, requested: '
    "requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=4, limited: "
    "requests.nvidia.com/gpu=4"
)


HOST_PATH = (
    'pods "x" is forbidden: violates PodSecurity "restricted:latest": restricted volume types '
    '(volume "models" uses restricted volume type "hostPath")'
)


ACCOUNT = (
    'pods "x" is forbidden: error looking up service account team/chat: serviceaccount "chat" '
    "not found"
)
"""The fleet's own, which the operator makes."""
THEIRS = ACCOUNT.replace("chat", "trainer")
"""One that the pool's template names."""


@pytest.mark.parametrize(
    ("message", "kind", "reason", "said"),
    [
        (QUOTA, "Degraded", "QuotaExceeded", "limited: requests.nvidia.com/gpu=4"),
        (HOST_PATH, "Degraded", "PodSecurity", "namespace of the level privileged"),
        (ACCOUNT, "Waiting", "FailedCreate", 'serviceaccount "chat" not found'),
        (
            THEIRS,
            "Degraded",
            "ServiceAccountMissing",
            "the namespace has no ServiceAccount trainer, which the pool's template names: create "
            "it, or leave serviceAccountName out of the template",
        ),
        (
            'pods "x" is forbidden: maximum cpu usage per Pod is 1',
            "Degraded",
            "FailedCreate",
            "cpu",
        ),
    ],
)
def test_pods_that_may_not_be_created_are_told_from_the_deployment(
    message: str, kind: str, reason: str, said: str
) -> None:
    cluster = new_cluster()
    (workload,) = [w for (pool, _), w in cluster.workloads.items() if pool == "decode"]
    for pod in decodes(cluster)[1:]:
        del cluster.pods[pod["metadata"]["name"]]
    cluster.running(decodes(cluster), ready=True)
    workload["status"] = {
        "replicas": 1,
        "conditions": [
            {
                "type": "ReplicaFailure",
                "status": "True",
                "reason": "FailedCreate",
                "message": message,
            }
        ],
    }
    (found,) = [p for p in cluster.problems() if p.pool == "decode"]
    assert (found.kind, found.reason) == (kind, reason)
    assert found.message.startswith("decode: 1 of 2 pods exist: ")
    assert said in found.message


def test_no_progress_is_told_only_where_nothing_else_says_why() -> None:
    cluster = new_cluster()
    cluster.running(cluster.pods.values(), ready=False)
    (workload,) = [w for (pool, _), w in cluster.workloads.items() if pool == "decode"]
    stopped = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    workload["status"]["conditions"] = [stopped]
    assert ("Degraded", "ProgressDeadlineExceeded") in [t[:2] for t in told(cluster)]
    cluster.crashed(decodes(cluster), log="boom")
    assert [t[1] for t in told(cluster)] == ["CrashLoopBackOff"]


def test_a_pool_that_finds_no_room_by_its_deadline_is_degraded_with_the_fix() -> None:
    cluster = new_cluster()
    cluster.unschedulable(decodes(cluster), "0/3 nodes are available: 3 Insufficient gpus.")
    assert [t[0] for t in told(cluster)] == ["Capacity"]
    (workload,) = [w for (pool, _), w in cluster.workloads.items() if pool == "decode"]
    stopped = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    workload["status"]["conditions"] = [stopped]
    (late,) = [t for t in told(cluster) if t[0] == "Degraded"]
    assert late[1] == "ProgressDeadlineExceeded"
    assert "add nodes, or let old instances make room (spec.rollout.maxUnav" in late[2]


def test_pods_that_leave_are_told_with_the_time_of_the_last() -> None:
    cluster = settled(load_fleet(EXAMPLE))
    one, other = decodes(cluster)
    cluster.delete(one)
    cluster.wait(10)
    cluster.delete(other)
    message = "decode: draining, gone by 10:01:45Z at the latest (2 pods, POD2)"
    assert told(cluster) == [("Waiting", "Draining", message)]


def test_a_pod_that_outlives_its_grace_period_is_a_problem() -> None:
    cluster = settled(load_fleet(EXAMPLE))
    cluster.delete(decodes(cluster)[0])
    cluster.wait(90 + 59)
    assert [reason for _, reason, _ in told(cluster)] == ["Draining"]
    cluster.wait(2)
    message = (
        "decode: should have been gone by 10:01:35Z (1 pod, POD1): its node node-1 does not "
        "answer, or a finalizer holds it"
    )
    assert told(cluster) == [("Degraded", "StuckTerminating", message)]


EVICTED = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 80Mi."


@pytest.mark.parametrize(("times", "kind"), [(1, "Waiting"), (3, "Degraded")])
def test_evicted_pods_are_told_while_their_pool_lacks_instances(times: int, kind: str) -> None:
    cluster = new_cluster()
    one = decodes(cluster)[0]
    cluster.failed([one], "Evicted", EVICTED)
    for number in range(1, times):
        pod = copy.deepcopy(one)
        pod["metadata"]["name"] = f"a-{number}"
        cluster.pods[f"a-{number}"] = pod
    cluster.turn()
    some = "1 pod" if times == 1 else f"{times} pods"
    assert (kind, "Evicted") in [t[:2] for t in told(cluster)]
    (message,) = [t[2] for t in told(cluster) if t[1] == "Evicted"]
    assert message.startswith(f"decode: failed for good ({some}, ")
    assert message.endswith(EVICTED)
    living = [p for p in decodes(cluster) if p["status"]["phase"] != "Failed"]
    cluster.running(living, ready=True)
    assert not told(cluster)


def test_pods_that_failed_long_ago_are_history() -> None:
    cluster = new_cluster()
    cluster.failed(decodes(cluster)[:1], "Evicted", EVICTED)
    cluster.wait(3600)
    assert "Evicted" not in [t[1] for t in told(cluster)]


def test_problems_come_with_causes_first_and_do_not_depend_on_the_order_of_objects() -> None:
    cluster = new_cluster()
    cluster.running(cluster.pods_of("router"), ready=False)
    cluster.unschedulable(
        cluster.pods_of("prefill"), "0/1 nodes are available: 1 Insufficient cpu."
    )
    cluster.crashed(decodes(cluster)[:1], log="boom")
    found = cluster.problems()
    assert [(p.kind, p.pool) for p in found] == [
        ("Degraded", "decode"),
        ("Capacity", "prefill"),
        ("Waiting", "decode"),
        ("Waiting", "router"),
    ]
    c = cluster.children
    turned = Children(c.deployments[::-1], (), c.pods[::-1], c.pools[::-1])
    assert find_problems(turned, cluster.look()) == found


def test_a_thousand_pods_with_one_problem_are_one_line() -> None:
    cluster = new_cluster()
    cluster.scale("decode", 8)
    cluster.turn()
    one = decodes(cluster)[0]
    cluster.crashed([one], log="boom")
    for number in range(1000):
        pod = copy.deepcopy(one)
        pod["metadata"]["name"] = f"z-{number}"
        cluster.pods[f"z-{number}"] = pod
    found = [p for p in cluster.problems() if p.kind == "Degraded"]
    assert len(found) == 1
    assert "(1001 of 1008 pods, " in found[0].message


def test_pods_without_their_workload_are_told_of_from_their_own_spec() -> None:
    cluster = settled(load_fleet(EXAMPLE))
    cluster.waiting(decodes(cluster), "ErrImageNeverPull")
    for pod in decodes(cluster):
        first(pod)["image"] = ""
        pod["status"]["conditions"] = []
    children = Children(pods=tuple(decodes(cluster)))
    (problem,) = find_problems(children, cluster.look())
    assert problem.message.endswith(": xpyd-worker:1")


def test_long_texts_are_cut_at_the_end_or_at_the_beginning() -> None:
    text = "begin " + "x" * 5000 + " end"
    assert short(text).startswith("begin x")
    assert short(text).endswith("x...")
    assert tail(text).startswith("...x")
    assert tail(text).endswith("x end")
    assert len(short(text)) == len(tail(text)) == MOST_TEXT
    assert short("a\n b\t c ") == tail("a\n b\t c ") == "a b c"


def test_times_are_those_of_the_api_server() -> None:
    assert rfc3339(Cluster(load_fleet(EXAMPLE)).now) == "2026-11-21T10:00:00Z"


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2026-11-21T10:00:00Z", "2026-11-21T10:00:00Z"),
        ("2026-11-21T11:30:00.123456+01:30", "2026-11-21T10:00:00Z"),
        ("2026-11-21T10:00:00", None),
        ("0001-01-01T00:00:00+14:00", None),
        ("soon", None),
        ("", None),
    ],
)
def test_only_a_time_with_its_zone_is_one(text: str, time: str | None) -> None:
    found = moment(text)
    assert (rfc3339(found) if found else None) == time


@pytest.mark.parametrize(("value", "number"), [(3, 3), (-3, 0), (True, 0), ("3", 0), (3.5, 0)])
def test_only_a_whole_number_that_is_not_negative_is_a_count(value: object, number: int) -> None:
    assert count({"spec": {"replicas": value}}, "spec", "replicas") == number
