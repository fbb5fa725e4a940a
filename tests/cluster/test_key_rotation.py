"""The fleet's key is rotated on a real node, while an open loop of requests runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.fleetkit import (
    FleetClient,
    Obj,
    charted_client,
    fleet_document,
    small_cases,
)
from tests.cluster.harness import Cluster, wait_for
from xpyd_operator.manifests.names import ANNOTATION_ROTATE, LABEL_FLEET

pytestmark = [pytest.mark.cluster, pytest.mark.changes, pytest.mark.long]
NAMESPACE = "rotation"
ROTATED_S = 420
"""Three steps, of which each takes kubelet up to a minute and a half."""


@pytest.fixture(scope="module")
def fleet(node_cluster: Cluster) -> Iterator[FleetClient]:
    """The chart, whose operator reaches the routers, and a client."""
    with charted_client(node_cluster, NAMESPACE) as found:
        yield found


def containers(fleet: FleetClient) -> dict[str, tuple[str, int]]:
    """Of each pod of the fleet: its uid and how often a container of it was started again."""
    pods = fleet.find("pods", labels=f"{LABEL_FLEET}={fleet.name}")
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            sum(one["restartCount"] for one in pod["status"]["containerStatuses"]),
        )
        for pod in pods
    }


def secrets(fleet: FleetClient) -> set[str]:
    return {secret["metadata"]["name"] for secret in fleet.find("secrets")}


def rotate(fleet: FleetClient, wish: str) -> Obj:
    """As docs/kv-transfer.md says; the condition at the end."""
    fleet.kubectl("annotate", f"fleet/{fleet.name}", f"{ANNOTATION_ROTATE}={wish}", "--overwrite")
    before = fleet.condition("KeyRotated")

    def is_done() -> Any:
        found = fleet.condition("KeyRotated")
        done = found.get("status") == "True" and found != before
        return found if done else None

    return wait_for(is_done, ROTATED_S, f"rotation {wish}", interval_s=1.0, explain=fleet.explain)


def ids_of(fleet: FleetClient) -> set[str]:
    """Ids of keys that the routers and all instances accept."""
    found: set[str] = set()
    for router in fleet.pods("router"):
        name = router["metadata"]["name"]
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}:10002/proxy/instances"
        said = json.loads(fleet.kubectl("get", "--raw", path))
        found |= {one for row in (said, *said["instances"]) for one in row["key_ids"]}
    return found


def count_events(fleet: FleetClient) -> tuple[int, int]:
    """How often a rotation has begun and ended."""
    told = [event["reason"] for event in fleet.events()]
    return told.count("KeyRotationAdding"), told.count("KeyRotationDone")


@pytest.mark.parametrize(
    "wishes", [("one",), pytest.param(("two", "three"), marks=pytest.mark.soak)]
)
def test_a_key_is_rotated_under_load_and_no_pod_starts_again(
    fleet: FleetClient, wishes: tuple[str, ...]
) -> None:
    fleet.apply(fleet_document(prefill=2, decode=2))
    fleet.wait_ready()
    pods, told = containers(fleet), count_events(fleet)
    with fleet.under_load(small_cases(), rate=2.0) as report:
        for wish in wishes:
            old, secret = ids_of(fleet), secrets(fleet)
            condition = rotate(fleet, wish)
            (new,) = ids_of(fleet)
            assert new not in old
            assert new in condition["message"]
            assert len(secrets(fleet)) == 1
            assert not secrets(fleet) & secret, "two names by turns"
            assert fleet.document()["status"]["kvKeySecret"] in secrets(fleet)
    assert report["failed"] == 0, report
    assert report["requests"] > 0
    assert containers(fleet) == pods
    assert count_events(fleet) == (told[0] + len(wishes), told[1] + len(wishes))
    # An engine that starts now has the new key from the start, and KV comes to it.
    fleet.scale("decode", 3)
    fleet.wait_pool("decode", 3)
    assert fleet.load(small_cases(), requests=10)["failed"] == 0
    fleet.scale("decode", 2)
    fleet.wait_pool("decode", 2)
