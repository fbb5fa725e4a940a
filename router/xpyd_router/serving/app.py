"""The HTTP surface: Quart routes over a Flow. Knows no engine; every error is OpenAI's JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

import orjson
from prometheus_client import CONTENT_TYPE_LATEST
from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException

from xpyd_core.errors import ApiError
from xpyd_router.config import RouterConfig
from xpyd_router.errors import EngineRefused
from xpyd_router.fleet.registry import Instance
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics, state_of
from xpyd_router.requests.bodies import Endpoint, parse_ask
from xpyd_router.requests.flow import Course, Flow
from xpyd_router.requests.trace import Trace
from xpyd_router.serving.resumed import Resumed

logger = logging.getLogger(__name__)

_MAX_CLIENT_ID = 256
_CLIENT_CLOSED = 499
"""nginx's status for a client that left; only seen in logs and metrics."""
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass
class Surface:
    """What the routes work with. `is_draining` is set by `main` at SIGTERM."""

    config: RouterConfig
    fleet: FleetView
    flow: Flow
    metrics: RouterMetrics
    clock: Callable[[], float]
    created: int
    """Unix time of the start: `created` of the models."""
    is_draining: bool = False


def _json(payload: object, status: int = 200) -> Response:
    return Response(orjson.dumps(payload), status, content_type="application/json")


def _error_response(error: ApiError) -> Response:
    response = Response(error.body(), error.status, content_type="application/json")
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def _describe(instance: Instance, now_s: float) -> dict[str, object]:
    """One line of /instances."""
    beat = instance.beat
    return {
        "instance": instance.name,
        "type": beat.type,
        "state": state_of(instance),
        "http_address": str(instance.http),
        "zmq_address": str(instance.kv),
        "incarnation": beat.incarnation,
        "age_seconds": round(max(0.0, now_s - instance.last_beat_s), 3),
        "models": list(beat.models),
        "compatibility": beat.compatibility,
        "continuation": beat.continuation,
        "fleet": beat.fleet,
        "pool": beat.pool,
        "revision": beat.revision,
        "max_model_len": beat.max_model_len,
        "load": {
            "running": beat.running,
            "waiting": beat.waiting,
            "free_blocks": beat.free_blocks,
            "total_blocks": beat.total_blocks,
        },
    }


class _Inference:
    """The two inference routes."""

    def __init__(self, surface: Surface) -> None:
        self._surface = surface

    async def serve(self, endpoint: Endpoint) -> Response:
        """Answer one POST; the access log line is written at its last byte."""
        surface = self._surface
        trace = Trace(endpoint, surface.clock())
        surface.metrics.in_flight.inc()
        try:
            body = cast(bytes, await request.get_data(as_text=False))
            course = surface.flow.begin(parse_ask(endpoint, body), trace)
            response = await self._answer(course)
        except (ApiError, EngineRefused, HTTPException) as error:
            response = _refusal(error)
        except asyncio.CancelledError:
            self._finish(trace, _CLIENT_CLOSED)
            raise
        except Exception:
            logger.exception("request failed", extra={"request": trace.request or "-"})
            response = _error_response(ApiError(500, "internal error of the router"))
        trace.status = response.status_code
        if name := _client_id() or trace.response_id:
            response.headers["X-Request-Id"] = name
        if response.timeout is not None:  # whole; a stream finishes itself
            trace.sent_bytes = int(response.headers.get("Content-Length", 0))
            self._finish(trace, response.status_code)
        return response

    async def _answer(self, course: Course) -> Response:
        flow = self._surface.flow
        if not course.ask.stream:
            answer = await flow.whole(course)
            return Response(answer.body, answer.status, content_type=answer.content_type)
        events = self._events(course)
        try:
            first = await anext(events)
        except BaseException:
            await events.aclose()
            raise
        stall_s = self._surface.config.request_timeout_s
        response = Response(Resumed(first, events, stall_s), 200, dict(_STREAM_HEADERS))
        response.content_type = "text/event-stream; charset=utf-8"
        response.timeout = None
        return response

    async def _events(self, course: Course) -> AsyncGenerator[bytes]:
        """The stream; once it has begun it finishes the trace however it ends."""
        surface, trace = self._surface, course.trace
        is_whole = False
        try:
            async with aclosing(surface.flow.stream(course)) as events:
                async for data in events:
                    if trace.first_s is None:
                        trace.first_s = surface.clock() - trace.started_s
                    trace.sent_bytes += len(data)
                    yield data
            is_whole = True
        finally:
            if trace.first_s is not None:
                self._finish(trace, 200 if is_whole else _CLIENT_CLOSED)

    def _finish(self, trace: Trace, status: int) -> None:
        metrics, now_s = self._surface.metrics, self._surface.clock()
        seconds = now_s - trace.started_s
        metrics.in_flight.dec()
        metrics.requests.labels(trace.endpoint, str(status)).inc()
        metrics.request_seconds.labels(trace.endpoint).observe(seconds)
        if trace.first_s is not None:
            metrics.ttft_seconds.labels(trace.endpoint).observe(trace.first_s)
        logger.info("POST /v1/%s %d", trace.endpoint, status, extra=trace.extra(now_s))


