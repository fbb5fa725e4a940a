"""The inference routes: before Quart, so that a request costs little more than its bytes.

Under our uvicorn protocol a usual request comes by `serve_direct`, and its answer goes straight to
the client's transport (ADR 0027). Under another server, or for an unusual request (a body of
unknown length, pipelining), it comes and goes as raw ASGI. Both meet in `_answer`. `Surface` is
what the HTTP side works with, `RouterControl` what concerns all processes of a router.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from xpyd_core.errors import ApiError
from xpyd_router.access_log import AccessLog, Trace
from xpyd_router.admission import PRIORITY_HEADER, Admission, Cost, Ticket, read_priority
from xpyd_router.config import RouterConfig
from xpyd_router.errors import Answer, EngineRefused
from xpyd_router.fleet.instances import InstanceKey
from xpyd_router.fleet.view import FleetView
from xpyd_router.http.sinks import (
    BODY_DEADLINE_S,
    AsgiSink,
    DirectRequest,
    DirectSink,
    Receive,
    Send,
)
from xpyd_router.metrics import RouterMetrics
from xpyd_router.request.client_request import (
    ENDPOINTS,
    Endpoint,
    HeadReader,
    InferenceRequest,
    parse_request,
)
from xpyd_router.request.flow import Flow
from xpyd_router.request.relay import ClientStream, Header
from xpyd_router.request.state import RequestState


class RouterControl(Protocol):
    """The router as its clients see it."""

    @property
    def is_current(self) -> bool:
        """Whether this process knows the present state of the fleet, not only an earlier one."""
        ...

    async def metrics(self) -> bytes:
        """The text exposition. Raises ApiError 503 where it cannot be had."""
        ...

    async def cordon(self, key: InstanceKey, *, is_cordoned: bool) -> None:
        """Keep new requests from an instance, or let them come again; returns when every process
        has been told. Raises ApiError 503 where they cannot be.
        """
        ...


class LocalControl:
    """A router of one process."""

    is_current = True

    def __init__(self, fleet: FleetView, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._metrics = metrics

    async def metrics(self) -> bytes:
        """See RouterControl."""
        return self._metrics.render(self._fleet.instances)

    async def cordon(self, key: InstanceKey, *, is_cordoned: bool) -> None:
        """See RouterControl."""
        self._fleet.cordon(key, is_cordoned=is_cordoned)


@dataclass
class Surface:
    """See the module. `is_draining` is set at SIGTERM."""

    config: RouterConfig
    fleet: FleetView
    admission: Admission
    flow: Flow
    metrics: RouterMetrics
    """Of this process."""
    control: RouterControl
    access_log: AccessLog
    clock: Callable[[], float]
    created: int
    """Unix time of the start: `created` of the models."""
    admin_keys: tuple[bytes, ...] = field(default=(), repr=False)
    """What opens /admin; none: it is closed."""
    is_draining: bool = False


def cost_of(request: InferenceRequest, prompt_tokens: int) -> Cost:
    """Its prompts and all that its choices may put out; without a limit, what is expected."""
    output = (
        request.output_tokens
        if request.max_tokens is None
        else request.max_tokens * request.choices
    )
    return Cost(1, prompt_tokens + output, len(request.raw))


logger = logging.getLogger(__name__)
Scope = MutableMapping[str, Any]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
_CLIENT_CLOSED = 499
"""nginx's status for a client that left; only seen in logs and metrics."""
_PRIORITY = PRIORITY_HEADER.lower().encode()
_ROUTES: dict[str, Endpoint] = {f"/v1/{endpoint}": endpoint for endpoint in ENDPOINTS}
_STREAM_HEADERS: list[Header] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class _ClientLeft(Exception):
    """The client closed its connection before its request was whole."""


