"""The only instance of a pool leaves a cordoned node when another one serves; on fake nodes.

API server, scheduler, controllers, budgets and `kubectl drain` are real, pods run nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cluster.fleetkit import FleetClient, delete_fleets, fake_fleet
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.operator_process import running_operator

DRAIN_S = 90


@pytest.fixture
def chat(plane: Cluster, namespace: str) -> Iterator[FleetClient]:
    plane.add_kwok_nodes(2)
    with running_operator(plane, namespace):
        found = FleetClient(plane, namespace)
        found.apply(fake_fleet(prefill=1, decode=1))
        found.wait_ready()
        yield found
        for node in nodes(plane):
            plane.kubectl("uncordon", node)
        delete_fleets(plane, namespace)


def nodes(plane: Cluster) -> list[str]:
    found = plane.get("/api/v1/nodes?labelSelector=type%3Dkwok") or {"items": []}
    return [node["metadata"]["name"] for node in found["items"]]


def node_of(chat: FleetClient, pool: str) -> str:
    (pod,) = chat.pods(pool)
    return pod["spec"]["nodeName"]


def ready(chat: FleetClient, pool: str) -> int:
    return sum(
        (condition["type"], condition["status"]) == ("Ready", "True")
        for pod in chat.pods(pool)
        for condition in pod.get("status", {}).get("conditions", [])
    )


@contextmanager
def watched(chat: FleetClient, *pools: str) -> Iterator[dict[str, int]]:
    """The fewest ready instances of each pool that were seen meanwhile."""
    fewest = {pool: ready(chat, pool) for pool in pools}
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.1):
            for pool in pools:
                fewest[pool] = min(fewest[pool], ready(chat, pool))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield fewest
    finally:
        stop.set()
        thread.join(10)


def drain(chat: FleetClient, node: str) -> str:
    """`kubectl drain` of the fleet's pods on the node."""
    argv = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data")
    selector = f"--pod-selector=xpyd.dev/fleet={chat.name}"
    limit = (f"--timeout={DRAIN_S}s", "--force")
    return chat.cluster.kubectl(*argv, selector, *limit, timeout_s=DRAIN_S + 10)


def test_a_drain_of_a_node_takes_the_only_instance_when_another_one_serves(
    chat: FleetClient,
) -> None:
    budget = chat.read("poddisruptionbudgets", "chat-decode")
    assert budget["spec"]["maxUnavailable"] == 0
    node = node_of(chat, "decode")
    with watched(chat, "prefill", "decode") as fewest:
        drain(chat, node)
    assert fewest == {"prefill": 1, "decode": 1}
    chat.wait_pool("decode", 1)
    assert node_of(chat, "decode") != node
    assert chat.condition("Ready")["status"] == "True"


def test_without_room_elsewhere_the_instance_stays_and_the_condition_says_so(
    chat: FleetClient,
) -> None:
    for node in nodes(chat.cluster):
        chat.cluster.kubectl("cordon", node)

    def told() -> str:
        found = chat.condition("CapacityAvailable")
        return found["message"] if found.get("reason") == "NoRoomToMove" else ""

    said = wait_for(told, 60, "NoRoomToMove", explain=chat.explain)
    assert "add a node, uncordon this one" in said
    assert chat.condition("Progressing")["reason"] == "Moving"
    assert ready(chat, "decode") == 1
    for node in nodes(chat.cluster):
        chat.cluster.kubectl("uncordon", node)
    wait_for(
        lambda: chat.condition("Progressing").get("reason") == "Settled",
        60,
        "all is as it was",
        explain=chat.explain,
    )
    assert ready(chat, "decode") == 1
    assert len(chat.pods("decode")) == 1
