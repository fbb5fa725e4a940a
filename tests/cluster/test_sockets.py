"""Engines of one real node share memory through a folder of it, without rights and without a key.

The operator is a process of the test; the folder, its owner and the container's memory are real.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fleetkit import FleetClient, fleet_document, fleet_of_images, small_cases
from tests.cluster.harness import Cluster, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long]
NAMESPACE = "near"
USER = 10001
_MEMORY = """
import json, pathlib
at = pathlib.Path("/sys/fs/cgroup")
at = at if (at / "memory.stat").exists() else at / "memory"
lines = (at / "memory.stat").read_text().splitlines()
shared = int(dict(line.split() for line in lines)["shmem"])
print(json.dumps([shared, [file.name for file in pathlib.Path("/dev/shm").iterdir()]]))
"""
CACHE_BYTES = 64 << 20  # as examples/fleet.yaml says
DEV_SHM_BYTES = 4096
"""Less than what is lent: /dev/shm has no part in it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On the node, which is this machine."""
    return tmp_path_factory.mktemp("node") / "sockets"


def document(folder: Path, **kv: Any) -> dict[str, Any]:
    made = fleet_document(prefill=1, decode=1)
    for pool in made["spec"]["pools"]:
        pool["resources"]["sharedMemory"] = DEV_SHM_BYTES
    made["spec"]["router"] = {"replicas": 1}
    made["spec"]["drain"] = {"timeoutSeconds": 5}
    made["spec"]["kvTransfer"] |= {
        "transport": "SharedMemory",
        "sameHostPath": str(folder),
        "onFailure": "Fail",
        **kv,
    }
    return made


@pytest.fixture(scope="module")
def fleet(node_cluster: Cluster, folder: Path) -> Iterator[FleetClient]:
    with fleet_of_images(node_cluster, NAMESPACE) as fleet:
        fleet.apply(document(folder))
        fleet.wait_ready()
        yield fleet


def answer_all(fleet: FleetClient) -> None:
    """With onFailure Fail no engine computes a prompt whose KV did not come."""
    fleet.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=30s")
    report = fleet.load(small_cases(), requests=24)
    assert report["failed"] == 0, report


def is_shared(fleet: FleetClient) -> None:
    (decode,) = fleet.pods("decode")
    assert fleet.metric(decode, 'xpyd_kv_peers_total{transport="shm"}') == 1
    received = fleet.metric(decode, "xpyd_kv_received_bytes_total")
    assert fleet.metric(decode, "xpyd_kv_shared_bytes_total") == received > 0


def test_engines_of_a_node_share_memory_through_a_folder_that_is_theirs_alone(
    fleet: FleetClient, folder: Path
) -> None:
    answer_all(fleet)
    is_shared(fleet)
    own = folder / f"{NAMESPACE}.chat"
    found = own.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (USER, USER, 0o700)
    (decode,) = fleet.pods("decode")
    assert [path.name for path in own.iterdir()] == [f"{decode['status']['podIP']}-21001"]
    message = degraded(fleet)
    assert message.startswith("nothing needs to be done; pods mount folders of their nodes")


def test_lent_memory_is_of_the_prefill_container_and_of_no_dev_shm(fleet: FleetClient) -> None:
    answer_all(fleet)
    shared: dict[str, int] = {}
    for pool in ("prefill", "decode"):
        (pod,) = fleet.pods(pool)
        argv = ("exec", pod["metadata"]["name"], "-c", "engine", "--", "python3", "-c", _MEMORY)
        shared[pool], files = json.loads(fleet.kubectl(*argv))
        assert files == []
    assert DEV_SHM_BYTES < shared["prefill"] <= 2 * CACHE_BYTES
    assert shared["decode"] == 0


def test_a_new_pod_takes_the_folder_as_it_is(fleet: FleetClient, folder: Path) -> None:
    (before,) = fleet.pods("decode")
    name = before["metadata"]["name"]
    fleet.kubectl("delete", "pod", name, "--timeout=60s", timeout_s=70)

    def is_replaced() -> bool:
        pods = fleet.pods("decode")
        return [p["metadata"]["name"] != name for p in pods] == [True]

    wait_for(is_replaced, 60, "there is another pod", explain=fleet.explain)
    fleet.wait_ready()
    (after,) = fleet.pods("decode")
    answer_all(fleet)
    is_shared(fleet)
    sockets = [path.name for path in (folder / f"{NAMESPACE}.chat").iterdir()]
    assert sockets == [f"{after['status']['podIP']}-21001"]


def test_a_fleet_that_gives_up_its_key_says_so_and_serves(fleet: FleetClient, folder: Path) -> None:
    revisions = {pool: pod_revision(fleet, pool) for pool in ("router", "prefill", "decode")}
    fleet.apply(document(folder, insecure=True))
    wait_for(
        lambda: all(pod_revision(fleet, pool) not in ("", old) for pool, old in revisions.items()),
        120,
        "all pods are of the new revision",
        explain=fleet.explain,
    )
    fleet.wait_ready()
    answer_all(fleet)
    is_shared(fleet)
    assert "the fleet has no KV key (spec.kvTransfer.insecure)" in degraded(fleet)
    assert "kvKeySecret" not in fleet.document()["status"]
    for pool in revisions:
        (pod,) = fleet.pods(pool)
        assert not [volume for volume in pod["spec"]["volumes"] if "secret" in volume]
        log = fleet.kubectl("logs", pod["metadata"]["name"])
        assert log.count("--kv-insecure: any host that reaches") == 1


def pod_revision(fleet: FleetClient, pool: str) -> str:
    """Of the pool's pods; "" while they differ."""
    found = {pod["metadata"]["labels"]["xpyd.dev/revision"] for pod in fleet.pods(pool)}
    return found.pop() if len(found) == 1 else ""


def degraded(fleet: FleetClient) -> str:
    return fleet.condition("Degraded")["message"]
