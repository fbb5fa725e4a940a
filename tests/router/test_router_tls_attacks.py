"""Strangers at the router's TLS port: handshakes that stall, leave or break, and what TLS itself is
asked for. `openssl s_client` says what Python's ssl cannot."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import socket
import ssl
import weakref
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.router.fakes import Fleet, fleet, until
from tests.router.several import several
from tests.tls_kit import client_context, write_pair
from xpyd_core import tls_connection
from xpyd_core.tls import WatchedContext
from xpyd_core.tls_connection import TlsServer

pytestmark = pytest.mark.usefixtures("both_loops")
OPENSSL = shutil.which("openssl") or ""
needs_openssl = pytest.mark.skipif(not OPENSSL, reason="no openssl")


def handshakes(made: Fleet, result: str) -> float:
    return made.metric("xpyd_router_tls_handshakes_total", result=result)


async def health(port: int, context: ssl.SSLContext | None = None) -> int:
    connector = aiohttp.TCPConnector(ssl=context or client_context())
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.get(f"https://127.0.0.1:{port}/health") as answer,
    ):
        return answer.status


def client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    said = client_context().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        said.do_handshake()
    return outgoing.read()


async def test_a_handshake_that_never_becomes_whole_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_connection, "HANDSHAKE_S", 0.3)
    hello = client_hello()

    async with fleet(tls=write_pair(tmp_path)) as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        with contextlib.suppress(ConnectionError):
            for byte in hello[:-1]:  # each one wakes the router up, and none moves the deadline
                writer.write(bytes([byte]))
                await writer.drain()
            assert await reader.read() == b""
        await until(lambda: handshakes(made, "late") == 1)
        writer.transport.abort()


@pytest.mark.parametrize("said", [0, 100])
async def test_a_client_that_leaves_before_it_is_in_is_counted_and_forgotten(
    said: int, tmp_path: Path
) -> None:
    async with fleet(tls=write_pair(tmp_path)) as made:
        _, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        writer.write(client_hello()[:said])
        writer.close()
        await until(lambda: handshakes(made, "left") == 1)
        assert await health(made.router.http_port) == 200


async def test_a_name_that_is_not_the_certificates_is_the_clients_to_refuse(tmp_path: Path) -> None:
    anyone = client_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE

    async with fleet(tls=write_pair(tmp_path, "chat.example")) as made:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await health(made.router.http_port)
        # asyncio's clients close without the alert that says why.
        await until(lambda: handshakes(made, "failed") + handshakes(made, "left") == 1)
        for name in ("other.example", "x" * 60 + ".example", "chat.example"):
            _, writer = await asyncio.open_connection(
                "127.0.0.1", made.router.http_port, ssl=anyone, server_hostname=name
            )
            writer.transport.abort()
        assert await health(made.router.http_port, anyone) == 200


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def test_a_connection_that_is_lost_leaves_nothing_to_the_garbage_collector(
    tmp_path: Path,
) -> None:
    made: weakref.WeakSet[asyncio.Protocol] = weakref.WeakSet()

    def make() -> asyncio.Protocol:
        made.add(one := Echo())
        return one

    server = TlsServer(WatchedContext(write_pair(tmp_path), "--ssl-certfile"))
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: server.wrap(make), "127.0.0.1", 0)
    with without_collector():
        for _ in range(5):
            reader, writer = await asyncio.open_connection(
                *listener.sockets[0].getsockname()[:2], ssl=client_context()
            )
            writer.write(b"hi")
            assert await reader.readexactly(2) == b"hi"
            writer.transport.abort()
        await until(lambda: len(made) == 0)
    listener.close()


async def test_a_connection_that_breaks_its_protocol_leaves_others_their_turn(
    tmp_path: Path,
) -> None:
    made: list[int] = []

    def make() -> asyncio.Protocol:
        made.append(1)
        if len(made) == 1:
            raise RuntimeError("a defect of a protocol")
        return Echo()

    server = TlsServer(WatchedContext(write_pair(tmp_path), "--ssl-certfile"))
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: server.wrap(make), "127.0.0.1", 0)
    where = listener.sockets[0].getsockname()[:2]
    try:
        async with asyncio.timeout(10):
            broken, writer = await asyncio.open_connection(*where, ssl=client_context())
            with contextlib.suppress(ConnectionError):
                assert await broken.read() == b""
            writer.transport.abort()
            reader, writer = await asyncio.open_connection(*where, ssl=client_context())
            writer.write(b"hi")
            assert await reader.readexactly(2) == b"hi"
            writer.transport.abort()
    finally:
        server.close()
        listener.close()
        await asyncio.sleep(0)


async def s_client(port: int, *flags: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    argv = ["s_client", "-connect", f"127.0.0.1:{port}", *flags]
    return await asyncio.create_subprocess_exec(
        OPENSSL, *argv, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )


async def command(client: asyncio.subprocess.Process, letter: bytes, said: bytes) -> bool:
    """Whether the client took the command; not, where its connection has ended."""
    assert client.stdin is not None
    assert client.stdout is not None
    with contextlib.suppress(ConnectionError, BrokenPipeError):
        client.stdin.write(letter + b"\n")
        await client.stdin.drain()
        while line := await client.stdout.readline():
            if said in line:
                return True
    return False


async def ended(client: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        client.kill()
    assert client.stdin is not None
    client.stdin.close()
    await client.communicate()


@needs_openssl
async def test_a_client_that_has_keys_changed_again_and_again_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is answered by TLS itself, to a client that may never read the answers."""
    monkeypatch.setattr(tls_connection, "MOST_UNASKED_BYTES", 300)

    async with fleet(tls=write_pair(tmp_path)) as made:
        client = await s_client(made.router.http_port)
        taken = 0
        while taken < 100 and await command(client, b"K", b"KEYUPDATE"):
            taken += 1
        await ended(client)
        assert 3 < taken < 100
        assert await health(made.router.http_port) == 200


