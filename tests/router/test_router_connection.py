"""One connection to an engine, byte by byte: what is of this answer, and what is out of step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import pytest

from xpyd_router.errors import CallFailed
from xpyd_router.upstream.connection import EngineConnection, Exchange

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"


class Wire:
    """Takes what is sent."""

    def __init__(self) -> None:
        self.sent = b""
        self.is_aborted = self.is_paused = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.sent += b"".join(parts)

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True


class Line:
    """A connection whose engine is the test. Who waits for an exchange needs a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.wire = Wire()
        self.loop = loop
        self.free: list[EngineConnection] = []
        self.connection = EngineConnection(self.free.append, lambda _: None)
        self.connection.connection_made(cast(Any, self.wire))

    def ask(self, body: bytes = b"{}") -> Exchange:
        exchange = Exchange(None, cast(asyncio.AbstractEventLoop, self.loop), 1.0)
        self.connection.send(exchange, b"HEAD\r\n\r\n", body)
        return exchange

    def says(self, *parts: bytes) -> None:
        for part in parts:
            self.connection.data_received(part)


@pytest.mark.parametrize("size", [2, 65536, 65537, 300_000])
def test_a_request_goes_out_whole(size: int) -> None:
    line = Line()
    line.ask(b"x" * size)
    assert line.wire.sent == b"HEAD\r\n\r\n" + b"x" * size


def test_a_body_that_looks_like_an_answer_is_a_body() -> None:
    line = Line()
    exchange = line.ask()
    line.says(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(OK), OK)
    assert exchange.is_whole
    assert exchange.answer.body == OK


async def test_an_answer_that_breaks_off_behind_its_head_has_begun() -> None:
    """What failed is the body, which `read` says: the engine may have worked for it."""
    line = Line(asyncio.get_running_loop())
    exchange = line.ask()
    line.says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
    line.connection.connection_lost(None)
    await exchange.begun()
    exchange.check()
    with pytest.raises(CallFailed) as failure:
        await exchange.read()
    assert failure.value.cause == "incomplete"


def test_chunks_are_told_by_their_bytes_only_where_one_begins() -> None:
    """The payload of a chunk, and a body of known length behind a chunked one, may look like it."""
    line, one = Line(), b"1\r\na\r\n"
    exchange = line.ask()
    line.says(CHUNKED[:-5], b"6\r\n", one, b"\r\n0\r\n\r\n")
    assert exchange.answer.body == b"hi" + one
    exchange.close()
    exchange = line.ask()
    line.says(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n", one)
    assert exchange.answer.body == one


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\nConnection: close\r\n", b"HTTP/1.0 200 OK\r\n"]
)
def test_what_an_engine_will_not_keep_is_closed(head: bytes) -> None:
    line = Line()
    exchange = line.ask()
    line.says(head + b"Content-Length: 2\r\n\r\nhi")
    exchange.close()
    assert exchange.is_whole
    assert line.wire.is_aborted
    assert not line.free


def test_a_connection_that_ended_with_its_answer_does_not_serve_again() -> None:
    line = Line()
    exchange = line.ask()
    line.says(OK)
    line.wire.is_aborted = True
    line.connection.connection_lost(None)
    exchange.close()
    assert exchange.is_whole
    assert not line.free


@pytest.mark.parametrize("code", [b"100 Continue", b"103 Early Hints"])
def test_an_interim_answer_is_none(code: bytes) -> None:
    line = Line()
    exchange = line.ask()
    line.says(b"HTTP/1.1 " + code + b"\r\nLink: x\r\n\r\n")
    assert (exchange.status, exchange.is_whole) == (0, False)
    line.says(OK)
    assert (exchange.status, exchange.answer.body) == (200, b"hi")


