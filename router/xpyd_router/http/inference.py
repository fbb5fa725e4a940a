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
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from xpyd_core.bodies import BodyCharge
from xpyd_core.errors import ApiError
from xpyd_core.http_head import with_one_slash
from xpyd_router.access_log import Trace
from xpyd_router.admission import PRIORITY_HEADER, Ticket, read_priority
from xpyd_router.app_state import AppState
from xpyd_router.errors import Answer, EngineRefused
from xpyd_router.fair_queue import Cost
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
from xpyd_router.http.direct import DirectRequest, DirectSink
from xpyd_router.http.keyed import Hold, OpenBodies, check_model, client_of, owner_of
from xpyd_router.http.translated import TranslatedStream, read_request, translated
from xpyd_router.keys.client import Client
from xpyd_router.keys.ring import REVOKED, Refused
from xpyd_router.request.client_request import ClientHead, HeadReader, InferenceRequest
from xpyd_router.request.flow import Flow
from xpyd_router.request.relay import ClientStream, Header
from xpyd_router.request.state import RequestState, with_members
from xpyd_router.translations import ROUTES, api_at
from xpyd_router.translations.seam import Api, Translation


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


@dataclass(slots=True, eq=False)
class _Call:
    """What one request holds; `end` gives all of it back."""

    trace: Trace
    sink: DirectSink | AsgiSink
    charge: BodyCharge | None
    owner: Client | None
    held: Hold | None
    ticket: Ticket | None = None
    client: ClientStream | None = None

    def end(self) -> None:
        if self.held is not None:
            self.held.leave(self.ticket)
        if self.ticket is not None:
            self.ticket.leave()
        if self.client is not None:
            self.client.close()
            self.trace.sent_bytes = self.client.sent_bytes


