"""uvicorn's HTTP connections, with a short way for inference requests.

A POST to an inference route, with a Content-Length and nothing unusual about it, is read here and
answered by `inference` through a DirectSink: no ASGI scope, no messages, no task per message. All
other requests are uvicorn's, and reach the application as ASGI.

A socket that is closed with unread data in it resets the connection, and the reset takes away what
the client has not read of its answer. So a connection whose client is still sending goes over to
`Lingering`: our side is ended first, and what still comes is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from xpyd_core.errors import ApiError
from xpyd_core.http_head import Chunks, head_fault, one_slash
from xpyd_router.http.asgi import BODY_DEADLINE_S
from xpyd_router.http.direct import DirectRequest, DirectSink, UnframedSink, usual_size
from xpyd_router.http.inference import Inference
from xpyd_router.http.lingering import CycleTransport, Lingering
from xpyd_router.http.origins import OriginGuard
from xpyd_router.http.patience import PatientProtocol, cancelled
from xpyd_router.http.text_calls import TEXT_ROUTES
from xpyd_router.keys.ring import Refused, Shown
from xpyd_router.translations import ROUTES, TARGETS

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MAX_HEAD_BYTES = 64 * 1024
_TOO_LONG = f"the request's head is longer than {MAX_HEAD_BYTES} bytes"
"""uvicorn would take any. A part of a head behind another request is not counted: one read's."""
_CHARGED_BYTES = 16 * 1024
"""A body of at most so much is not charged to the budget of open bodies."""
_FRAMING = (b"content-length", b"transfer-encoding")
_ENGINES_PATHS = frozenset((*(f"/v1/{route}" for route in ROUTES), *TEXT_ROUTES))
_logger = logging.getLogger("uvicorn.error.clients")
# One per request that is none: strangers would fill the log. Errors pass.
_logger.addFilter(lambda record: record.levelno != logging.WARNING)
_common: tuple[object, bytes] = (None, b"")


class _Body:
    """What a parser calls that reads a single body: no head, and nothing behind it."""

    def __init__(self, protocol: ClientProtocol) -> None:
        self.on_body = protocol.on_body
        self.on_chunk_header = protocol.on_chunk_header
        self.on_message_complete = protocol.on_message_complete


