"""The bound of a request's head counts all of it, however it comes, and nothing but it."""

from __future__ import annotations

import asyncio

import pytest

from tests.router.fakes import Fleet, fleet, pair, until
from xpyd_router.http.protocol import MAX_HEAD_BYTES

"""uvloop reads up to 250 KiB at once, asyncio's loop 256 KiB."""
BODY = b'{"model": "m", "prompt": "x"}'
STARTS = {
    "of the short way": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
    % len(BODY),
    "of ASGI": b"POST /v1/completions?x HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(BODY),
}


def heads_begun(made: Fleet) -> int:
    """Connections that have said a part of a head."""
    # uvicorn's own list; nothing else tells that a part of a head has been read.
    server = made.router._server  # pyright: ignore[reportPrivateUsage] - see above
    connections = server.server_state.connections
    return sum(getattr(c, "_is_in_head", False) for c in connections)


async def read_answer(reader: asyncio.StreamReader, status: int) -> bytes:
    """The head of an answer of this status, whose body is read, too."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
    return head


async def send_for_ever(writer: asyncio.StreamWriter, piece: bytes) -> None:
    while True:
        writer.write(piece)
        await writer.drain()


def head_of(start: bytes, size_bytes: int) -> bytes:
    """A head of this size: the first line's method, spaces and version, and the last line, count
    for nothing in one that comes whole."""
    uncounted = len(b"POST  HTTP/1.1\r\n")
    name = b"X-Long: "
    return start + name + b"a" * (size_bytes + uncounted - len(start + name) - 2) + b"\r\n\r\n"


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS.keys())
@pytest.mark.parametrize(
    ("size_bytes", "status"), [(MAX_HEAD_BYTES, 200), (MAX_HEAD_BYTES + 1, 431), (200_000, 431)]
)
async def test_a_head_that_comes_at_once(size_bytes: int, status: int, start: bytes) -> None:
    async with pair() as (made, _, d):
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        times = 2 if status == 200 else 1
        for _ in range(times):
            writer.write(head_of(start, size_bytes) + BODY)
            await read_answer(reader, status)
        assert d.served == (times if status == 200 else 0)
        writer.close()


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize(("more_bytes", "status"), [(0, b"200"), (1, b"431")])
async def test_a_head_in_pieces(more_bytes: int, status: bytes) -> None:
    start = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: "

    async with fleet() as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        writer.write(start)
        await until(lambda: heads_begun(made) == 1)
        writer.write(b"a" * (MAX_HEAD_BYTES - len(start) + more_bytes))
        if not more_bytes:
            writer.write(b"\r\n\r\n")
        assert (await reader.readline()).split()[1] == status
        writer.close()


async def test_a_body_does_not_count_for_the_head_before_it_nor_for_the_next() -> None:
    async with fleet() as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        body = b"a" * (2 * MAX_HEAD_BYTES)
        writer.write(
            b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await read_answer(reader, 405)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        await until(lambda: heads_begun(made) == 1)
        writer.write(b"\r\n")
        await read_answer(reader, 200)
        writer.close()


async def test_trailers_do_not_count_for_the_next_head() -> None:
    start = b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n"
    long = b"X-Long: " + b"a" * (MAX_HEAD_BYTES // 2 + 1000)

    async with fleet() as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        writer.write(start)
        await read_answer(reader, 405)
        writer.write(b"0\r\n" + long + b"\r\n\r\n")
        async with made.http.get(f"{made.base}/health"):
            pass  # what was sent is read first
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n" + long)
        await until(lambda: heads_begun(made) == 1)
        writer.write(b"\r\n\r\n")
        await read_answer(reader, 200)
        writer.close()


async def test_a_head_behind_another_request_does_not_count_it() -> None:
    request = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: %b\r\n\r\n"
    half = request % (b"a" * (MAX_HEAD_BYTES // 2 + 1000))

    async with fleet() as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        writer.write(half + half[:-2])
        await read_answer(reader, 200)
        await until(lambda: heads_begun(made) == 1)
        writer.write(half[-2:])
        await read_answer(reader, 200)
        writer.close()


ENDLESS = {
    "a trailer": (b"0\r\nX-Long: ", b"a" * 1000),
    "many trailers": (b"0\r\n", b"X-A: b\r\n" * 125),
    "an extension of a chunk": (b"2;x=", b"a" * 1000),
}


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("case", ENDLESS)
async def test_what_is_no_body_where_a_body_should_be_has_a_bound(case: str) -> None:
    """The parser would keep it, for as long as a body may take."""
    start, more = ENDLESS[case]
    line = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

    async with fleet() as made:
        _, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        writer.write(line + b"2\r\n{}\r\n" + start)
        with pytest.raises(ConnectionError):
            await send_for_ever(writer, more)
        writer.close()


async def test_trailers_are_no_headers_of_the_request() -> None:
    chunks = b"%x\r\n%b\r\n0\r\nX-Request-Id: a-trailer\r\n\r\n" % (len(BODY), BODY)
    line = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

    async with pair() as (made, _, d):
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        writer.write(line + chunks)
        head = await read_answer(reader, 200)
        assert b"a-trailer" not in head
        assert d.served == 1
        writer.close()
