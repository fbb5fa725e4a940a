"""Who is answered while it still sends can read its answer: no reset takes it away."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tests.router.fakes import fleet, until
from tests.tls_kit import client_context
from xpyd_router.http import lingering
from xpyd_router.http.protocol import ClientProtocol

pytestmark = pytest.mark.usefixtures("plain_and_tls")
MORE = 8 * 1024 * 1024
"""More than what both kernels keep for a connection on loopback."""
LONG = b"Host: x\r\nContent-Length: %d\r\n" % MORE
EAGER = {
    "a head without end": (b"GET /health HTTP/1.1\r\nX-A: ", 431),
    "no HTTP": (b"\x16\x03\x01", 400),
    "too long a body, and the last": (
        b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\n" + LONG + b"\r\n",
        413,
    ),
    "too long a body of an old client": (
        b"POST /v1/completions HTTP/1.0\r\n" + LONG + b"\r\n",
        413,
    ),
    "too long a body": (b"POST /v1/completions HTTP/1.1\r\n" + LONG + b"\r\n", 413),
    "a body for nobody, and the last": (
        b"POST /v1/nothing HTTP/1.1\r\nConnection: close\r\n" + LONG + b"\r\n",
        404,
    ),
}


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("case", EAGER)
async def test_a_client_that_sends_all_before_it_reads_gets_its_answer(
    case: str, plain_and_tls: bool
) -> None:
    head, status = EAGER[case]
    said: list[bytes] = []

    def client(port: int) -> None:
        sock = socket.create_connection(("127.0.0.1", port), timeout=15)
        if plain_and_tls:
            sock = client_context().wrap_socket(sock, server_hostname="127.0.0.1")
        with sock:
            sock.sendall(head + b"a" * MORE)
            said.append(sock.recv(65536))

    async with fleet(max_body_bytes=1024) as made:
        await asyncio.to_thread(client, made.tls_port)
        assert int(said[0].split()[1]) == status


async def refused(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that was answered, up to the end of our side, and is still open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"no HTTP\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    return reader, writer


async def send_until_closed(writer: asyncio.StreamWriter, piece: bytes) -> int:
    """The bytes that were sent before the other side closed."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
            await asyncio.sleep(0)
    writer.close()
    return sent


@pytest.mark.usefixtures("both_loops")
async def test_who_goes_on_for_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "LINGER_S", 0.2)

    async with fleet() as made:
        _, writer = await refused(made.router.http_port)
        await send_until_closed(writer, b"a")


@pytest.mark.usefixtures("both_loops")
async def test_who_sends_much_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "MAX_DROPPED_BYTES", 4 * MORE)
    monkeypatch.setattr(lingering, "LINGER_S", 3600.0)

    async with fleet() as made:
        _, writer = await refused(made.router.http_port)
        assert await send_until_closed(writer, b"a" * 65536) >= 4 * MORE - 65536


@pytest.mark.usefixtures("both_loops")
@pytest.mark.parametrize("end", ["closes", "resets"])
async def test_a_connection_is_forgotten_when_its_client_ends_it(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lingering, "LINGER_S", 3600.0)

    async with fleet() as made:
        # uvicorn's own list: what is in it is waited for when the router ends.
        state = made.router._server.server_state  # pyright: ignore[reportPrivateUsage] - see above
        _, writer = await refused(made.router.http_port)
        assert len(state.connections) == 1
        if end == "resets":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        writer.close()
        await until(lambda: not state.connections)


@pytest.mark.usefixtures("both_loops")
async def test_the_router_ends_without_waiting_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lingering, "LINGER_S", 3600.0)

    async with fleet() as made:
        _, writer = await refused(made.router.http_port)
    writer.close()


@pytest.mark.usefixtures("both_loops")
async def test_what_follows_a_last_answer_is_not_begun(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The parser reads on behind an old client's request; that we close is told with the answer."""
    monkeypatch.setattr(lingering, "LINGER_S", 3600.0)
    began: list[str] = []
    begin = ClientProtocol._start_asgi_task  # pyright: ignore[reportPrivateUsage] - uvicorn's

    def note(self: ClientProtocol, cycle: RequestResponseCycle, app: Any) -> None:
        began.append(cycle.scope["path"])
        begin(self, cycle, app)

    monkeypatch.setattr(ClientProtocol, "_start_asgi_task", note)

    async with fleet() as made:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.router.http_port)
        writer.write(b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        writer.write(b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc")
        assert (await reader.read()).count(b"HTTP/1.1 ") == 1
    # Left while the client still holds its side: nothing waits for it.
    assert began == ["/health"]
    assert not [one for one in caplog.records if one.exc_info]
    writer.close()
