"""Many fake nodes: kwok makes pods bound to them Ready and lets them go, without running them.

Fake nodes are tainted, so nothing gets onto them by accident, and the cluster's real node stays
a choice of its own.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.cluster.harness import build
from tests.cluster.harness.waiting import wait_for

if TYPE_CHECKING:
    from tests.cluster.harness.cluster import Cluster

NODE_SELECTOR = {"type": "kwok"}
TOLERATIONS = [{"key": "kwok.x-k8s.io/node", "operator": "Exists", "effect": "NoSchedule"}]
_CAPACITY = {"cpu": "64", "memory": "512Gi", "pods": "256", "ephemeral-storage": "1Ti"}
_READY_DEADLINE_S = 60.0


def ensure(cluster: Cluster, count: int) -> None:
    """Have at least `count` fake nodes, all of them Ready."""
    if not cluster.components.running("kwok"):
        _start(cluster)
    present = len(_nodes(cluster))
    new = [_node(number) for number in range(present, count)]
    if new:
        document = {"apiVersion": "v1", "kind": "List", "items": new}
        cluster.kubectl("create", "-f", "-", input=json.dumps(document))
    wait_for(
        lambda: sum(map(_is_ready, _nodes(cluster))) >= count,
        _READY_DEADLINE_S,
        f"{count} fake nodes are ready",
        explain=lambda: cluster.components.tail("kwok"),
    )


def _start(cluster: Cluster) -> None:
    kubeconfig = cluster.plane.pki.kubeconfig(
        "kwok", "kwok", server=cluster.api_url, group="system:masters"
    )
    cluster.components.start(
        "kwok",
        [
            build.binary(build.KWOK),
            f"--kubeconfig={kubeconfig}",
            "--manage-all-nodes=false",
            "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
            "--node-lease-duration-seconds=200",
        ],
    )


def _nodes(cluster: Cluster) -> list[dict[str, Any]]:
    found = cluster.get("/api/v1/nodes?labelSelector=type%3Dkwok")
    return [] if found is None else found["items"]


def _is_ready(node: dict[str, Any]) -> bool:
    conditions = node.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _node(number: int) -> dict[str, Any]:
    name = f"kwok-{number}"
    labels = {"type": "kwok", "kubernetes.io/hostname": name}
    labels |= {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": labels,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        },
        "spec": {
            "taints": [{"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}]
        },
        "status": {"capacity": _CAPACITY, "allocatable": _CAPACITY},
    }
