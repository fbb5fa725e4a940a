"""What the status says when the cluster refuses: the words are those of real components.

The commands of docs/troubleshooting.md run here, against a fleet that has a trouble.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.fleetkit import ROOT, FleetClient, Obj, fake_fleet, installed_crds, operated
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.harness.node import TEST_IMAGE
from tests.cluster.operator_process import OperatorProcess

PAGE = ROOT / "docs" / "troubleshooting.md"
TOLD_S = 60


@pytest.fixture(scope="module")
def node(node_cluster: Cluster) -> Iterator[Cluster]:
    with installed_crds(node_cluster):
        yield node_cluster


@pytest.fixture
def chat(plane: Cluster, namespace: str) -> FleetClient:
    """On fake nodes."""
    return FleetClient(plane, namespace)


@pytest.fixture
def operator(chat: FleetClient) -> Iterator[OperatorProcess]:
    with operated(chat.cluster, chat.namespace) as found:
        yield found


@pytest.fixture
def real(node: Cluster, namespace: str) -> FleetClient:
    """On the real node."""
    return FleetClient(node, namespace)


@pytest.fixture
def node_operator(real: FleetClient) -> Iterator[OperatorProcess]:
    with operated(real.cluster, real.namespace) as found:
        yield found


def fleet(change: Callable[[Obj], object] | None = None) -> Obj:
    """1P1D on fake nodes."""
    document = fake_fleet(model={"uri": "file:///models/x"}, drain={"timeoutSeconds": 1})
    if change:
        change(document["spec"])
    return document


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


def wait_told(chat: FleetClient, operator: OperatorProcess, kind: str, reason: str) -> str:
    """The condition's message once it has that reason."""

    def explain() -> str:
        return f"{chat.document()}\n{operator.log()}"

    def is_told() -> bool:
        return chat.condition(kind).get("reason") == reason

    wait_for(is_told, TOLD_S, f"{kind} is {reason}", explain=explain)
    return str(chat.condition(kind)["message"])


def test_a_fleet_without_gpus_in_the_cluster_has_the_schedulers_words(
    chat: FleetClient, operator: OperatorProcess
) -> None:
    def want_gpus(spec: Obj) -> None:
        spec["pools"][1]["resources"] = {"gpus": 1}

    chat.apply(fleet(want_gpus))
    message = wait_told(chat, operator, "CapacityAvailable", "Unschedulable")
    assert message.startswith("decode: no node fits (1 of 1 pods, chat-decode-")
    assert "Insufficient nvidia.com/gpu" in message
    assert "preemption" not in message
    assert chat.condition("Ready")["reason"] == "Unschedulable"
    assert chat.condition("Degraded")["status"] == "False"
    chat.apply(fleet())
    chat.wait_ready(TOLD_S)
    # The old revision's pod goes a moment after its successor is ready.
    wait_told(chat, operator, "CapacityAvailable", "Sufficient")


def test_a_quota_that_is_full_is_told_with_its_numbers(
    chat: FleetClient, operator: OperatorProcess
) -> None:
    chat.kubectl("create", "quota", "few", "--hard=pods=3")
    chat.apply(fleet())
    message = wait_told(chat, operator, "Degraded", "QuotaExceeded")
    assert re.search(r"0 of [12] pods exist: .*exceeded quota: few", message) or re.search(
        r"1 of 2 pods exist: .*exceeded quota: few", message
    )
    assert "limited: pods=3" in message
    assert chat.condition("CapacityAvailable")["reason"] == "QuotaExceeded"


