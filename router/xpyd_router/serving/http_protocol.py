"""uvicorn's HTTP connections with a deadline for each head, and a hook for direct answers.

uvicorn closes a connection that is idle between requests, but waits for ever for the first request,
and for the rest of a head that began: a few thousand such connections would use up the file limit.
Its `send` tells an application nothing of a client that left; DirectSink is told at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from xpyd_router.serving.sinks import DirectSink

HEAD_DEADLINE_S = 30.0
MAX_HEAD_BYTES = 64 * 1024
"""Of a head that comes in several reads, beyond the first: uvicorn would keep all of it."""
STALL_S = 1800.0
_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)
EXTENSION = "xpyd.direct"
"""The scope's extension by which an application finds this protocol."""


class ClientProtocol(HttpToolsProtocol):
    """uvicorn's protocol; a head that is not whole `HEAD_DEADLINE_S` after the connection was made,
    or after its first byte, closes the connection, as does a client that takes nothing of its
    answer for `stall_s`: it may hold a place on an engine. A head that goes on for more than
    `MAX_HEAD_BYTES` is refused.
    """

    head_deadline_s = HEAD_DEADLINE_S
    stall_s = STALL_S
    _head_timer: asyncio.TimerHandle | None = None
    _is_in_head = False
    _head_bytes = 0
    """Read since the read in which the last head began."""
    _stall_timer: asyncio.TimerHandle | None = None
    _sink: DirectSink | None = None
    _serving: RequestResponseCycle | None = None
    """The request that the application has; `cycle` is the last one that came, with pipelining
    another."""

    # uvicorn narrows asyncio's BaseTransport in the same way.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head:
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()
            elif self._head_timer is None:
                self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # uvicorn's type of a scope leaves the key out; ASGI has it.
        self.scope["extensions"] = {EXTENSION: self}  # type: ignore[typeddict-unknown-key]
        self._is_in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._forget_head()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        self._forget_taking()
        super().connection_lost(exc)
        if self._serving is not None:
            self._serving.disconnected = True
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.lose()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_taking()
        if self._sink is not None:
            self._sink.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_taking()
        if self._sink is not None:
            self._sink.resume()

    def direct_sink(self, on_lost: Callable[[], None]) -> DirectSink | None:
        """A sink for the request that the application has; None where only ASGI will do.

        That is HTTP/1.0, which knows no chunks, and a client that is gone.
        """
        cycle = self._serving
        if cycle is None or cycle.disconnected or cycle.scope["http_version"] != "1.1":
            return None
        self._sink = sink = DirectSink(self, on_lost)
        sink.is_paused = self.flow.write_paused
        return sink

    @property
    def common_headers(self) -> list[tuple[bytes, bytes]]:
        """See sinks.Connected."""
        return self.server_state.default_headers

    @property
    def keeps_alive(self) -> bool:
        """See sinks.Connected."""
        return self._serving is not None and self._serving.keep_alive

    def answered(self) -> None:
        """See sinks.Connected."""
        self._sink = None
        cycle = self._serving
        assert cycle is not None
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        # Without this hook of uvicorn no request is known to be served, and all go through ASGI.
        self._serving = cycle
        super()._start_asgi_task(cycle, app)

    def _expect_head(self) -> None:
        self._forget_head()
        self._head_timer = self.loop.call_later(self.head_deadline_s, self._close_late)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_head(self) -> None:
        # Before an answer that is still being written a status would be part of it.
        if self._serving is None or self._serving.response_complete:
            self.transport.write(_TOO_LONG)
        self.transport.close()

    def _close_late(self) -> None:
        self._head_timer = None
        self.transport.close()

    def _expect_taking(self) -> None:
        """The client's buffer is full: it must take some of it in time, or it counts as gone."""
        self._forget_taking()
        waiting = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self.stall_s, self._check_taking, waiting)

    def _check_taking(self, waiting_bytes: int) -> None:
        self._stall_timer = None
        if self.transport.get_write_buffer_size() < waiting_bytes:
            self._expect_taking()
        else:
            self.transport.abort()

    def _forget_taking(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
