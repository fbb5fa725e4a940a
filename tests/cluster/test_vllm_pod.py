"""A real vLLM as P and one as D, in pods that the operator makes, behind the fleet's router.

vLLM's libraries are those of scripts/vllm_environment.py, mounted from this machine; the image has
the rest (images/vllm.Dockerfile). The demo model in float32, so that answers are those of
transformers. Two vLLM start in one to two minutes on two quiet cores, four in twice that: `make
soak` runs this.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.vllm_environment import vllm_environment
from tests.cluster.fleetkit import (
    ROOT,
    FleetClient,
    Obj,
    installed_chart,
    small_cases,
    start_client,
)
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.images.build import (
    VLLM_IMAGE,
    default_cache,
    ensure_vllm_image,
    vllm_test_template,
)
from tests.e2e.oracle import Case
from tests.kv.vllm_kit import D, P, cores_of

pytestmark = [pytest.mark.cluster, pytest.mark.soak]
NAMESPACE = "vllm"
START_S = 400
"""Of two vLLM, beside two that serve."""
RATE = 1.0
"""Requests each second: the cores are those of vLLMs that start, too."""
ARGS = (
    "--dtype=float32",
    "--max-model-len=1024",
    "--enforce-eager",
    "--max-num-batched-tokens=256",
)
LEFT = (
    "inferencefleets,inferencefleetpools,deployments,replicasets,pods,services,serviceaccounts,"
    "poddisruptionbudgets,networkpolicies,secrets"
)


def document(*args: str) -> Obj:
    """As docs/vllm.md shows it, small; each pool on a core of its own."""
    folder, _ = vllm_environment()
    pools: list[Obj] = []
    for name, role, host in (("prefill", "Prefill", P), ("decode", "Decode", D)):
        bind = {"name": "VLLM_CPU_OMP_THREADS_BIND", "value": cores_of(host)}
        template = vllm_test_template(folder, env=[bind], resources={"requests": {"memory": "2Gi"}})
        resources = {"gpus": 0, "sharedMemory": "1Gi"}
        pools.append({"name": name, "role": role, "resources": resources, "template": template})
    return {
        "apiVersion": "xpyd.dev/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {
                "uri": "file://./demo-model",
                "servedNames": ["demo"],
                "cache": {"type": "HostPath", "path": str(ROOT / "examples")},
            },
            "engine": {
                "type": "VLLM",
                "connector": "Xpyd",
                "image": VLLM_IMAGE,
                "args": [*ARGS, *args],
                "env": [{"name": "VLLM_CPU_KVCACHE_SPACE", "value": "1"}],
            },
            "pools": pools,
            "router": {"replicas": 1},
            "kvTransfer": {"hostPoolSize": "256Mi"},
            "drain": {"timeoutSeconds": 20},
        },
    }


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return small_cases()


@pytest.fixture(scope="module")
def fleet(node_cluster: Cluster, cases: list[Case]) -> Iterator[FleetClient]:
    """The chart, whose operator asks the router what became of KV, and 1P1D, ready."""
    node_cluster.load_image(ensure_vllm_image(default_cache()))
    with installed_chart(node_cluster):
        node_cluster.kubectl("create", "namespace", NAMESPACE)
        start_client(node_cluster, NAMESPACE)
        fleet = FleetClient(node_cluster, NAMESPACE)
        fleet.apply(document())
        fleet.wait_ready(START_S)
        fleet.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=30s")
        yield fleet
        node_cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def test_answers_are_those_of_transformers_by_kv_that_p_computed(
    fleet: FleetClient, cases: list[Case]
) -> None:
    report = fleet.load(cases, requests=len(cases), rate=RATE)
    assert report["failures"] == {}, report
    (prefill,), (decode,) = fleet.pods("prefill"), fleet.pods("decode")
    assert fleet.metric(decode, "xpyd_kv_transfers_total") == len(cases)
    assert fleet.metric(decode, "xpyd_kv_recomputed_tokens_total", absent=0) == 0
    # vLLM computes each prompt's last token again, and counts it as a hit all the same.
    due = sum(len(case.prompt) for case in cases)
    assert fleet.metric(decode, "vllm:external_prefix_cache_hits_total") == due
    assert fleet.metric(decode, "xpyd_kv_received_bytes_total") > 0
    assert fleet.metric(prefill, "xpyd_kv_sent_bytes_total") > 0


def test_the_fleet_says_that_kv_moves(fleet: FleetClient, cases: list[Case]) -> None:
    def holds() -> bool:
        assert fleet.load(cases, requests=2, rate=RATE)["failures"] == {}
        return fleet.condition("KVTransferVerified").get("reason") == "KVMoved"

    wait_for(holds, 60, "KVTransferVerified is KVMoved", explain=fleet.explain)
    assert fleet.condition("KVTransferVerified")["status"] == "True"


def test_decode_scales_to_two_and_back_under_load(fleet: FleetClient, cases: list[Case]) -> None:
    with fleet.under_load(cases, rate=RATE) as report:
        fleet.scale("decode", 2)
        fleet.wait_pool("decode", 2, START_S)
        fleet.scale("decode", 1)
        fleet.wait_pool("decode", 1)
    assert report["failures"] == {}, report


def revisions(fleet: FleetClient, pool: str) -> set[str]:
    return {pod["metadata"]["labels"]["xpyd.dev/revision"] for pod in fleet.pods(pool)}


def test_other_arguments_are_rolled_out_under_load(fleet: FleetClient, cases: list[Case]) -> None:
    before = {pool: revisions(fleet, pool) for pool in ("prefill", "decode")}

    def is_rolled() -> bool:
        now = {pool: revisions(fleet, pool) for pool in before}
        left = {pool for pool in before if before[pool] & now[pool]}
        # No old one goes before both of the new ones are there.
        assert len(left) != 1 or all(now[pool] - before[pool] for pool in before), now
        return not left and fleet.condition("Ready").get("status") == "True"

    with fleet.under_load(cases, rate=RATE) as report:
        fleet.apply(document("--max-num-seqs=8"))
        wait_for(is_rolled, START_S, "P and D have the new arguments", explain=fleet.explain)
    assert report["failures"] == {}, report
    for pool in before:
        (pod,) = fleet.pods(pool)
        assert "--max-num-seqs=8" in pod["spec"]["containers"][0]["args"]
        (status,) = pod["status"]["containerStatuses"]
        assert status["restartCount"] == 0, status


def test_a_deleted_fleet_leaves_nothing(fleet: FleetClient) -> None:
    fleet.kubectl("delete", "fleet", fleet.name, "--timeout=90s", timeout_s=100)
    labels = f"xpyd.dev/fleet={fleet.name}"
    wait_for(lambda: not fleet.find(LEFT, labels=labels), 60, "all is gone", explain=fleet.explain)
