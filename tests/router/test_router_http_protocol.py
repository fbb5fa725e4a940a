"""Connections that say nothing, or half a head, are closed in time, and lost ones are forgotten:
of router and worker alike."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import struct
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from tests.router.fakes import fleet
from xpyd_router.http.protocol import ClientProtocol as RouterProtocol
from xpyd_worker.server.http.server import HeadDeadlineProtocol as WorkerProtocol

PROTOCOLS = [RouterProtocol, WorkerProtocol]
LONG = b"x" * 32 * 1024
"""More than fits between `Narrow` and a client, and less than what pauses an answer."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok" if scope["path"] == "/" else LONG})


@contextlib.asynccontextmanager
async def serving(protocol: type, keep_alive_s: int = 3600) -> AsyncIterator[tuple[str, int]]:
    quick = type("Quick", (protocol,), {"head_deadline_s": 0.2})
    config = uvicorn.Config(app, host="127.0.0.13", port=0, http=quick, lifespan="off")
    config.timeout_keep_alive = keep_alive_s
    config.log_config = None
    server = uvicorn.Server(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_no_signals(server))
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()
        server.should_exit = True
        await task


@contextlib.contextmanager
def _no_signals(server: uvicorn.Server) -> Any:
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    yield


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Half: "])
async def test_a_connection_without_a_whole_head_is_closed(protocol: type, said: bytes) -> None:
    async with serving(protocol) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(said)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_second_half_head_on_a_used_connection_is_closed(protocol: type) -> None:
    async with serving(protocol) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Half")
        await reader.read()  # to the end: closed
        writer.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_connection_that_the_client_reset_after_its_answer_is_forgotten(
    protocol: Any,
) -> None:
    made: list[weakref.ref[Any]] = []

    def connection_made(self: Any, transport: asyncio.Transport) -> None:
        made.append(weakref.ref(self))
        protocol.connection_made(self, transport)

    noted = type("Noted", (protocol,), {"connection_made": connection_made})
    async with serving(noted) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"ok")
        # Closed without lingering: a reset, not an end.
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        while made[0]() is not None:  # the deadline is _run's
            await asyncio.sleep(0.05)
            gc.collect()


class Narrow(RouterProtocol):
    """Next to nothing of an answer is under way without having been taken."""

    stall_s = 0.2
    lost: asyncio.Event

    def connection_made(self, transport: Any) -> None:
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost.set()


@pytest.mark.parametrize("reason", ["Connection: close", "it was idle", "the server ends"])
async def test_a_client_that_takes_nothing_does_not_keep_a_connection_that_closes(
    reason: str,
) -> None:
    narrow: Any = type("Noted", (Narrow,), {"lost": asyncio.Event()})
    ends = reason == "the server ends"
    keep_alive_s = 0 if reason == "it was idle" else 3600
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        async with serving(narrow, keep_alive_s) as address:
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, address)
            header = b"Connection: close" if reason == "Connection: close" else b"X-A: b"
            await loop.sock_sendall(
                client, b"GET /long HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n\r\n"
            )
            begun = await loop.sock_recv(client, 100)
            assert b" 200 " in begun
            if not ends:
                await narrow.lost.wait()
        assert narrow.lost.is_set()


async def test_what_is_no_http_is_answered_without_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else strangers fill the log."""
    with caplog.at_level(logging.WARNING, "uvicorn.error"):
        async with fleet() as fleet_:
            reader, writer = await asyncio.open_connection("127.0.0.1", fleet_.router.http_port)
            writer.write(b"no HTTP\r\n\r\n")
            assert b" 400 " in await reader.readline()
            writer.close()
    assert "Invalid HTTP request" not in caplog.text
