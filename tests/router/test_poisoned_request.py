"""A request of which engines die, seen from outside: a router, 4P4D mock engines as processes, and
clients who ask for something else meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.router.chaos.asks import MODEL, Ask
from tests.router.chaos.load import Load, Outcome
from tests.router.chaos.moods import lethal
from tests.router.chaos.script import Exposure
from tests.router.chaos.world import Mock, World, world

pytestmark = [pytest.mark.slow, pytest.mark.patience(240)]

OTHERS = 2
"""Clients beside the poisoned one. They and it may lose one engine at the same time; there are
three more to try them on apart, and so to tell them from each other."""


def dead(world_: World) -> list[str]:
    """The engines whose process is gone."""
    return sorted(name for name, mock in world_.mocks.items() if mock.process.poll() is not None)


async def ask_poisoned(world_: World, prompt: str, *, stream: bool) -> tuple[int, dict[str, Any]]:
    """Status and error of the request that kills."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 40, "ignore_eos": True, "seed": 1}
    url = f"{world_.router.url}/v1/completions"
    async with world_.http.post(url, data=json.dumps(body | {"stream": stream})) as response:
        text = await response.text()
    if response.content_type == "text/event-stream":
        assert not text.endswith("[DONE]\n\n")
        text = text.rstrip().rpartition("\n\n")[2].removeprefix("data: ")
    return response.status, json.loads(text)["error"]


async def poison(world_: World, prompt: str, role: str, *, stream: bool, status: int) -> None:
    """Ask for it again and again: two engines of `role` die of the first, none of the others."""
    got, error = await ask_poisoned(world_, prompt, stream=stream)

    async def have_ended() -> bool:
        # The router knows by the port, which is closed before the process is seen as ended.
        return len(dead(world_)) >= 2

    await world_.until(f"two engines have ended, after {got} {error}", have_ended)
    killed = dead(world_)
    assert [name[0] for name in killed] == 2 * [role.lower()], (got, error, killed)
    assert (got, error["code"]) == (status, "poisoned_request")
    assert "refused" in error["message"]
    assert not any(mock.host in json.dumps(error) for mock in world_.mocks.values())
    # Whoever has said how often that was has heard of it: all processes of the router, too.
    assert (await world_.metrics())["xpyd_router_poisoned_requests_total"] == 1
    for _ in range(5):
        got, error = await ask_poisoned(world_, prompt, stream=stream)
        assert (got, error["code"]) == (422, "poisoned_request")
    assert dead(world_) == killed
    assert (await world_.metrics())["xpyd_router_poisoned_requests_total"] == 6


async def beside(
    world_: World, work: Coroutine[Any, Any, None], *, exposure: Exposure, **load: Any
) -> Outcome:
    """What became of the others' requests: some before `work`, some while it goes on, some after
    it."""
    goal = math.inf

    async def has_served() -> bool:
        return loading.outcome.answered >= 20

    async def begin() -> None:
        nonlocal goal
        try:
            await world_.until("others are served", has_served)
            await work
        finally:
            goal = loading.outcome.answered + 20

    loading = Load(
        world_.router.url,
        seed=5,
        exposure=exposure,
        is_enough=lambda _: loading.outcome.answered >= goal,
        **load,
    )
    working = asyncio.create_task(begin())
    outcome = await loading.run()
    await working
    return outcome


@pytest.mark.parametrize(
    ("role", "step", "stream", "status"),
    [
        ("P", 0, False, 422),
        ("D", 0, False, 422),
        # P's token is out when D gets it: the refusal is the stream's last event.
        ("D", 0, True, 200),
        ("D", 4, True, 200),
    ],
)
async def test_two_engines_die_of_a_poisoned_request_and_the_others_are_served(
    tmp_path: Path, role: str, step: int, stream: bool, status: int
) -> None:
    async with world(tmp_path, prefill=4, decode=4) as world_:
        poisoning = poison(world_, lethal(role, step), role, stream=stream, status=status)
        outcome = await beside(world_, poisoning, exposure=Exposure(), clients=OTHERS)
        assert not [failure.lines for failure in outcome.failures]


@pytest.mark.parametrize("role", ["P", "D"])
async def test_two_processes_of_a_router_stop_it_as_one_does(tmp_path: Path, role: str) -> None:
    flags = ("--processes", "2")
    async with world(tmp_path, prefill=3, decode=3, flags=flags) as world_:
        await poison(world_, lethal(role, 0), role, stream=False, status=422)


async def kill(world_: World, mock: Mock, exposure: Exposure) -> None:
    """Kill an engine that has calls; returns when all who met its death have been answered."""

    async def is_busy() -> bool:
        return (await world_.state(mock))["open_calls"] > 0

    async def is_known() -> bool:
        return not await world_.is_ready(mock)

    async def are_answered() -> bool:
        return exposure.may_begin("deadly")

    await world_.until("it has calls", is_busy)
    exposure.begin_fault("deadly")
    mock.process.kill()
    await asyncio.to_thread(mock.process.wait, 10)
    await world_.until("its death is known", is_known)
    exposure.end_fault("deadly")
    await world_.until("who met it is answered", are_answered)


async def test_a_body_that_many_send_is_not_blamed_for_engines_that_are_killed(
    tmp_path: Path,
) -> None:
    """Many requests with one and the same body meet each death, none of them two."""
    exposure = Exposure()

    def same(_: random.Random, number: int) -> Ask:
        body: dict[str, Any] = {"model": MODEL, "prompt": "the same for all", "user": "same"}
        body |= {"max_tokens": 20, "seed": 1, "ignore_eos": True}
        return Ask(number, "completions", body)

    async def kill_some(world_: World) -> None:
        for name in ("d0", "p0", "d1"):
            await kill(world_, world_.mocks[name], exposure)

    async with world(tmp_path, prefill=4, decode=4) as world_:
        outcome = await beside(world_, kill_some(world_), exposure=exposure, clients=24, draw=same)
        assert not [failure.lines for failure in outcome.failures]
        metrics = await world_.metrics()
        assert metrics["xpyd_router_poisoned_requests_total"] == 0
        broken = [
            value
            for name, value in metrics.items()
            if name.startswith("xpyd_router_errors_total") and 'cause="reset"' in name
        ]
        assert sum(broken) >= 1, broken
