"""Clients that end their sending side and wait for the answer (`nc -N`): they get those that cost
nothing. From the inference routes they get none: a client that is gone looks the same."""

from __future__ import annotations

import asyncio

import pytest

from tests.router.fakes import begin_and_hang, fleet, hang, pair, until

pytestmark = pytest.mark.usefixtures("plain_and_tls")
CHEAP = {
    "an old one": (b"GET /health HTTP/1.0\r\n\r\n", b" 200 "),
    "another": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", b" 200 "),
    "a body": (b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", b" 404 "),
    "half a head": (b"GET /health HTTP/1.1\r\nHost: x\r\n", None),
    "half a body": (b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 20\r\n\r\n{}", None),
    "nothing": (b"", None),
}


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("case", CHEAP)
async def test_a_request_without_inference_is_answered(case: str) -> None:
    request, status = CHEAP[case]

    async with fleet() as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        writer.write(request)
        writer.write_eof()
        answer = await reader.read()  # to the end: closed, not kept alive
        if status is None:
            assert answer == b""
        else:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert status in head
            assert b"\r\nconnection: close" in head
            assert int(head.partition(b"content-length: ")[2].split()[0]) == len(body)
        writer.close()


BODY = b'{"model": "m", "prompt": "x", "stream": %b}'
FRAMES = {
    "of a known length": b"Content-Length: %d\r\n\r\n%b",
    "in chunks": b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n",
}


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES.keys())
@pytest.mark.parametrize("is_stream", [False, True])
async def test_engines_stop_for_a_client_that_ends_its_side(is_stream: bool, frame: bytes) -> None:
    body = BODY % (b"true" if is_stream else b"false")
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + frame % (len(body), body)

    async with pair() as (made, _, d):
        d.script = begin_and_hang if is_stream else hang
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        writer.write(request)
        await until(lambda: d.served == 1)
        if is_stream:
            await reader.readuntil(b"t0.1 ")
        writer.write_eof()
        assert b"[DONE]" not in await reader.read()
        await until(lambda: d.calls[0].is_closed)
        await until(lambda: made.metric("xpyd_router_in_flight") == 0)
        writer.close()
