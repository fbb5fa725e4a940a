"""TLS between a listening socket's connections and their HTTP protocol.

asyncio's TLS, and uvloop's, cannot end one side of a connection: `write_eof` is missing, and a
client that ends its side ends both. An HTTP server needs both: a last answer to a client that still
sends, and an answer to a client that sends no more. So here TLS is a protocol of its own over
OpenSSL's memory buffers, with deadlines and bounds for what has not shown who it is:

- a connection has `HANDSHAKE_S` for its handshake, and of more than `MAX_HANDSHAKES` the oldest is
  closed: it had the longest time;
- a handshake costs a signature of the key, up to a millisecond: `HANDSHAKES_A_TURN` are taken in a
  turn of the event loop, so that streams go on while many clients connect;
- a client that speaks plain HTTP is told so;
- TLS itself answers some of what a client says (KeyUpdate, renegotiation): a client that asks for
  more than `MOST_UNASKED_BYTES` of such answers is closed, for it may never read them.

See docs/adr/0083.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast

from xpyd_core.tls import WatchedContext

HANDSHAKE_S = 10.0
MAX_HANDSHAKES = 1024
HANDSHAKES_A_TURN = 8
MOST_UNASKED_BYTES = 64 * 1024
"""Some thousand answers; a connection that changes its keys as TLS wants it needs a few."""
_READ_BYTES = 256 * 1024
_WAITING_BYTES = 64 * 1024
"""Above this a connection is not read from until its turn: a client sends its request behind its
last word of the handshake at once. OpenSSL bounds what belongs to the handshake."""
_TLS_HANDSHAKE = 0x16
_SENTENCE = b"this port speaks TLS: the URL begins with https://\n"
_PLAIN = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(_SENTENCE), _SENTENCE)
)
_log = logging.getLogger(__name__)
Handshake = Literal["ok", "failed", "plain", "late", "crowded", "left"]
"""How a handshake ended: `crowded` is the oldest of too many, `left` a client that closed."""


class TlsServer:
    """Makes the connections of listeners that have one certificate. `note` is told how each
    handshake ended."""

    def __init__(
        self, context: WatchedContext, note: Callable[[Handshake], object] = lambda result: None
    ) -> None:
        self.context = context
        self.note = note
        self._beginning: dict[TlsConnection, None] = {}
        """Connections without a protocol, the oldest first."""
        self._waiting: deque[TlsConnection] = deque()
        """Those that have sent something that is not read yet."""
        self._turn: asyncio.Handle | None = None

    def wrap(self, make_protocol: Callable[[], asyncio.Protocol]) -> TlsConnection:
        """The protocol for a new connection; `make_protocol` makes that of its content, once the
        handshake is done."""
        return TlsConnection(self, make_protocol)

    def close(self) -> None:
        """Close the connections whose handshake is not done."""
        if self._turn is not None:
            self._turn.cancel()
        for connection in tuple(self._beginning):
            connection.abort()

    # What connections do.

    def begin(self, connection: TlsConnection) -> None:
        """It is there, and has sent nothing."""
        self._beginning[connection] = None
        if len(self._beginning) > MAX_HANDSHAKES:
            self.make_room(1)

    @property
    def shaking_hands(self) -> int:
        """How many connections have no protocol yet."""
        return len(self._beginning)

    def make_room(self, most: int) -> int:
        """Close the oldest connections whose handshake is not done, at most so many; how many."""
        oldest = tuple(itertools.islice(self._beginning, most))
        for one in oldest:
            one.refuse("crowded")
        return len(oldest)

    def forget(self, connection: TlsConnection) -> None:
        """Its handshake is done, or it is closed. Idempotent."""
        self._beginning.pop(connection, None)

    def wait(self, connection: TlsConnection) -> None:
        """It has sent something: its turn comes."""
        self._waiting.append(connection)
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._take_some)

    def _take_some(self) -> None:
        self._turn = None
        for _ in range(min(HANDSHAKES_A_TURN, len(self._waiting))):
            connection = self._waiting.popleft()
            try:
                connection.shake_hands()
            except Exception:  # a connection's edge: the others have their turn all the same
                _log.exception("a connection's first request")
                connection.abort()
        if self._waiting and self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._take_some)


class TlsConnection(asyncio.Protocol, asyncio.Transport):
    """The protocol of a socket's transport, and the transport of the protocol of its content.

    `write_eof` ends our side, of TLS and of TCP; what still comes is given to the protocol as it
    comes, not decrypted, for the protocol only drops it then (`lingering`).
    """

    _raw: asyncio.Transport

    def __init__(self, server: TlsServer, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        super().__init__()
        self._server = server
        self._make_protocol = make_protocol
        self._protocol: asyncio.Protocol | None = None
        self._ssl: ssl.SSLObject | None = None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._hello = b""
        """What came, and waits for its turn."""
        self._deadline: asyncio.TimerHandle | None = None
        self._is_dropping = False
        """What comes is dropped: no TLS, or our side has ended."""
        self._is_closed = False
        self._has_eof = False
        self._stays_open = False
        """The client has ended its side, and still gets an answer."""
        self._unasked_bytes = 0
        """What TLS said by itself since the handshake."""

    # The socket's protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(HANDSHAKE_S, self.refuse, "late")
        self._server.begin(self)

    def data_received(self, data: bytes) -> None:
        protocol = self._protocol
        if self._is_dropping:
            if protocol is not None:
                protocol.data_received(data)
        elif protocol is not None:
            self._read(data)
        else:
            is_first = not self._hello
            self._hello += data
            if is_first:
                self._server.wait(self)
            if len(self._hello) > _WAITING_BYTES:
                self._raw.pause_reading()

    def eof_received(self) -> bool:
        """Whether our side stays open for an answer, as the protocol says."""
        if not self._has_eof and self._protocol is not None:
            self._has_eof = True
            self._stays_open = bool(self._protocol.eof_received())
        return self._stays_open

    def connection_lost(self, exc: Exception | None) -> None:
        if self._protocol is None and not self._is_dropping:
            self._server.note("left")
        self._end_handshake()
        self._is_closed = self._is_dropping = True
        # No cycle is left to the garbage collector, which a router runs seldom: OpenSSL's buffers
        # are 50 KiB.
        protocol, self._protocol, self._ssl = self._protocol, None, None
        if protocol is not None:
            protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        if self._protocol is not None:
            self._protocol.resume_writing()

    # The handshake.

    def shake_hands(self) -> None:
        """Read what came of the handshake: its turn has come."""
        data, self._hello = self._hello, b""
        if self._is_closed or self._is_dropping:
            return
        if len(data) > _WAITING_BYTES:
            self._raw.resume_reading()
        if self._ssl is None:
            if data[0] != _TLS_HANDSHAKE:
                self._refuse_plain(is_text=data[:1].isalpha())
                return
            context = self._server.context.current
            self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._incoming.write(data)
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError as error:
            _log.debug("a TLS handshake failed: %s", error.reason or error)
            self._flush()  # the alert that says why
            self.refuse("failed")
        else:
            self._flush()
            self._end_handshake()
            self._server.note("ok")
            self._protocol = self._make_protocol()
            self._protocol.connection_made(self)
            self._read(b"")

    def refuse(self, why: Handshake) -> None:
        """Close a connection that has no protocol."""
        if not self._is_dropping:  # else it was counted
            self._server.note(why)
        self._end_handshake()
        self._is_closed = self._is_dropping = True
        self._raw.close()

    def _refuse_plain(self, *, is_text: bool) -> None:
        """This is no TLS. A person who forgot the s of https reads why."""
        if not is_text:
            self.refuse("failed")
            return
        self._server.note("plain")
        self._is_dropping = True  # until the client ends, or the deadline
        self._raw.write(_PLAIN)
        with contextlib.suppress(OSError):
            self._raw.write_eof()

    def _end_handshake(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._server.forget(self)

    # What is said.

    def _read(self, data: bytes) -> None:
        tls, incoming, protocol = self._ssl, self._incoming, self._protocol
        assert tls is not None
        assert protocol is not None
        incoming.write(data)
        pieces: list[bytes] = []
        is_end = is_broken = False
        try:
            while incoming.pending or tls.pending():
                piece = tls.read(_READ_BYTES)
                if not piece:
                    is_end = True
                    break
                pieces.append(piece)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            _log.debug("TLS of a connection is broken: %s", error.reason or error)
            is_broken = True
        self._unasked_bytes += self._outgoing.pending
        if self._unasked_bytes > MOST_UNASKED_BYTES:
            _log.debug("a client asks TLS itself for too many answers")
            self.abort()
            return
        self._flush()
        if pieces:
            protocol.data_received(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if is_broken:
            self._raw.abort()
        elif is_end and not self._is_closed and not self._is_dropping and not self.eof_received():
            self.close()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._raw.write(self._outgoing.read())

    # The transport of the protocol.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See asyncio. All of it is encrypted at once; `pause_writing` bounds what is written."""
        if self._is_closed or self._is_dropping or not data:
            return
        tls = self._ssl
        assert tls is not None
        try:
            written = tls.write(data)
            if written < len(data):  # of a record's size
                rest = memoryview(data)
                while written < len(rest):
                    written += tls.write(rest[written:])
        except ssl.SSLError as error:
            _log.debug("TLS of a connection is broken: %s", error.reason or error)
            self._raw.abort()
            return
        self._raw.write(self._outgoing.read())

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """See asyncio."""
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        """See asyncio."""
        return True

    def write_eof(self) -> None:
        """End our side; see the class."""
        if self._is_closed or self._is_dropping:
            return
        self._end_tls()
        self._is_dropping = True
        self._raw.write_eof()

    def close(self) -> None:
        """End both sides, behind what is written."""
        if self._is_closed or self._raw.is_closing():
            self._is_closed = True
            return
        self._is_closed = True
        if not self._is_dropping:
            self._end_tls()
        self._raw.close()

    def abort(self) -> None:
        """See asyncio."""
        self._is_closed = True
        self._raw.abort()

    def shutdown(self) -> None:
        """See uvicorn, which calls it where the server ends before the handshake began."""
        self.abort()

    def _end_tls(self) -> None:
        """Say that nothing follows: so the client knows that its answer is whole."""
        assert self._ssl is not None
        # It wants the client's farewell, too, for which nobody waits.
        with contextlib.suppress(ssl.SSLError):
            self._ssl.unwrap()
        self._flush()

    def is_closing(self) -> bool:
        """See asyncio."""
        return self._is_closed or self._raw.is_closing()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """See asyncio."""
        self._protocol = cast(asyncio.Protocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """See asyncio."""
        return self._protocol or self

    def pause_reading(self) -> None:
        """See asyncio."""
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        """See asyncio."""
        self._raw.resume_reading()

    def is_reading(self) -> bool:
        """See asyncio."""
        return self._raw.is_reading()

    def get_write_buffer_size(self) -> int:
        """See asyncio."""
        return self._raw.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """See asyncio."""
        return self._raw.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See asyncio."""
        self._raw.set_write_buffer_limits(high, low)

    def get_extra_info(self, name: str, default: object = None) -> Any:  # noqa: ANN401 - asyncio's
        """See asyncio; `ssl_object` and `sslcontext` as its own TLS has them."""
        if name == "ssl_object":
            return self._ssl
        if name == "sslcontext":
            return None if self._ssl is None else self._ssl.context
        return self._raw.get_extra_info(name, default)
