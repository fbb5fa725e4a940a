"""A connection whose answer is written and whose client still sends.

A socket that is closed with unread data in it resets the connection, and the reset takes away what
the client has not read of its answer yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LINGER_S = 10.0
"""How long a client may go on sending behind its answer."""
MAX_DROPPED_BYTES = 64 * 1024 * 1024
"""Twice the longest body by default: a client that did not wait for the answer can read it."""


class CycleTransport(asyncio.Transport):
    """The part of a transport that uvicorn's request cycle uses, whose `close` is another's."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        super().__init__()
        self._transport = transport
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class Lingering(asyncio.Protocol):
    """Takes the place of `owner` once all of the answer is written: drops what comes, until the
    client closes, `LINGER_S` are over or `MAX_DROPPED_BYTES` came; then calls `close`. `owner`
    still hears of the client's pace and of the end.
    """

    def __init__(self, owner: asyncio.Protocol, close: Callable[[], None]) -> None:
        self._owner = owner
        self._close = close
        self._dropped_bytes = 0
        self._timer = asyncio.get_running_loop().call_later(LINGER_S, close)

    def data_received(self, data: bytes) -> None:
        """Drop it."""
        self._dropped_bytes += len(data)
        if self._dropped_bytes > MAX_DROPPED_BYTES:
            self._close()

    def eof_received(self) -> None:
        """See asyncio: the client has said all that it will."""
        self._close()

    def pause_writing(self) -> None:
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        self._owner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._owner.connection_lost(exc)
