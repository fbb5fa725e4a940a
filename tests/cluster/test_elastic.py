"""An edit of `parallelism.data` changes the replicas of engines that serve, and no pod."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.fleetkit import (
    FleetClient,
    fleet_document,
    install_chart,
    load_images,
    small_cases,
    start_client,
)
from tests.cluster.harness import Cluster, wait_for

pytestmark = pytest.mark.cluster

NAMESPACE = "elastic"


def document(data: int) -> dict[str, Any]:
    """examples/fleet.yaml with room for two replicas in each of its D."""
    found = fleet_document()
    pool = next(one for one in found["spec"]["pools"] if one["role"] == "Decode")
    pool["parallelism"] = {"data": data, "maxData": 2}
    return found


@pytest.fixture
def fleet(node_cluster: Cluster) -> Iterator[FleetClient]:
    load_images(node_cluster)
    node_cluster.kubectl("create", "namespace", NAMESPACE)
    start_client(node_cluster, NAMESPACE)
    found = FleetClient(node_cluster, NAMESPACE)
    found.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=30s")
    install_chart(node_cluster)
    found.apply(document(1))
    found.wait_ready()
    yield found
    node_cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false", check=False)


def test_replicas_come_and_go_by_an_edit_and_pods_stay(fleet: FleetClient) -> None:
    before = {pod["metadata"]["uid"] for pod in fleet.pods("decode")}

    def have(replicas: int) -> bool:
        up = (fleet.metric(pod, "xpyd_engine_replica_up") for pod in fleet.pods("decode"))
        return all(one == replicas for one in up)

    with fleet.under_load(small_cases(), rate=2.0) as report:
        for data in (2, 1):
            fleet.apply(document(data))
            what = f"each D has {data} replicas"
            wait_for(lambda n=data: have(n), 240, what, interval_s=2.0, explain=fleet.explain)
    assert report["failed"] == 0, report
    assert {pod["metadata"]["uid"] for pod in fleet.pods("decode")} == before
    told = [event for event in fleet.events() if event["reason"] == "ReplicasChanged"]
    assert told, "the change from 1 to 2 is an Event"