class ClientProtocol(PatientProtocol):
    """uvicorn's protocol with PatientProtocol's deadlines, and the short way. A head of more than
    `MAX_HEAD_BYTES` is refused; so much behind a body that is no part of it ends the connection. So
    is a body in too many `Chunks`.
    """

    body_deadline_s = BODY_DEADLINE_S
    _head_bytes = 0
    """Read since the last end of a head, piece of a body or end of a request: so in a head all of
    it, or all but a part in the read in which another request ended.
    """
    _fault = ""
    """What is wrong with the head, or the chunk, that is here."""
    _denied: Refused | None = None
    """Why the request whose head is here is refused for its key."""
    _is_lingering = False
    """All of the answers is written; see `Lingering`."""
    _body_timer: asyncio.TimerHandle | None = None
    _direct: DirectRequest | None = None
    """The one that is read or served now."""
    _upgrade_at: int | None = None
    """The place at which the parser stopped, behind a head that asks for another protocol."""
    _sink: DirectSink | None = None
    _served: RequestResponseCycle | None = None
    """uvicorn's last request whose answer began; `cycle` is the last that came."""
    _app: Inference | None = None
    _guard: OriginGuard

    # uvicorn narrows asyncio's BaseTransport in the same way.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.logger = _logger
        self._chunks = Chunks()
        self._shown = Shown()
        # Of a plain ASGI application all requests are uvicorn's.
        app = cast(object, self.__dict__["app"])
        if isinstance(app, OriginGuard):
            self._app, self._guard = app.inference, app

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._upgrade_at is not None:
            self._go_on_in_http(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._end_of_patience()
        is_between = self._head_bytes and not self._is_in_body and not self._is_busy
        if (self._is_in_head or is_between) and self._head_timer is None:
            self._expect_head()  # also behind empty lines: uvicorn forgot its own deadline
        if self._is_in_body and self._body_timer is None:
            self._expect_body()

    # asyncio's type is bool | None, which uvicorn narrows to None.
    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open for an answer to a client that sends no more.

        Not where engines answer: a client whose process ended looks the same, and engines shall
        not work for it. Other answers take moments.
        """
        is_whole = self._is_busy and not self._is_in_body and not self.pipeline
        if (
            is_whole
            and self._direct is None
            and one_slash(self.scope["path"]) not in _ENGINES_PATHS
        ):
            self.cycle.keep_alive = False
            return True
        self._close()
        return False

    def on_message_begin(self) -> None:
        # uvicorn makes its scope here: only requests that need it pay for it.
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        assert self.parser is not None
        if self._head_bytes > MAX_HEAD_BYTES and self._parsed_bytes() > MAX_HEAD_BYTES:
            self._fault = _TOO_LONG
        else:
            self._fault = head_fault(self.parser.get_http_version(), self.headers)
        if self._fault:
            raise ValueError  # what the parser then raises leads to send_400_response
        self._head_bytes = 0
        self._is_in_head = False
        self._is_in_body = True
        if self._head_timer is not None:
            self._head_timer = cancelled(self._head_timer)
        if self._app is not None and self._is_direct(self._app):
            if self._denied is not None:
                raise ValueError  # as above: nothing behind this head is read
            return
        if not self._is_busy:  # with pipelining a read has chunks of several bodies
            self._chunks = Chunks()
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers.extend(headers)
        super().on_headers_complete()
        self.headers = []  # trailers come here, and are not the application's
        self.cycle.transport = CycleTransport(self.transport, self._close_behind_answer)

    def on_chunk_header(self) -> None:
        """See httptools."""
        self._fault = self._chunks.begin()
        if self._fault:
            raise ValueError

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        direct = self._direct
        if direct is not None and self._is_last(direct):
            direct.take(body)
        else:
            self._chunks.size += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        self._is_in_body = False
        if self._body_timer is not None:
            self._body_timer = cancelled(self._body_timer)
        direct = self._direct
        if direct is None or not self._is_last(direct):
            super().on_message_complete()
            if self.cycle.response_complete:  # before its end, which ended uvicorn's own deadline
                self._expect_head()
        elif not direct.response_complete:
            self._serve(direct)

    def connection_lost(self, exc: Exception | None) -> None:
        cancelled(self._body_timer)
        super().connection_lost(exc)
        served, self._served = self._served, None
        if served is not None:  # uvicorn informs only the last cycle
            served.disconnected = True
            served.message_event.set()
        # uvicorn forgets it only where the client closed, not where it reset the connection.
        self._unset_keepalive_if_required()
        direct, self._direct = self._direct, None
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.lose()
        elif direct is not None and self._app is not None:
            self._app.broke_off(direct, None)
        # They refer back: the memory of both would stay until the next collection.
        self.cycle = None  # type: ignore[assignment]
        self.pipeline.clear()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._sink is not None:
            self._sink.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._sink is not None:
            self._sink.resume()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._is_lingering:
            return  # what came behind a last answer is not begun
        super().on_response_complete()

    def shutdown(self) -> None:
        if self._is_lingering:
            self._close()
            return
        super().shutdown()
        self._watch_close()

    @property
    def common_head(self) -> bytes:
        """See inference.Connected."""
        global _common  # uvicorn makes the list anew each second, for all connections
        headers = self.server_state.default_headers
        if headers is not _common[0]:
            _common = (headers, b"".join([b"%b: %b\r\n" % header for header in headers]))
        return _common[1]

    @property
    def keeps_alive(self) -> bool:
        """See inference.Connected."""
        return self._direct is not None and self._direct.keep_alive

    def answered(self) -> None:
        """See inference.Connected."""
        self._sink = None
        direct, self._direct = self._direct, None
        assert direct is not None
        direct.response_complete = True
        if not direct.keep_alive:
            self._close_behind_answer()
        elif self.pipeline or self.flow.read_paused:
            self.on_response_complete()
        else:
            self._rest()

    def _is_last(self, direct: DirectRequest) -> bool:
        """Whether what the parser gives belongs to it: with pipelining another may have come."""
        return cast(object, self.cycle) is direct

    def _is_direct(self, app: Inference) -> bool:
        """Whether the request whose head is here goes the short way; then it has begun."""
        endpoint = TARGETS.get(self.url)
        if endpoint is None or self._is_busy:
            return False
        parser = self.parser
        assert parser is not None
        version = parser.get_http_version()
        if parser.get_method() != b"POST" or version not in ("1.1", "1.0"):
            return False
        size = usual_size(self.headers, self._guard.unusual, self._guard.is_right)
        if size is None or size > app.max_body_bytes:
            return False
        keys = app.keys
        found = None if keys is None else keys.ring.find(self.headers, self._shown)
        if found is None and keys is not None:
            return False  # only `verify` can say
        self._denied = denied = found if isinstance(found, Refused) else None
        client = None if isinstance(found, Refused) else found
        is_long = size > _CHARGED_BYTES and denied is None
        takes_chunks = version == "1.1"
        direct = DirectRequest(
            endpoint,
            self.headers,
            app.now_s(),
            keep_alive=takes_chunks and parser.should_keep_alive() and denied is None,
            takes_chunks=takes_chunks,
            client=client,
            charge=app.bodies.charge(client) if is_long else None,
        )
        self._direct = direct
        # uvicorn calls only what DirectRequest has, too.
        self.cycle = direct  # type: ignore[assignment]
        return True

    def _serve(self, direct: DirectRequest) -> None:
        assert self._app is not None
        sink = DirectSink(self) if direct.takes_chunks else UnframedSink(self)
        sink.is_paused = self.flow.write_paused
        task = self.loop.create_task(self._app.serve_direct(direct, sink))
        sink.on_lost = task.cancel
        self._sink = sink
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _expect_body(self) -> None:
        self._body_timer = self.loop.call_later(self.body_deadline_s, self._body_late)

    def _body_late(self) -> None:
        self._body_timer = None
        direct = self._direct
        if not self._is_busy:
            self._close()  # answered before its end, which will not be read
        elif direct is None or not self._is_last(direct):
            self._expect_body()  # the application reads it with a deadline of its own
        elif self._app is not None:
            direct.keep_alive = False
            self._app.broke_off(direct, DirectSink(self))

    def _unsupported_upgrade_warning(self) -> None:
        # uvicorn calls it as it handles the parser's exception.
        error = sys.exception()
        assert isinstance(error, httptools.HttpParserUpgrade)
        self._upgrade_at = error.args[0]

    def _go_on_in_http(self, data: bytes) -> None:
        """Read the body of a request that would rather upgrade: servers may ignore the wish (RFC
        9110, 7.8), and some clients have it with each first request. The parser takes what follows
        the head for another protocol, so a second one reads it.
        """
        at, self._upgrade_at = self._upgrade_at, None
        framing = [header for header in self.scope["headers"] if header[0] in _FRAMING]
        if not framing:
            return
        self._is_in_body = True
        self.cycle.more_body, self.cycle.keep_alive = True, False
        self.parser = httptools.HttpRequestParser(_Body(self))
        lines = b"".join([b"%b: %b\r\n" % header for header in framing])
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + lines + b"\r\n")
        super().data_received(data[at:])

    def send_400_response(self, msg: str) -> None:
        # uvicorn calls it for what its parser refuses.
        direct, denied = self._direct, self._denied
        if denied is not None and direct is not None and self._app is not None:
            self._denied = None
            self._app.deny(direct, DirectSink(self), denied, self.client)
        elif self._fault == _TOO_LONG:
            self._refuse_head()
        else:
            self._refuse(400, self._fault or "this is not valid HTTP/1.1")

    def _parsed_bytes(self) -> int:
        """The length of the head whose end is here, as it is usually written."""
        return len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])

    def _end_of_patience(self) -> None:
        """Bytes came for long that are no body."""
        if self._is_in_head:
            self._refuse_head()
        elif self._is_in_body:
            self._close()  # trailers, or extensions of a chunk, without end

    def _refuse_head(self) -> None:
        self._refuse(431, _TOO_LONG)

    def _refuse(self, status: int, message: str) -> None:
        """Answer what is no request, and close the connection."""
        self._is_in_head = False
        if self._is_busy and not self._is_unanswered():
            self._close()  # in an answer that is still being written a status would be part of it
            return
        if self._fault and self._is_in_body and not self._is_busy:
            self._linger()  # of chunks behind their answer
            return
        body = ApiError(status, message).body()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json"
            f"\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._linger()

    def _is_unanswered(self) -> bool:
        """Whether the request whose body is read has had nothing of an answer; its application
        then learns that the client is gone."""
        cycle = self.cycle
        if not self._is_in_body or cycle.response_started or self.pipeline:
            return False
        cycle.disconnected = True
        cycle.message_event.set()
        return True

    def _close_behind_answer(self) -> None:
        if self._is_in_body:
            self._linger()
        else:
            self._close()

    def _linger(self) -> None:
        """Close behind an answer whose client is still sending."""
        self._head_timer = cancelled(self._head_timer)
        self._idle_timer = cancelled(self._idle_timer)  # of the answer before
        if self.transport.is_closing():
            return
        self._is_lingering = True
        self.transport.set_protocol(Lingering(self, self._close))
        self.flow.resume_reading()
        with contextlib.suppress(OSError):  # asyncio's, where the client has just reset it
            self.transport.write_eof()
