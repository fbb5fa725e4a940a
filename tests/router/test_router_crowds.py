"""Many clients that leave, and clients that read slowly: nothing stays behind, nothing grows."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import zmq
from aiohttp import web

from tests.e2e.harness import Process, empty_fleet, wait_for
from tests.router.chaos.asks import draw
from tests.router.chaos.world import World, world
from tests.router.fakes import (
    Call,
    HttpEngine,
    begin_and_hang,
    fleet,
    hang,
    serve_model,
    sse,
    start_stream,
    until,
)
from xpyd_core.keys import beat_mac
from xpyd_core.messages import Heartbeat, encode_heartbeat

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SETTLING_BYTES = 4 * 1024 * 1024
"""By so much an allocator's arenas may differ from one moment to another."""


def request_bytes(path: str, body: Any) -> bytes:
    raw = orjson.dumps(body)
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def resident_bytes(process: Process) -> int:
    fields = Path(f"/proc/{process.popen.pid}/statm").read_text().split()
    return int(fields[1]) * _PAGE_BYTES


async def leave(address: tuple[str, int], sent: bytes, rng: random.Random) -> None:
    """A client that leaves at a random moment: within its request, or some time behind it; by a
    close or by a reset."""
    with contextlib.suppress(ConnectionError):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent[: rng.randrange(len(sent))] if rng.random() < 0.2 else sent)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.random() ** 2 * 0.5):
                if await reader.read(rng.randrange(1, 2000)):
                    await reader.read(rng.randrange(1, 2000))
        if rng.random() < 0.5:
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        writer.close()
        await writer.wait_closed()


async def several(count: int, at_once: int, work: Callable[[int], Awaitable[None]]) -> None:
    """`work` for each number below `count`, `at_once` of them together."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    await asyncio.gather(*(worker() for _ in range(at_once)))


async def moody(engine: HttpEngine, call: Call, request: web.Request) -> web.StreamResponse:
    """An engine that serves every third call, hangs in another, and begins the others only."""
    if call.body.get("stream") and len(engine.calls) % 3 == 0:
        return await begin_and_hang(engine, call, request)
    return await (serve_model if len(engine.calls) % 3 else hang)(engine, call, request)


async def test_clients_that_leave_leave_no_task_behind(both_ways: None) -> None:
    async with fleet() as fleet_:
        for kind in "PPDD":
            (await fleet_.engine(kind, period_ms=60_000)).script = moody
        await fleet_.json(max_tokens=1)  # the client of the test itself is connected
        tasks = len(asyncio.all_tasks())
        address = ("127.0.0.1", fleet_.router.http_port)

        async def client(number: int) -> None:
            rng = random.Random(number)
            body = {"model": "m", "prompt": "x", "max_tokens": rng.choice([1, 8])}
            sent = request_bytes("completions", {**body, "stream": rng.random() < 0.7})
            await leave(address, sent, rng)

        await several(200, 40, client)
        await until(lambda: fleet_.metric("xpyd_router_in_flight") == 0)
        # A call that hangs ends only because the router closed it.
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert any(call.is_closed for engine in fleet_.engines for call in engine.calls)
        assert [load.own.requests for load in loads_of(fleet_)] == [0] * 4


def loads_of(fleet_: Any) -> list[Any]:
    """What the router believes to be in flight on each engine."""
    view = fleet_.router.state.fleet
    return [view.load(instance.key) for instance in view.instances]


async def crowd(world_: World, first: int, count: int) -> None:
    """`count` clients that ask and leave; then the router and its engines are at rest."""
    address = (world_.router.ip, world_.router.http_port)

    async def client(number: int) -> None:
        rng = random.Random(number)
        ask = draw(rng, number)
        await leave(address, request_bytes(ask.endpoint, ask.body), rng)

    await several(count, 60, lambda number: client(first + number))

    async def is_idle() -> bool:
        states = [await world_.state(mock) for mock in world_.mocks.values()]
        in_flight = (await world_.metrics())["xpyd_router_in_flight"]
        # The connection that asks is one of them.
        return in_flight == 0 and all(
            state["open_calls"] == 0 and state["connections"] == 1 for state in states
        )

    await world_.until("every call and connection of the engines ends", is_idle)


async def leave_nothing(folder: Path, clients: int) -> None:
    async with world(folder, prefill=2, decode=2) as world_:
        router, names = world_.router, ("p0", "d0")
        for name in names:
            await world_.state(world_.mocks[name], {"mode": "hang", "chance": 0.3})
        files = router.open_files()
        await crowd(world_, 0, clients)  # pools, caches and the allocator have what they want
        before_bytes = resident_bytes(router)
        await crowd(world_, clients, clients)
        # A probe may be under way.
        assert router.open_files() <= files + len(world_.mocks)
        grown_bytes = resident_bytes(router) - before_bytes
        left_bytes = _SETTLING_BYTES + 1024 * clients
        assert grown_bytes < left_bytes, f"{grown_bytes} bytes for {clients} clients"
        assert "Traceback" not in router.log


@pytest.mark.slow
@pytest.mark.patience(400)
async def test_300_clients_that_leave_leave_nothing_behind(tmp_path: Path) -> None:
    await leave_nothing(tmp_path, 300)


@pytest.mark.soak
@pytest.mark.patience(400)
async def test_2000_clients_that_leave_leave_nothing_behind(tmp_path: Path) -> None:
    await leave_nothing(tmp_path, 2000)


# --- slow readers

BOUND_BYTES = 1024 * 1024
"""What a client that does not read costs the router: 64 KiB of its transport's buffer, the piece
that filled it (256 KiB at most) once as it came and once as it leaves, and the allocator's waste.
"""
_EVENT = sse({"choices": [{"index": 0, "text": "x" * 60_000, "finish_reason": None}]})
_EVENTS = 400
_READERS = 12


async def flood(engine: HttpEngine, call: Call, request: web.Request) -> web.StreamResponse:
    """An engine that streams as fast as it is read: 24 MB, or as much as max_tokens says."""
    response = await start_stream(request)
    for _ in range(call.body.get("max_tokens", _EVENTS)):
        await response.write(_EVENT)
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


@contextlib.asynccontextmanager
async def flooding(router: Process, host: str, key: bytes) -> AsyncGenerator[HttpEngine]:
    """An engine that floods, in this process, known to `router`; its calls."""
    beat = Heartbeat(type="A", http_address=f"{host}:20001", zmq_address=f"{host}:21001")
    engine = HttpEngine(beat, 20001, flood)
    app = web.Application()
    app.router.add_post("/v1/completions", engine.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, 20001).start()
    ours = {"instance": "a", "incarnation": "i", "models": ("m",), "compatibility": "k"}
    fields: dict[str, Any] = {
        "type": "A",
        "period_ms": 60_000,
        "sent_us": time.time_ns() // 1000,
        **ours,
    }
    message = Heartbeat(http_address=beat.http_address, zmq_address=beat.zmq_address, **fields)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://{router.ip}:30001")
    frame = encode_heartbeat(message)
    dealer.send_multipart([frame, beat_mac(key, frame)])
    try:
        yield engine
    finally:
        context.destroy(0)
        await runner.cleanup()


async def trickle(address: tuple[str, int], is_enough: asyncio.Event) -> int:
    """A client that takes 1 KB/s, with as little as possible in the kernel; what it got."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        await loop.sock_sendall(sock, request_bytes("completions", {"model": "m", "stream": True}))
        got = 0
        while not is_enough.is_set():
            got += len(await loop.sock_recv(sock, 1024))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await is_enough.wait()
        return got


