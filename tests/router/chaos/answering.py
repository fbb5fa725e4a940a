"""A mock engine's answers to inference calls, from a call's arrival to its last byte, with what the
engine's mood makes of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Protocol

import orjson

from tests.router.chaos.contract import faults_of
from tests.router.chaos.moods import Fate, Mood, fate_of, lethal_step
from tests.router.chaos.wire import DONE, Call, Stream, event, whole

_ERROR = {"message": "the engine could not run this request", "type": "server_error"}


@dataclass
class Book:
    """What this engine has seen."""

    log: IO[str]
    calls: int = 0
    open_calls: int = 0
    answered: int = 0
    releases: int = 0
    connections: int = 0
    uuids: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    def write(self, what: str, call: Call, detail: str = "") -> None:
        """One line: when, what, which try of which request, in which part."""
        self.log.write(f"{time.time():.4f} {what} {call.uuid} {call.tag} {call.part} {detail}\n")

    def violation(self, call: Call, detail: str) -> None:
        self.write("VIOLATION", call, detail.replace("\n", " ")[:600])


@dataclass
class Host:
    """What all calls of an engine share. `pace` stretches its times."""

    book: Book
    rng: random.Random
    pace: float
    mood: Mood = field(default_factory=Mood)
    is_draining: bool = False


class Wire(Protocol):
    """The connection that a call came on."""

    transport: asyncio.Transport

    def reply(self, status: int, body: bytes, extra: bytes = b"") -> None:
        """A whole answer."""
        ...

    def rest(self) -> None:
        """The answer is out."""
        ...


class Answer:
    """One inference call from its arrival to its last byte."""

    def __init__(
        self, host: Host, call: Call, connection: Wire, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._host = host
        self._call = call
        self._connection = connection
        self._loop = loop
        self._fate: Fate = fate_of(call, host.mood, host.rng, pace=host.pace)
        self._timer: asyncio.TimerHandle | None = None
        self._left: int | None = None
        self._steps: Iterator[bytes] = iter(())
        self._step = 0
        self._is_open = False
        self._dies_at = lethal_step(call)

    def begin(self) -> None:
        """Take the call, or refuse it."""
        call, book = self._call, self._host.book
        book.calls += 1
        if self._host.is_draining or self._fate.mode == "busy":
            book.write("refused", call)
            body = orjson.dumps({"error": {"message": "busy", "type": "server_error"}})
            self._connection.reply(503, body, b"retry-after: 1\r\n")
            return
        self._check()
        self._is_open = True
        book.open_calls += 1
        book.write("begin", call, self._fate.mode)
        if self._dies_at == 0:
            _die()
        self._left = self._fate.cut_after_bytes
        if self._fate.mode != "hang":
            self._later(self._fate.prefill_s, self._first)

    def _check(self) -> None:
        call, book = self._call, self._host.book
        for fault in faults_of(call):
            book.violation(call, fault)
        if (key := (call.uuid, call.part)) in book.uuids:
            book.violation(call, "a uuid came again")
        else:
            book.uuids.add(key)

    def abandon(self) -> None:
        """The router closed the connection."""
        if self._timer is not None:
            self._timer.cancel()
        self._end("closed")

    def _end(self, how: str) -> None:
        if self._is_open:
            self._is_open = False
            book = self._host.book
            book.open_calls -= 1
            book.answered += how == "done"
            book.write(how, self._call)

    def _later(self, seconds: float, then: Callable[[], None]) -> None:
        self._timer = self._loop.call_later(seconds, then)

    def _first(self) -> None:
        call, fate = self._call, self._fate
        if fate.mode == "error500":
            self._end("error500")
            self._connection.reply(500, orjson.dumps({"error": _ERROR}))
        elif not call.wanted.stream:
            body = whole(call)
            head = (
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            )
            if self._send(head % len(body) + body):
                self._end("done")
                self._connection.rest()
        else:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            self._steps = iter(Stream(call))
            if self._send(head + b"transfer-encoding: chunked\r\n\r\n"):
                self._next()

    def _next(self) -> None:
        fate = self._fate
        self._step += 1
        if self._step == self._dies_at:
            _die()
        is_trouble = fate.mode in ("error_event", "early_end") and self._step > fate.steps
        data = None if is_trouble else next(self._steps, None)
        if data is not None and not data.endswith(DONE):
            if self._send(_chunk(data)):
                self._later(fate.step_s, self._next)
            return
        if is_trouble and fate.mode == "error_event":
            data = event({"error": _ERROR})
        if self._send((_chunk(data) if data else b"") + b"0\r\n\r\n"):
            self._end(fate.mode if is_trouble else "done")
            self._connection.rest()

    def _send(self, data: bytes) -> bool:
        """Write; False where the connection was cut within."""
        transport = self._connection.transport
        if self._left is None or len(data) <= self._left:
            self._left = None if self._left is None else self._left - len(data)
            transport.write(data)
            return True
        transport.write(data[: self._left])
        if not self._fate.cut_after_bytes:
            # As if the connection had been closed while it was idle: the call may come again.
            self._host.book.uuids.discard((self._call.uuid, self._call.part))
        self._end("cut")
        if self._fate.is_reset:
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        else:
            transport.close()
        return False


def _die() -> None:
    """As a process does that crashes: without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
