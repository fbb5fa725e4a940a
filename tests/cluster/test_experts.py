"""A fleet whose replicas share experts, in one pod: a rank of one is killed under load, the others
go on, and no request fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.train_demo_model.random_checkpoint import make_checkpoint
from tests.cluster.fleetkit import FleetClient, Obj, fleet_of_images
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.images.build import worker_test_template
from tests.e2e.oracle import Case, make_cases
from tests.operator.fleets import cpu_pool
from tests.operator.fleets import document as fleet_document

pytestmark = [pytest.mark.cluster, pytest.mark.changes, pytest.mark.long]
NAMESPACE = "experts"
REQUESTS = 12
MODEL = "/models/mixtral"
_KILL = """
import os, pathlib, signal
for comm in pathlib.Path("/proc").glob("[0-9]*/comm"):
    if comm.read_text() == "xpyd-rank-1\\n":
        os.kill(int(comm.parent.name), signal.SIGKILL)
        print("killed")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral, where pods can read it."""
    folder = tmp_path_factory.mktemp("models") / "mixtral"
    make_checkpoint(
        folder,
        family="mixtral",
        layers=2,
        hidden=64,
        intermediate=64,
        heads=4,
        kv_heads=2,
        max_len=1024,
        experts=4,
    )
    for above in (folder, *folder.parents[:3]):
        above.chmod(0o755)
    return folder


@pytest.fixture
def fleet(node_cluster: Cluster) -> Iterator[FleetClient]:
    with fleet_of_images(node_cluster, NAMESPACE) as found:
        yield found


def document(model: Path) -> Obj:
    """One engine with two replicas, each with a half of the experts."""
    template = worker_test_template()
    spec = template["spec"]
    spec["volumes"].append({"name": "model", "hostPath": {"path": str(model)}})
    mount = {"name": "model", "mountPath": MODEL, "readOnly": True}
    spec["containers"][0]["volumeMounts"].append(mount)
    layout = {"data": 2, "expert": 2, "onRankLoss": "Continue"}
    pool = cpu_pool("all", "Aggregated", replicas=1, parallelism=layout, template=template)
    pool["resources"]["sharedMemory"] = "64Mi"
    args = ["--dtype=float32", "--max-model-len=1024", "--kv-cache-memory=16Mi", "--threads=1"]
    return fleet_document(
        "chat",
        model={"uri": f"file://{MODEL}", "servedNames": ["demo"]},
        engine={"args": args},
        pools=[pool],
        router={"replicas": 1},
    )


def engine(fleet: FleetClient) -> Obj:
    (pod,) = fleet.pods("all")
    return pod


def place(pod: Obj) -> tuple[str, int]:
    """The pod, and how often its containers were started again."""
    restarts = [one["restartCount"] for one in pod["status"]["containerStatuses"]]
    return pod["metadata"]["uid"], sum(restarts)


def answer_all(fleet: FleetClient, cases: list[Case]) -> None:
    report = fleet.load(cases, requests=REQUESTS)
    assert report["failed"] == 0, report


def test_a_killed_rank_of_replicas_that_share_experts_fails_no_request(
    fleet: FleetClient, model: Path
) -> None:
    cases = make_cases(model, count=REQUESTS)
    fleet.apply(document(model))
    fleet.wait_ready()
    fleet.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=30s")
    assert fleet.pool("all")["status"]["layout"] == "TP1xPP1xDP2xEP2"
    answer_all(fleet, cases)
    before = engine(fleet)

    def is_back() -> bool:
        pod = engine(fleet)
        restarts = fleet.metric(pod, "xpyd_engine_replica_restarts_total")
        return (restarts, fleet.metric(pod, "xpyd_engine_replica_up")) == (1, 2)

    with fleet.under_load(cases, rate=2.0) as report:
        argv = ("exec", before["metadata"]["name"], "-c", "engine", "--", "python3", "-c", _KILL)
        assert fleet.kubectl(*argv).split() == ["killed"]
        what = "the lost replica is there again"
        wait_for(is_back, 120, what, interval_s=2.0, explain=fleet.explain)
    assert report["failed"] == 0, report
    assert place(engine(fleet)) == place(before)
    answer_all(fleet, cases)
