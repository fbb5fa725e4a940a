"""The near side of ASGI: a request that our uvicorn protocol reads itself, and the sink of its
answer, which goes straight to the client's transport (docs/adr/0027). Knows no route.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

from xpyd_core.bodies import BodyBuffer, BodyCharge
from xpyd_router.keys.client import Client, Header
from xpyd_router.request.relay import CHUNK_LINES, KNOWN_LINES, do_nothing


def usual_size(
    headers: Sequence[Header], unusual: Container[bytes], is_right: Callable[[bytes], bool]
) -> int | None:
    """The length of the body behind a head with nothing unusual about it; None for others. See
    `OriginGuard`."""
    size = b""
    for name, value in headers:
        if name == b"content-length":
            size = value
        elif name in unusual and not (name == b"host" and is_right(value)):
            return None
    return int(size) if size.isdigit() else None


@dataclass(slots=True, eq=False)
class DirectRequest:
    """A request that is served without ASGI. It takes the place of uvicorn's `cycle`, with the
    names that uvicorn reads there.
    """

    endpoint: str
    """See translations.ROUTES."""
    headers: list[Header]
    began_s: float
    keep_alive: bool
    takes_chunks: bool
    """Whether the client takes chunks; HTTP/1.0 has none: the connection's end ends a stream."""
    body: BodyBuffer = field(default_factory=BodyBuffer)
    client: Client | None = None
    """Whose key it has; None where none is needed."""
    charge: BodyCharge | None = None
    """What its body is charged with; None for a short one."""
    response_complete: bool = False
    disconnected: bool = False

    def take(self, part: bytes) -> None:
        """A part of the body came; it is dropped where there is no room for it."""
        if self.charge is None or self.charge.take(len(part)):
            self.body.add(part)
        else:
            self.body.take()

    @property
    def message_event(self) -> DirectRequest:
        """uvicorn wakes its cycle by it; nothing waits here."""
        return self

    def set(self) -> None:
        """See message_event."""


class Connected(Protocol):
    """What DirectSink needs of the connection: ClientProtocol has it, which imports this module."""

    transport: asyncio.Transport

    def answered(self) -> None:
        """A response is whole on the wire: the connection may go on to the next request."""
        ...

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection outlives this response."""
        ...

    @property
    def common_head(self) -> bytes:
        """Header lines of every response, such as the date."""
        ...


def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode("ascii")


_STATUS_LINES = {status: _status_line(status) for status in range(200, 600)}


class DirectSink:
    """Writes HTTP/1.1 to the client's transport: nothing between an engine's bytes and it."""

    def __init__(self, connection: Connected) -> None:
        self._connection = connection
        self._write = connection.transport.write
        self.on_lost: Callable[[], object] = do_nothing
        self.on_pause: Callable[[], None] = do_nothing
        self.on_resume: Callable[[], None] = do_nothing
        self.is_paused = False
        self.is_lost = False

    @property
    def write_frame(self) -> Callable[[bytes], None] | None:
        """See Sink. Not an attribute: it would refer back, and a sink is made for each request."""
        return self._write_frame

    def whole(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """See Sink."""
        if not self.is_lost:
            length = b"content-length: %d\r\n\r\n" % len(body)
            self._write(b"".join((self._head(status, headers), length, body)))
            self._connection.answered()

    def start(self, status: int, headers: Sequence[Header]) -> None:
        """See Sink."""
        if not self.is_lost:
            self._write(self._head(status, headers) + b"transfer-encoding: chunked\r\n\r\n")

    def write(self, data: bytes) -> None:
        """See Sink."""
        if not self.is_lost:
            size = len(data)
            line = CHUNK_LINES[size] if size < KNOWN_LINES else b"%x\r\n" % size
            self._write(b"".join((line, data, b"\r\n")))

    def _write_frame(self, frame: bytes) -> None:
        if not self.is_lost:
            self._write(frame)

    def end(self) -> None:
        """See Sink."""
        if not self.is_lost:
            self._write(b"0\r\n\r\n")
            self._connection.answered()

    def cut(self) -> None:
        """See Sink."""
        self._connection.transport.abort()

    # What the connection does.

    def pause(self) -> None:
        """The transport's buffer is full."""
        self.is_paused = True
        self.on_pause()

    def resume(self) -> None:
        """The transport's buffer has room again."""
        self.is_paused = False
        self.on_resume()

    def lose(self) -> None:
        """The client is gone."""
        if not self.is_lost:
            self.is_lost = True
            self.on_lost()

    def _head(self, status: int, headers: Sequence[Header]) -> bytes:
        lines = [_STATUS_LINES[status], self._connection.common_head]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        if not self._connection.keeps_alive:
            lines.append(b"connection: close\r\n")
        return b"".join(lines)


class UnframedSink(DirectSink):
    """A sink for HTTP/1.0 clients: the end of the connection is the end of a stream."""

    @property
    def write_frame(self) -> None:
        """See Sink."""

    def start(self, status: int, headers: Sequence[Header]) -> None:
        """See Sink."""
        if not self.is_lost:
            self._write(self._head(status, headers) + b"\r\n")

    def write(self, data: bytes) -> None:
        """See Sink."""
        if not self.is_lost:
            self._write(data)

    def end(self) -> None:
        """See Sink."""
        if not self.is_lost:
            self._connection.answered()