@pytest.mark.parametrize("answer", [OK, CHUNKED])
def test_what_comes_behind_an_answer_that_nobody_took_yet_ends_the_connection(
    answer: bytes,
) -> None:
    line = Line()
    exchange = line.ask()
    line.says(answer, b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\nno")
    assert line.wire.is_aborted
    exchange.close()
    assert not line.free
    assert (exchange.status, exchange.is_whole) == (200, True)


def test_an_engine_that_began_to_answer_has_answered() -> None:
    """Else the client would ask it again, as if the connection had been closed while idle."""
    line = Line()
    exchange = line.ask()
    assert not exchange.has_answered
    line.says(b"HTTP/1.1 2")
    assert exchange.has_answered


async def test_an_answer_of_many_pieces_is_read_as_one() -> None:
    line = Line(asyncio.get_running_loop())
    exchange = line.ask()
    line.says(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    reading = asyncio.create_task(exchange.read())
    await asyncio.sleep(0)
    line.says(*[b"x" * 100_000] * 10)
    assert (await reading).body == b"x" * 1_000_000


def test_when_to_come_again_is_read_of_a_refusal() -> None:
    line = Line()
    exchange = line.ask()
    line.says(b"HTTP/1.1 429 Many\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\nno")
    assert exchange.answer[:2] == (429, b"no")
    assert exchange.answer.retry_after == "7"


class Clock:
    """The running loop, at a time that is set."""

    now_s = 0.0

    def create_future(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    def time(self) -> float:
        return self.now_s


def test_a_pause_takes_nothing_of_the_time_until_the_next_piece() -> None:
    clock = Clock()
    line = Line(cast(Any, clock))
    exchange = line.ask()
    line.says(CHUNKED[:-5])
    exchange.bound_gaps(10.0)
    clock.now_s = 4.0
    exchange.pause()
    assert line.wire.is_paused
    clock.now_s = 100.0
    assert not exchange.is_due(100.0)
    exchange.resume()
    assert not line.wire.is_paused
    assert not exchange.is_due(105.9)
    assert exchange.is_due(106.0)


async def test_each_piece_that_comes_begins_the_time_until_the_next() -> None:
    clock = Clock()
    line = Line(cast(Any, clock))
    exchange = line.ask()
    line.says(CHUNKED[:-5])
    exchange.bound_gaps(10.0)
    relaying = asyncio.create_task(exchange.relay(lambda _: None))
    await asyncio.sleep(0)
    for now_s in (1.0, 10.5, 20.4, 30.3):
        line.says(b"1\r\nx\r\n")
        assert not exchange.is_due(now_s)
    assert not exchange.is_due(40.2)
    assert exchange.is_due(40.3)
    relaying.cancel()


async def test_nothing_of_a_call_that_failed_reaches_its_consumer() -> None:
    """Another engine may go on already: what this one still says would stand between."""

    line, got = Line(asyncio.get_running_loop()), list[bytes]()
    exchange = line.ask()
    line.says(CHUNKED[:-5])
    relaying = asyncio.create_task(exchange.relay(got.append))
    await asyncio.sleep(0)
    exchange.fail("lost")
    line.says(b"1\r\nx\r\n")
    line.connection.connection_lost(None)
    with pytest.raises(CallFailed, match="lost"):
        await relaying
    assert got == [b"hi"]


@pytest.mark.parametrize("before", [OK, CHUNKED])
def test_the_end_of_the_connection_ends_an_answer_without_a_length(before: bytes) -> None:
    line = Line()
    first = line.ask()
    line.says(before)
    first.close()
    assert line.free == [line.connection]
    second = line.ask()
    line.says(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo")
    line.connection.connection_lost(None)
    assert second.is_whole
    assert second.answer.body == b"hello"


@pytest.mark.parametrize(
    ("said", "error"), [(CHUNKED[:-5], None), (b"HTTP/1.1 200 OK\r\n\r\nhel", OSError())]
)
def test_a_connection_that_ends_within_an_answer_fails_it(
    said: bytes, error: Exception | None
) -> None:
    line = Line()
    exchange = line.ask()
    line.says(said)
    line.connection.connection_lost(error)
    assert not exchange.is_whole
    with pytest.raises(CallFailed, match="incomplete"):
        asyncio.run(exchange.read())