@needs_openssl
async def test_keys_may_change_and_a_request_goes_on(tmp_path: Path) -> None:
    async with fleet(tls=write_pair(tmp_path)) as made:
        client = await s_client(made.router.http_port, "-crlf")
        for _ in range(3):
            assert await command(client, b"K", b"KEYUPDATE")
        request = b"GET /health HTTP/1.1\nHost: localhost\nConnection: close\n"
        assert await command(client, request, b"HTTP/1.1 200")
        await ended(client)


@needs_openssl
async def test_nobody_may_negotiate_again(tmp_path: Path) -> None:
    async with fleet(tls=write_pair(tmp_path)) as made:
        client = await s_client(made.router.http_port, "-tls1_2")
        assert await command(client, b"R", b"RENEGOTIATING")
        assert not await command(client, b"R", b"RENEGOTIATING")
        await ended(client)
        assert handshakes(made, "ok") == 1
        assert await health(made.router.http_port) == 200


def resumed(port: int, session: ssl.SSLSession | None) -> tuple[bool, ssl.SSLSession | None]:
    """Ask over a connection that offers the session of an earlier one: whether it was taken."""
    context = SESSIONS
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as spoken,
    ):
        spoken.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b""
        while piece := spoken.recv(65536):
            answer += piece
        assert answer.startswith(b"HTTP/1.1 200"), answer
        return bool(spoken.session_reused), spoken.session


SESSIONS = client_context()
"""Of `resumed`: a session is of one context."""


@pytest.mark.slow
async def test_clients_go_on_when_a_process_of_the_router_is_replaced(tmp_path: Path) -> None:
    async with several(2, tls=write_pair(tmp_path)) as made:
        port = made.router.http_port
        connector = aiohttp.TCPConnector(ssl=client_context())
        async with aiohttp.ClientSession(f"https://127.0.0.1:{port}", connector=connector) as http:
            tickets = [(await asyncio.to_thread(resumed, port, None))[1] for _ in range(4)]
            for _ in range(4):
                async with http.get("/health") as answer:
                    assert answer.status == 200
            pid = made.workers[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: made.workers[0].pid != pid and made.workers[0].is_ready)
            statuses: list[int] = []
            while len(statuses) < 4:  # a kept connection may be that of the killed one
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get("/health") as answer:
                        statuses.append(answer.status)
            assert statuses == [200] * 4
        for ticket in tickets:  # of whichever process: one that cannot read it does without
            await asyncio.to_thread(resumed, port, ticket)
