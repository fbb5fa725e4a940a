"""Canaries on a real node with real engines, while an open loop of requests runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
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

pytestmark = [pytest.mark.cluster, pytest.mark.changes]
NAMESPACE = "canary"
STEP_S = 300
"""The kubelet brings the routers' file within a minute and a half; then come engines, requests."""


@pytest.fixture(scope="module")
def fleet(node_cluster: Cluster) -> Iterator[FleetClient]:
    """The chart, whose operator reaches the routers, and a client."""
    with charted_client(node_cluster, NAMESPACE) as found:
        yield found


def document(mark: str, **analysis: int) -> Obj:
    """A fleet 1P1D whose engines are others with another `mark`."""
    found: dict[str, Any] = fleet_document(prefill=1, decode=1)
    found["spec"]["engine"]["env"] = [{"name": "MARK", "value": mark}]
    canary = {"weightPercent": 40, "analysis": {"minRequests": 10, **analysis}}
    found["spec"]["rollout"] = {"canary": canary}
    return found


def wait_phase(fleet: FleetClient, *phases: str) -> None:
    def there() -> bool:
        return fleet.document()["status"].get("canary", {}).get("phase") in phases

    wait_for(there, STEP_S, f"the canary is {phases}", interval_s=1.0, explain=fleet.explain)


def uids(fleet: FleetClient) -> set[str]:
    return {pod["metadata"]["uid"] for pool in ("prefill", "decode") for pod in fleet.pods(pool)}


def test_a_canary_that_holds_is_promoted_and_no_request_fails(fleet: FleetClient) -> None:
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
    assert not first & uids(fleet)
    told = [event["reason"] for event in fleet.events()]
    assert {"CanaryStarted", "CanaryPromoted"} <= set(told)


def slow() -> Obj:
    """Engines that are fine, and a limit that none could hold."""
    return document("slow", ttftMilliseconds=1)


def impatient(on_failure: str) -> Obj:
    """Ready engines between which no KV moves: it is fetched when D asks for it, and D waits no
    time for it."""
    found = document(f"impatient-{on_failure}")
    args = ("--kv-mode=get", "--kv-wait-seconds=0", f"--kv-on-failure={on_failure}")
    found["spec"]["engine"]["args"] += args
    return found


def failing() -> Obj:
    """Each request fails."""
    return impatient("fail")


def recomputing() -> Obj:
    """Each prompt is computed again by D: no request fails."""
    return impatient("recompute")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        pytest.param(
            slow,
            r"its TTFT p95 is [\d.]+ ms, the limit is 1 ms",
            id="TTFT",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            failing,
            r"[\d.]+ % of its requests failed, the limit is 1 %; [1-9]\d* of 10 requests, [1-9]",
            id="errors",
        ),
        pytest.param(
            recomputing,
            r"[\d.]+ % of its requests were computed again by D \(their KV did not come\)",
            id="recomputed",
            marks=pytest.mark.soak,
        ),
    ],
)
@pytest.mark.long
def test_a_canary_that_breaks_a_limit_is_taken_back_and_no_request_fails(
    fleet: FleetClient, edit: Callable[[], Obj], words: str
) -> None:
    fleet.apply(document("two"))
    fleet.wait_ready()
    before = uids(fleet)
    with fleet.under_load(small_cases(), rate=1.0) as report:
        fleet.apply(edit())
        wait_phase(fleet, "Running")
        wait_phase(fleet, "Failed")
        wait_for(lambda: uids(fleet) == before, 120, "it is gone", explain=fleet.explain)
    assert report["failed"] == 0, report
    degraded = fleet.condition("Degraded")
    assert degraded["reason"] == "CanaryFailed"
    assert re.search(words, degraded["message"]), degraded
    told = [event for event in fleet.events() if event["reason"] == "CanaryFailed"]
    assert any(re.search(words, event["message"]) for event in told), told
    assert fleet.condition("Available")["status"] == "True"
