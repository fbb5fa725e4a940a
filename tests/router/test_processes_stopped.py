"""Processes of a router that are stopped (SIGSTOP), as by a debugger or a machine that swaps: who
notices, and what clients see meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import aiohttp
import pytest

from tests.router.fakes import pair, until
from tests.router.several import Client, children, routed, several, when
from xpyd_router.processes.channel import Channel
from xpyd_router.processes.events import (
    Ping,
    PoisonCleared,
    Pong,
    Splitter,
    ToParent,
    ToWorker,
    to_parent,
    to_worker,
)
from xpyd_router.processes.worker import SILENCE_S, ParentControl

MORE_THAN_BUFFERS = [PoisonCleared(bytes(1000))] * 2000
"""2 MB: a socket and its transport hold some hundred KB."""


def test_a_worker_is_current_as_long_as_its_parent_is_heard() -> None:
    now_s, told = 100.0, list[ToParent]()
    control = ParentControl(told.append, lambda: now_s)
    now_s += SILENCE_S - 1
    assert control.is_current
    now_s += 1
    assert not control.is_current
    control.take(Ping(7))
    assert control.is_current
    assert told == [Pong(7)]


async def test_a_router_that_is_not_current_is_not_ready_and_serves() -> None:
    class Old:
        is_current = False

    async with pair() as (fleet_, _, d):
        fleet_.router.state.control = Old()  # pyright: ignore[reportAttributeAccessIssue] - a part
        async with fleet_.http.get(f"{fleet_.base}/readiness") as response:
            assert response.status == 503
            assert await response.json() == {"status": "no word of the instances"}
        async with fleet_.http.get(f"{fleet_.base}/health") as response:
            assert response.status == 200
        await fleet_.json()
        assert d.served == 1


@pytest.mark.parametrize("deadline_s", [None, 0.0])
async def test_who_does_not_read_is_waited_for_without_a_deadline(deadline_s: float | None) -> None:
    ours, theirs = socket.socketpair()
    lost = asyncio.Event()
    channel = await Channel[ToWorker].open(
        ours, to_worker, lambda _: None, lost.set, read_deadline_s=deadline_s
    )
    for event in MORE_THAN_BUFFERS:
        channel.send(event)
    # Past the deadline of 0 s: written first, then counted as stuck.
    for _ in range(5):
        await asyncio.sleep(0)
    assert lost.is_set() is (deadline_s is not None)
    if lost.is_set():
        theirs.close()
        return
    reader, writer = await asyncio.open_connection(sock=theirs)
    splitter, found = Splitter(), list[ToParent]()
    while len(found) < len(MORE_THAN_BUFFERS):
        found += [to_parent.decode(b) for b in splitter.feed(await reader.read(2**20))]
    assert found == MORE_THAN_BUFFERS
    channel.close()
    await lost.wait()
    writer.close()


def is_refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


async def status_of(client: Client, path: str) -> int:
    async with client.http.get(f"{client.base}{path}") as response:
        await response.read()
        return response.status


@pytest.mark.slow
async def test_workers_of_a_stopped_parent_serve_on_say_so_and_are_ready_when_it_goes_on() -> None:
    async def is_status(client: Client, path: str, status: int) -> bool:
        return await status_of(client, path) == status

    async with routed() as (parent, made):
        await made.engine("P")
        await made.engine("D")
        names = {engine.beat.instance for engine in made.engines}
        async with aiohttp.ClientSession() as http:
            client = Client(made.base, http, made.admin, http)
            await when(lambda: client.knows(names))
            assert await status_of(client, "/readiness") == 200
            parent.send_signal(signal.SIGSTOP)
            await when(lambda: is_status(client, "/readiness", 503))
            assert await status_of(client, "/health") == 200
            assert await client.status() == 200
            parent.send_signal(signal.SIGCONT)
            await when(lambda: is_status(client, "/readiness", 200))


@pytest.mark.slow
async def test_a_stopped_worker_of_a_killed_parent_ends_and_its_port_is_free() -> None:
    async with routed() as (parent, made):
        workers = children(parent.pid)
        os.kill(workers[1], signal.SIGSTOP)
        parent.kill()
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        assert is_refused(made.router.http_port)


@pytest.mark.slow
async def test_signals_for_all_of_a_terminal_are_blocked_in_a_worker_till_it_ignores_them() -> None:
    def signals(pid: int | None, *masks: str) -> set[int]:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        bits = 0
        for mask in masks:
            bits |= int(found[mask], 16)
        return {number for number in range(1, 65) if bits >> (number - 1) & 1}

    async with several(2) as made:
        place = made.workers[0]
        pid = place.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: place.pid not in (pid, None))
        assert {signal.SIGINT, signal.SIGTERM} <= signals(place.pid, "SigBlk", "SigIgn")
        await until(lambda: place.is_ready)
        assert {signal.SIGINT, signal.SIGTERM} <= signals(place.pid, "SigIgn")
        assert not signals(place.pid, "SigBlk")
