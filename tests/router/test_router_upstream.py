"""The client towards engines: what it keeps, what it gives up, and what it tells."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import pytest

from tests.router.fakes import until
from xpyd_core.request_id import Address
from xpyd_router.errors import CallFailed
from xpyd_router.fleet.instances import InstanceKey
from xpyd_router.upstream.client import UpstreamClient
from xpyd_router.upstream.connection import MAX_HEAD_BYTES, Exchange

KEY = InstanceKey("x:1", "a")
HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/x\r\nContent-Length: 2\r\n\r\nhi"

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Engine:
    """A server whose connections each run `serve`, over and over while it returns."""

    def __init__(self, serve: Serve) -> None:
        self.serve = serve
        self.connections = 0
        self.lost = 0
        self.address = Address("127.0.0.1", 0)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while not reader.at_eof() and not writer.is_closing():
                await self.serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.lost += 1
            writer.close()


@contextlib.asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[tuple[Engine, UpstreamClient]]:
    engine = Engine(serve)
    server = await asyncio.start_server(engine.handle, "127.0.0.1", 0)
    engine.address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    client = UpstreamClient()
    try:
        yield engine, client
    finally:
        await client.close()
        await until(lambda: client.open_connections == 0)
        server.close()


async def taken(reader: asyncio.StreamReader) -> None:
    """One request of the tests: its head and two bytes."""
    await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(2)


def says(*parts: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await taken(reader)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    return serve


def says_and_closes(*parts: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await says(*parts)(reader, writer)
        writer.close()

    return serve


async def start(engine: Engine, client: UpstreamClient, timeout_s: float = 20.0) -> Exchange:
    return await client.start(engine.address, HEAD, b"{}", instance=KEY, timeout_s=timeout_s)


async def body(engine: Engine, client: UpstreamClient) -> bytes:
    exchange = await start(engine, client)
    try:
        return (await exchange.read()).body
    finally:
        client.end(exchange)


async def cause(work: Awaitable[object]) -> str:
    with pytest.raises(CallFailed) as raised:
        await work
    return raised.value.cause


@pytest.mark.parametrize(
    "parts",
    [
        (OK,),
        tuple(OK[i : i + 1] for i in range(len(OK))),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\n\r\n",),
        (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", OK),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK,),
    ],
)
async def test_a_connection_serves_again_once_its_answer_is_whole(parts: tuple[bytes, ...]) -> None:
    async with serving(says(*parts)) as (engine, client):
        for _ in range(3):
            assert await body(engine, client) == b"hi"
        assert (engine.connections, client.open_connections) == (1, 1)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    ],
)
async def test_what_an_engine_will_not_keep_is_not_kept(answer: bytes) -> None:
    async with serving(says_and_closes(answer)) as (engine, client):
        for _ in range(2):
            assert await body(engine, client) == b"hi"
        assert engine.connections == 2
        await until(lambda: client.open_connections == 0)


async def test_a_connection_that_was_closed_while_idle_costs_one_fresh_try() -> None:
    async with serving(says_and_closes(OK)) as (engine, client):
        assert await body(engine, client) == b"hi"
        # The engine's end is not yet seen: what is sent next meets a closed connection.
        assert await body(engine, client) == b"hi"
        assert engine.connections == 2


@pytest.mark.parametrize(
    ("serve", "want"),
    [
        (says_and_closes(), "reset"),
        (says_and_closes(b"HTTP/1.1 2"), "reset"),
        (says_and_closes(b"junk\r\n\r\n"), "reset"),
        (says_and_closes(OK[:-1]), "incomplete"),
        (says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), "incomplete"),
        (says(b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n"), "too_large"),
        (says(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"), "answer"),
    ],
)
async def test_a_broken_answer_is_told_and_its_connection_closed(serve: Serve, want: str) -> None:
    async with serving(serve) as (engine, client):
        assert await cause(body(engine, client)) == want
        await until(lambda: client.open_connections == 0)


async def test_an_engine_that_nobody_listens_for_is_a_connect_failure() -> None:
    async with serving(says(OK)) as (engine, client):
        gone = await asyncio.start_server(engine.handle, "127.0.0.1", 0)
        engine.address = Address("127.0.0.1", gone.sockets[0].getsockname()[1])
        gone.close()
        await gone.wait_closed()
        assert await cause(start(engine, client)) == "connect"


async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def test_no_head_in_time_is_a_timeout_and_a_lost_engine_ends_the_wait() -> None:
    async with serving(silent) as (engine, client):
        assert await cause(start(engine, client, timeout_s=0.05)) == "timeout"
        waiting = asyncio.create_task(start(engine, client))
        await until(lambda: engine.connections == 2)
        client.lose([InstanceKey("other", "a")])
        client.lose([KEY])
        assert await cause(waiting) == "lost"
        await until(lambda: engine.lost == 2)


async def test_a_cancelled_call_closes_its_connection() -> None:
    async with serving(silent) as (engine, client):
        waiting = asyncio.create_task(start(engine, client))
        await until(lambda: engine.connections == 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        await until(lambda: engine.lost == 1)


class Flood:
    """An engine that writes a body without end, as fast as it is read."""

    def __init__(self) -> None:
        self.written = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await taken(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            self.written += 0x10000
            await writer.drain()

    async def stands_still(self) -> None:
        before = -1
        while self.written != before:
            before = self.written
            await asyncio.sleep(0.3)


async def test_an_answer_that_nobody_takes_is_not_read_on() -> None:
    flood = Flood()
    async with serving(flood) as (engine, client):
        exchange = await start(engine, client)
        await flood.stands_still()
        assert flood.written < 64 * 1024 * 1024
        assert await cause(exchange.read(1024 * 1024)) == "too_large"
        client.end(exchange)
        await until(lambda: engine.lost == 1)


async def test_a_paused_relay_reads_no_more_and_is_not_late_for_it() -> None:
    flood = Flood()
    got = 0

    def consume(data: bytes) -> None:
        nonlocal got
        got += len(data)

    async with serving(flood) as (engine, client):
        exchange = await start(engine, client)
        exchange.bound_gaps(0.2)
        relaying = asyncio.create_task(exchange.relay(consume))
        await until(lambda: got > 1024 * 1024)
        exchange.pause()
        await flood.stands_still()
        await asyncio.sleep(0.5)
        assert not relaying.done()
        before = got
        exchange.resume()
        await until(lambda: got > before + 8 * 1024 * 1024)
        client.end(exchange)
        relaying.cancel()


async def test_a_gap_in_a_relay_is_a_timeout() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await says(head)(reader, writer)
        await reader.read()

    async with serving(serve) as (engine, client):
        exchange = await start(engine, client)
        exchange.bound_gaps(0.05)
        got: list[bytes] = []
        assert await cause(exchange.relay(got.append)) == "timeout"
        assert got == [b"h"]
        client.end(exchange)


async def test_a_consumer_that_fails_ends_the_exchange() -> None:
    def consume(data: bytes) -> None:
        raise CallFailed("status")

    async with serving(Flood()) as (engine, client):
        exchange = await start(engine, client)
        assert await cause(exchange.relay(consume)) == "status"
        client.end(exchange)
        await until(lambda: engine.lost == 1)


async def test_an_engine_that_speaks_unasked_loses_its_connection() -> None:
    async with serving(says(OK + b"HTTP/1.1 200 OK\r\n")) as (engine, client):
        assert await body(engine, client) == b"hi"
        await until(lambda: engine.lost == 1)
        assert await body(engine, client) == b"hi"


def pause(exchange: Exchange, data: bytes) -> None:
    exchange.pause()


async def test_a_connection_paused_at_its_end_serves_again() -> None:
    relayed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await says(OK[:-2])(reader, writer)
        await relayed.wait()
        relayed.clear()
        writer.write(OK[-2:])

    async with serving(serve) as (engine, client):
        for _ in range(2):
            exchange = await start(engine, client)
            relaying = asyncio.create_task(exchange.relay(partial(pause, exchange)))
            await asyncio.sleep(0)  # the relay has begun before the body comes
            relayed.set()
            await relaying
            client.end(exchange)
        assert engine.connections == 1
