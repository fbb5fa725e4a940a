"""An engine's HTTP port over TLS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
from quart import Quart, request

from tests.tls_kit import client_context, write_pair
from tests.worker.server_fakes import run
from xpyd_core.tls import WatchedContext
from xpyd_core.tls_connection import TlsServer
from xpyd_worker.server.http.server import listen, make_server


@contextlib.asynccontextmanager
async def serving(directory: Path) -> AsyncGenerator[int]:
    """The port of a server whose one route says how it was reached."""
    app = Quart(__name__)

    @app.post("/echo")
    async def echo() -> dict[str, object]:
        return {"scheme": request.scheme, "bytes": len(await request.get_data())}

    _ = echo
    tls = TlsServer(WatchedContext(write_pair(directory), "--ssl-certfile"))
    server, sockets = make_server(app, tls), listen("127.0.0.1", 0)
    task = asyncio.create_task(server.serve(sockets=sockets))
    try:
        yield sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task
        tls.close()


def test_requests_come_over_tls(tmp_path: Path) -> None:
    async def body() -> None:
        async with (
            serving(tmp_path) as port,
            httpx.AsyncClient(verify=client_context(), timeout=10) as client,
        ):
            answer = await client.post(f"https://127.0.0.1:{port}/echo", content=b"x" * 900_000)
            assert answer.json() == {"scheme": "https", "bytes": 900_000}

    run(body())


def test_a_client_of_plain_http_is_told_so(tmp_path: Path) -> None:
    async def body() -> None:
        async with serving(tmp_path) as port, httpx.AsyncClient(timeout=10) as client:
            answer = await client.post(f"http://127.0.0.1:{port}/echo")
            assert answer.status_code == 400
            assert "https://" in answer.text

    run(body())
