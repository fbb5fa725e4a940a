"""Pools on a real node with a stand-in for the engine: HPA acts on them, instances span pods.

The stand-in (harness/testpod, `worker` and `router`) answers probes; it ends with an error when its
environment is not what an engine needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from tests.cluster.fleetkit import FleetClient, Obj, installed_crds, operated
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.harness.node import TEST_IMAGE

pytestmark = [pytest.mark.cluster, pytest.mark.long]


@pytest.fixture
def fleet(node_cluster: Cluster, namespace: str) -> Iterator[FleetClient]:
    """A fleet to be applied, with an operator whose images are stand-ins."""
    with (
        installed_crds(node_cluster),
        operated(node_cluster, namespace, worker=TEST_IMAGE, router=TEST_IMAGE),
    ):
        yield FleetClient(node_cluster, namespace)


def document(**spec: Any) -> Obj:
    return {
        "apiVersion": "xpyd.dev/v1alpha1",
        "kind": "InferenceFleet",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"uri": "file:///models/none"},
            "router": {"replicas": 1},
            "drain": {"timeoutSeconds": 1},
            **spec,
        },
    }


@pytest.mark.slow
def test_an_autoscaler_scales_a_pool_by_its_pods_cpu_and_back(
    node_cluster: Cluster, fleet: FleetClient
) -> None:
    node_cluster.install_metrics_server()
    busy = {"name": "engine", "resources": {"requests": {"cpu": "50m"}, "limits": {"cpu": "60m"}}}
    pool = {
        "name": "all",
        "role": "Aggregated",
        "resources": {"gpus": 0, "sharedMemory": "1Mi"},
        "scaling": {"minReplicas": 1, "maxReplicas": 2},
        "template": {"spec": {"containers": [busy]}},
    }
    env = [{"name": "STAND_IN_BURNS", "value": "1"}]
    fleet.apply(document(pools=[pool], engine={"env": env}))
    fleet.wait_ready(150)
    scaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "chat-all"},
        "spec": {
            "scaleTargetRef": {
                "apiVersion": "xpyd.dev/v1alpha1",
                "kind": "InferenceFleetPool",
                "name": "chat-all",
            },
            "minReplicas": 1,
            "maxReplicas": 2,
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
            "metrics": [
                {
                    "type": "Resource",
                    "resource": {
                        "name": "cpu",
                        "target": {"type": "Utilization", "averageUtilization": 50},
                    },
                }
            ],
        },
    }
    fleet.kubectl("apply", "-f", "-", input=json.dumps(scaler))
    what = "the autoscaler has added an instance"
    wait_for(lambda: len(fleet.pods("all")) == 2, 120, what, explain=fleet.explain)
    fleet.wait_pool("all", 2, timeout_s=180)
    # The same document again: the autoscaler's number stays.
    fleet.apply(document(pools=[pool], engine={"env": env}))
    assert fleet.pool("all")["spec"]["replicas"] == 2
    # Nothing burns any more; this is a new revision, at the autoscaler's number first.
    fleet.apply(document(pools=[pool]))
    fleet.wait_pool("all", 1, timeout_s=420)


def _goes_down_whole_and_returns(fleet: FleetClient) -> None:
    """One pod of the instance fails: both are made again, and the fleet has said why."""
    said = "rank 3 (pod 1, stage 1, tensor share 1) was ended by SIGKILL"
    before = {pod["metadata"]["uid"] for pod in fleet.pods("decode")}
    victim = max(fleet.pods("decode"), key=lambda pod: len(pod["metadata"]["name"]))
    url = f"http://127.0.0.1:20001/fail?text={quote(said)}"
    fleet.kubectl("exec", victim["metadata"]["name"], "--", "/testpod", "get", url)

    def told() -> bool:
        return any(
            e["reason"] in ("Recovering", "Degraded") and said in e["message"]
            for e in fleet.events()
        )

    wait_for(told, 60, "an Event names the rank", explain=fleet.explain)

    def is_new() -> bool:
        pods = fleet.pods("decode")
        return len(pods) == 2 and not before & {pod["metadata"]["uid"] for pod in pods}

    wait_for(is_new, 60, "both pods are made again", explain=fleet.explain)
    fleet.wait_ready(60)


def test_an_instance_of_several_pods_is_a_group_with_what_engines_need_to_find_each_other(
    node_cluster: Cluster, fleet: FleetClient
) -> None:
    node_cluster.set_node_capacity({"nvidia.com/gpu": 8})
    pools = [
        {
            "name": name,
            "role": role,
            "replicas": 1,
            "parallelism": {"tensor": 2, "pipeline": pipeline},
            "resources": {"gpus": 2, "sharedMemory": "1Mi"},
        }
        for name, role, pipeline in (("prefill", "Prefill", 1), ("decode", "Decode", 2))
    ]
    fleet.apply(document(pools=pools))

    def says_what_is_missing() -> bool:
        found = fleet.condition("Degraded")
        return (found.get("status"), found.get("reason")) == ("True", "LeaderWorkerSetMissing")

    what = "a condition says that the API is missing"
    wait_for(says_what_is_missing, 30, what, explain=fleet.explain)
    wait_for(lambda: len(fleet.pods("prefill")) == 1, 30, "the other pool goes on")
    node_cluster.install_lws()
    try:
        fleet.wait_ready(90)
        assert fleet.condition("Degraded")["status"] == "False"
        pods = fleet.pods("decode")
        assert len(pods) == 2
        leader = min(pods, key=lambda pod: len(pod["metadata"]["name"]))
        for index, pod in enumerate(sorted(pods, key=lambda p: p is not leader)):
            name = pod["metadata"]["name"]
            lines = fleet.kubectl("logs", name).splitlines()
            seen = dict(line.split("=", 1) for line in lines if "=" in line)
            assert seen["XPYD_ROLE"] == "Decode"
            assert seen["XPYD_INSTANCE"] == name
            assert seen["LWS_GROUP_SIZE"] == "2"
            assert seen["LWS_WORKER_INDEX"] == str(index)
            assert seen["LWS_LEADER_ADDRESS"].startswith(f"{leader['metadata']['name']}.")

        def counts() -> tuple[int, int]:
            status = fleet.pool("decode")["status"]
            return status["replicas"], status["readyReplicas"]

        # The fleet's status and the pools' are written one after the other.
        wait_for(lambda: counts() == (1, 1), 30, "the pool counts its group as one")
        assert fleet.document()["status"]["summary"]["gpus"] == 6
        _goes_down_whole_and_returns(fleet)
        fleet.scale("decode", 2)
        # 8 GPUs: two groups of two pods with two each leave none for prefill, which has its own.
        wait_for(
            lambda: fleet.condition("CapacityAvailable").get("status") == "False",
            60,
            "a condition says that the second group has no GPUs",
            explain=fleet.explain,
        )
        assert "nvidia.com/gpu" in fleet.condition("CapacityAvailable")["message"]
        fleet.scale("decode", 1)
        fleet.wait_ready(60)
        fleet.kubectl("delete", "fleet", "chat", "--timeout=60s", timeout_s=70)
    finally:
        node_cluster.set_node_capacity({"nvidia.com/gpu": None})
        node_cluster.uninstall_lws()
