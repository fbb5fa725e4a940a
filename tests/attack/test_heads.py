"""Malformed requests: what a strict parser (h11) refuses, the router does not serve.

A request that two parsers read in two ways lets a client talk past the proxy in front of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

import h11
import pytest

from tests.router.fakes import Fleet, pair

Part = TypeVar("Part")
_AT_ONCE = 50
_WAIT_S = 3.0
BODY = b'{"model":"m","prompt":"x","max_tokens":2}'
LENGTH = b"Content-Length: %d" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
LINES = (
    b"POST /v1/completions HTTP/1.1",
    b"POST /v1/completions HTTP/1.0",
    b"POST /v1/completions",
    b"POST /v1/completions HTTP/0.9",
    b"POST /v1/completions HTTP/1.2",
    b"POST /v1/completions HTTP/2.0",
    b"POST /v1/completions HTTP/11",
    b"POST\t/v1/completions\tHTTP/1.1",
    b"post /v1/completions HTTP/1.1",
    b"PO@ST /v1/completions HTTP/1.1",
    b"POST //v1/completions HTTP/1.1",
    b"POST http://x/v1/completions HTTP/1.1",
)
HOSTS = ((b"Host: x",), (), (b"Host: x", b"Host: y"), (b"Host: x", b"Host: x"))
OTHERS = (
    (),
    (b"X-A: a\r\n b",),
    (b"X-A : a",),
    (b"X-A: a\rb",),
    (b"X-A: a\0b",),
    (b": a",),
    (b"X-A",),
    (b"X-\xff: a",),
    (b"X-A: \xff",),
    (b"Connection: close",),
)
FRAMINGS = (
    ((LENGTH,), BODY),
    ((LENGTH, LENGTH), BODY),
    ((LENGTH, b"Content-Length: 3"), BODY),
    ((b"Content-Length: +41",), BODY),
    ((b"Content-Length: 0x29",), BODY),
    ((b"Content-Length: 99999999999999999999",), BODY),
    ((LENGTH, CHUNKED), CHUNKS),
    ((CHUNKED,), CHUNKS),
    ((b"Transfer-Encoding: gzip, chunked",), CHUNKS),
    ((b"Transfer-Encoding: chunked, gzip",), CHUNKS),
    ((b"Transfer-Encoding: identity",), BODY),
    ((b"Transfer-Encoding: xchunked",), CHUNKS),
    ((b"Transfer-Encoding : chunked",), CHUNKS),
    ((CHUNKED, CHUNKED), CHUNKS),
    ((CHUNKED,), CHUNKS.replace(b"\r\n", b"\n")),
    ((CHUNKED,), CHUNKS.replace(b"}\r\n", b"}")),
    ((CHUNKED,), b"zz" + CHUNKS[2:]),
    ((CHUNKED,), b"-1" + CHUNKS[2:]),
    ((CHUNKED,), b"0x" + CHUNKS),
    ((CHUNKED,), b"f" * 17 + CHUNKS[2:]),
    ((CHUNKED,), CHUNKS[:-2]),
)


def _draw(rng: random.Random, parts: Sequence[Part]) -> Part:
    """Mostly the first one, with which nothing is wrong."""
    return parts[0] if rng.random() < 0.6 else rng.choice(parts)


def corpus(seed: int, count: int) -> Iterator[bytes]:
    """Requests of these parts; every fourth with some bytes changed, left out or doubled."""
    rng = random.Random(seed)
    for number in range(count):
        framing, body = _draw(rng, FRAMINGS)
        lines = [_draw(rng, LINES), *_draw(rng, HOSTS), *_draw(rng, OTHERS), *framing]
        request = b"\r\n".join([*lines, b"", body])
        if number % 4 == 3:
            at = rng.randrange(len(request) - len(body))
            other = rng.choice((b"", request[at : at + 1] * 2, bytes([rng.randrange(256)])))
            request = request[:at] + other + request[at + 1 :]
        yield request


def is_served_by_h11(request: bytes) -> bool:
    """Whether a strict server finds one whole request in it."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(request)
    connection.receive_data(b"")
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.EndOfMessage):
                return True
            if event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):
                return False
    except h11.RemoteProtocolError:
        return False