class Inference:
    """See the module: the application that uvicorn gets. It answers POSTs to the inference routes,
    and leaves `app` the rest. Knows no engine; every error is OpenAI's JSON.
    """

    def __init__(self, surface: Surface, app: AsgiApp) -> None:
        self._surface = surface
        self._app = app
        self._heads = HeadReader(surface.config.forward_headers)
        self.max_body_bytes = surface.config.max_body_bytes
        self.now_s = surface.clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = _ROUTES.get(scope["path"])
            if endpoint is not None:
                await self.serve(endpoint, scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def serve_direct(self, request: DirectRequest, sink: DirectSink) -> None:
        """Answer a request that is whole."""
        trace = Trace(request.endpoint, request.began_s)
        self._surface.metrics.requests.began()
        status = _CLIENT_CLOSED
        try:
            status = await self._answer(trace, request.body, request.headers, sink)
        finally:
            self._finish(trace, status)

    def broke_off(self, request: DirectRequest, sink: DirectSink | None) -> None:
        """Refuse, through `sink`, a request whose body came too late; None: its client left."""
        trace, status = Trace(request.endpoint, request.began_s), _CLIENT_CLOSED
        self._surface.metrics.requests.began()
        if sink is not None:
            answer, headers = _refusal(_late(), self._heads.read(request.headers).request_id)
            status, trace.sent_bytes = answer.status, len(answer.body)
            sink.whole(answer.status, headers, answer.body)
        self._finish(trace, status)

    async def serve(self, endpoint: Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one POST; the access log line is written at its last byte."""
        surface = self._surface
        trace = Trace(endpoint, surface.clock())
        surface.metrics.requests.began()
        status = _CLIENT_CLOSED
        try:
            body = await _read_body(receive, scope, surface.config.max_body_bytes)
        except _ClientLeft:
            pass
        except ApiError as error:
            status = error.status
            await _send_plain(send, error, trace, self._heads.read(scope["headers"]).request_id)
        except asyncio.CancelledError:
            self._finish(trace, status)
            raise
        else:
            status = await self._serve_body(trace, body, scope, receive, send)
        self._finish(trace, status)

    async def _serve_body(
        self, trace: Trace, body: bytes, scope: Scope, receive: Receive, send: Send
    ) -> int:
        """Answer the request `body`; the status for log and metrics."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        sink = AsgiSink(send, task.cancel, self._surface.config.request_timeout_s)
        watch = asyncio.create_task(_watch(receive, sink))
        pump = asyncio.create_task(sink.run())
        try:
            status = await self._answer(trace, body, scope["headers"], sink)
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
        self, trace: Trace, body: bytes, headers_in: Sequence[Header], sink: DirectSink | AsgiSink
    ) -> int:
        flow = self._surface.flow
        head = self._heads.read(headers_in)
        client_id = head.request_id
        trace.client_id, trace.trace_id = client_id.decode("ascii"), head.trace_id
        trace.body_bytes = len(body)
        client: ClientStream | None = None
        ticket: Ticket | None = None
        try:
            if head.complaint is not None:
                raise head.complaint
            request = parse_request(cast(Endpoint, trace.endpoint), body)
            state = flow.begin(request, trace, head)
            ticket = self._at_once(state) or await self._enter(state, headers_in)
            name = (b"x-request-id", client_id or trace.response_id.encode())
            if state.request.stream:
                client = ClientStream(sink, [*_STREAM_HEADERS, name], trace, self._surface.clock)
                await flow.stream(state, client)
                return 200
            answer = await flow.whole(state)
            headers = [(b"content-type", answer.content_type.encode("latin-1")), name]
        except (ApiError, EngineRefused) as error:
            answer, headers = _refusal(error, client_id or trace.response_id.encode())
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
            error = ApiError(500, "internal error of the router")
            answer, headers = _refusal(error, client_id or trace.response_id.encode())
        finally:
            if ticket is not None:
                ticket.leave()
            if client is not None:
                trace.sent_bytes = client.sent_bytes
        trace.sent_bytes = len(answer.body)
        sink.whole(answer.status, headers, answer.body)
        return answer.status

    def _at_once(self, state: RequestState) -> Ticket | None:
        if self._surface.flow.counts_tokens:
            return None
        return self._surface.admission.at_once(cost_of(state.request, state.prompt_tokens))

    async def _enter(self, state: RequestState, headers: Sequence[Header]) -> Ticket:
        """The request's place, for which it may have to wait; counted before, where it is."""
        if self._surface.flow.counts_tokens:
            await self._surface.flow.count(state)
        admission, request, priority = self._surface.admission, state.request, 0
        if admission.is_limited:
            priority = read_priority(request.fields, _header(headers, _PRIORITY).decode("latin-1"))
            state.trace.priority = priority
        cost = cost_of(request, state.prompt_tokens)
        ticket = await admission.enter(cost, priority=priority, deadline_s=state.deadline_s)
        state.trace.queue_s += ticket.queue_s
        return ticket

    def _finish(self, trace: Trace, status: int) -> None:
        surface = self._surface
        now_s = surface.clock()
        trace.status = status
        surface.metrics.requests.ended(trace, status, now_s)
        surface.access_log.add(trace, status, now_s)


def _refusal(error: ApiError | EngineRefused, name: bytes) -> tuple[Answer, list[Header]]:
    if isinstance(error, ApiError):
        retry_after = None if error.retry_after_s is None else str(error.retry_after_s)
        answer = Answer(error.status, error.body(), "application/json", retry_after)
    else:
        answer = error.answer
    headers: list[Header] = [(b"content-type", answer.content_type.encode("latin-1"))]
    if name:
        headers.append((b"x-request-id", name))
    if answer.retry_after is not None:
        headers.append((b"retry-after", answer.retry_after.encode("latin-1")))
    return answer, headers


async def _send_plain(send: Send, error: ApiError, trace: Trace, client_id: bytes) -> None:
    """Refuse a request whose body is not read to its end: only ASGI servers can tidy that up."""
    answer, headers = _refusal(error, client_id)
    length = (b"content-length", str(len(answer.body)).encode())
    trace.sent_bytes = len(answer.body)
    start = {"type": "http.response.start", "status": answer.status, "headers": [*headers, length]}
    await send(start)
    await send({"type": "http.response.body", "body": answer.body})


def _header(headers: Sequence[Header], wanted: bytes) -> bytes:
    """The first header of this name, in lower case; empty where there is none."""
    return next((value for name, value in headers if name == wanted), b"")


async def _read_body(receive: Receive, scope: Scope, limit_bytes: int) -> bytes:
    """The whole body. Raises ApiError 413 for one above the limit, 408 for one that does not come,
    _ClientLeft.
    """
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit_bytes:
            raise _too_long()
    parts: list[bytes] = []
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BODY_DEADLINE_S):
            while (message := await receive())["type"] == "http.request":
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit_bytes:
                    raise _too_long()
                if not message.get("more_body"):
                    return b"".join(parts)
            raise _ClientLeft
    raise _late()


def _late() -> ApiError:
    return ApiError(408, "the request body did not come in time")


def _too_long() -> ApiError:
    return ApiError(413, "the request body is too long")


async def _watch(receive: Receive, sink: AsgiSink) -> None:
    """Tell `sink` when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    sink.lose()
