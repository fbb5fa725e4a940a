"""The inference routes: before Quart, so that a request costs little more than its bytes.

Under our uvicorn protocol a usual request comes by `serve_direct` as a DirectRequest, and a
DirectSink writes its answer to the client's transport (ADR 0027). Under another server, or for an
unusual request (a body of unknown length, pipelining), it comes and goes as raw ASGI (`asgi`). Both
meet in `_answer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Protocol, TypeVar, cast

from xpyd_core.bodies import BodyBudget, BodyBuffer, BodyCharge
from xpyd_core.errors import ApiError
from xpyd_core.http_head import with_one_slash
from xpyd_router.access_log import Trace
from xpyd_router.admission import PRIORITY_HEADER, Cost, Ticket, read_priority
from xpyd_router.app_state import AppState
from xpyd_router.errors import EngineRefused
from xpyd_router.http.asgi import (
    AsgiApp,
    AsgiSink,
    ClientLeft,
    Receive,
    Scope,
    Send,
    id_headers,
    late_body,
    read_body,
    refusal,
    send_answer,
    watch_client,
)
from xpyd_router.http.translated import TranslatedStream, read_request, translated
from xpyd_router.request.client_request import ClientHead, HeadReader, InferenceRequest
from xpyd_router.request.flow import Flow
from xpyd_router.request.relay import CHUNK_LINES, KNOWN_LINES, ClientStream, Header, do_nothing
from xpyd_router.request.state import RequestState
from xpyd_router.translations import ROUTES
from xpyd_router.translations.seam import Api, Translation


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


def cost_of(request: InferenceRequest, prompt_tokens: int) -> Cost:
    """Tokens of the request's prompts and all that its choices may put out; without a limit an
    estimate.
    """
    output = (
        request.output_tokens
        if request.max_tokens is None
        else request.max_tokens * request.choices
    )
    return Cost(1, prompt_tokens + output, len(request.raw))


logger = logging.getLogger(__name__)
_CLIENT_CLOSED = 499
"""nginx's status for a client that left; only seen in logs and metrics."""
_COPIES = 2
"""What the calls of P and D may take of memory besides: asyncio's own loop copies what it writes,
uvloop does not."""
INLINE_BYTES = 256 * 1024
"""Reading so much takes a millisecond, a few at most."""
_Read = TypeVar("_Read")


async def read_on(reader: Executor, read: Callable[[bytes], _Read], waiting: list[bytes]) -> _Read:
    """`read` of the body in `waiting`, on a thread. It is taken out there, or when the request
    ends: an executor keeps what it was given until its turn, and the body would be there
    uncharged.
    """
    try:
        work = asyncio.get_running_loop().run_in_executor(reader, lambda: read(waiting.pop()))
        return await work
    finally:
        waiting.clear()


