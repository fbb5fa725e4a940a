"""Bodies that come late, or never: refused in time, whatever way they were to come."""

from __future__ import annotations

import asyncio

import pytest

from tests.router.fakes import Fleet, fleet, until
from xpyd_router.http import asgi
from xpyd_router.http.protocol import ClientProtocol

HEADS = {
    "of a known length": b"HTTP/1.1\r\nContent-Length: 30",
    "in chunks": b"HTTP/1.1\r\nTransfer-Encoding: chunked",
    "announced": b"HTTP/1.1\r\nContent-Length: 30\r\nExpect: 100-continue",
    "of an old client": b"HTTP/1.0\r\nContent-Length: 30",
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies have little time."""
    monkeypatch.setattr(asgi, "BODY_DEADLINE_S", 0.2)
    monkeypatch.setattr(ClientProtocol, "body_deadline_s", 0.2)


async def say(fleet_: Fleet, *pieces: bytes) -> asyncio.StreamReader:
    """Send these, one after the other; what comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", fleet_.router.http_port)
    for piece in pieces:
        writer.write(piece)
        async with fleet_.http.get(f"{fleet_.base}/health"):
            pass  # what was sent is read first
    fleet_.stack.callback(writer.close)
    return reader


@pytest.mark.usefixtures("both_ways", "quick")
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
async def test_a_body_of_which_nothing_comes_is_refused(head: bytes) -> None:
    async with fleet() as fleet_:
        reader = await say(fleet_, b"POST /v1/completions " + head + b"\r\nHost: x\r\n\r\n")
        answer = (await reader.readuntil(b"\r\n\r\n")).removeprefix(b"HTTP/1.1 100 Continue")
        answer = answer.strip() or await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 408 ")
        await until(lambda: fleet_.metric("xpyd_router_in_flight") == 0)


ANSWERED = {
    "too long": (b"POST /v1/completions", b"99999999999", b" 413 "),
    "of no interest": (b"GET /health", b"10", b" 200 "),
    "for nobody": (b"POST /v1/nothing", b"10", b" 404 "),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("case", ANSWERED)
async def test_a_body_that_goes_on_behind_its_answer_has_an_end(case: str) -> None:
    line, length, status = ANSWERED[case]

    async with fleet() as fleet_:
        head = line + b" HTTP/1.1\r\nHost: x\r\nContent-Length: " + length + b"\r\n\r\n"
        reader = await say(fleet_, head, b"a", b"b")
        assert status in await reader.readuntil(b"\r\n\r\n")
        await reader.read()  # to the end: closed
