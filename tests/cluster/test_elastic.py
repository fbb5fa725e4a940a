"""An edit of `parallelism.data` changes the replicas of engines that serve, and no pod, while an
open loop of requests runs: of D, and of engines whose replicas share experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.train_demo_model.random_checkpoint import make_checkpoint
from tests.cluster.fleetkit import (
    FleetClient,
    Obj,
    charted_client,
    delete_fleets,
    fleet_document,
    small_cases,
)
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.images.build import worker_test_template
from tests.e2e.oracle import Case, make_cases
from tests.operator.fleets import cpu_pool
from xpyd_operator.manifests.names import ANNOTATION_REPLICAS

pytestmark = [pytest.mark.cluster, pytest.mark.changes]
NAMESPACE = "elastic"
STEP_S = 300
"""The kubelet brings the annotation's file within a minute and a half, to one instance after the
other; then a replica loads."""


@pytest.fixture(scope="module")
def site(node_cluster: Cluster) -> Iterator[FleetClient]:
    """The chart, whose operator reaches the routers, and a client."""
    with charted_client(node_cluster, NAMESPACE) as found:
        yield found


@pytest.fixture
def fleet(site: FleetClient) -> Iterator[FleetClient]:
    """A fleet's client; the node has room for one fleet."""
    yield site
    delete_fleets(site.cluster, NAMESPACE)


def document(data: int) -> Obj:
    """A fleet 1P2D, each D with room for two replicas."""
    found: Obj = fleet_document(prefill=1, decode=2)
    pool = next(one for one in found["spec"]["pools"] if one["role"] == "Decode")
    pool["parallelism"] = {"data": data, "maxData": 2}
    return found


def document_of_experts(data: int, model: Path) -> Obj:
    """One engine with room for two replicas that share experts, each with two ranks."""
    found: Obj = fleet_document(prefill=1, decode=1)
    parallelism = {"tensor": 2, "data": data, "maxData": 2, "expert": 2 * data}
    template = worker_test_template(model)
    pool = cpu_pool("both", "Aggregated", parallelism=parallelism, template=template)
    found["metadata"]["name"] = "experts"
    found["spec"]["pools"] = [pool]
    del found["spec"]["kvTransfer"]
    return found


def engines(fleet: FleetClient, pool: str) -> set[tuple[str, int]]:
    """Each engine's pod, and how often its containers were started again."""
    return {
        (
            pod["metadata"]["uid"],
            sum(one["restartCount"] for one in pod["status"].get("containerStatuses", [])),
        )
        for pod in fleet.pods(pool)
    }


def edited_under_load(fleet: FleetClient, pool: str, one: Obj, two: Obj, cases: list[Case]) -> None:
    """The document with one replica in each engine of the pool, then that with two, then the first
    again, while requests come."""

    def have(replicas: int) -> bool:
        assert engines(fleet, pool) == before, "an edit of data makes no new pod"
        pods = fleet.pods(pool)
        up = [fleet.metric(pod, "xpyd_engine_replica_up") for pod in pods]
        notes = [pod["metadata"]["annotations"][ANNOTATION_REPLICAS] for pod in pods]
        return (up, notes) == ([replicas] * len(before), [str(replicas)] * len(before))

    fleet.apply(one)
    fleet.wait_ready()
    before = engines(fleet, pool)
    with fleet.under_load(cases, rate=1.0) as report:
        for replicas, document in ((2, two), (1, one)):
            fleet.apply(document)
            what = f"each engine has {replicas} replicas"
            wait_for(
                lambda n=replicas: have(n), STEP_S, what, interval_s=2.0, explain=fleet.explain
            )
    assert report["failed"] == 0, report
    assert engines(fleet, pool) == before
    told = [event["message"] for event in fleet.events() if event["reason"] == "ReplicasChanged"]
    assert {line.rsplit(": ", 1)[1] for line in told} == {"1 -> 2", "2 -> 1"}


def test_replicas_come_and_go_by_an_edit_and_pods_stay(fleet: FleetClient) -> None:
    edited_under_load(fleet, "decode", document(1), document(2), small_cases())


def test_replicas_that_share_experts_come_and_go_by_an_edit(
    fleet: FleetClient, tmp_path: Path
) -> None:
    model = make_checkpoint(
        tmp_path / "model",
        family="mixtral",
        layers=2,
        hidden=64,
        intermediate=64,
        heads=4,
        kv_heads=2,
        max_len=1024,
        experts=4,
    )
    for above in (model, *model.parents[:3]):
        above.chmod(0o755)
    one, two = (document_of_experts(data, model) for data in (1, 2))
    cases = make_cases(model, count=12)
    edited_under_load(replace(fleet, name="experts"), "both", one, two, cases)
