"""One connection to an engine, and one request with its answer on it (`Exchange`).

Connection: bytes in, an Exchange fed; at most one Exchange at a time. What an engine sends is
nearly always a whole small answer in one read, or one chunk of a stream. Both are recognised by
their bytes (`whole_answer`, `whole_chunks`) and never reach the HTTP parser, whose calls back into
Python cost more than all else here (ADR 0028). The parser reads everything else.

Exchange: `client` makes one and hands it to the caller, who reads the whole answer or relays it. A
relayed answer reaches its consumer in the event loop's read callback: no task wakes up per chunk.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

from xpyd_core.bodies import LongBody
from xpyd_core.kv_outcome import HEADER as KV_HEADER
from xpyd_router.errors import Answer, CallFailed, FailureCause
from xpyd_router.fleet.instances import InstanceKey

MAX_ANSWER_BYTES = 128 * 1024 * 1024
MAX_HEAD_BYTES = 64 * 1024
_WAITING_BYTES = 256 * 1024
"""Bytes of an answer that has no reader yet; above this the engine is not read from."""


@dataclass(slots=True, eq=False)
class Exchange:
    """See the module. One owner: the task that asked for it, which calls `close` at the end.

    `due_s` is on the event loop's clock; the client's sweep fails an exchange whose time has come.
    """

    instance: InstanceKey | None
    _loop: asyncio.AbstractEventLoop
    due_s: float
    status: int = 0
    content_type: str = ""
    retry_after: str | None = None
    kv: str = ""
    """What D says of the KV."""
    has_answered: bool = False
    """A byte of the answer has come."""
    is_whole: bool = False
    carrier: EngineConnection | None = None
    """The connection on which it was sent, which writes this."""
    take_frame: Callable[[bytes], bool] | None = None
    """What `connection` offers each read to between two chunks, before it reads them itself."""
    has_news: bool = False
    """A piece came since `is_due` was asked; per token, a mark is cheaper than a time."""
    _waiter: asyncio.Future[None] | None = None
    """The caller's wait for the head or for the end."""
    _waits_for_end: bool = False
    _consumer: Callable[[bytes], None] | None = None
    _body: list[bytes] = field(default_factory=list[bytes])
    _size: int = 0
    _limit_bytes: int = _WAITING_BYTES
    _head_bytes: int = 0
    _failure: FailureCause | None = None
    _is_paused: bool = False
    _gap_s: float = math.inf
    _left_s: float = math.inf
    _end_by_s: float = math.inf

    # What the caller does.

    def begun(self) -> asyncio.Future[None]:
        """Done when the answer's head is here, or will not come: then `check` it. For one caller,
        once; no coroutine, because every call to an engine waits here.
        """
        self._waiter = waiter = self._loop.create_future()
        if self.status or self._failure is not None:
            waiter.set_result(None)
        return waiter

    def check(self) -> None:
        """CallFailed where the head did not come."""
        if not self.status and self._failure is not None:
            raise CallFailed(self._failure)

    @property
    def answer(self) -> Answer:
        """The whole answer, of one that is whole."""
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        return Answer(self.status, body, self.content_type, self.retry_after, self.kv)

    async def read(self, limit_bytes: int = MAX_ANSWER_BYTES) -> Answer:
        """The whole answer; CallFailed `incomplete` when it broke off, `too_large` above the limit.

        Resumes a connection that was paused because the body had no reader.
        """
        self._limit_bytes = limit_bytes
        self._consumer = None
        if self._size > limit_bytes:
            self.fail("too_large")
        self.resume()
        await self._finished()
        return self.answer

    async def relay(
        self,
        consumer: Callable[[bytes], None],
        take_frame: Callable[[bytes], bool] | None = None,
    ) -> None:
        """Give each piece of the body to `consumer` as it comes; returns at its proper end.

        `consumer` may raise CallFailed, which ends the exchange and is raised here. `take_frame`
        may have what was read between two chunks, still framed, and says whether it took it.
        """
        self._consumer = consumer
        self.take_frame = take_frame
        if self._body:
            waiting, self._body = b"".join(self._body), []
            self.on_bytes(waiting)
        self.resume()
        await self._finished()

    def bound_gaps(self, gap_s: float) -> None:
        """Make the answer due `gap_s` after each piece that comes, unless reading is paused."""
        self._gap_s = gap_s
        self.due_s = self._loop.time() + gap_s

    def end_within(self, left_s: float) -> None:
        """What matters of the body has come: its end is due in `left_s`, even if pieces come."""
        self._end_by_s = self._loop.time() + left_s

    def is_due(self, now_s: float) -> bool:
        """Whether the answer's time is up; asked by the client's sweep, some times a second."""
        if now_s >= self._end_by_s:
            return True
        if self.has_news:
            self.has_news = False
            if not self._is_paused:
                self.due_s = now_s + self._gap_s
        return self.due_s <= now_s

    def pause(self) -> None:
        """Read no more from the engine until `resume`: the client's buffer is full."""
        if not self._is_paused and self.carrier is not None and not self.is_whole:
            self._is_paused = True
            self._left_s = self.due_s - self._loop.time()
            self.due_s = math.inf
            self.carrier.pause_reading()

    def resume(self) -> None:
        """Go on reading."""
        if self._is_paused and self.carrier is not None:
            self._is_paused = False
            self.due_s = self._loop.time() + self._left_s
            self.carrier.resume_reading()

    def close(self) -> None:
        """Free the connection: kept where the answer is whole, else closed. Idempotent."""
        carrier = self.carrier
        if carrier is None:
            return
        self.carrier = None
        self._body = []
        if self._consumer is not None:
            self._consumer = self.take_frame = None
        if self.is_whole:
            if self._is_paused:
                carrier.resume_reading()
            carrier.give_back()
        else:
            carrier.abort()

    def fail(self, cause: FailureCause) -> None:
        """End it with a failure, which the waiting caller gets."""
        if not self.is_whole:
            self._end_with(cause)

    def _end_with(self, cause: FailureCause) -> None:
        if self._failure is not None:
            return
        self._failure = cause
        self.take_frame = None
        if self._consumer is not None:
            self._consumer = _drop  # another engine may go on already
        self._wake()

    # What the connection does.

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line of the answer; the name in lower case."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            self.fail("too_large")
            return
        if name == b"content-type":
            self.content_type = value.decode("latin-1")
        elif name == b"retry-after":
            self.retry_after = value.decode("latin-1")
        elif name == _KV_NAME:
            self.kv = value.decode("latin-1")

    def on_head(self, status: int) -> None:
        """All headers are here."""
        self.status = status
        self._wake()

    def on_bytes(self, data: bytes) -> None:
        """A piece of the body."""
        if self._consumer is not None:
            self.has_news = True
            try:
                self._consumer(data)
            except CallFailed as failure:
                # Also where the answer is whole: what it says is the failure.
                self._end_with(failure.cause)
            return
        self._body.append(data)
        self._size += len(data)
        if self._size > self._limit_bytes:
            if self._waits_for_end:
                self.fail("too_large")
            else:  # no reader yet
                self.pause()

    def on_whole(self, content_type: bytes, body: bytes, kv: bytes = b"") -> None:
        """A whole answer with status 200, in one piece."""
        self.content_type = content_type.decode("latin-1")
        self.kv = kv.decode("latin-1")
        self.status = 200
        self._body.append(body)  # no consumer yet: `relay` comes after the head
        if self._failure is None:
            self.is_whole = True
        self._wake()

    def on_end(self) -> None:
        """The answer is whole."""
        if self._failure is None:
            self.is_whole = True
            self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _finished(self) -> None:
        self._waits_for_end = True
        if not self.is_whole and self._failure is None:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._failure is not None:
            raise CallFailed(self._failure)


