"""An edit of `parallelism.data` changes the replicas of engines that serve, and no pod, while an
open loop of requests runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.fleetkit import (
    FleetClient,
    Obj,
    charted_client,
    fleet_document,
    small_cases,
)
from tests.cluster.harness import Cluster, wait_for
from xpyd_operator.manifests.names import ANNOTATION_REPLICAS

pytestmark = [pytest.mark.cluster, pytest.mark.changes]
NAMESPACE = "elastic"
STEP_S = 300
"""The kubelet brings the annotation's file within a minute and a half, to one D after the other;
then a replica loads."""


@pytest.fixture
def fleet(node_cluster: Cluster) -> Iterator[FleetClient]:
    """The chart, whose operator reaches the routers, and a client."""
    with charted_client(node_cluster, NAMESPACE) as found:
        yield found


def document(data: int) -> Obj:
    """A fleet 1P2D, each D with room for two replicas."""
    found: Obj = fleet_document(prefill=1, decode=2)
    pool = next(one for one in found["spec"]["pools"] if one["role"] == "Decode")
    pool["parallelism"] = {"data": data, "maxData": 2}
    return found


def engines(fleet: FleetClient) -> set[tuple[str, int]]:
    """Each D's pod, and how often its containers were started again."""
    return {
        (
            pod["metadata"]["uid"],
            sum(one["restartCount"] for one in pod["status"].get("containerStatuses", [])),
        )
        for pod in fleet.pods("decode")
    }


def test_replicas_come_and_go_by_an_edit_and_pods_stay(fleet: FleetClient) -> None:
    def have(replicas: int) -> bool:
        assert engines(fleet) == before, "an edit of data makes no new pod"
        pods = fleet.pods("decode")
        up = [fleet.metric(pod, "xpyd_engine_replica_up") for pod in pods]
        notes = [pod["metadata"]["annotations"][ANNOTATION_REPLICAS] for pod in pods]
        return (up, notes) == ([replicas] * 2, [str(replicas)] * 2)

    fleet.apply(document(1))
    fleet.wait_ready()
    before = engines(fleet)
    with fleet.under_load(small_cases(), rate=1.0) as report:
        for data in (2, 1):
            fleet.apply(document(data))
            what = f"each D has {data} replicas"
            wait_for(lambda n=data: have(n), STEP_S, what, interval_s=2.0, explain=fleet.explain)
    assert report["failed"] == 0, report
    assert engines(fleet) == before
    told = [event["message"] for event in fleet.events() if event["reason"] == "ReplicasChanged"]
    assert {line.rsplit(": ", 1)[1] for line in told} == {"1 -> 2", "2 -> 1"}
