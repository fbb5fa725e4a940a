"""What the status says when the cluster refuses: the words are those of real components.

The commands of docs/troubleshooting.md run here, against a fleet that has a trouble.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.harness import Cluster, wait_for
from tests.cluster.harness.kwok import NODE_SELECTOR, TOLERATIONS
from tests.cluster.operator_process import OperatorProcess, running_operator

ROOT = Path(__file__).parents[2]
CRDS = ROOT / "crds"
PAGE = ROOT / "docs" / "troubleshooting.md"
TOLD_S = 60.0
GONE_S = 90.0
TEST_IMAGE = "localhost/testpod:1"
"""On the real node; it ends at once when it is started as an engine."""
_FAKE_NODES = {"spec": {"nodeSelector": NODE_SELECTOR, "tolerations": TOLERATIONS}}
Obj = dict[str, Any]


@pytest.fixture(scope="module")
def plane(control_plane: Cluster) -> Iterator[Cluster]:
    control_plane.kubectl("apply", "-f", str(CRDS))
    control_plane.kubectl("wait", "--for=condition=Established", "-f", str(CRDS))
    control_plane.add_kwok_nodes(1)
    yield control_plane
    control_plane.kubectl("delete", "-f", str(CRDS), "--timeout=60s")


@pytest.fixture(scope="module")
def node(node_cluster: Cluster) -> Iterator[Cluster]:
    node_cluster.kubectl("apply", "-f", str(CRDS))
    node_cluster.kubectl("wait", "--for=condition=Established", "-f", str(CRDS))
    yield node_cluster
    node_cluster.kubectl("delete", "-f", str(CRDS), "--timeout=60s")


@contextmanager
def _operator_of(cluster: Cluster, namespace: str) -> Iterator[OperatorProcess]:
    with running_operator(cluster, namespace) as found:
        yield found
        where = ("-n", namespace, "delete", "inferencefleets", "--all", f"--timeout={GONE_S}s")
        cluster.kubectl(*where, timeout_s=GONE_S + 10)


@pytest.fixture
def operator(plane: Cluster, namespace: str) -> Iterator[OperatorProcess]:
    with _operator_of(plane, namespace) as found:
        yield found


@pytest.fixture
def node_operator(node: Cluster, namespace: str) -> Iterator[OperatorProcess]:
    with _operator_of(node, namespace) as found:
        yield found


def fleet(change: Callable[[Obj], object] | None = None) -> Obj:
    """1P1D on fake nodes, named chat."""
    pools: list[Obj] = [
        {
            "name": role.lower(),
            "role": role,
            "replicas": 1,
            "resources": {"gpus": 0},
            "template": _FAKE_NODES,
        }
        for role in ("Prefill", "Decode")
    ]
    spec: Obj = {
        "model": {"uri": "file:///models/x"},
        "pools": pools,
        "router": {"template": _FAKE_NODES},
        "drain": {"timeoutSeconds": 1},
    }
    if change:
        change(spec)
    return {
        "apiVersion": "xpyd.dev/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": "chat"},
        "spec": spec,
    }


def real_fleet(image: str, *, env: list[Obj] | None = None) -> Obj:
    """The same on the real node, with that image of engines and routers."""
    document = fleet()
    spec = document["spec"]
    spec["engine"] = {"image": image, "env": env or []}
    for pool in spec["pools"]:
        pool["resources"]["sharedMemory"] = "1Mi"
        del pool["template"]
    container = {"name": "router", "image": image}
    spec["router"] = {"replicas": 1, "template": {"spec": {"containers": [container]}}}
    return document


def apply(cluster: Cluster, namespace: str, document: Obj) -> None:
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=yaml.safe_dump(document))


def conditions(cluster: Cluster, namespace: str) -> dict[str, Obj]:
    got = json.loads(cluster.kubectl("-n", namespace, "get", "fleet/chat", "-o", "json"))
    return {c["type"]: c for c in got.get("status", {}).get("conditions", [])}


def wait_told(
    cluster: Cluster, namespace: str, operator: OperatorProcess, kind: str, reason: str
) -> str:
    """The condition's message once it has that reason."""

    def is_told() -> bool:
        return conditions(cluster, namespace).get(kind, {}).get("reason") == reason

    def explain() -> str:
        return f"{conditions(cluster, namespace)}\n{operator.log()}"

    wait_for(is_told, TOLD_S, f"{kind} is {reason}", explain=explain)
    return str(conditions(cluster, namespace)[kind]["message"])


