"""HTTP connections with a deadline for each request's head.

uvicorn closes a connection that is idle between requests, but waits for ever for the first request,
and for the rest of a head that began: a few thousand such connections would use up the file limit.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_DEADLINE_S = 30.0


class HeadDeadlineProtocol(HttpToolsProtocol):
    """uvicorn's protocol; a head that is not whole `HEAD_DEADLINE_S` after the connection was made,
    or after its first byte, closes the connection."""

    head_deadline_s = HEAD_DEADLINE_S
    _head_timer: asyncio.TimerHandle | None = None

    # uvicorn narrows asyncio's BaseTransport in the same way.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._forget_head()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)
        # uvicorn forgets it only where the client closed, not where it reset the connection.
        self._unset_keepalive_if_required()

    def _expect_head(self) -> None:
        self._forget_head()
        self._head_timer = self.loop.call_later(self.head_deadline_s, self._close_late)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_late(self) -> None:
        self._head_timer = None
        self.transport.close()