async def whole(address: tuple[str, int]) -> int:
    """A client that reads as fast as it can; the size of its answer."""
    reader, writer = await asyncio.open_connection(*address, limit=2**20)
    body = {"model": "m", "stream": True, "max_tokens": 5}
    writer.write(request_bytes("completions", body))
    data = await reader.readuntil(b"data: [DONE]\n\n")
    writer.close()
    await writer.wait_closed()
    return len(data)


@pytest.mark.slow
@pytest.mark.patience(400)
async def test_slow_readers_cost_little_memory_and_slow_nobody(tmp_path: Path) -> None:
    with empty_fleet(tmp_path) as made:
        router = made.start_router("--request-timeout", "300")
        host, key = f"{made.subnet}.2", made.key_file.read_bytes().strip()
        address = (router.ip, router.http_port)
        async with flooding(router, host, key) as engine:
            await asyncio.to_thread(
                wait_for, "the engine", lambda: router.metric("xpyd_router_instances") >= 1
            )
            await several(8, 4, lambda _: _is_whole(address))
            before_bytes = resident_bytes(router)
            is_enough = asyncio.Event()
            slow = [asyncio.create_task(trickle(address, is_enough)) for _ in range(_READERS)]
            await until(lambda: len(engine.calls) == 8 + _READERS)
            await several(40, 4, lambda _: _is_whole(address))
            grown_bytes = resident_bytes(router) - before_bytes
            is_enough.set()
            assert all(0 < got < 1_000_000 for got in await asyncio.gather(*slow))
            assert grown_bytes < _READERS * BOUND_BYTES, f"{grown_bytes} bytes more"
            # None of them had its answer: their calls end because they left.
            await until(lambda: sum(call.is_closed for call in engine.calls) == _READERS)


async def _is_whole(address: tuple[str, int]) -> None:
    assert await whole(address) > 5 * 60_000