def test_a_fleet_without_gpus_in_the_cluster_has_the_schedulers_words(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    def want_gpus(spec: Obj) -> None:
        spec["pools"][1]["resources"] = {"gpus": 1}

    apply(plane, namespace, fleet(want_gpus))
    message = wait_told(plane, namespace, operator, "CapacityAvailable", "Unschedulable")
    assert message.startswith("decode: no node fits (1 of 1 pods, chat-decode-")
    assert "Insufficient nvidia.com/gpu" in message
    assert "preemption" not in message
    found = conditions(plane, namespace)
    assert found["Ready"]["reason"] == "Unschedulable"
    assert found["Degraded"]["status"] == "False"
    apply(plane, namespace, fleet())
    plane.kubectl(
        "-n", namespace, "wait", "--for=condition=Ready", "fleet/chat", f"--timeout={TOLD_S}s",
        timeout_s=TOLD_S + 10,
    )  # fmt: skip
    # The old revision's pod goes a moment after its successor is ready.
    wait_told(plane, namespace, operator, "CapacityAvailable", "Sufficient")


def test_a_quota_that_is_full_is_told_with_its_numbers(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    plane.kubectl("-n", namespace, "create", "quota", "few", "--hard=pods=3")
    apply(plane, namespace, fleet())
    message = wait_told(plane, namespace, operator, "Degraded", "QuotaExceeded")
    assert re.search(r"0 of [12] pods exist: .*exceeded quota: few", message) or re.search(
        r"1 of 2 pods exist: .*exceeded quota: few", message
    )
    assert "limited: pods=3" in message
    assert conditions(plane, namespace)["CapacityAvailable"]["reason"] == "QuotaExceeded"


def test_host_paths_in_a_restricted_namespace_are_told_with_the_way_out(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    def use_host_path(spec: Obj) -> None:
        spec["model"]["cache"] = {"type": "HostPath", "path": "/models"}

    level = "pod-security.kubernetes.io/enforce=restricted"
    plane.kubectl("label", "namespace", namespace, level)
    apply(plane, namespace, fleet(use_host_path))
    message = wait_told(plane, namespace, operator, "Degraded", "PodSecurity")
    assert "violates PodSecurity" in message
    assert message.endswith("(hostPath needs a namespace of the level privileged)") or (
        "(hostPath needs a namespace of the level privileged); prefill: " in message
    )


def test_a_claim_that_is_not_there_is_no_lack_of_room(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    def use_claim(spec: Obj) -> None:
        spec["model"]["cache"] = {"type": "PersistentVolumeClaim", "claimName": "weights"}

    apply(plane, namespace, fleet(use_claim))
    message = wait_told(plane, namespace, operator, "Degraded", "VolumeUnavailable")
    assert 'persistentvolumeclaim "weights" not found' in message
    assert conditions(plane, namespace)["CapacityAvailable"]["status"] == "True"


def test_the_commands_of_the_page_run_and_tell_of_the_trouble(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    def want_gpus(spec: Obj) -> None:
        spec["pools"][1]["resources"] = {"gpus": 1}

    apply(plane, namespace, fleet(want_gpus))
    wait_told(plane, namespace, operator, "CapacityAvailable", "Unschedulable")
    fence = r"^```sh not-run: needs a cluster; tests/cluster/test_status.py[^\n]*\n(.*?)^```$"
    blocks = re.findall(fence, PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 3
    script = f'set -eu\nkubectl() {{ command kubectl --namespace={namespace} "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-c", script + "".join(blocks)],
        env=plane.client_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^chat +1/1 +0/1 +1 +False +Unschedulable ", done.stdout, re.M)
    shown = r"^CapacityAvailable=False Unschedulable: decode: no node fits \(1 of 1 pods, chat-"
    assert re.search(shown, done.stdout, re.M)
    assert re.search(r"Warning +NoCapacity +InferenceFleet/chat ", done.stdout)
    assert re.search(r"^fleetpool|^NAME +FLEET +ROLE", done.stdout, re.M)


def test_an_image_in_no_registry_is_told_with_what_the_registry_says(
    node: Cluster, namespace: str, node_operator: OperatorProcess
) -> None:
    apply(node, namespace, real_fleet("registry.invalid/xpyd-worker:1"))
    message = wait_told(node, namespace, node_operator, "Degraded", "ImagePullBackOff")
    # Of the pool whose kubelet's word comes first.
    assert re.match(
        r"(decode|prefill|router): the image cannot be pulled \(1 of 1 pods, chat-\1-\S+\): "
        r"registry.invalid/xpyd-worker:1: .+",
        message,
    ), message
    assert "rpc error" not in message


def test_a_crash_is_told_with_the_last_line_of_the_log(
    node: Cluster, namespace: str, node_operator: OperatorProcess
) -> None:
    env: list[Obj] = [{"name": "STAND_IN_FAILS", "value": "told to fail"}]
    apply(node, namespace, real_fleet(TEST_IMAGE, env=env))
    message = wait_told(node, namespace, node_operator, "Degraded", "CrashLoopBackOff")
    assert re.match(
        r"(decode|prefill): the container crashes \(1 of 1 pods, chat-\1-\S+\): "
        r"exit code 1, \d+ restarts?: told to fail",
        message,
    ), message
    (block,) = re.findall(
        r"^```sh not-run: needs a crashed container; [^\n]*\n(.*?)^```$",
        PAGE.read_text(),
        re.M | re.S,
    )
    script = f'set -eu\nkubectl() {{ command kubectl --namespace={namespace} "$@"; }}\n{block}'

    def told() -> str:
        done = subprocess.run(
            ["bash", "-c", script],
            env=node.client_environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    # A restart between takes the container before the last one away, and its log.
    found = [told()]
    while found[-1].startswith("unable to retrieve container logs") and len(found) < 5:
        found.append(told())
    assert found[-1] == "told to fail\n"


def test_a_key_that_is_missing_is_named(
    node: Cluster, namespace: str, node_operator: OperatorProcess
) -> None:
    reference = {"secretKeyRef": {"name": "hub", "key": "token"}}
    env: list[Obj] = [{"name": "HUB_TOKEN", "valueFrom": reference}]
    apply(node, namespace, real_fleet(TEST_IMAGE, env=env))
    message = wait_told(node, namespace, node_operator, "Degraded", "CreateContainerConfigError")
    assert re.match(r"(decode|prefill): the container cannot be configured \(1 of 1 pods", message)
    assert 'secret "hub" not found' in message


def test_a_volume_that_does_not_come_is_named_after_half_a_minute(
    node: Cluster, namespace: str, node_operator: OperatorProcess
) -> None:
    document = real_fleet(TEST_IMAGE)
    document["spec"]["kvTransfer"] = {"keySecretRef": {"name": "own-key"}}
    apply(node, namespace, document)
    message = wait_told(node, namespace, node_operator, "Ready", "VolumesNotMounted")
    assert "may lack Secret own-key or the pod's network" in message
