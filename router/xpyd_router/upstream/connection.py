"""One connection to an engine: bytes in, an Exchange fed. At most one exchange at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from xpyd_router.upstream.exchange import Exchange

_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})


class Connection(asyncio.Protocol):
    """See the module. `on_free(self)` is called when it may serve again, `on_lost(self)` once, when
    it is closed.
    """

    def __init__(
        self,
        on_free: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self._on_free = on_free
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._pieces: list[bytes] = []
        self._is_bounded = False
        self._is_interim = False
        self._has_ended = False
        self._may_keep = False
        self.idle_since_s = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether the next request may be sent on it."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        """Begin an exchange; the connection is idle and usable."""
        assert self._transport is not None
        self._exchange = exchange
        self._has_ended = self._is_bounded = False
        exchange.carried_by(self)
        if len(body) <= 65536:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))

    # Exchange's Carrier.

    def pause_reading(self) -> None:
        """See Carrier."""
        if self.is_usable:
            cast(asyncio.Transport, self._transport).pause_reading()

    def resume_reading(self) -> None:
        """See Carrier."""
        if self.is_usable:
            cast(asyncio.Transport, self._transport).resume_reading()

    def give_back(self) -> None:
        """See Carrier."""
        self._exchange = None
        if self._may_keep and self.is_usable:
            self._on_free(self)
        else:
            self.abort()

    def abort(self) -> None:
        """See Carrier."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio's Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        exchange = self._exchange
        if exchange is None or self._has_ended:
            # An engine that speaks unasked is out of step: what it says next would be another's.
            self.abort()
            return
        exchange.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._may_keep = False
            exchange.fail("reset" if exchange.status == 0 else "incomplete")
            return
        except httptools.HttpParserUpgrade:
            self._may_keep = False
            exchange.fail("answer")
            return
        pieces = self._pieces
        if pieces:
            self._pieces = []
            exchange.on_bytes(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if self._has_ended:
            exchange.on_end()

    def eof_received(self) -> bool:
        """See asyncio: the connection is closed."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not self._has_ended:
            if exchange.status and not self._is_bounded and exc is None:
                exchange.on_end()  # the answer's length was told by the end of the connection
            else:
                exchange.fail("incomplete" if exchange.status else "reset")
        self._on_lost(self)

    # httptools' callbacks.

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        if self._exchange is None:
            return
        lowered = name.lower()
        if lowered in _LENGTHS:
            self._is_bounded = True
        self._exchange.on_header(lowered, value)

    def on_headers_complete(self) -> None:
        """See httptools."""
        status = self._parser.get_status_code()
        self._is_interim = 100 <= status < 200
        if self._exchange is not None and not self._is_interim:
            self._exchange.on_head(status)

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        if self._is_interim:
            return
        self._may_keep = self._parser.should_keep_alive()
        self._has_ended = True
