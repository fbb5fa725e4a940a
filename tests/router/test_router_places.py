"""More connections than the router has files for: who waits longest for its client makes room."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn

from bench.process import free_port
from tests.router.several import when
from tests.tls_kit import client_context, write_pair
from xpyd_router.http import patience
from xpyd_router.http.patience import Places
from xpyd_router.http.protocol import ClientProtocol

FILES = 200


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/body":
        await receive()
        await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a" * 100, "more_body": True})
    if scope["path"] == "/serves":
        await asyncio.Event().wait()
    if scope["path"] == "/stalls":
        await send({"type": "http.response.body", "body": bytes(8 << 20), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


class Noted(ClientProtocol):
    """Its client's port is known from its beginning."""

    port = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.port = transport.get_extra_info("peername")[1]


@contextlib.asynccontextmanager
async def serving() -> AsyncGenerator[tuple[tuple[str, int], set[Noted]]]:
    """The address, and the connections that there are."""
    config = uvicorn.Config(app, port=0, http=Noted, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    found: Any = server.server_state.connections
    yield server.servers[0].sockets[0].getsockname(), found
    server.force_exit = server.should_exit = True
    await task


async def asks(address: tuple[str, int], said: bytes) -> socket.socket:
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await loop.sock_connect(client, address)
    await loop.sock_sendall(client, said)
    if b"\r\n\r\n" in said and b"/body" not in said:
        assert b" 200 " in await loop.sock_recv(client, 200)
    return client


async def test_who_waits_longest_for_its_client_goes_first_and_nobody_who_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "_STALLED_S", 0.0)
    head = b" HTTP/1.1\r\nHost: x\r\n"
    kinds = {
        "is served": b"GET /serves" + head + b"\r\n",
        "takes nothing": b"GET /stalls" + head + b"\r\n",
        "half a body": b"POST /body" + head + b"Content-Length: 9\r\n\r\nhalf",
        "silent": b"",
        "half a head": b"GET /" + head,
        "idle": b"GET /" + head + b"\r\n",
    }
    async with serving() as (address, connections):
        clients = {}
        for kind, said in kinds.items():
            clients[kind] = await asks(address, said)
            await when(lambda made=clients[kind]: _is_in(made, connections))
            await asyncio.sleep(0.01)  # each came at another time
        ports = {client.getsockname()[1]: kind for kind, client in clients.items()}
        places = Places((connections,), lambda _: None, files=FILES)
        gone: list[str] = []
        while True:
            before = set(connections)
            if not places.make_room():
                break
            await when(lambda before=before: _has_fewer(before, connections))
            gone += [ports[one.port] for one in before - connections]
        assert gone == ["silent", "half a head", "idle", "half a body", "takes nothing"]
        assert {ports[one.port] for one in connections} == {"is served"}
        for client in clients.values():
            client.close()


async def _is_in(client: socket.socket, connections: set[Noted]) -> bool:
    return client.getsockname()[1] in {one.port for one in connections}


async def _has_fewer(before: set[Noted], connections: set[Noted]) -> bool:
    return len(connections) < len(before)


async def test_a_sixteenth_goes_at_once_and_no_more_while_they_close() -> None:
    counted: list[int] = []
    async with serving() as (address, connections):
        clients = [await asks(address, b"") for _ in range(64)]
        await when(lambda: _are(64, connections))
        places = Places((connections,), counted.append, files=FILES)
        assert places.make_room()
        assert places.make_room()  # before their files are free
        await when(lambda: _are(60, connections))
        assert counted == [4]
        for client in clients:
            client.close()


async def _are(many: int, connections: set[Noted]) -> bool:
    return len(connections) == many


@contextlib.contextmanager
def router_with_few_files(log: Path, *flags: str) -> Iterator[tuple[int, int]]:
    """A router that may have FILES files; its two ports."""
    ports = free_port(), free_port()
    given = ("--port", str(ports[0]), "--admin-port", str(ports[1]), "--kv-insecure")
    more = ("--discovery-port", str(free_port()), "--host", "127.0.0.1", *flags)
    command = (str(Path(sys.executable).with_name("xpyd")), "router", *given, *more)
    shell = f'ulimit -n {FILES}; exec "$@"'
    with log.open("wb") as out:
        running = subprocess.Popen(("sh", "-c", shell, "sh", *command), stdout=out, stderr=out)
    try:
        yield ports
    finally:
        running.send_signal(signal.SIGTERM)
        try:
            running.wait(20)
        finally:
            running.kill()


@pytest.mark.slow
@pytest.mark.parametrize("says", ["nothing", "half a head", "nothing, where TLS is spoken"])
async def test_silent_connections_shut_nobody_out(says: str, tmp_path: Path) -> None:
    is_tls = "TLS" in says
    files = write_pair(tmp_path / "tls")
    pair = ("--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key))
    flags = pair if is_tls else ()
    connector = aiohttp.TCPConnector(ssl=client_context(), force_close=True)
    log = tmp_path / "router.log"
    with router_with_few_files(log, "--drain-seconds", "0", *flags) as (port, admin):
        async with aiohttp.ClientSession(connector=connector) as http:

            async def status(url: str) -> int:
                async with asyncio.timeout(10), http.get(url) as answer:
                    return answer.status

            public = f"http{'s' * is_tls}://127.0.0.1:{port}/health"
            metrics = f"http://127.0.0.1:{admin}/metrics"
            await when(lambda: _answers(port))
            assert await status(public) == 200
            strangers = []
            for _ in range(FILES + 60):
                stranger = socket.create_connection(("127.0.0.1", port))
                stranger.sendall(b"GET / HTTP/1.1\r\n" if says == "half a head" else b"")
                strangers.append(stranger)
            for _ in range(3):
                assert await status(public) == 200
                assert await status(metrics) == 200
            async with http.get(metrics) as answer:
                text = await answer.text()
            line = next(x for x in text.splitlines() if x.startswith("xpyd_router_displaced_c"))
            assert float(line.split()[1]) > 60
            for stranger in strangers:
                stranger.close()
    assert "allow more files (ulimit -n)" in log.read_text()
    assert os.strerror(24) not in log.read_text()


async def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.1):
        return True
    return False
