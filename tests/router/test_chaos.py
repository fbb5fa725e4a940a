"""4P4D mock engines die, freeze, come back, answer 500, cut streams, refuse and are slow, while
clients ask: every one of them gets the right answer, to the byte.

`script.py` says why a right router can answer all of them. XPYD_CHAOS_SEED plays one again.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.router.chaos.director import Director
from tests.router.chaos.load import Load, Outcome
from tests.router.chaos.report import report
from tests.router.chaos.script import Exposure, Fault, Timeline, faults
from tests.router.chaos.world import World, world
from tests.router.several import children

CLIENTS = 24
# Idle connections that a router may keep to each mock, and to clients that come again.
_POOLED_FILES = 400


async def at_rest(world_: World) -> None:
    """Nothing is left behind: no call, no request in flight."""

    async def is_idle() -> bool:
        states = [await world_.state(mock) for mock in world_.mocks.values()]
        in_flight = (await world_.metrics())["xpyd_router_in_flight"]
        return in_flight == 0 and not any(state["open_calls"] for state in states)

    await world_.until("every call of an engine ends", is_idle)


def open_files(world_: World) -> int:
    """Of all the router's processes."""
    pid = world_.router.popen.pid
    return sum(len(os.listdir(f"/proc/{one}/fd")) for one in (pid, *children(pid)))


def hits_of(calls: str) -> int:
    """Calls that the script broke: begun, and not answered to the end."""
    kinds = [line.split(" ", 2)[1] for line in calls.splitlines()]
    return kinds.count("begin") - kinds.count("done")


def mocks_words(folder: Path) -> str:
    """What the mocks wrote on standard error: nothing."""
    return "".join(path.read_text() for path in folder.glob("[pd]?.log"))


async def chaos(
    folder: Path,
    *,
    size: int,
    requests: int,
    script: Iterator[Fault],
    faults_wanted: int,
    seed: int,
    processes: int,
) -> tuple[Outcome, str]:
    """The outcome, and what to show of it."""
    flags = ("--processes", str(processes))
    async with world(folder, prefill=size, decode=size, seed=seed, flags=flags) as world_:
        before = open_files(world_)
        exposure, timeline = Exposure(), Timeline()
        director = Director(world_, script, exposure, timeline)
        playing = asyncio.create_task(director.play(faults_wanted))
        load = Load(
            world_.router.url,
            seed=seed,
            clients=CLIENTS,
            exposure=exposure,
            is_enough=lambda made: made >= requests and playing.done(),
        )
        outcome = await load.run()
        await playing
        await at_rest(world_)
        assert world_.router.popen.poll() is None
        assert (await world_.metrics()).get("xpyd_router_worker_deaths_total", 0) == 0
        assert open_files(world_) <= before + processes * _POOLED_FILES
        log, calls = world_.router.log, world_.calls_path.read_text()
        outcome.hits = hits_of(calls)
        assert not (words := mocks_words(folder)), f"a mock engine complains: {words}"
        violations = [line for line in calls.splitlines() if " VIOLATION " in line]
        assert not violations, f"seed {seed}: {len(violations)}\n" + "\n".join(violations[:10])
        uuids = {uuid.encode() for uuid in re.findall(r"\b[0-9a-f]{32}\b", calls)}
        assert not uuids & outcome.seen, "a client saw a transfer's uuid"
        assert "Traceback" not in log, log[log.index("Traceback") - 500 :][:3000]
        shown = report(
            outcome, seed=seed, timeline=timeline, calls_path=world_.calls_path, router_log=log
        )
        return outcome, f"{shown}\n\n{outcome.hits} calls broken by {dict(director.done)}"


def judge(
    folder: Path,
    *,
    requests: int,
    faults_wanted: int,
    seed: int,
    limit_s: float,
    size: int = 4,
    processes: int = 1,
) -> None:
    seed = int(os.environ.get("XPYD_CHAOS_SEED", seed))

    async def work() -> None:
        async with asyncio.timeout(limit_s):
            outcome, shown = await chaos(
                folder,
                size=size,
                requests=requests,
                script=faults(seed),
                faults_wanted=faults_wanted,
                seed=seed,
                processes=processes,
            )
        assert not outcome.failures, shown
        assert outcome.answered >= requests
        # Else nothing was tested: a fault hits at least one call on the average.
        assert outcome.hits >= faults_wanted, f"seed {seed}: {outcome.hits} calls were broken"

    asyncio.run(work())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.soak), 2])
@pytest.mark.long
def test_a_thousand_requests_among_failing_engines_are_all_answered_right(
    tmp_path: Path, processes: int
) -> None:
    judge(tmp_path, requests=1000, faults_wanted=12, seed=1, limit_s=400, processes=processes)


@pytest.mark.slow
def test_so_are_a_few_by_a_router_of_one_process(tmp_path: Path) -> None:
    judge(tmp_path, requests=250, faults_wanted=4, seed=1, limit_s=200)


@pytest.mark.soak
@pytest.mark.parametrize("processes", [1, 2])
def test_20_000_requests_among_failing_engines_are_all_answered_right(
    tmp_path: Path, processes: int
) -> None:
    judge(
        tmp_path,
        requests=20_000,
        faults_wanted=120,
        seed=11,
        limit_s=3000,
        processes=processes,
    )


def test_requests_among_well_engines_are_all_answered_right(tmp_path: Path) -> None:
    judge(tmp_path, requests=150, faults_wanted=0, seed=3, limit_s=120, size=1)
