"""What a connection leaves: no memory once it is closed, and no socket that nobody watches."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import weakref

import pytest
from aiohttp import web

from tests.router.fakes import (
    Call,
    Fleet,
    Generated,
    HttpEngine,
    fleet,
    pair,
    sse,
    start_stream,
    until,
)
from xpyd_router.http.protocol import ClientProtocol

BODY = b'{"model": "m", "prompt": "x", "stream": %b}'
LAST = {
    "whole": BODY % b"false",
    "a stream": BODY % b"true",
    "refused": b"{}",
    "of another route": None,
}


def connections(made: Fleet) -> set[ClientProtocol]:
    """uvicorn's own list."""
    state = made.router._server.server_state  # pyright: ignore[reportPrivateUsage] - uvicorn's
    return state.connections  # type: ignore[return-value]


def post(body: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("case", LAST)
async def test_the_memory_of_a_connection_is_free_at_once(case: str) -> None:
    """It holds its last request's body, and the garbage collector seldom comes."""
    body = LAST[case]
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" if body is None else post(body)

    async with pair() as (made, _, _d):
        gc.disable()
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
            writer.write(request)
            await until(lambda: any(_is_answered(one) for one in connections(made)))
            (kept,) = [weakref.ref(one) for one in connections(made)]
            writer.close()
            await until(lambda: kept() is None)
        finally:
            gc.enable()


def _is_answered(connection: ClientProtocol) -> bool:
    cycle = connection.cycle
    return bool(cycle) and cycle.response_complete


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("case", ["an empty line", "the rest of a body"])
async def test_what_comes_behind_an_answer_does_not_keep_a_connection(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn's deadline of idle connections ends with any byte, and begins with an answer."""
    monkeypatch.setattr(ClientProtocol, "head_deadline_s", 0.3)
    requests = {
        "an empty line": (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n"),
        "the rest of a body": (
            b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n{}",
            b"{}",
        ),
    }
    first, rest = requests[case]

    async with fleet() as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        writer.write(first)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        writer.write(rest)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.usefixtures("both_loops")
async def test_who_says_no_more_must_take_its_answers() -> None:
    """A little that is not taken does not pause the writer, and would wait for ever."""

    async with fleet(request_timeout_s=0.3) as made:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(sock.connect, ("127.0.0.1", made.router.http_port))
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: any(_is_answered(one) for one in connections(made)))
        (connection,) = connections(made)
        # As an answer of this size, which the client does not take.
        own = connection.transport.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        while connection.transport.get_write_buffer_size() < 32768:
            connection.transport.write(b"a" * 4096)
            await asyncio.sleep(0.005)  # both kernels take what they can
        assert not connection.flow.write_paused
        sock.shutdown(socket.SHUT_WR)
        await until(lambda: not connections(made))
        sock.close()


FRAMES = {
    "of a known length": b"Content-Length: %d\r\n\r\n%b",
    "in chunks": b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n",
}


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES.keys())
async def test_the_engine_of_a_client_that_resets_stops_with_more_in_its_pipeline(
    frame: bytes,
) -> None:
    """A connection with a pipeline is not read: the next write shows that nobody is there."""
    body = BODY % b"true"
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + frame % (len(body), body)

    async with pair() as (made, _, d):
        d.script = stream_on
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        writer.write(request + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"t0.1 ")
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await until(lambda: d.calls[0].is_closed)
        await until(lambda: made.metric("xpyd_router_in_flight") == 0)


@pytest.mark.usefixtures("both_loops")
async def test_half_a_head_behind_a_request_does_not_end_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ClientProtocol, "head_deadline_s", 0.1)

    async with pair() as (made, _, d):
        d.script = stream_on
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        writer.write(post(BODY % b"true") + b"GET /health HT")
        for _ in range(60):  # of one every 10 ms
            await reader.readuntil(b"t0.1 ")
        writer.close()


async def stream_on(engine: HttpEngine, call: Call, request: web.Request) -> web.StreamResponse:
    """An engine that streams for ever."""
    response = await start_stream(request)
    generated = Generated(engine, call)
    while True:
        piece = generated.piece(0, [1], delta=True)
        chunk = {"id": "x", "object": generated.object, "model": "m", "choices": [piece]}
        await response.write(sse(chunk))
        await asyncio.sleep(0.01)
