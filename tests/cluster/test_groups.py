"""Real engines whose stages stand in two pods: the group of a LeaderWorkerSet answers, falls whole
and returns.

The node has no GPUs. It offers their resource, which decides how many pods an instance has, and the
engines are told to compute on the CPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.cluster.fleetkit import (
    DEMO_MODEL,
    FleetClient,
    Obj,
    finish_load,
    fleet_document,
    fleet_of_images,
    small_cases,
)
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.harness.tools import kubectl_binary
from tests.e2e.oracle import Case

pytestmark = pytest.mark.cluster
NAMESPACE = "groups"
GPU = "nvidia.com/gpu"
REQUESTS = 12
_KILL_RANKS = """
import os, pathlib, signal
seen = {}
for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
    seen[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
ranks = set(seen) - set(seen.values()) - {os.getpid()}
for rank in ranks:
    os.kill(rank, signal.SIGKILL)
print(len(ranks))
"""
"""The ranks are the container's processes that have started no others."""


def document() -> Obj:
    """1P1D; D has two stages, each in a pod, and nobody computes a prompt whose KV did not come."""
    made = fleet_document(prefill=1, decode=1)
    spec = made["spec"]
    spec["engine"]["args"].append("--device=cpu")
    decode = next(pool for pool in spec["pools"] if pool["name"] == "decode")
    decode["parallelism"] = {"tensor": 1, "pipeline": 2}
    decode["resources"]["gpus"] = 1
    spec["router"] = {"replicas": 1}
    spec["drain"] = {"timeoutSeconds": 30}
    spec["kvTransfer"]["onFailure"] = "Fail"
    return made


@pytest.fixture(scope="module")
def fleet(node_cluster: Cluster) -> Iterator[FleetClient]:
    node_cluster.install_lws()
    try:
        node_cluster.set_node_capacity({GPU: 4})
        with fleet_of_images(node_cluster, NAMESPACE) as fleet:
            fleet.apply(document())
            fleet.wait_ready()
            yield fleet
    finally:
        node_cluster.set_node_capacity({GPU: None})
        node_cluster.uninstall_lws()


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return small_cases()


def answer_all(fleet: FleetClient, cases: list[Case]) -> None:
    fleet.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=30s")
    report = fleet.load(cases, requests=REQUESTS)
    assert report["failed"] == 0, report


def group(fleet: FleetClient, number: int = 0) -> dict[int, Obj]:
    """The pods of decode's instance of this number, by their own number in it."""
    labels = "leaderworkerset.sigs.k8s.io"
    return {
        int(pod["metadata"]["labels"][f"{labels}/worker-index"]): pod
        for pod in fleet.pods("decode")
        if pod["metadata"]["labels"][f"{labels}/group-index"] == str(number)
    }


def uids(pods: dict[int, Obj]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods.values()}


def wait_until_made_again(fleet: FleetClient, before: dict[int, Obj], number: int = 0) -> None:
    def is_new() -> bool:
        found = uids(group(fleet, number))
        return len(found) == 2 and not uids(before) & found

    wait_for(is_new, 60, "both pods are made again", explain=fleet.explain)


def told(fleet: FleetClient) -> list[str]:
    """What the fleet's Events say."""
    return [event["message"] for event in fleet.events()]


def token_bytes() -> int:
    """Keys and values of one token in all layers, as float32."""
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    each = config["num_key_value_heads"] * config["head_dim"]
    return 2 * 4 * config["num_hidden_layers"] * each


@pytest.mark.long
def test_stages_in_two_pods_answer_from_the_kv_of_a_third(
    fleet: FleetClient, cases: list[Case]
) -> None:
    pods = group(fleet)
    assert sorted(pods) == [0, 1]
    answer_all(fleet, cases)
    leader = pods[0]
    assert fleet.metric(leader, "xpyd_engine_prompt_tokens_computed_total") <= REQUESTS
    tokens = fleet.metric(leader, "xpyd_kv_received_tokens_total")
    # Of all layers: either stage has received its own.
    assert fleet.metric(leader, "xpyd_kv_received_bytes_total") >= tokens * token_bytes() > 0
    assert fleet.pool("decode")["status"]["readyReplicas"] == 1


@pytest.mark.long
def test_a_rank_killed_in_the_second_pod_takes_the_instance_down_whole(
    fleet: FleetClient, cases: list[Case]
) -> None:
    before = group(fleet)
    argv = ("exec", before[1]["metadata"]["name"], "-c", "engine", "--")
    assert fleet.kubectl(*argv, "python3", "-c", _KILL_RANKS).split() == ["1"]
    said = re.compile(
        r"^InstanceRecreated: decode: .* exit code (11|14): .*"
        r"rank 1 \(pod 1, stage 1, tensor share 0\) was ended by SIGKILL"
    )
    wait_for(
        lambda: any(map(said.search, told(fleet))),
        60,
        "an Event names the rank",
        explain=fleet.explain,
    )
    wait_until_made_again(fleet, before)
    fleet.wait_ready()
    answer_all(fleet, cases)


@pytest.mark.long
def test_a_second_pod_that_is_deleted_drains_its_instance(
    fleet: FleetClient, cases: list[Case]
) -> None:
    fleet.scale("decode", 2)
    fleet.wait_pool("decode", 2)
    before = group(fleet, 1)
    leader, other = (before[number]["metadata"]["name"] for number in (0, 1))
    argv = [kubectl_binary(), "-n", NAMESPACE, "logs", "--follow", leader]
    log = fleet.cluster.popen(argv, stdout=-1, stderr=-1, text=True)
    load = fleet.start_load(cases)
    wait_for(
        lambda: fleet.metric(before[0], "xpyd_engine_prompt_tokens_total") > 0,
        60,
        "the new instance has requests",
        interval_s=1.0,
        explain=fleet.explain,
    )
    fleet.kubectl("delete", "pod", other, "--wait=false")
    # It ends with the container.
    lines, _ = log.communicate(timeout=60)
    report = finish_load(load)
    assert report["failed"] == 0, report
    assert "draining, at most" in lines
    assert lines.rstrip().endswith("xpyd_worker.main: drained")
    wait_until_made_again(fleet, before, 1)
