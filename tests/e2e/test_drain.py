"""Instances leave and die under load: nobody who asks notices.

Real processes: a router, two Ps, two Ds, the demo model. Clients come in an open loop, each by a
connection of its own, whether or not those before them have their answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field

import aiohttp
import pytest

from tests.e2e.harness import Fleet, Process, empty_fleet, wait_for

pytestmark = pytest.mark.slow
PER_SECOND = 8
ANSWER_S = 60.0
TOKENS = 24
PROMPT_WORDS = 200
_PROMPT = "one two three four five six seven eight nine ten "


@dataclass
class Load:
    """Requests by id, and what was wrong with those that failed."""

    url: str
    failed: dict[str, str] = field(default_factory=dict[str, str])
    sent: list[str] = field(default_factory=list[str])
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def run(self) -> None:
        """Until cancelled."""
        begun_s = time.monotonic()
        for number in itertools.count():
            task = asyncio.create_task(self._ask(f"drain-{next(self._numbers)}"))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(max(0.0, begun_s + (number + 1) / PER_SECOND - time.monotonic()))

    async def finish(self) -> None:
        """Until all that are asked now have their answers; none takes longer than its deadline."""
        await asyncio.gather(*self._tasks)

    async def _ask(self, name: str) -> None:
        self.sent.append(name)
        is_stream = len(self.sent) % 2 == 0
        body = {
            "model": "demo",
            # No two have the same prefix: each prompt's KV moves.
            "prompt": f"{name} " + _PROMPT * (PROMPT_WORDS // 10),
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": is_stream,
        }
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as http,
                http.post(
                    f"{self.url}/v1/completions", json=body, headers={"X-Request-Id": name}
                ) as answer,
            ):
                text = (await answer.read()).decode()
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failed[name] = repr(error)
            return
        is_whole = "data: [DONE]" in text if is_stream else '"finish_reason":"length"' in text
        if answer.status != 200 or not is_whole or '"error"' in text:
            self.failed[name] = f"{answer.status} {text[-300:]}"


@contextlib.asynccontextmanager
async def under_load(fleet: Fleet) -> AsyncGenerator[Load]:
    """Within, clients come; behind it all have their answers, or are in `failed`."""
    load = Load(fleet.router.url)
    running = asyncio.create_task(load.run())
    try:
        await asyncio.sleep(1.0)
        yield load
        await asyncio.sleep(1.0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await load.finish()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with empty_fleet(tmp_path_factory.mktemp("drain")) as running:
        running.start_router("--processes", "2")
        roles = ("Prefill", "Prefill", "Decode", "Decode")
        running.wait_ready(*(running.start_engine(role) for role in roles))
        yield running


def disturbed(fleet: Fleet, load: Load) -> list[str]:
    """Lines of the access log of requests that were tried more than once, or whose KV did not
    move."""

    def lines() -> list[str] | None:
        found = {
            match[1]: line
            for line in fleet.router.log.splitlines()
            if (match := re.search(r" client_id=(\S+)", line))
        }
        return [found[one] for one in load.sent] if set(load.sent) <= set(found) else None

    found: list[str] = wait_for("the access log", lines)
    return [line for line in found if " tries=1 " not in line or not line.endswith(" kv=moved")]


async def leave(fleet: Fleet, victim: Process) -> None:
    """Drain it, then have another start in its place."""
    assert await asyncio.to_thread(victim.stop, 60.0) == 0
    assert "are cut" not in victim.log
    await asyncio.to_thread(_start_again, fleet, victim)


def _start_again(fleet: Fleet, victim: Process) -> None:
    victim.popen = victim.start()
    fleet.wait_ready(victim)


@pytest.mark.parametrize("role", ["Prefill", "Decode"])
async def test_no_request_is_even_tried_again_when_an_instance_is_scaled_down(
    fleet: Fleet, role: str
) -> None:
    victims = [one for one in fleet.engines if one.role == role]
    async with under_load(fleet) as load:
        for victim in victims:
            await leave(fleet, victim)
    assert load.failed == {}
    assert disturbed(fleet, load) == []
    for victim in victims:
        assert "routers have 0 requests here" in victim.log


@pytest.mark.parametrize("role", ["Prefill", "Decode"])
@pytest.mark.long
async def test_no_request_fails_when_an_instance_is_killed(fleet: Fleet, role: str) -> None:
    victims = [one for one in fleet.engines if one.role == role]
    async with under_load(fleet) as load:
        for victim in victims:
            await asyncio.to_thread(victim.kill)
            await asyncio.to_thread(_start_again, fleet, victim)
            # A request that meets two deaths is refused.
            await load.finish()
    assert load.failed == {}
    wait_for("no KV held anywhere, as the router knows it", lambda: not any(leases(fleet)))


def leases(fleet: Fleet) -> list[int]:
    return [row["load"]["kv_leases"] for row in fleet.instances()]
