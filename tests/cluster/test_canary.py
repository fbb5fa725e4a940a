"""Canaries on a real node with real engines, while an open loop of requests runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.fleetkit import (
    FleetClient,
    Obj,
    delete_fleets,
    fleet_document,
    installed_chart,
    small_cases,
    start_client,
)
from tests.cluster.harness import Cluster, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.changes]
NAMESPACE = "canary"
STEP_S = 300
"""The kubelet brings the routers' file within a minute and a half; then come engines, requests."""


@pytest.fixture(scope="module")
def fleet(node_cluster: Cluster) -> Iterator[FleetClient]:
    """The chart, whose operator reaches the routers, and a client."""
    with installed_chart(node_cluster):
        node_cluster.kubectl("create", "namespace", NAMESPACE)
        start_client(node_cluster, NAMESPACE)
        found = FleetClient(node_cluster, NAMESPACE)
        found.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=30s")
        yield found
        delete_fleets(node_cluster, NAMESPACE)
        node_cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def document(mark: str, **analysis: int) -> Obj:
    """A fleet 1P1D whose engines are others with another `mark`."""
    found: dict[str, Any] = fleet_document(prefill=1, decode=1)
    found["spec"]["engine"]["env"] = [{"name": "MARK", "value": mark}]
    canary = {"weightPercent": 40, "analysis": {"minRequests": 10, **analysis}}
    found["spec"]["rollout"] = {"canary": canary}
    return found


def wait_phase(fleet: FleetClient, *phases: str) -> None:
    def there() -> bool:
        return (fleet.document()["status"].get("canary") or {}).get("phase") in phases

    wait_for(there, STEP_S, f"the canary is {phases}", interval_s=1.0, explain=fleet.explain)


def uids(fleet: FleetClient) -> set[str]:
    return {pod["metadata"]["uid"] for pool in ("prefill", "decode") for pod in fleet.pods(pool)}


def test_one_canary_is_promoted_and_one_is_taken_back_and_no_request_fails(
    fleet: FleetClient,
) -> None:
    fleet.apply(document("one"))
    fleet.wait_ready()
    first = uids(fleet)
    with fleet.under_load(small_cases(), rate=1.0) as report:
        fleet.apply(document("two"))
        wait_phase(fleet, "Running")
        wait_phase(fleet, "Promoting", "Promoted")
        wait_phase(fleet, "Promoted")
        fleet.wait_ready(STEP_S)
    assert report["failed"] == 0, report
    second = uids(fleet)
    assert not first & second
    told = [event["reason"] for event in fleet.events()]
    assert {"CanaryStarted", "CanaryPromoted"} <= set(told)

    with fleet.under_load(small_cases(), rate=1.0) as report:
        fleet.apply(document("three", ttftMilliseconds=1))
        wait_phase(fleet, "Failed")
        wait_for(lambda: uids(fleet) == second, 120, "it is gone", explain=fleet.explain)
    assert report["failed"] == 0, report
    degraded = fleet.condition("Degraded")
    assert degraded["reason"] == "CanaryFailed"
    assert "the limit is 1 ms" in degraded["message"]
    assert fleet.condition("Available")["status"] == "True"
