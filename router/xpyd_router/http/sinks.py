"""Both ends of a request on the client's side: the request that we read ourselves, and sinks.

`protocol` makes a DirectRequest for each inference request of the usual form. `inference` makes one
sink per request: DirectSink writes to the client's transport, AsgiSink through plain ASGI. The
request's task writes to the sink and never waits: a client that reads too slowly pauses the source
of the answer by `on_pause`, and resumes it by `on_resume`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol

from xpyd_router.request.client_request import Endpoint
from xpyd_router.request.relay import CHUNK_LINES, KNOWN_LINES, Header


class DirectRequest:
    """A request that is served without ASGI. It takes the place of uvicorn's `cycle`, with the
    names that uvicorn reads there.
    """

    __slots__ = (
        "began_s",
        "disconnected",
        "endpoint",
        "headers",
        "keep_alive",
        "parts",
        "response_complete",
        "takes_chunks",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        headers: list[Header],
        began_s: float,
        *,
        keep_alive: bool,
        takes_chunks: bool,
    ) -> None:
        self.endpoint: Endpoint = endpoint
        self.headers = headers
        self.began_s = began_s
        self.keep_alive = keep_alive
        self.takes_chunks = takes_chunks
        """Else the end of the connection is the end of a stream: HTTP/1.0 has no chunks."""
        self.parts: list[bytes] = []
        self.response_complete = False
        self.disconnected = False

    @property
    def body(self) -> bytes:
        """What came of it."""
        parts = self.parts
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def message_event(self) -> DirectRequest:
        """uvicorn wakes its cycle by it; nothing waits here."""
        return self

    def set(self) -> None:
        """See message_event."""


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
BODY_DEADLINE_S = 60.0
"""For the whole body of a request, from its head."""
HIGH_WATER_BYTES = 64 * 1024
"""Of an answer that the client has not taken: above it its source is paused."""


def _nothing() -> None:
    return


class Connected(Protocol):
    """What DirectSink needs of the connection: http_protocol's class has it."""

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
        self.on_lost: Callable[[], object] = _nothing
        self.on_pause: Callable[[], None] = _nothing
        self.on_resume: Callable[[], None] = _nothing
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
        """It has room."""
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
    """For HTTP/1.0 clients, whose connection closes behind each answer: that ends a stream."""

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


class AsgiSink:
    """Writes through ASGI's send, for servers other than ours and for unusual requests.

    `run` sends what was written, until the end; its caller awaits it. A client that takes nothing
    for `stall_s` counts as gone: it holds a place on an engine.
    """

    write_frame: Callable[[bytes], None] | None = None

    def __init__(self, send: Send, on_lost: Callable[[], object], stall_s: float) -> None:
        self._send = send
        self._on_lost = on_lost
        self._stall_s = stall_s
        self._messages: list[Message] = []
        self._size = 0
        self._news = asyncio.Event()
        self._has_ended = False
        self.on_pause: Callable[[], None] = _nothing
        self.on_resume: Callable[[], None] = _nothing
        self.is_paused = False
        self.is_lost = False

    def whole(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """See Sink."""
        length = (b"content-length", str(len(body)).encode())
        self._put({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        self._put({"type": "http.response.body", "body": body})
        self._has_ended = True

    def start(self, status: int, headers: Sequence[Header]) -> None:
        """See Sink."""
        self._put({"type": "http.response.start", "status": status, "headers": list(headers)})

    def write(self, data: bytes) -> None:
        """See Sink."""
        self._put({"type": "http.response.body", "body": data, "more_body": True})
        self._size += len(data)
        if self._size > HIGH_WATER_BYTES and not self.is_paused:
            self.is_paused = True
            self.on_pause()

    def end(self) -> None:
        """See Sink."""
        self._put({"type": "http.response.body", "body": b""})
        self._has_ended = True

    def cut(self) -> None:
        """See Sink: a server cuts the connection of an application that returns too early."""
        self._messages.clear()
        self._has_ended = True
        self._news.set()

    def lose(self) -> None:
        """The client is gone. Servers also say so of one that has its whole answer."""
        if not self.is_lost and (self._messages or not self._has_ended):
            self.is_lost = True
            self.cut()
            self._on_lost()

    async def run(self) -> None:
        """Send what is written; returns at the end of the answer."""
        while self._messages or not self._has_ended:
            await self._news.wait()
            self._news.clear()
            messages, self._messages = self._messages, []
            self._size = 0
            try:
                for message in messages:
                    async with asyncio.timeout(self._stall_s):
                        await self._send(message)
            except TimeoutError:
                self.lose()
                return
            if self.is_paused and self._size <= HIGH_WATER_BYTES:
                self.is_paused = False
                self.on_resume()

    def _put(self, message: Message) -> None:
        if not self.is_lost:
            self._messages.append(message)
            self._news.set()
