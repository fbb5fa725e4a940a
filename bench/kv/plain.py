"""Plain TCP: the simplest good loop over one or two connections, a thread for each.

sendmsg and recvmsg_into straight from and into the blocks, layers shared out among the connections,
one byte back when all has come. No protocol, no checksum, the kernel's own buffer sizes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.kv.contender import WAIT_S, Place
from bench.kv.shape import LAYERS, Case

_VIEWS_PER_CALL = 1024


class _Connections:
    def __init__(self, place: Place) -> None:
        self._arena, self._ring = place.arena, place.ring
        self._socks: list[socket.socket] = []
        self._threads = ThreadPoolExecutor(1)

    def _add(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        self._socks.append(sock)

    def _move(self, case: Case, step: Callable[[socket.socket, list[memoryview]], None]) -> Any:
        ids = self._ring.take(case.blocks, case.layout)
        views = self._arena.views(ids, case.layout)
        each = len(views) // LAYERS * (LAYERS // len(self._socks))
        others = [
            self._threads.submit(step, sock, views[n * each : (n + 1) * each])
            for n, sock in enumerate(self._socks)
            if n
        ]
        step(self._socks[0], views[:each])
        for other in others:
            other.result(WAIT_S)
        return ids

    def close(self) -> None:
        self._threads.shutdown()
        for sock in self._socks:
            sock.close()


class PlainReceiver(_Connections):
    def __init__(self, place: Place, connections: int) -> None:
        super().__init__(place)
        self._connections = connections
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(WAIT_S)
        self.address = self._listener.getsockname()

    def accept(self) -> None:
        while len(self._socks) < self._connections:
            self._add(self._listener.accept()[0])
        self._listener.close()

    def receive(self, case: Case) -> list[int]:
        return self._move(case, _receive)


class PlainSender(_Connections):
    def __init__(self, place: Place, address: Any, connections: int) -> None:
        super().__init__(place)
        for _ in range(connections):
            self._add(socket.create_connection(tuple(address), WAIT_S))

    def send(self, case: Case) -> list[int]:
        return self._move(case, _send)


def _send(sock: socket.socket, views: list[memoryview]) -> None:
    first = 0
    while first < len(views):
        count = sock.sendmsg(views[first : first + _VIEWS_PER_CALL])
        while first < len(views) and count >= len(views[first]):
            count -= len(views[first])
            first += 1
        if count:
            views[first] = views[first][count:]
    if not sock.recv(1):
        raise ConnectionError("closed")


def _receive(sock: socket.socket, views: list[memoryview]) -> None:
    for first in range(0, len(views), _VIEWS_PER_CALL):
        part = views[first : first + _VIEWS_PER_CALL]
        count = sock.recvmsg_into(part, 0, socket.MSG_WAITALL)[0]
        if count != sum(map(len, part)):
            raise ConnectionError("closed")
    sock.sendall(b"\1")


def make_receiver(place: Place, *, connections: int) -> PlainReceiver:
    return PlainReceiver(place, connections)


def make_sender(place: Place, address: Any, *, connections: int) -> PlainSender:
    return PlainSender(place, address, connections)