def _refusal(error: ApiError | EngineRefused | HTTPException) -> Response:
    if isinstance(error, ApiError):
        return _error_response(error)
    if isinstance(error, HTTPException):
        return _http_error(error)
    answer = error.answer
    response = Response(answer.body, answer.status, content_type=answer.content_type)
    if answer.retry_after is not None:
        response.headers["Retry-After"] = answer.retry_after
    return response


def _http_error(error: HTTPException) -> Response:
    """Quart's own refusals (no such path, wrong method, body too long) in OpenAI's format."""
    status = error.code or 500
    messages = {
        404: f"no such path: {request.method} {request.path[:200]}",
        405: f"{request.method} is not allowed here",
        413: "the request body is too long",
        408: "the request body did not come in time",
    }
    response = _error_response(ApiError(status, messages.get(status, error.name)))
    for name, value in error.get_headers():
        if name.lower() == "allow":
            response.headers["Allow"] = value
    return response


def _client_id() -> str:
    """The client's own id: echoed, never parsed, never sent on."""
    value = request.headers.get("X-Request-Id", "")
    # What is not ASCII has no one form in a header; it would come back as other bytes.
    return value if len(value) <= _MAX_CLIENT_ID and value.isascii() else ""


def build_app(surface: Surface) -> Quart:
    """The application; `surface` lives as long as it."""
    app = Quart("xpyd_router")
    app.config["MAX_CONTENT_LENGTH"] = surface.config.max_body_bytes
    inference = _Inference(surface)

    @app.post("/v1/completions")
    async def completions() -> Response:
        return await inference.serve("completions")

    @app.post("/v1/chat/completions")
    async def chat_completions() -> Response:
        return await inference.serve("chat/completions")

    _add_models(app, surface)
    _add_state(app, surface)

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        return _http_error(error)

    # Quart's decorators register them; pyright sees names that nobody reads.
    _ = completions, chat_completions, http_error
    return app


def _add_models(app: Quart, surface: Surface) -> None:
    def describe(model: str) -> dict[str, object]:
        return {
            "id": model,
            "object": "model",
            "created": surface.created,
            "owned_by": "xpyd",
        }

    @app.get("/v1/models")
    async def models() -> Response:
        names = surface.fleet.snapshot.models
        return _json({"object": "list", "data": [describe(name) for name in names]})

    @app.get("/v1/models/<path:name>")
    async def model(name: str) -> Response:
        if name in surface.fleet.snapshot.models:
            return _json(describe(name))
        message = f"The model `{name[:200]}` does not exist."
        error = ApiError(404, message, param="model", code="model_not_found")
        return _error_response(error)

    _ = models, model


def _add_state(app: Quart, surface: Surface) -> None:
    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/readiness")
    async def readiness() -> Response:
        if surface.is_draining:
            return _json({"status": "draining"}, 503)
        if not surface.fleet.snapshot.is_ready:
            return _json({"status": "no instances"}, 503)
        return _json({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        text = surface.metrics.render(surface.fleet.instances)
        return Response(text, content_type=CONTENT_TYPE_LATEST)

    @app.get("/instances")
    async def instances() -> Response:
        now_s = surface.fleet.now_s
        found = [_describe(instance, now_s) for instance in surface.fleet.instances]
        return _json({"instances": found})

    _ = health, readiness, metrics, instances
