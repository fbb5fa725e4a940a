"""Processes of a router that are killed while many clients ask, seen from outside: mock engines as
processes, a router of two workers, and every answer judged to the byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest

from tests.router.chaos.load import Failure, Load
from tests.router.chaos.script import Exposure
from tests.router.chaos.world import World, world
from tests.router.several import children

pytestmark = [pytest.mark.slow, pytest.mark.patience(240)]

CLIENTS = 16
KEY = "k" * 32
_LASTING = ("_total", "_bucket", "_count", "_sum")


class Scraper:
    """Reads /metrics again and again; `falls` are counters that went back."""

    def __init__(self, world_: World) -> None:
        self._world = world_
        self._last: dict[str, float] = {}
        self.scrapes = 0
        self.falls: list[str] = []

    async def run(self) -> None:
        while True:
            try:
                found = await self._world.metrics()
            except aiohttp.ClientError:
                continue  # asked of the worker that was killed
            for name, was in self._last.items():
                if name.partition("{")[0].endswith(_LASTING) and found.get(name, 0) < was:
                    self.falls.append(f"{name}: {was}, then {found.get(name)}")
            self._last = found
            self.scrapes += 1
            await asyncio.sleep(0.05)


class Asked:
    """A load that goes on until `stop`."""

    def __init__(self, world_: World) -> None:
        self._is_over = False
        self._world = world_
        self._load = Load(
            world_.router.url,
            seed=9,
            clients=CLIENTS,
            exposure=Exposure(),
            is_enough=lambda _: self._is_over,
        )
        self._running = asyncio.create_task(self._load.run())

    async def more(self, count: int) -> None:
        """Until so many more were answered right."""
        goal = self._right() + count

        async def are_answered() -> bool:
            return self._right() >= goal

        await self._world.until(f"{count} more are answered", are_answered)

    async def stop(self) -> list[Failure]:
        """Ask no more; what was not answered right."""
        self._is_over = True
        return (await self._running).failures

    def _right(self) -> int:
        return self._load.outcome.answered - len(self._load.outcome.failures)


def lines_of(failures: list[Failure]) -> list[str]:
    return [line for failure in failures for line in failure.lines]


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def are_gone(world_: World, pids: list[int]) -> None:
    async def is_so() -> bool:
        return not any(lives(pid) for pid in pids)

    await world_.until(f"{pids} are gone", is_so)


async def kill_worker(world_: World, pid: int) -> None:
    """Kill one; returns when its successor serves."""
    deaths = (await settled(world_))["xpyd_router_worker_deaths_total"]
    os.kill(pid, signal.SIGKILL)
    await are_gone(world_, [pid])

    async def is_replaced() -> bool:
        found = await settled(world_)
        return found["xpyd_router_worker_deaths_total"] == deaths + 1

    await world_.until("another worker serves", is_replaced)


async def settled(world_: World) -> dict[str, float]:
    """/metrics while two workers serve."""
    found: dict[str, float] = {}

    async def are_two() -> bool:
        nonlocal found
        try:
            found = await world_.metrics()
        except aiohttp.ClientError:
            return False
        return found["xpyd_router_workers"] == 2

    await world_.until("two workers serve", are_two)
    return found


async def in_flight(world_: World, name: str) -> int:
    """An engine's calls, as the worker that is asked by chance has them of all."""
    url = f"{world_.router.admin}/admin/instances/{name}"
    async with world_.http.get(url, headers={"Authorization": f"Bearer {KEY}"}) as answer:
        return (await answer.json())["in_flight"]


async def open_calls(world_: World) -> int:
    states = [await world_.state(mock) for mock in world_.mocks.values()]
    return sum(state["open_calls"] for state in states)


@contextlib.asynccontextmanager
async def two_workers(folder: Path, *flags: str) -> AsyncGenerator[World]:
    """Two workers and 2P2D mocks."""
    key_file = folder / "admin.key"
    key_file.write_text(KEY)
    flags = ("--processes", "2", "--admin-key-file", str(key_file), *flags)
    async with world(folder, prefill=2, decode=2, flags=flags) as world_:
        yield world_
        assert "Traceback" not in world_.router.log


async def test_killed_workers_take_their_own_requests_with_them_and_nothing_stays(
    tmp_path: Path,
) -> None:
    async with two_workers(tmp_path) as world_:
        scraper = Scraper(world_)
        scraping = asyncio.create_task(scraper.run())
        asked = Asked(world_)
        first = children(world_.router.popen.pid)
        for pid in first:
            await asked.more(40)
            await kill_worker(world_, pid)
        await asked.more(40)
        failures = await asked.stop()
        # Nobody was answered wrong or not at all, and those who came later met nothing.
        assert all(line.startswith("lost: ") for line in lines_of(failures)), lines_of(failures)
        assert 0 < len(failures) <= len(first) * CLIENTS

        async def is_idle() -> bool:
            counted = [await in_flight(world_, name) for name in world_.mocks]
            found = await world_.metrics()
            return not any(counted) and found["xpyd_router_in_flight"] == 0

        async def has_none() -> bool:
            return await open_calls(world_) == 0

        await world_.until("the engines' calls end", has_none)
        await world_.until("nothing is in flight", is_idle)
        scraping.cancel()
        assert scraper.scrapes > 5
        assert not scraper.falls, scraper.falls
        assert not set(first) & set(children(world_.router.popen.pid))


async def test_workers_of_a_killed_parent_finish_what_runs_under_load_and_end(
    tmp_path: Path,
) -> None:
    async with two_workers(tmp_path, "--exact-prefixes") as world_:
        router = world_.router
        asked = Asked(world_)
        await asked.more(40)
        family = children(router.popen.pid)
        family += [pid for worker in family for pid in children(worker)]
        assert len(family) == 4, "two workers, each with its process that counts tokens"
        router.kill()

        async def is_refused() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex((router.ip, router.http_port)) != 0

        await world_.until("nobody listens", is_refused)
        lines = lines_of(await asked.stop())
        # What had begun to be answered was answered to its end.
        assert all(line.startswith("lost: ") and line.endswith(", b''") for line in lines), lines
        await are_gone(world_, family)
        assert await open_calls(world_) == 0
