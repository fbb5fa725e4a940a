"""`xpyd rollout` on a real API server with its controllers; pods run on fake nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fleetkit import FleetClient, delete_fleets, fake_fleet
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.operator_process import OperatorProcess, running_operator

WAIT_S = 60


@pytest.fixture
def operator(plane: Cluster, namespace: str) -> Iterator[OperatorProcess]:
    with running_operator(plane, namespace) as found:
        yield found
        delete_fleets(plane, namespace)


def history(chat: FleetClient) -> list[tuple[int, str]]:
    found = json.loads(chat.rollout("history", "chat", "-o", "json"))
    return [(row["revision"], row["spec"]["engine"].get("image", "")) for row in found]


def images(chat: FleetClient, pool: str = "decode") -> set[str]:
    found = chat.find("deployments", labels=f"xpyd.dev/fleet=chat,xpyd.dev/pool={pool}")
    return {d["spec"]["template"]["spec"]["containers"][0]["image"] for d in found}


@pytest.mark.long
def test_a_rollout_is_paused_resumed_taken_back_and_restarted_by_the_command(
    plane: Cluster, namespace: str, operator: OperatorProcess, tmp_path: Path
) -> None:
    chat = FleetClient(plane, namespace)
    first = fake_fleet(decode=2, engine={"image": "engine:1"})
    chat.apply(first)
    chat.wait_ready()
    assert "Complete" in chat.rollout("status", "chat", "--wait", f"--timeout={WAIT_S}")
    assert history(chat) == [(1, "engine:1")]

    second = fake_fleet(decode=2, engine={"image": "engine:2"})
    file = tmp_path / "fleet.yaml"
    file.write_text(json.dumps(second))
    edit = json.loads(chat.rollout("plan", "-f", str(file), "-o", "json"))
    assert [(p["pool"], p["change"], p["why"]) for p in edit["pools"]] == [
        ("router", "unchanged", []),
        ("prefill", "new revision", ["engine.image"]),
        ("decode", "new revision", ["engine.image"]),
    ]
    assert chat.document()["metadata"]["generation"] == 1, "nothing was written"

    # Paused: the edit does not begin, and a scale counts for what runs.
    chat.rollout("pause", "chat")
    chat.apply(second)
    wait_for(lambda: chat.condition("Progressing").get("reason") == "Paused", 30, "Paused")
    assert "of the newest revision" in chat.rollout("status", "chat", "--wait", code=4)
    chat.scale("decode", 3)
    chat.wait_pool("decode", 3)
    assert images(chat) == {"engine:1"}
    assert history(chat) == [(1, "engine:1")]

    chat.rollout("resume", "chat")
    chat.rollout("status", "chat", "--wait", f"--timeout={WAIT_S}")
    assert images(chat) == {"engine:2"}
    assert history(chat) == [(1, "engine:1"), (2, "engine:2")]
    assert len(chat.pods("decode")) == 3

    chat.rollout("undo", "chat", program="kubectl-xpyd")
    chat.rollout("status", "chat", "--wait", f"--timeout={WAIT_S}")
    assert images(chat) == {"engine:1"}
    assert history(chat) == [(2, "engine:2"), (3, "engine:1")]
    assert len(chat.pods("decode")) == 3, "sizes stay"

    before = {pod["metadata"]["uid"] for pool in ("decode", "router") for pod in chat.pods(pool)}
    chat.rollout("restart", "chat")
    chat.rollout("status", "chat", "--wait", f"--timeout={WAIT_S}")
    after: set[Any] = {p["metadata"]["uid"] for n in ("decode", "router") for p in chat.pods(n)}
    assert not before & after
    told = {event["reason"] for event in chat.events()}
    assert {"RolloutPaused", "RolloutResumed", "Rollout"} <= told


def test_a_rollout_that_is_stuck_is_paused_in_the_middle_and_taken_back_without_a_loss(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    chat = FleetClient(plane, namespace)
    chat.apply(fake_fleet(decode=2))
    chat.wait_ready()
    serving = {pod["metadata"]["uid"] for n in ("prefill", "decode") for pod in chat.pods(n)}

    stuck = fake_fleet(decode=2)
    for pool in stuck["spec"]["pools"]:
        pool["template"] = {"spec": {"nodeSelector": {"no": "node"}}}
    chat.apply(stuck)
    wait_for(
        lambda: len(chat.pods("decode")) == 3, 30, "a pod without a node", explain=chat.explain
    )
    chat.rollout("status", "chat", code=3)

    def marks() -> list[bool]:
        found = chat.find("deployments", labels="xpyd.dev/fleet=chat,xpyd.dev/pool=decode")
        return sorted(bool(d["spec"].get("paused")) for d in found)

    chat.rollout("pause", "chat")
    wait_for(lambda: marks() == [False, True], 30, "the deadline rests", explain=chat.explain)
    chat.scale("decode", 4)
    chat.wait_pool("decode", 3)  # with the one that has no node, 4
    chat.rollout("undo", "chat")
    chat.rollout("resume", "chat")
    chat.rollout("status", "chat", "--wait", f"--timeout={WAIT_S}")
    now = {pod["metadata"]["uid"] for n in ("prefill", "decode") for pod in chat.pods(n)}
    assert serving <= now
    assert len(chat.pods("decode")) == 4
    assert marks() == [False]


@pytest.mark.long
def test_status_why_and_drain_say_what_a_fleet_waits_for_and_who_left(
    plane: Cluster, namespace: str, operator: OperatorProcess
) -> None:
    chat = FleetClient(plane, namespace)
    assert chat.xpyd("status") == f"no fleet in namespace {namespace}\n"
    chat.apply(fake_fleet(decode=2))
    chat.wait_ready()
    page = chat.xpyd("status", "chat")
    assert page.startswith(f"fleet {namespace}/chat  Ready=True")
    same = chat.xpyd("status", "chat", program="xpyd")
    assert re.sub(r"for \d+s", "", same) == re.sub(r"for \d+s", "", page)
    (found,) = json.loads(chat.xpyd("status", "-o", "json"))
    assert {p["name"]: (p["wanted"], p["ready"]) for p in found["pools"]} == {
        "router": (2, 2), "prefill": (1, 1), "decode": (2, 2),
    }  # fmt: skip

    # Pods of fake nodes end at once, log nothing and have no router: nothing proves it.
    leaving = chat.pods("decode")[0]["metadata"]["name"]
    words = chat.xpyd("drain", leaving, "--wait", "--timeout", "60", code=1)
    assert "Unproven" in words
    assert "pool decode has 2 of 2 instances ready" in words
    assert leaving not in [pod["metadata"]["name"] for pod in chat.pods("decode")]
    chat.wait_ready()
    chat.xpyd("status", "chat")
    smaller = chat.pods("decode")[1]["metadata"]["name"]
    chat.xpyd("drain", smaller, "--no-replace", "--wait", "--timeout", "60", code=1)
    chat.wait_pool("decode", 1)
    assert smaller not in [pod["metadata"]["name"] for pod in chat.pods("decode")]

    stuck = fake_fleet(decode=2)
    for pool in stuck["spec"]["pools"]:
        pool["template"] = {"spec": {"nodeSelector": {"no": "node"}}}
    chat.apply(stuck)
    wait_for(lambda: "no node fits" in chat.xpyd("why", "chat"), 30, "the pod is named")
    why = chat.xpyd("why", "chat")
    assert "(rollout.maxSurgePercent 25)" in why
    assert "Rollout: pool " in why
    waits = json.loads(chat.xpyd("why", "chat", "-o", "json"))["waits"]
    assert {one["pool"] for one in waits} == {"prefill", "decode"}
    assert "OLDER" in chat.xpyd("status", "chat")
    chat.xpyd("trace", "cmpl-unknown", code=1)