_PRIORITY = PRIORITY_HEADER.lower().encode()
_ROUTES = {f"/v1/{route}": route for route in ROUTES}
_STREAM_HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Inference:
    """See the module: the application that uvicorn gets. It answers POSTs to the inference routes,
    and leaves `app` the rest. Knows no engine; every error is OpenAI's JSON, or that of one of
    `apis`. `reader` reads long bodies, one at a time (docs/adr/0046).
    """

    def __init__(
        self,
        state: AppState,
        flow: Flow,
        bodies: BodyBudget,
        app: AsgiApp,
        *,
        reader: Executor,
        apis: Mapping[str, Api],
    ) -> None:
        self._app_state = state
        self._apis = apis
        self._flow = flow
        self._app = app
        self._heads = HeadReader(state.config.forward_headers)
        self.max_body_bytes = state.config.max_body_bytes
        self.bodies = bodies
        self._reader = reader
        self._loop = asyncio.get_running_loop()
        self.now_s = state.clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http":
            scope = with_one_slash(scope)
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = _ROUTES.get(scope["path"])
            if endpoint is not None:
                await self.serve(endpoint, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def serve_direct(self, request: DirectRequest, sink: DirectSink) -> None:
        """Answer a request that is whole."""
        trace = Trace(request.endpoint, request.began_s)
        self._app_state.metrics.requests.began()
        status = _CLIENT_CLOSED
        try:
            body, charge = request.body.take(), request.charge
            status = await self._answer(trace, body, request.headers, sink, charge)
        finally:
            if request.charge is not None:
                request.charge.end()
            self._finish(trace, status)

    def broke_off(self, request: DirectRequest, sink: DirectSink | None) -> None:
        """Refuse, through `sink`, a request whose body came too late; None: its client left."""
        trace, status = Trace(request.endpoint, request.began_s), _CLIENT_CLOSED
        self._app_state.metrics.requests.began()
        if request.charge is not None:
            request.charge.end()
        if sink is not None:
            name, api = self._heads.read(request.headers).request_id, self._apis.get(trace.endpoint)
            answer, headers = refusal(late_body(), name, api)
            status, trace.sent_bytes = answer.status, len(answer.body)
            sink.whole(answer.status, headers, answer.body)
        self._finish(trace, status)

    async def serve(self, endpoint: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one POST; the access log line is written at its last byte."""
        app_state = self._app_state
        trace = Trace(endpoint, app_state.clock())
        app_state.metrics.requests.began()
        status = _CLIENT_CLOSED
        charge = BodyCharge(self.bodies, self.max_body_bytes)
        try:
            body = await read_body(receive, scope, charge)
        except ClientLeft:
            pass
        except ApiError as error:
            status = error.status
            name = self._heads.read(scope["headers"]).request_id
            answer, headers = refusal(error, name, self._apis.get(endpoint))
            trace.sent_bytes = len(answer.body)
            await send_answer(send, answer, headers)
        else:
            status = await self._serve_body(trace, body, scope, receive, send, charge)
        finally:
            charge.end()
            self._finish(trace, status)

    async def _serve_body(
        self,
        trace: Trace,
        body: bytes,
        scope: Scope,
        receive: Receive,
        send: Send,
        charge: BodyCharge,
    ) -> int:
        """Answer the request `body`; the status for log and metrics."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        sink = AsgiSink(send, task.cancel, self._app_state.config.request_timeout_s)
        watch = asyncio.create_task(watch_client(receive, sink))
        pump = asyncio.create_task(sink.run())
        try:
            status = await self._answer(trace, body, scope["headers"], sink, charge)
            if not sink.is_lost:
                await pump
            return status
        except asyncio.CancelledError:
            if sink.is_lost:
                return _CLIENT_CLOSED
            raise
        finally:
            for helper in (watch, pump):
                helper.cancel()
            await asyncio.gather(watch, pump, return_exceptions=True)

    async def _answer(
        self,
        trace: Trace,
        body: bytes,
        headers_in: Sequence[Header],
        sink: DirectSink | AsgiSink,
        charge: BodyCharge | None,
    ) -> int:
        flow, api = self._flow, self._apis.get(trace.endpoint)
        head = self._heads.read(headers_in)
        client_id = head.request_id
        trace.client_id, trace.trace_id = client_id.decode("ascii"), head.trace_id
        trace.body_bytes = len(body)
        client: ClientStream | None = None
        ticket: Ticket | None = None
        try:
            if head.complaint is not None:
                raise head.complaint
            request, translation = await self._read(api, trace, body, charge)
            state = self._begin(api, request, trace, head)
            ticket = self._at_once(state) or await self._enter(state, headers_in)
            names = id_headers(client_id or trace.response_id.encode(), api)
            if state.request.stream:
                client = self._stream_to(sink, names, state, translation)
                await flow.stream(state, client)
                return 200
            answer = translated(translation, await flow.whole(state))
            headers = [(b"content-type", answer.content_type.encode("latin-1")), *names]
        except (ApiError, EngineRefused) as error:
            answer, headers = refusal(error, client_id or trace.response_id.encode(), api)
        except asyncio.CancelledError:
            if not sink.is_lost:
                sink.cut()
                raise
            return _CLIENT_CLOSED
        except Exception:
            logger.exception("request failed", extra={"request": trace.request or "-"})
            if client is not None and client.has_begun:
                sink.cut()
                return 500
            answer, headers = refusal(
                ApiError(500, "internal error of the router"),
                client_id or trace.response_id.encode(),
                api,
            )
        finally:
            if ticket is not None:
                ticket.leave()
            if client is not None:
                client.close()
                trace.sent_bytes = client.sent_bytes
        trace.sent_bytes = len(answer.body)
        sink.whole(answer.status, headers, answer.body)
        return answer.status

    def _begin(
        self, api: Api | None, request: InferenceRequest, trace: Trace, head: ClientHead
    ) -> RequestState:
        state = self._flow.begin(request, trace, head)
        if api is not None:
            trace.response_id = api.id_prefix + state.public
        return state

    def _stream_to(
        self,
        sink: DirectSink | AsgiSink,
        names: Sequence[Header],
        state: RequestState,
        translation: Translation | None,
    ) -> ClientStream:
        headers, clock = [*_STREAM_HEADERS, *names], self._app_state.clock
        if translation is None:
            return ClientStream(sink, headers, state.trace, clock)
        return TranslatedStream(sink, headers, state, clock, events=translation.events())

    async def _read(
        self, api: Api | None, trace: Trace, body: bytes, charge: BodyCharge | None
    ) -> tuple[InferenceRequest, Translation | None]:
        """The request, once there is room for the copies of its body; of `api`, as a chat."""
        if charge is not None:
            copies = _COPIES if api is None else _COPIES + 1
            charge.take_more(copies * len(body))
            charge.check()
        read = partial(read_request, api, trace.endpoint)
        if len(body) <= INLINE_BYTES:
            return read(body)
        waiting = [body]
        del body
        return await read_on(self._reader, read, waiting)

    def _at_once(self, state: RequestState) -> Ticket | None:
        if self._flow.counts_tokens:
            return None
        return self._app_state.admission.at_once(cost_of(state.request, state.prompt_tokens))

    async def _enter(self, state: RequestState, headers: Sequence[Header]) -> Ticket:
        """The request's place, for which it may have to wait; counted before, where it is."""
        if self._flow.counts_tokens:
            await self._flow.count(state)
        admission, request, priority = self._app_state.admission, state.request, 0
        if admission.is_limited:
            priority = read_priority(
                request.members.priority, _header(headers, _PRIORITY).decode("latin-1")
            )
            state.trace.priority = priority
        cost = cost_of(request, state.prompt_tokens)
        ticket = await admission.enter(cost, priority=priority, deadline_s=state.deadline_s)
        state.trace.queue_s += ticket.queue_s
        return ticket

    def _finish(self, trace: Trace, status: int) -> None:
        app_state = self._app_state
        now_s = app_state.clock()
        trace.status = status
        app_state.metrics.requests.ended(trace, status, now_s)
        app_state.access_log.add(trace, status, now_s)


def _header(headers: Sequence[Header], wanted: bytes) -> bytes:
    """The first header of this name, in lower case; empty where there is none."""
    return next((value for name, value in headers if name == wanted), b"")
