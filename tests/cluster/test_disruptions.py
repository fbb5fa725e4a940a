"""The last P, the last D and whole pools go away under open load: nobody is refused, all answered.

The load opens a connection for each request, at a fixed rate (load_client.py), through the
fleet's Service. The fleet has one P, one D and one router; the operator is a process of the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fleetkit import (
    FleetClient,
    Obj,
    finish_load,
    fleet_document,
    fleet_of_images,
    small_cases,
)
from tests.cluster.harness import Cluster, wait_for
from tests.e2e.oracle import Case

pytestmark = [pytest.mark.cluster, pytest.mark.changes]
NAMESPACE = "disrupted"
POOLS = ("prefill", "decode")


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return small_cases()


@pytest.fixture(scope="module")
def fleet(node_cluster: Cluster, cases: list[Case]) -> Iterator[FleetClient]:
    with fleet_of_images(node_cluster, NAMESPACE) as fleet:
        fleet.apply(document())
        fleet.wait_ready()
        fleet.kubectl("wait", "--for=condition=Ready", "pod/client", "--timeout=30s")
        report = fleet.load(cases, requests=len(cases))
        assert report["failed"] == 0, report
        yield fleet


def document(**router: Any) -> Obj:
    made = fleet_document(prefill=1, decode=1)
    made["spec"]["router"] = {"replicas": 1, **router}
    made["spec"]["drain"] = {"timeoutSeconds": 5}
    return made


def kill(fleet: FleetClient, pod: Obj) -> None:
    """SIGKILL at once."""
    fleet.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")


def evict(fleet: FleetClient, pod: Obj) -> str:
    """As `kubectl drain` does; what kubectl says of a refusal."""
    name = pod["metadata"]["name"]
    path = f"/api/v1/namespaces/{fleet.namespace}/pods/{name}/eviction"
    metadata = {"name": name, "namespace": fleet.namespace}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
    argv = ("create", "--raw", path, "-f", "-")
    return fleet.kubectl(*argv, input=json.dumps(body), check=False)


def wait_replaced(fleet: FleetClient, pod: Obj) -> None:
    """Until another pod of the pool is ready in this one's place."""

    def is_replaced() -> bool:
        ready = [
            one["metadata"]["uid"]
            for one in fleet.pods(pod["metadata"]["labels"]["xpyd.dev/pool"])
            for condition in one.get("status", {}).get("conditions", [])
            if (condition["type"], condition["status"]) == ("Ready", "True")
        ]
        return bool(ready) and pod["metadata"]["uid"] not in ready

    wait_for(is_replaced, 90, "another pod is ready", explain=fleet.explain)


@pytest.mark.parametrize("pool", POOLS)
def test_requests_wait_while_the_last_instance_of_a_pool_is_replaced(
    fleet: FleetClient, cases: list[Case], pool: str
) -> None:
    load = fleet.start_load(cases)
    (pod,) = fleet.pods(pool)
    kill(fleet, pod)
    wait_replaced(fleet, pod)
    report = finish_load(load)
    assert report["failures"] == {}, report


@pytest.mark.parametrize("pool", POOLS)
def test_the_only_instance_of_a_pool_is_not_evicted(fleet: FleetClient, pool: str) -> None:
    """It leaves a cordoned node when another one serves: test_moves.py. There are two nodes."""
    (pod,) = fleet.pods(pool)
    said = evict(fleet, pod)
    assert "disruption budget" in said, said
    assert [one["metadata"]["uid"] for one in fleet.pods(pool)] == [pod["metadata"]["uid"]]


def processes_of(pod: Obj) -> list[int]:
    """Of the pod's containers, as this machine numbers them."""
    uid = pod["metadata"]["uid"]
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if uid in (folder / "cgroup").read_text().replace("_", "-"):
                found.append(int(folder.name))
    return found


def states(fleet: FleetClient, pool: str, but: str) -> list[tuple[str, str]]:
    """ContainersReady and Ready of the pool's pods but one."""
    found: list[tuple[str, str]] = []
    for pod in fleet.pods(pool):
        said = {c["type"]: c["status"] for c in pod.get("status", {}).get("conditions", [])}
        if pod["metadata"]["uid"] != but:
            found.append((said.get("ContainersReady", ""), said.get("Ready", "")))
    return found


def test_a_pod_is_ready_only_when_the_router_sends_it_requests(fleet: FleetClient) -> None:
    """While the only router stands still nobody admits the new D, although its containers are
    ready; then `kubectl wait` for it succeeds."""
    (router,), (old,) = fleet.pods("router"), fleet.pods("decode")
    halted = processes_of(router)
    assert halted
    try:
        for process in halted:
            os.kill(process, signal.SIGSTOP)
        kill(fleet, old)
        uid = old["metadata"]["uid"]

        def serves() -> bool:
            found = states(fleet, "decode", uid)
            assert ("True", "True") not in found, "ready, and no router has admitted it"
            return ("True", "False") in found

        wait_for(serves, 50, "the containers of the new D are ready", explain=fleet.explain)
    finally:
        for process in halted:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
    (new,) = fleet.pods("decode")
    name = new["metadata"]["name"]
    fleet.kubectl("wait", "--for=condition=Ready", f"pod/{name}", "--timeout=60s", timeout_s=70)
    fleet.wait_ready()


def wait_available(fleet: FleetClient, status: str) -> None:
    """Routers are ready all the time: this condition says whether requests can be answered."""

    def is_so() -> bool:
        return fleet.condition("Available").get("status") == status

    wait_for(is_so, 30, f"Available is {status}", explain=fleet.explain)


def test_requests_wait_while_both_pools_are_scaled_to_0_and_back(
    fleet: FleetClient, cases: list[Case]
) -> None:
    load = fleet.start_load(cases)
    for pool in POOLS:
        fleet.scale(pool, 0)
    for pool in POOLS:
        wait_for(lambda p=pool: not fleet.pods(p), 60, f"{pool} is at 0", explain=fleet.explain)
    wait_available(fleet, "False")
    for pool in POOLS:
        fleet.scale(pool, 1)
    fleet.wait_ready()
    wait_available(fleet, "True")
    report = finish_load(load)
    assert report["failures"] == {}, report


def test_a_rollout_of_the_only_router_refuses_nobody(fleet: FleetClient, cases: list[Case]) -> None:
    """The new one is ready once it has a pair; the old one takes requests until clients know."""
    load = fleet.start_load(cases)
    (router,) = fleet.pods("router")
    fleet.apply(document(queue={"timeoutSeconds": 59}))
    wait_replaced(fleet, router)
    fleet.kubectl("wait", "--for=delete", f"pod/{router['metadata']['name']}", "--timeout=60s")
    report = finish_load(load)
    assert report["failures"] == {}, report
