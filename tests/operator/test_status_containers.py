"""find_problems(): containers that do not run, and the words of their last exit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from tests.operator.observed_cluster import (
    EXAMPLE,
    Cluster,
    decodes,
    first,
    new_cluster,
    settled,
    told,
)
from xpyd_operator.document.load import load_fleet
from xpyd_operator.status.children import MOST_TEXT
from xpyd_operator.status.crashes import last_line

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
        "decode: out of memory at the limit of 66684Mi; its template sets "
        "resources.limits.memory of engine (2 of 2 pods, POD1): 3 restarts",
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
    some = "1 restart" if restarts == 1 else f"{restarts} restarts"
    assert told(cluster) == [
        (
            "Waiting",
            "ModelLoading",
            "decode: the model is loading since 10:00:00Z (2 of 2 pods, POD1): "
            f"after exit code 1, {some}: boom",
        )
    ]


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
    message = (
        "decode: out of memory at the limit of 4Gi; its template sets resources.limits.memory of "
        "engine (2 of 2 pods, POD1): 1 restart"
    )
    assert told(cluster) == [("Degraded", "OOMKilled", message)]


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
