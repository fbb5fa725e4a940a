"""One connection to an engine: bytes in, an Exchange fed. At most one exchange at a time.

What an engine sends is nearly always a whole small answer in one read, or one chunk of a stream.
Both are recognised by their bytes (`whole_answer`, `whole_chunks`) and never reach the HTTP parser:
its calls back into Python cost more than all else here. Everything else it parses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from xpyd_router.upstream.exchange import MAX_HEAD_BYTES, Exchange

_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})
_LENGTH = b"\r\ncontent-length:"
_TYPE = b"\r\ncontent-type:"
_MAX_LENGTH_DIGITS = 15
_MAX_CHUNK_LINE_BYTES = 10
_HEX = b"0123456789abcdefABCDEF"


def whole_answer(data: bytes) -> tuple[bytes, bytes] | None:
    """Content type and body of the 200 that `data` is, where it is exactly that and its connection
    stays; None where it is more, less, or anything but the plainest form.
    """
    if not data.startswith(b"HTTP/1.1 200 "):
        return None
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    if end < 0:
        return None
    head = data[:end].lower()
    _, found, rest = head.partition(_LENGTH)
    if (
        not found
        or rest.find(_LENGTH) >= 0
        or head.find(b"\r\ntransfer-encoding:") >= 0
        or head.find(b"\r\nconnection:") >= 0
        or head.find(b"\r\nretry-after:") >= 0
    ):
        return None
    digits = rest.partition(b"\r")[0].strip(b" ")
    if not digits.isdigit() or len(digits) > _MAX_LENGTH_DIGITS:
        return None
    body = data[end + 4 :]
    if len(body) != int(digits):
        return None
    start = head.find(_TYPE) + len(_TYPE)
    if start < len(_TYPE):
        return b"", body
    return data[start:end].partition(b"\r")[0].strip(b" "), body


def whole_chunks(data: bytes) -> bytes | None:
    """The payload of the chunks that `data` is; None where one is cut, or is the last one."""
    total = len(data)
    line = data.find(b"\r\n", 0, _MAX_CHUNK_LINE_BYTES)
    if line <= 0 or data[:line].strip(_HEX):  # int() takes more than HTTP does
        return None
    end = line + 2 + int(data[:line], 16)
    if end + 2 == total and end > line + 2:
        return data[line + 2 : end] if data.endswith(b"\r\n") else None
    payloads: list[bytes] = []
    while data[end : end + 2] == b"\r\n" and end > line + 2:
        payloads.append(data[line + 2 : end])
        start = end + 2
        if start == total:
            return b"".join(payloads)
        line = data.find(b"\r\n", start, start + _MAX_CHUNK_LINE_BYTES)
        if line <= start or data[start:line].strip(_HEX):
            return None
        end = line + 2 + int(data[start:line], 16)
    return None


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
        self._has_begun = False
        """The parser has seen something of the answer."""
        self._is_between_chunks = False
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
        transport = self._transport
        assert transport is not None
        self._exchange = exchange
        self._has_begun = self._has_ended = self._is_bounded = False
        exchange.carrier = self
        if len(body) <= 65536:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

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
        if self._is_between_chunks:
            take_frame = exchange.take_frame
            if take_frame is not None and take_frame(data):
                exchange.has_news = True
                return
            if (payload := whole_chunks(data)) is not None:
                exchange.on_bytes(payload)
                return
        exchange.has_answered = True
        if not self._has_begun:
            if (answer := whole_answer(data)) is not None:
                self._may_keep = self._has_ended = True
                exchange.on_whole(*answer)
                return
            self._has_begun = True
        self._parse(exchange, data)

    def _parse(self, exchange: Exchange, data: bytes) -> None:
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
        if exchange is not None:
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

    def on_chunk_header(self) -> None:
        """See httptools."""
        self._is_between_chunks = False

    def on_chunk_complete(self) -> None:
        """See httptools."""
        self._is_between_chunks = True

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        if self._is_interim:
            return
        self._may_keep = self._parser.should_keep_alive()
        self._has_ended = True
        self._is_between_chunks = False