def _drop(data: bytes) -> None:
    del data


_LENGTHS = frozenset({b"content-length", b"transfer-encoding"})
_LENGTH = b"\r\ncontent-length:"
_TYPE = b"\r\ncontent-type:"
_KV_NAME = KV_HEADER.lower().encode()
_KV = b"\r\n" + _KV_NAME + b":"
_MAX_LENGTH_DIGITS = 15
_MAX_CHUNK_LINE_BYTES = 10
_HEX = b"0123456789abcdefABCDEF"


def whole_answer(data: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Content type, body and word of the KV of the 200 that `data` is, where it is exactly that and
    its connection stays; None where it is more, less, or anything but the plainest form.
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
    return _value(data, end, head.find(_TYPE), _TYPE), body, _value(data, end, head.find(_KV), _KV)


def _value(data: bytes, end: int, at: int, name: bytes) -> bytes:
    """The value of the header that is `at` in the head, which ends at `end`; -1: it has none."""
    return data[at + len(name) : end].partition(b"\r")[0].strip(b" ") if at >= 0 else b""


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


class EngineConnection(asyncio.Protocol):
    """See the module. `on_free(self)` is called when it may serve again, `on_lost(self)` once, when
    it is closed.
    """

    def __init__(
        self,
        on_free: Callable[[EngineConnection], None],
        on_lost: Callable[[EngineConnection], None],
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

    def send(self, exchange: Exchange, head: bytes, body: bytes | LongBody) -> None:
        """Begin an exchange; the connection is idle and usable."""
        transport = self._transport
        assert transport is not None
        self._exchange = exchange
        self._has_begun = self._has_ended = self._is_bounded = False
        exchange.carrier = self
        if isinstance(body, LongBody):
            transport.writelines((head, *body.pieces))
        elif len(body) <= 65536:
            transport.write(head + body)
        else:
            transport.writelines((head, body))

    # What its exchange does.

    def pause_reading(self) -> None:
        """Read no more from the engine's socket."""
        if self.is_usable:
            cast(asyncio.Transport, self._transport).pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self.is_usable:
            cast(asyncio.Transport, self._transport).resume_reading()

    def give_back(self) -> None:
        """The answer is whole: the next request may be sent on the connection."""
        self._exchange = None
        if self._may_keep and self.is_usable:
            self._on_free(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Close the connection now."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio's Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
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
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            if exchange.status and not self._is_bounded and exc is None:
                exchange.on_end()  # the answer's length is given by the end of the connection
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
