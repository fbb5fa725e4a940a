"""A router and mock engines as processes on loopback, and the hand that does faults to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.e2e.harness import Fleet, Process, empty_fleet
from tests.router.chaos.script import Fitness, Role
from tests.warm_start import WarmProcess, start_warm

PERIOD_MS = 150
# Times the period: long enough for a machine whose cores all tests share.
MISSED_BEATS = 10
START_S = 60.0


@dataclass
class Mock:
    """One mock engine: where it is, and the process there now."""

    fitness: Fitness
    host: str
    port: int
    process: WarmProcess
    incarnation: str = ""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class World:
    """Use through `world`. `http` is the judge's own session, not the clients'."""

    def __init__(self, fleet: Fleet, http: aiohttp.ClientSession, seed: int, pace: float) -> None:
        self.fleet = fleet
        self.http = http
        self.mocks: dict[str, Mock] = {}
        self._seed = seed
        self._pace = pace
        self._starts = 0

    @property
    def router(self) -> Process:
        return self.fleet.router

    @property
    def calls_path(self) -> Path:
        return self.fleet.folder / "calls.log"

    def start(self, name: str, *, moves: bool = False) -> Mock:
        """Start an engine, or the next process of one that ended, at its old address or another."""
        known = self.mocks.get(name)
        role: Role = "P" if name.startswith("p") else "D"
        if known is None or moves:
            host, port = f"{self.fleet.subnet}.{next(self.fleet.hosts) % 250}", 20001
        else:
            host, port = known.host, known.port
        self._starts += 1
        argv = {
            "--kind": role,
            "--name": name,
            "--host": host,
            "--port": str(port),
            "--discovery": f"{self.fleet.subnet}.1:30001",
            "--key-file": str(self.fleet.key_file),
            "--calls": str(self.calls_path),
            "--seed": str(self._seed + self._starts),
            "--period-ms": str(PERIOD_MS),
            "--pace": str(self._pace),
        }
        with (self.fleet.folder / f"{name}.log").open("ab") as log:
            words = [word for pair in argv.items() for word in pair]
            process = start_warm(["tests.router.chaos.engine", *words], stderr=log)
        fitness = known.fitness if known else Fitness(name, role)
        self.mocks[name] = Mock(fitness, host, port, process)
        return self.mocks[name]

    async def state(self, mock: Mock, mood: dict[str, Any] | None = None) -> dict[str, Any]:
        """What a mock says of itself, after it was given `mood`."""
        data = json.dumps(mood) if mood else None
        method = "POST" if mood else "GET"
        async with self.http.request(method, f"{mock.url}/chaos", data=data) as answer:
            return await answer.json()

    async def shown(self) -> dict[str, dict[str, Any]]:
        """The router's instances by name."""
        async with self.http.get(f"{self.router.admin}/instances") as answer:
            found = (await answer.json())["instances"]
        return {one["instance"]: one for one in found}

    async def metrics(self) -> dict[str, float]:
        """The router's samples, labels within the names."""
        async with self.http.get(f"{self.router.admin}/metrics") as answer:
            text = await answer.text()
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    async def until(self, what: str, holds: Any, timeout_s: float = START_S) -> None:
        """Until the coroutine function `holds` gives true; AssertionError names `what`."""
        deadline_s = time.monotonic() + timeout_s
        while not await holds():
            assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
            await asyncio.sleep(0.03)

    async def is_served(self, mock: Mock) -> bool:
        """Whether the process there answers, and the router takes it for ready."""
        assert mock.process.poll() is None, f"{mock.fitness.name} ended"
        try:
            mock.incarnation = (await self.state(mock))["incarnation"]
        except aiohttp.ClientError:
            return False
        return await self.is_ready(mock)

    async def is_ready(self, mock: Mock) -> bool:
        one = (await self.shown()).get(mock.fitness.name)
        return bool(one and one["state"] == "Ready" and one["incarnation"] == mock.incarnation)

    async def refresh(self) -> None:
        """Ask everyone how they are."""
        shown = await self.shown()
        for mock in self.mocks.values():
            fitness = mock.fitness
            one = shown.get(fitness.name, {})
            fitness.is_ready = (
                one.get("state") == "Ready" and one.get("incarnation") == mock.incarnation
            )
            if fitness.is_well:
                fitness.answered = (await self.state(mock))["answered"]

    async def become_well(self, mock: Mock) -> None:
        """From here on it has to show that it serves."""
        mock.fitness.answered_before = (await self.state(mock))["answered"]
        mock.fitness.answered = mock.fitness.answered_before
        mock.fitness.is_well = True

    def close(self) -> None:
        for mock in self.mocks.values():
            if mock.process.poll() is None:
                mock.process.send_signal(signal.SIGCONT)
                mock.process.kill()
            mock.process.wait(10)


@contextlib.asynccontextmanager
async def world(
    folder: Path, *, prefill: int, decode: int, seed: int = 0, pace: float = 1.0, flags: Any = ()
) -> AsyncGenerator[World]:
    """A router with so many mocks, all of them ready; ended on leaving."""
    timeout = aiohttp.ClientTimeout(total=20)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    with empty_fleet(folder) as fleet:
        fleet.heartbeat_ms = PERIOD_MS
        # argparse takes the last of a flag that comes twice.
        fleet.start_router(
            *("--missed-beats", str(MISSED_BEATS), "--request-timeout", "50"),
            *("--prefill-timeout", "40", "--log-format", "json", *flags),
        )
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            made = World(fleet, http, seed, pace)
            try:
                names = [f"p{i}" for i in range(prefill)] + [f"d{i}" for i in range(decode)]
                mocks = [made.start(name) for name in names]
                for mock in mocks:
                    await made.until(f"{mock.fitness.name} ready", lambda m=mock: made.is_served(m))
                yield made
            finally:
                made.close()
