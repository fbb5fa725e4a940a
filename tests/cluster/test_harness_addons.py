"""What some tests need besides, by itself: LeaderWorkerSets, and metrics of real pods for
autoscaling. In each run tests/cluster/test_pools.py has both with fleets."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from tests.cluster.harness import Cluster, wait_for
from tests.cluster.harness.kwok import NODE_SELECTOR, TOLERATIONS
from tests.cluster.harness.node import TEST_IMAGE


def apply(cluster: Cluster, namespace: str, *documents: dict[str, Any]) -> None:
    """kubectl apply."""
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=text)


@pytest.mark.soak
def test_a_leader_worker_set_gets_its_pods_and_may_be_taken_away(
    control_plane: Cluster, namespace: str
) -> None:
    control_plane.add_kwok_nodes(1)
    control_plane.install_lws()
    pod = {
        "nodeSelector": NODE_SELECTOR,
        "tolerations": TOLERATIONS,
        "containers": [{"name": "main", "image": "none.invalid/none:1"}],
    }
    group = {"size": 3, "workerTemplate": {"spec": pod}}
    apply(
        control_plane,
        namespace,
        {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": {"name": "group"},
            "spec": {"replicas": 2, "leaderWorkerTemplate": group},
        },
    )

    def status() -> dict[str, Any]:
        path = f"/apis/leaderworkerset.x-k8s.io/v1/namespaces/{namespace}/leaderworkersets/group"
        return (control_plane.get(path) or {}).get("status", {})

    wait_for(lambda: status().get("readyReplicas") == 2, 60, "both groups are ready")
    pods = control_plane.get(f"/api/v1/namespaces/{namespace}/pods")
    assert pods is not None
    names = {item["metadata"]["name"] for item in pods["items"]}
    assert names == {f"group-{g}{worker}" for g in (0, 1) for worker in ("", "-1", "-2")}
    variables = pods["items"][0]["spec"]["containers"][0]["env"]
    assert "LWS_LEADER_ADDRESS" in {one["name"] for one in variables}
    control_plane.uninstall_lws()
    assert control_plane.get("/apis/leaderworkerset.x-k8s.io/v1") is None


@pytest.mark.soak
def test_an_autoscaler_follows_the_cpu_of_real_pods(node_cluster: Cluster, namespace: str) -> None:
    node_cluster.install_metrics_server()
    labels = {"app": "busy"}
    container = {
        "name": "main",
        "image": TEST_IMAGE,
        "imagePullPolicy": "Never",
        "args": ["burn"],
        "resources": {"requests": {"cpu": "50m"}, "limits": {"cpu": "100m"}},
    }
    spec = {"terminationGracePeriodSeconds": 1, "containers": [container]}
    apply(
        node_cluster,
        namespace,
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "busy"},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": spec},
            },
        },
    )
    kubectl = partial(node_cluster.kubectl, "-n", namespace)
    kubectl("autoscale", "deployment/busy", "--cpu=50%", "--min=1", "--max=2")
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/busy"
    wait_for(
        lambda: (node_cluster.get(path) or {})["spec"]["replicas"] == 2,
        120,
        "the autoscaler has added a pod",
        explain=lambda: kubectl("describe", "hpa"),
    )
