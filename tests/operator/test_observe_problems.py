"""find_problems(): what kubelet, scheduler and controllers write, and what people read of it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.operator.observed_cluster import NODE, Cluster, first, rfc3339, settled
from xpyd_operator.api import load_fleet, parse_fleet
from xpyd_operator.observe import Children, Problem, find_problems
from xpyd_operator.observe.crashes import last_line
from xpyd_operator.observe.raw import MOST_TEXT, count, moment, short, tail

EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.yaml"


def new_cluster() -> Cluster:
    cluster = Cluster(load_fleet(EXAMPLE))
    cluster.turn()
    return cluster


def told(cluster: Cluster, pool: str = "decode") -> list[tuple[str, str, str]]:
    """The pool's problems, without the hash in its pods' names."""
    found = find_problems(cluster.children, cluster.time)
    for problem in found:
        assert len(problem.message) < 4 * MOST_TEXT
        assert problem.message.isprintable()
    return [(p.kind, p.reason, _plain(p)) for p in found if p.pool == pool]


def _plain(problem: Problem) -> str:
    return re.sub(r"chat-decode-[0-9a-f]{8}-5d9c7b8f4d-decode(\d+)", r"POD\1", problem.message)


def decodes(cluster: Cluster) -> list[dict[str, Any]]:
    return cluster.living("decode")


Change = Callable[[Cluster], None]


def waits(reason: str, message: str = "") -> Change:
    return lambda c: c.waiting(decodes(c), reason, message)


CANNOT_START: dict[str, tuple[Change, str, str]] = {
    "a pull that failed": (
        waits(
            "ErrImagePull",
            "failed to pull and unpack image "
            '"ghcr.io/acme/worker:9": failed to resolve reference "ghcr.io/acme/worker:9": '
            "pull access denied, repository does not exist or may require authorization",
        ),
        "ImagePullBackOff",
        "decode: the image cannot be pulled (2 of 2 pods, POD1): xpyd-worker:1: pull access "
        "denied, repository does not exist or may require authorization",
    ),
    "the same while kubelet waits": (
        waits(
            "ImagePullBackOff",
            'Back-off pulling image "ghcr.io/acme/worker:9": ErrImagePull: failed to pull and '
            'unpack image "ghcr.io/acme/worker:9": failed to resolve reference '
            '"ghcr.io/acme/worker:9": pull access denied, repository does not exist or may '
            "require authorization",
        ),
        "ImagePullBackOff",
        "decode: the image cannot be pulled (2 of 2 pods, POD1): xpyd-worker:1: pull access "
        "denied, repository does not exist or may require authorization",
    ),
    "a registry that does not answer": (
        waits("RegistryUnavailable", "image pull failed for x because the registry is unavailable"),
        "ImagePullBackOff",
        "decode: the image cannot be pulled (2 of 2 pods, POD1): xpyd-worker:1: image pull failed "
        "for x because the registry is unavailable",
    ),
    "an image that may not be pulled": (
        waits(
            "ErrImageNeverPull",
            'Container image "xpyd-worker:1" is not present with pull policy of Never',
        ),
        "ErrImageNeverPull",
        "decode: the image is not on the node and imagePullPolicy is Never (2 of 2 pods, POD1): "
        "xpyd-worker:1",
    ),
    "a name that is none": (
        waits(
            "InvalidImageName",
            'Failed to apply default image tag "Worker:": couldn\'t parse image reference',
        ),
        "InvalidImageName",
        "decode: the image's name is invalid (2 of 2 pods, POD1): xpyd-worker:1",
    ),
    "a Secret's key that is missing": (
        waits("CreateContainerConfigError", "couldn't find key token in Secret team/hub"),
        "CreateContainerConfigError",
        "decode: the container cannot be configured (2 of 2 pods, POD1): couldn't find key token "
        "in Secret team/hub",
    ),
    "a command that is missing": (
        waits(
            "RunContainerError",
            "failed to create containerd task: failed to create shim task: OCI runtime create "
            "failed: runc create failed: unable to start container process: error during "
            'container init: exec: "xpyd": executable file not found in $PATH: unknown',
        ),
        "RunContainerError",
        "decode: the container cannot be started (2 of 2 pods, POD1): failed to create containerd "
        "task: failed to create shim task: OCI runtime create failed: runc create failed: unable "
        'to start container process: error during container init: exec: "xpyd": executable file '
        "not found in $PATH: unknown",
    ),
    "a crash": (
        lambda c: c.crashed(decodes(c), log="a\nValueError: no such model\n\n"),
        "CrashLoopBackOff",
        "decode: the container crashes (2 of 2 pods, POD1): exit code 1, 3 restarts: ValueError: "
        "no such model",
    ),
    "a crash without a word": (
        lambda c: c.crashed(decodes(c), log="", code=139, restarts=1),
        "CrashLoopBackOff",
        "decode: the container crashes (2 of 2 pods, POD1): exit code 139 (SIGSEGV), 1 restart",
    ),
    "a crash that was logged as JSON": (
        lambda c: c.crashed(decodes(c), log='{"level": "error", "message": "no memory left"}\n'),
        "CrashLoopBackOff",
        "decode: the container crashes (2 of 2 pods, POD1): exit code 1, 3 restarts: no memory "
        "left",
    ),
    "too much memory": (
        lambda c: c.crashed(decodes(c), log="", code=137, reason="OOMKilled"),
        "OOMKilled",
        "decode: out of memory (2 of 2 pods, POD1): 3 restarts",
    ),
    "a start that the runtime refuses": (
        lambda c: c.crashed(
            decodes(c), log='exec: "xpyd": not found', code=128, reason="StartError"
        ),
        "CrashLoopBackOff",
        "decode: the container crashes (2 of 2 pods, POD1): exit code 128, 3 restarts: exec: "
        '"xpyd": not found',
    ),
}


@pytest.mark.parametrize("name", CANNOT_START)
def test_what_keeps_a_container_from_running_is_degraded_and_said(name: str) -> None:
    change, reason, message = CANNOT_START[name]
    cluster = new_cluster()
    change(cluster)
    assert told(cluster) == [("Degraded", reason, message)]


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
                "Secret chat-kv or the pod's network",
            ),
        ),
        (
            200,
            (
                "Degraded",
                "VolumesNotMounted",
                "decode: not created since 10:00:00Z (2 of 2 pods, POD1): node node-1 may lack "
                "Secret chat-kv or the pod's network",
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
    (problem,) = [p for p in find_problems(cluster.children, cluster.time) if p.pool == "decode"]
    for name in ("Secret chat-kv", "PersistentVolumeClaim weights", "ConfigMap extra"):
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
    found = find_problems(cluster.children, cluster.time)
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


def test_an_init_container_that_runs_is_named() -> None:
    cluster = new_cluster()
    cluster.bind(decodes(cluster), sandbox=True)
    for pod in decodes(cluster):
        first(pod)["state"] = {"waiting": {"reason": "PodInitializing"}}
        pod["status"]["initContainerStatuses"] = [
            {
                "name": "warm",
                "state": {"running": {"startedAt": cluster.time}},
                "ready": False,
                "started": False,
            }
        ]
    message = "decode: init container warm runs since 10:00:00Z (2 of 2 pods, POD1)"
    assert told(cluster) == [("Waiting", "PodInitializing", message)]


def test_a_sidecar_that_fails_is_told_by_its_name() -> None:
    cluster = settled(load_fleet(EXAMPLE))
    for pod in decodes(cluster)[:1]:
        pod["status"]["containerStatuses"][0]["name"] = "sidecar"
    cluster.crashed(decodes(cluster)[:1], log="no config")
    message = (
        "decode: the container crashes (1 of 2 pods, POD1): container sidecar, exit code 1, "
        "3 restarts: no config"
    )
    assert told(cluster) == [("Degraded", "CrashLoopBackOff", message)]


def test_the_container_that_fails_is_told_and_not_one_that_failed_before() -> None:
    cluster = new_cluster()
    cluster.crashed(decodes(cluster)[:1], log="boom")
    (pod, other) = decodes(cluster)
    good = {**copy.deepcopy(first(pod)), "ready": True, "state": {"running": {}}}
    cluster.running([pod], ready=False)
    first(pod)["lastState"], first(pod)["restartCount"] = {}, 0
    pod["status"]["containerStatuses"].append({**good, "name": "sidecar"})
    cluster.running([other], ready=True)
    assert [reason for _, reason, _ in told(cluster)] == ["ModelLoading"]


def test_of_two_containers_the_one_that_needs_somebody_is_told() -> None:
    cluster = new_cluster()
    cluster.waiting(decodes(cluster), "SomethingNew", "of a later Kubernetes")
    broken = {"name": "sidecar", "image": "x", "state": {"waiting": {"reason": "ErrImagePull"}}}
    message = "decode: SomethingNew (2 of 2 pods, POD1): of a later Kubernetes"
    assert told(cluster) == [("Waiting", "SomethingNew", message)]
    for pod in decodes(cluster):
        pod["status"]["containerStatuses"].append(broken)
    assert [t[:2] for t in told(cluster)] == [("Degraded", "ImagePullBackOff")]


@pytest.mark.parametrize("strange", ["some reason", "x" * 100, "Grün", "9Lives", "A\n"])
def test_reasons_that_are_no_words_are_given_a_name(strange: str) -> None:
    cluster = new_cluster()
    cluster.waiting(decodes(cluster), strange)
    assert [reason for _, reason, _ in told(cluster)] == ["ContainerWaiting"]
    cluster.failed(decodes(cluster)[:1], strange, "")
    assert "PodFailed" in [reason for _, reason, _ in told(cluster)]


@pytest.mark.parametrize(("code", "expected"), [(0, "ContainerCreating"), (1, "ContainerExited")])
def test_an_init_container_may_end_but_not_fail(code: int, expected: str) -> None:
    cluster = new_cluster()
    for workload in cluster.workloads.values():
        workload["spec"]["template"]["spec"]["initContainers"] = [{"name": "warm"}]
    cluster.bind(decodes(cluster), sandbox=True)
    for pod in decodes(cluster):
        ended = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
        pod["status"]["initContainerStatuses"] = [
            {"name": "warm", "state": ended, "ready": not code}
        ]
    assert [reason for _, reason, _ in told(cluster)] == [expected]


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


def test_a_container_that_runs_between_two_crashes_is_still_one_that_crashes() -> None:
    cluster = new_cluster()
    cluster.crashed(decodes(cluster), log="boom", restarts=2)
    before = told(cluster)
    cluster.running(decodes(cluster), ready=False)
    assert told(cluster) == before
    assert before[0][0] == "Degraded"
    cluster.running(decodes(cluster), ready=True)
    assert not told(cluster)


@pytest.mark.parametrize(("restarts", "ran_s"), [(1, 5), (7, 3600)])
def test_one_crash_or_one_after_long_is_not_yet_a_loop(restarts: int, ran_s: int) -> None:
    cluster = new_cluster()
    cluster.crashed(decodes(cluster), log="boom", restarts=restarts, ran_s=ran_s)
    cluster.running(decodes(cluster), ready=False)
    assert [reason for _, reason, _ in told(cluster)] == ["ModelLoading"]


def test_the_first_exit_is_told_and_waited_for() -> None:
    cluster = new_cluster()
    cluster.crashed(decodes(cluster), log="boom", restarts=0)
    for pod in decodes(cluster):
        first(pod)["state"] = first(pod).pop("lastState")
    message = (
        "decode: the container ended and is started again (2 of 2 pods, POD1): exit code 1, "
        "0 restarts: boom"
    )
    assert told(cluster) == [("Waiting", "ContainerExited", message)]


def test_memory_limits_are_named_where_they_are_known() -> None:
    cluster = new_cluster()
    for workload in cluster.workloads.values():
        container = workload["spec"]["template"]["spec"]["containers"][0]
        container["resources"] = {"limits": {"memory": "4Gi"}}
    cluster.crashed(decodes(cluster), log="", code=137, reason="OOMKilled", restarts=1)
    message = "decode: out of memory at the limit of 4Gi (2 of 2 pods, POD1): 1 restart"
    assert told(cluster) == [("Degraded", "OOMKilled", message)]


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


@pytest.mark.parametrize(
    ("message", "kind", "reason", "said"),
    [
        (QUOTA, "Degraded", "QuotaExceeded", "limited: requests.nvidia.com/gpu=4"),
        (HOST_PATH, "Degraded", "PodSecurity", "namespace of the level privileged"),
        (ACCOUNT, "Waiting", "FailedCreate", 'serviceaccount "chat" not found'),
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
    (found,) = [p for p in find_problems(cluster.children, cluster.time) if p.pool == "decode"]
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
    found = find_problems(cluster.children, cluster.time)
    assert [(p.kind, p.pool) for p in found] == [
        ("Degraded", "decode"),
        ("Capacity", "prefill"),
        ("Waiting", "decode"),
        ("Waiting", "router"),
    ]
    c = cluster.children
    turned = Children(c.deployments[::-1], (), c.pods[::-1], c.pools[::-1])
    assert find_problems(turned, cluster.time) == found


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
    found = [p for p in find_problems(cluster.children, cluster.time) if p.kind == "Degraded"]
    assert len(found) == 1
    assert "(1001 of 1008 pods, " in found[0].message


def test_pods_without_their_workload_are_told_of_from_their_own_spec() -> None:
    cluster = settled(load_fleet(EXAMPLE))
    cluster.waiting(decodes(cluster), "ErrImageNeverPull")
    for pod in decodes(cluster):
        first(pod)["image"] = ""
        pod["status"]["conditions"] = []
    children = Children(pods=tuple(decodes(cluster)))
    (problem,) = find_problems(children, cluster.time)
    assert problem.message.endswith(": xpyd-worker:1")


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", ""),
        ("\n \n", ""),
        ("one\ntwo\n", "two"),
        ("2026-11-21T10:00:00.123+00:00 ERROR   xpyd: no key\n", "ERROR xpyd: no key"),
        ('{"message": "no key", "level": "error"}', "no key"),
        ('{"message": 5}', '{"message": 5}'),
        ("{broken", "{broken"),
        ("[" * 5000, "[" * (MOST_TEXT - 3) + "..."),
        ("\x1b[31mred\x1b[0m\x00", "?[31mred?[0m?"),
    ],
)
def test_the_last_line_of_a_log_is_one_printable_line(log: str, line: str) -> None:
    assert last_line(log) == line


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