def is_harmless(request: bytes) -> bool:
    """Known differences, in which no parser finds another request: blanks around the target, empty
    lines before the request, and bytes above 127 in a value."""
    line = request.lstrip(b"\r\n").split(b"\r\n")[0]
    return request[:1] in b"\r\n" or b"  " in line or max(request) > 127


async def status_of(port: int, request: bytes) -> int:
    """The status that the router answers; 0 where it closes without an answer, or waits for more of
    the request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer), contextlib.suppress(ConnectionError, TimeoutError):
        writer.write(request)
        async with asyncio.timeout(_WAIT_S):
            line = await reader.readline()
        return int(line.split()[1]) if line else 0
    return 0


async def judge(made: Fleet, seed: int, count: int) -> list[tuple[int, bytes]]:
    """Requests that were served and must not be, or were answered by a defect."""
    wrong: list[tuple[int, bytes]] = []
    requests = list(corpus(seed, count))
    found: list[int] = []
    for start in range(0, count, _AT_ONCE):
        for engine in made.engines:
            await made.beat(engine)
        some = requests[start : start + _AT_ONCE]
        found += await asyncio.gather(*(status_of(made.router.http_port, one) for one in some))
    assert count // 10 < found.count(200) < count // 2
    for request, status in zip(requests, found, strict=True):
        is_wrong = status == 200 and not is_served_by_h11(request) and not is_harmless(request)
        if status >= 500 or is_wrong:
            wrong.append((status, request))
    return wrong


async def test_what_a_strict_parser_refuses_is_not_served() -> None:
    async with pair() as (made, _, _):
        assert await judge(made, 1, 300) == []


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
async def test_so_it_is_with_many_more(seed: int) -> None:
    async with pair() as (made, _, _):
        assert await judge(made, seed, 1000) == []


@pytest.mark.parametrize(
    ("request_line", "headers", "body", "word"),
    [
        (LINES[0], (LENGTH,), BODY, b"no Host"),
        (LINES[0], (b"Host: x", b"Host: y", LENGTH), BODY, b"several Host"),
        (b"POST /v1/completions", (b"Host: x", LENGTH), BODY, b"version"),
        (LINES[0], (b"Host: x", b"Transfer-Encoding: gzip, chunked"), CHUNKS, b"must be chunked"),
        (LINES[0], (b"Host: x", CHUNKED, CHUNKED), CHUNKS, b"not valid HTTP"),
        (LINES[0].replace(b"1.1", b"1.0"), (b"Host: x", CHUNKED), CHUNKS, b"must be chunked"),
        (LINES[0], (b"Host: x", CHUNKED), b"zz\r\n", b"not valid HTTP"),
        (LINES[0], (b"Host: x", LENGTH, *[b"a:"] * 255), BODY, b"more than 256 headers"),
    ],
)
async def test_a_malformed_request_gets_a_400_that_says_why(
    request_line: bytes, headers: tuple[bytes, ...], body: bytes, word: bytes
) -> None:
    async with pair() as (made, p, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        with contextlib.closing(writer):
            writer.write(b"\r\n".join([request_line, *headers, b"", body]))
            answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert word in answer
        assert p.served == 0


async def test_as_many_headers_as_may_be_are_served() -> None:
    async with pair() as (made, _, _):
        head = (LINES[0], b"Host: x", LENGTH, *[b"a:"] * 254)
        assert await status_of(made.router.http_port, b"\r\n".join([*head, b"", BODY])) == 200


async def test_a_base_url_that_ends_in_a_slash_is_served() -> None:
    async with pair() as (made, _, _):
        for line in (b"POST //v1/completions HTTP/1.1", b"POST ///v1/completions HTTP/1.1"):
            request = b"\r\n".join([line, b"Host: x", LENGTH, b"", BODY])
            reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
            with contextlib.closing(writer):
                writer.write(request)
                status = await asyncio.wait_for(reader.readline(), 20)
            assert status.startswith(b"HTTP/1.1 200 ")
