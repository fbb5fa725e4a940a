"""Bodies in, JSON answers and errors out, within a bound on the memory of all request bodies.

A body is charged with the bytes that arrived, not with the length that its head names: a client
that announces much and sends nothing holds nothing. Bytes above the bound are dropped, and the
reader of that body answers 503. The charge ends when the body is parsed, or with the request.
Errors have OpenAI's format. Loop only.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeVar, cast

import orjson
from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException

from xpyd_core.errors import ApiError
from xpyd_worker.server.service import TextThreads

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# Above the router's own bound (32 MiB), since it adds a continuation's ids to the body.
MAX_BODY_BYTES = 48 * 1024 * 1024
MAX_READING_BYTES = 1024**3
_SCOPE_KEY = "xpyd.body"


class BodyBudget:
    """The bytes of bodies that were not parsed yet, of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int = MAX_READING_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, count: int) -> bool:
        """Charge `count` bytes, unless that would be too many."""
        if self.used_bytes + count > self._limit_bytes:
            return False
        self.used_bytes += count
        return True

    def give_back(self, count: int) -> None:
        """Charge them no more."""
        self.used_bytes -= count


class BodyCharge:
    """What one request's body is charged with."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._bytes = 0
        self._is_refused = False

    def take(self, count: int) -> bool:
        """Charge what has come; False: it, and all that follows, is to be thrown away."""
        # What is behind the largest body is not kept by anybody.
        count = min(count, MAX_BODY_BYTES - self._bytes)
        if self._is_refused or not self._budget.take(count):
            self._is_refused = True
            return False
        self._bytes += count
        return True

    def check(self) -> None:
        """ApiError 503 where some of the body was thrown away."""
        if self._is_refused:
            raise ApiError(503, "too many large requests are being read", retry_after_s=1)

    def end(self) -> None:
        """The body is parsed, or will not be read. May be called again."""
        self._budget.give_back(self._bytes)
        self._bytes = 0


class ChargedBodies:
    """ASGI middleware: each request has a BodyCharge, which `charge_of` finds."""

    def __init__(self, app: AsgiApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        charge = BodyCharge(self._budget)
        scope[_SCOPE_KEY] = charge

        async def receive_charged() -> Message:
            message = await receive()
            if message["type"] != "http.request" or charge.take(len(message.get("body", b""))):
                return message
            # To the reader the body ends here.
            return {**message, "body": b"", "more_body": False}

        try:
            await self._app(scope, receive_charged, send)
        finally:
            charge.end()


def charge_of(scope: Mapping[str, Any]) -> BodyCharge:
    """The charge of the request with this ASGI scope."""
    return cast("BodyCharge", scope[_SCOPE_KEY])


_log = logging.getLogger(__name__)
JSON = "application/json"
T = TypeVar("T")
# Reading and checking so much takes a few milliseconds.
_INLINE_BYTES = 256 * 1024


async def json_body(*, may_be_empty: bool = False) -> Mapping[str, Any]:
    """The request's body, a JSON object; ApiError 400 where it is none (NaN is no JSON), 503 where
    too much of all requests was being read."""
    data, charge = await _body()
    try:
        return {} if may_be_empty and not data else _object(data)
    finally:
        charge.end()


async def parsed_body(threads: TextThreads, parse: Callable[[Mapping[str, Any]], T]) -> T:
    """What `parse` makes of the request's body, see json_body; of a long one on a text thread."""
    data, charge = await _body()
    try:
        if len(data) <= _INLINE_BYTES:
            return parse(_object(data))
        return await threads.run(lambda: parse(_object(data)))
    finally:
        charge.end()


async def _body() -> tuple[bytes, BodyCharge]:
    data = cast("bytes", await request.get_data(cache=False))
    # Quart's type of an ASGI scope is partly unknown.
    charge = charge_of(cast("Mapping[str, Any]", request.scope))
    charge.check()
    return data, charge


def _object(data: bytes) -> Mapping[str, Any]:
    try:
        body: object = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return cast("dict[str, Any]", body)


def json_response(value: Mapping[str, Any], status: int = 200) -> Response:
    """`value` as JSON."""
    return Response(orjson.dumps(value), status=status, content_type=JSON)


def _error_response(error: ApiError) -> Response:
    response = Response(error.body(), status=error.status, content_type=JSON)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


async def _on_api_error(error: ApiError) -> Response:
    return _error_response(error)


async def _on_http_error(error: HTTPException) -> Response:
    """Unknown path, wrong method, body too large: werkzeug's words in OpenAI's format."""
    status = error.code or 500
    if status == 404:
        message = f"Unknown path: {request.method} {request.path[:200]}"
    else:
        message = error.description or "error"
    response = _error_response(ApiError(status, message))
    if status == 405:
        allowed = getattr(error, "valid_methods", None) or ()
        response.headers["Allow"] = ", ".join(allowed)
    return response


async def _on_bug(error: Exception) -> Response:
    _log.error("error in a handler", exc_info=error)
    return _error_response(ApiError(500, "internal error"))


def register_errors(app: Quart) -> None:
    """Answer every error of `app`'s routes, unknown paths included, in OpenAI's format."""
    app.register_error_handler(ApiError, _on_api_error)
    app.register_error_handler(HTTPException, _on_http_error)
    app.register_error_handler(Exception, _on_bug)
