"""Clients that come together are taken together, and nobody who came is left open."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from xpyd_router.http import server
from xpyd_router.http.server import Acceptor

pytestmark = pytest.mark.usefixtures("uv_loop")


class Peers:
    """The protocols that were made; in which turn of the event loop each got its transport."""

    def __init__(self) -> None:
        self.turn = 0
        self.turns: list[int] = []
        self.shut = 0
        self.open: set[asyncio.BaseTransport] = set()

    def make(self) -> asyncio.Protocol:
        peers = self

        class Peer(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self.transport = transport
                peers.turns.append(peers.turn)
                peers.open.add(transport)

            def connection_lost(self, exc: Exception | None) -> None:
                peers.open.discard(self.transport)

            def shutdown(self) -> None:
                peers.shut += 1
                self.transport.close()

        return Peer()

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)

    async def wait_for(self, many: int) -> None:
        await _until(lambda: len(self.turns) >= many)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - each turn of the loop is to be seen
        await asyncio.sleep(0)


@contextlib.contextmanager
def _meeting(
    clients: int, listener: socket.socket | None = None
) -> Iterator[tuple[Peers, Acceptor, list[socket.socket]]]:
    """Clients that came before anybody accepted, and who accepts them now."""
    listener = listener or _listener()
    peers = Peers()
    with contextlib.ExitStack() as stack:
        at = listener.getsockname()
        came = [stack.enter_context(socket.create_connection(at)) for _ in range(clients)]
        acceptor = Acceptor(listener, peers.make)
        stack.callback(acceptor.close)
        yield peers, acceptor, came


def _listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=512)


@pytest.mark.usefixtures("both_loops")
async def test_many_are_taken_in_one_turn() -> None:
    with _meeting(100) as (peers, _, _):
        counting = asyncio.create_task(peers.count_turns())
        await peers.wait_for(100)
        assert max(peers.turns) - min(peers.turns) <= 2
        counting.cancel()
    await _until(lambda: not peers.open)


async def test_more_than_a_turn_takes_come_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_AT_ONCE", 8)

    with _meeting(40) as (peers, _, _):
        await peers.wait_for(40)
    assert len(peers.turns) == 40


@pytest.mark.usefixtures("both_loops")
async def test_who_is_told_of_the_end_too_late_is_shut_down() -> None:
    with _meeting(5) as (peers, acceptor, clients):
        await _until(lambda: bool(acceptor._beginning))
        acceptor.close()
        await acceptor.wait_closed()
        assert peers.shut == len(peers.turns) == 5
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(clients[0].getpeername())
        await _until(lambda: not peers.open)
        assert [client.recv(1) for client in clients] == [b""] * 5


class Full(socket.socket):
    """A listener of a process that has no file left, once; then of a client that has left."""

    refusals: ClassVar = [errno.EMFILE, errno.ECONNABORTED]

    def accept(self) -> tuple[socket.socket, Any]:
        if self.refusals:
            raise OSError(self.refusals.pop(0), "refused")
        return super().accept()


async def test_without_a_file_it_rests_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_REST_S", 0.05)

    with _meeting(1, Full(fileno=_listener().detach())) as (peers, _, _):
        await peers.wait_for(1)
    assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1
    assert not Full.refusals


async def test_while_it_rests_it_does_not_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_REST_S", 1000.0)
    monkeypatch.setattr(Full, "refusals", [errno.EMFILE] * 2)

    with _meeting(1, Full(fileno=_listener().detach())):
        await _until(lambda: len(Full.refusals) == 1)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert len(Full.refusals) == 1


async def test_who_has_left_before_it_began_does_no_harm() -> None:
    listener = _listener()
    gone = socket.create_connection(listener.getsockname())
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    gone.close()
    with _meeting(1, listener) as (peers, _, _):
        await peers.wait_for(2)
    await _until(lambda: not peers.open)
