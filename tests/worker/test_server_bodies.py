"""Request bodies in memory: what counts, on which routes, until when."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tests.worker.server_fakes import Running, ScriptedEngine, serving, until
from xpyd_worker.server.http.bodies import MAX_BODY_BYTES, BodyBudget

ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/tokenize",
    "/detokenize",
    "/drain",
    "/reset_prefix_cache",
    "/kv/release",
    "/kv/probe",
)


@contextlib.asynccontextmanager
async def begun(
    server: Running, path: str, sent: bytes = b"", *, head: str = f"Content-Length: {90_000}"
) -> AsyncIterator[asyncio.StreamReader]:
    """A request whose client has sent so much of its body and then falls silent."""
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + sent)
    try:
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()


async def test_clients_that_announce_bodies_and_send_nothing_hold_nothing() -> None:
    async with serving() as server, contextlib.AsyncExitStack() as clients:
        for _ in range(30):
            head = f"Content-Length: {MAX_BODY_BYTES}"
            await clients.enter_async_context(begun(server, "/v1/completions", head=head))
        await until(lambda: server.api.admission.requests == 30)
        assert server.api.admission.bodies.used_bytes == 0
        assert (await server.post("/v1/completions", {"prompt": "hi"})).status_code == 200


@pytest.mark.parametrize("path", ROUTES)
async def test_what_has_come_of_bodies_is_bounded_on_every_route(path: str) -> None:
    bodies = BodyBudget(100_000)
    async with serving(bodies=bodies) as server:
        async with begun(server, path, b" " * 60_000):
            await until(lambda: bodies.used_bytes == 60_000)
            refused = await server.client.post(path, content=b" " * 60_000)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert "being read" in refused.json()["error"]["message"]
            assert bodies.used_bytes == 60_000
        await until(lambda: bodies.used_bytes == 0)
        assert (await server.client.post(path, content=b" " * 60_000)).status_code == 400


async def test_a_body_of_unknown_length_counts_as_what_has_come_of_it() -> None:
    bodies = BodyBudget(100_000)
    async with serving(bodies=bodies) as server:
        chunk = b"%x\r\n%s\r\n" % (1000, b" " * 1000)
        head = "Transfer-Encoding: chunked"
        async with begun(server, "/tokenize", chunk * 3, head=head):
            await until(lambda: bodies.used_bytes == 3000)
        await until(lambda: bodies.used_bytes == 0)


async def test_who_is_refused_in_the_middle_of_a_body_gives_back_what_came() -> None:
    bodies = BodyBudget(50_000)
    async with serving(bodies=bodies) as server:
        async with begun(server, "/tokenize", b" " * 60_000) as answer:
            assert b" 503 " in await answer.readline()
            await until(lambda: bodies.used_bytes == 0)
        assert (await server.post("/tokenize", {"prompt": "hi"})).status_code == 200


async def test_a_parsed_body_counts_no_more_while_its_request_runs() -> None:
    engine, bodies = ScriptedEngine(silent=True), BodyBudget(100_000)
    async with serving(engine, bodies=bodies) as server:
        asking = asyncio.create_task(server.post("/v1/completions", {"prompt": "hi"}))
        await engine.submitted(1)
        assert bodies.used_bytes == 0
        asking.cancel()