class Inference:
    """See the module: the application that uvicorn gets. It answers POSTs to the inference routes,
    and leaves `app` the rest. Knows no engine; every error is OpenAI's JSON, or that of one of
    `apis`. `reader` reads long bodies, one at a time (docs/adr/0046).
    """

    def __init__(
        self,
        state: AppState,
        flow: Flow,
        bodies: OpenBodies,
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
        self.keys = state.client_keys
        self.now_s = state.clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "http":
            scope = with_one_slash(scope)
            if self.keys is not None and (error := await client_of(scope, self.keys)) is not None:
                await self._turn_away(scope, send, error)
                return
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
            status = await self._answer(trace, body, request.headers, sink, charge, request.client)
        finally:
            if request.charge is not None:
                request.charge.end()
            self._finish(trace, status)

    def broke_off(
        self, request: DirectRequest, sink: DirectSink | None, error: ApiError | None = None
    ) -> None:
        """Refuse, through `sink`, a request whose body was not read: for `error`, which has its own
        line in the log, else since it came too late. `sink` None: its client left."""
        trace, status = Trace(request.endpoint, request.began_s), _CLIENT_CLOSED
        self._app_state.metrics.requests.began()
        if request.charge is not None:
            request.charge.end()
        if sink is not None:
            name, api = self._heads.read(request.headers).request_id, self._apis.get(trace.endpoint)
            answer, headers = refusal(error or late_body(), name, api)
            status, trace.sent_bytes = answer.status, len(answer.body)
            sink.whole(answer.status, headers, answer.body)
        self._finish(trace, status, is_logged=error is None)

    def deny(
        self,
        request: DirectRequest,
        sink: DirectSink,
        refused: Refused,
        address: tuple[str, int] | None,
    ) -> None:
        """Refuse a request for its key; nothing of its body is read."""
        if self.keys is not None:
            host = address[0] if address else "-"
            path = f"/v1/{request.endpoint}"
            self.keys.audit.refused(refused.reason, path, host, request.headers)
        self.broke_off(request, sink, refused.error)

    async def _turn_away(self, scope: Scope, send: Send, error: ApiError) -> None:
        """Refuse a request without a key that counts; nothing of its body is read."""
        endpoint = _ROUTES.get(scope["path"]) if scope["method"] == "POST" else None
        name, api = self._heads.read(scope["headers"]).request_id, api_at(scope["path"], self._apis)
        answer, headers = refusal(error, name, api)
        if endpoint is not None:
            trace = Trace(endpoint, self._app_state.clock())
            trace.sent_bytes = len(answer.body)
            self._app_state.metrics.requests.began()
            self._finish(trace, error.status, is_logged=False)
        await send_answer(send, answer, headers)

    async def serve(self, endpoint: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one POST; the access log line is written at its last byte."""
        app_state = self._app_state
        trace = Trace(endpoint, app_state.clock())
        app_state.metrics.requests.began()
        status = _CLIENT_CLOSED
        charge = self.bodies.charge(owner_of(scope))
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
            owner = owner_of(scope)
            status = await self._answer(trace, body, scope["headers"], sink, charge, owner)
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
        owner: Client | None,
    ) -> int:
        api = self._apis.get(trace.endpoint)
        head = self._heads.read(headers_in)
        client_id = head.request_id
        trace.client_id, trace.trace_id = client_id.decode("ascii"), head.trace_id
        trace.body_bytes = len(body)
        held = None if owner is None else Hold(owner, trace, self._loop)
        call = _Call(trace, sink, charge, owner, held)
        try:
            if head.complaint is not None:
                raise head.complaint
            found = await self._serve_call(call, api, body, head, headers_in)
            if found is None:
                return 200
            answer, headers = found
        except (ApiError, EngineRefused) as error:
            answer, headers = refusal(error, client_id or trace.response_id.encode(), api)
            if call.held is not None:
                call.held.refused(headers)
        except asyncio.CancelledError:
            if sink.is_lost:
                return _CLIENT_CLOSED
            if owner is None or not owner.is_gone:
                sink.cut()
                raise
            if call.client is not None and call.client.has_begun:
                sink.cut()
                return REVOKED.error.status
            # Its key was revoked while it ran.
            answer, headers = refusal(REVOKED.error, client_id or trace.response_id.encode(), api)
        except Exception:
            logger.exception("request failed", extra={"request": trace.request or "-"})
            if call.client is not None and call.client.has_begun:
                sink.cut()
                return 500
            answer, headers = refusal(
                ApiError(500, "internal error of the router"),
                client_id or trace.response_id.encode(),
                api,
            )
        finally:
            call.end()
        trace.sent_bytes = len(answer.body)
        sink.whole(answer.status, headers, answer.body)
        return answer.status

    async def _serve_call(
        self,
        call: _Call,
        api: Api | None,
        body: bytes,
        head: ClientHead,
        headers_in: Sequence[Header],
    ) -> tuple[Answer, list[Header]] | None:
        """The whole answer and its headers; None for a stream, which is written."""
        flow, trace, owner = self._flow, call.trace, call.owner
        request, translation = await self._read(api, call, body)
        if owner is not None:
            check_model(owner, request.model, self._app_state.fleet.snapshot)
        state = self._begin(api, request, trace, head)
        if flow.counts_tokens:
            await flow.count(state)
        cost = cost_of(request, state.prompt_tokens)
        names = id_headers(head.request_id or trace.response_id.encode(), api)
        if call.held is not None:
            call.held.take(cost, names)
        call.ticket = self._app_state.admission.at_once(cost) or await self._enter(
            state, cost, headers_in, owner
        )
        if state.request.stream:
            call.client = self._stream_to(call.sink, names, state, translation)
            await flow.stream(state, call.client)
            return None
        answer = translated(translation, await flow.whole(state))
        return answer, [(b"content-type", answer.content_type.encode("latin-1")), *names]

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
        self, api: Api | None, call: _Call, body: bytes
    ) -> tuple[InferenceRequest, Translation | None]:
        """The request, once there is room for the copies of its body; of `api`, as a chat. With
        what its key adds to it."""
        charge, owner, endpoint = call.charge, call.owner, call.trace.endpoint
        if charge is not None:
            copies = _COPIES + (api is not None) + (owner is not None)
            charge.take_more(copies * len(body))
            charge.check()
        if len(body) <= INLINE_BYTES:
            return _read_of(owner, api, endpoint, body)
        waiting = [body]
        del body
        return await read_on(self._reader, partial(_read_of, owner, api, endpoint), waiting)

    async def _enter(
        self, state: RequestState, cost: Cost, headers: Sequence[Header], owner: Client | None
    ) -> Ticket:
        """The request's place, for which it may have to wait."""
        admission, request, priority = self._app_state.admission, state.request, 0
        if admission.is_limited:
            priority = read_priority(
                request.members.priority, _header(headers, _PRIORITY).decode("latin-1")
            )
            if owner is not None:
                priority = max(priority, owner.priority)
            state.trace.priority = priority
        account = None if owner is None else owner.account
        ticket = await admission.enter(
            cost, priority=priority, deadline_s=state.deadline_s, account=account
        )
        state.trace.queue_s += ticket.queue_s
        return ticket

    def _finish(self, trace: Trace, status: int, *, is_logged: bool = True) -> None:
        """Count a request that has ended. `is_logged`: not one that was refused for its key:
        strangers can send any number of these, and the audit bounds its lines."""
        app_state = self._app_state
        now_s = app_state.clock()
        trace.status = status
        app_state.metrics.requests.ended(trace, status, now_s)
        if trace.key:
            app_state.metrics.keys.ended(trace, status)
        if is_logged:
            app_state.access_log.add(trace, status, now_s)


def _read_of(
    owner: Client | None, api: Api | None, endpoint: str, body: bytes
) -> tuple[InferenceRequest, Translation | None]:
    """The request in `body`, as engines get it: of a key with its salt, and not before its
    priority. ApiError 400."""
    found = read_request(api, endpoint, "" if owner is None else owner.name, body)
    if owner is None:
        return found
    request = with_members(found[0], salt=owner.salt, least_priority=owner.priority)
    return request, found[1]


def _header(headers: Sequence[Header], wanted: bytes) -> bytes:
    """The first header of this name, in lower case; empty where there is none."""
    return next((value for name, value in headers if name == wanted), b"")
