"""Bodies in tiny chunks: each chunk is a call of the parser, which holds the event loop of all."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tests.router.fakes import pair
from tests.worker.server_fakes import EOS, VOCAB, ByteTokenizer, serving
from xpyd_core.http_head import LEAST_MEAN_BYTES, MANY_CHUNKS
from xpyd_worker.server.service import ServedModel

BODY = b'{"model":"m","prompt":"hi","max_tokens":2}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n%b\r\n"
LAST = b"0\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Server = Callable[[], AbstractAsyncContextManager[tuple[str, int]]]


@contextlib.asynccontextmanager
async def router() -> AsyncGenerator[tuple[str, int]]:
    async with pair() as (made, _, _):
        yield "127.0.0.1", made.router.http_port


@contextlib.asynccontextmanager
async def engine() -> AsyncGenerator[tuple[str, int]]:
    model = ServedModel(("m",), ByteTokenizer(), frozenset({EOS}), VOCAB, 200, 7)
    async with serving(model=model) as running:
        yield running.address


both = pytest.mark.parametrize("server", [router, engine])


def chunks(*parts: bytes) -> bytes:
    return b"".join([b"%x\r\n%b\r\n" % (len(part), part) for part in parts])


def blanks(count: int, size: int = 1) -> bytes:
    """So many chunks of what JSON may have around it."""
    return chunks(b" " * size) * count


@contextlib.asynccontextmanager
async def asking(server: Server, *parts: bytes, extra: bytes = b"") -> AsyncGenerator[Streams]:
    """A client that has sent a head and these, and goes on listening."""
    async with server() as address, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.closing(writer):
            writer.write(b"".join((HEAD % extra, *parts)))
            yield reader, writer


async def status_of(reader: asyncio.StreamReader) -> int:
    """That of the next answer, which is read to its end."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.I)
    assert length, head
    await reader.readexactly(int(length[1]))
    return int(head.split()[1])


def assert_refused(answer: bytes) -> None:
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"send longer chunks, or a Content-Length" in answer


@both
@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(blanks(MANY_CHUNKS + 1), id="from the start"),
        # A long chunk is no leave for many short ones.
        pytest.param(blanks(1, 1_000_000) + blanks(2 * MANY_CHUNKS), id="behind a long one"),
        pytest.param(blanks(MANY_CHUNKS + 1, LEAST_MEAN_BYTES - 1), id="just too short"),
    ],
)
async def test_a_body_in_tiny_chunks_is_refused_before_its_end(server: Server, sent: bytes) -> None:
    async with asking(server, sent) as (reader, _):
        assert_refused(await reader.read())  # to the end: closed


async def test_so_it_is_where_the_client_would_rather_upgrade() -> None:
    wish = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    async with asking(router, blanks(MANY_CHUNKS + 1), extra=wish) as (reader, _):
        assert_refused(await reader.read())


@both
@pytest.mark.parametrize(
    "padding",
    [
        pytest.param(blanks(MANY_CHUNKS - 10), id="few tiny ones"),
        pytest.param(blanks(2 * MANY_CHUNKS + 10, LEAST_MEAN_BYTES), id="many"),
        pytest.param((blanks(63) + blanks(1, 8192)) * 100, id="some long ones among tiny ones"),
    ],
)
async def test_a_body_in_ordinary_chunks_is_served(server: Server, padding: bytes) -> None:
    request = padding + chunks(BODY) + LAST
    async with asking(server, request) as (reader, writer):
        assert await status_of(reader) == 200
        writer.write(HEAD % b"" + request)  # each body is counted for itself
        assert await status_of(reader) == 200


@both
async def test_the_chunks_of_requests_that_do_not_wait_for_answers_count_together(
    server: Server,
) -> None:
    """And the connection is closed, before any is answered."""
    some = blanks(MANY_CHUNKS // 2) + chunks(BODY) + LAST
    async with asking(server, some, HEAD % b"", some, HEAD % b"", some) as (reader, _):
        assert await reader.read() == b""
    async with asking(server, some) as (reader, writer):
        assert await status_of(reader) == 200
        for _ in range(2):
            writer.write(HEAD % b"" + some)
            assert await status_of(reader) == 200


@both
async def test_behind_an_answer_there_is_no_other(server: Server) -> None:
    head = b"POST /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with server() as address, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.closing(writer):
            writer.write(head)
            assert await status_of(reader) == 404
            writer.write(blanks(MANY_CHUNKS + 1))
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