def test_host_paths_in_a_restricted_namespace_are_told_with_the_way_out(
    chat: FleetClient, operator: OperatorProcess
) -> None:
    def use_host_path(spec: Obj) -> None:
        spec["model"]["cache"] = {"type": "HostPath", "path": "/models"}

    level = "pod-security.kubernetes.io/enforce=restricted"
    chat.cluster.kubectl("label", "namespace", chat.namespace, level)
    chat.apply(fleet(use_host_path))
    message = wait_told(chat, operator, "Degraded", "PodSecurity")
    assert "violates PodSecurity" in message
    assert message.endswith("(hostPath needs a namespace of the level privileged)") or (
        "(hostPath needs a namespace of the level privileged); prefill: " in message
    )


def test_a_claim_that_is_not_there_is_no_lack_of_room(
    chat: FleetClient, operator: OperatorProcess
) -> None:
    def use_claim(spec: Obj) -> None:
        spec["model"]["cache"] = {"type": "PersistentVolumeClaim", "claimName": "weights"}

    chat.apply(fleet(use_claim))
    message = wait_told(chat, operator, "Degraded", "VolumeUnavailable")
    assert 'persistentvolumeclaim "weights" not found' in message
    assert chat.condition("CapacityAvailable")["status"] == "True"


def test_the_commands_of_the_page_run_and_tell_of_the_trouble(
    chat: FleetClient, operator: OperatorProcess
) -> None:
    def want_gpus(spec: Obj) -> None:
        spec["pools"][1]["resources"] = {"gpus": 1}

    chat.apply(fleet(want_gpus))
    wait_told(chat, operator, "CapacityAvailable", "Unschedulable")
    fence = r"^```sh not-run: needs a cluster; tests/cluster/test_status.py[^\n]*\n(.*?)^```$"
    blocks = re.findall(fence, PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 3
    script = f'set -eu\nkubectl() {{ command kubectl --namespace={chat.namespace} "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-c", script + "".join(blocks)],
        env=chat.cluster.client_environment(),
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
    real: FleetClient, node_operator: OperatorProcess
) -> None:
    real.apply(real_fleet("registry.invalid/xpyd-worker:1"))
    message = wait_told(real, node_operator, "Degraded", "ImagePullBackOff")
    # Of the pool whose kubelet's word comes first.
    assert re.match(
        r"(decode|prefill|router): the image cannot be pulled \(1 of 1 pods, chat-\1-\S+\): "
        r"registry.invalid/xpyd-worker:1: .+",
        message,
    ), message
    assert "rpc error" not in message


def test_a_crash_is_told_with_the_last_line_of_the_log(
    real: FleetClient, node_operator: OperatorProcess
) -> None:
    env: list[Obj] = [{"name": "STAND_IN_FAILS", "value": "told to fail"}]
    real.apply(real_fleet(TEST_IMAGE, env=env))
    message = wait_told(real, node_operator, "Degraded", "CrashLoopBackOff")
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
    script = f'set -eu\nkubectl() {{ command kubectl --namespace={real.namespace} "$@"; }}\n{block}'

    def told() -> str:
        done = subprocess.run(
            ["bash", "-c", script],
            env=real.cluster.client_environment(),
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


def test_a_key_that_is_missing_is_named(real: FleetClient, node_operator: OperatorProcess) -> None:
    reference = {"secretKeyRef": {"name": "hub", "key": "token"}}
    env: list[Obj] = [{"name": "HUB_TOKEN", "valueFrom": reference}]
    real.apply(real_fleet(TEST_IMAGE, env=env))
    message = wait_told(real, node_operator, "Degraded", "CreateContainerConfigError")
    assert re.match(r"(decode|prefill): the container cannot be configured \(1 of 1 pods", message)
    assert 'secret "hub" not found' in message


def test_a_volume_that_does_not_come_is_named_after_half_a_minute(
    real: FleetClient, node_operator: OperatorProcess
) -> None:
    document = real_fleet(TEST_IMAGE)
    document["spec"]["kvTransfer"] = {"keySecretRef": {"name": "own-key"}}
    real.apply(document)
    message = wait_told(real, node_operator, "Ready", "VolumesNotMounted")
    assert "may lack Secret own-key or the pod's network" in message
