"""Bodies in, JSON answers and errors out, within a bound on the memory of all request bodies.

Bytes above the bound are dropped, and the reader of that body answers 503. A body's charge ends
when it is parsed, or with the request. Errors have OpenAI's format. Loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeVar, cast

import orjson
from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge, RequestTimeout

from xpyd_core.bodies import BodyBudget, BodyBuffer, BodyCharge
from xpyd_core.errors import ApiError
from xpyd_worker.server.service import TextThreads

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

# Above the router's own bound (32 MiB), since it adds a continuation's ids to the body.
MAX_BODY_BYTES = 48 * 1024 * 1024
MAX_OPEN_BYTES = 1024**3
_SCOPE_KEY = "xpyd.body"


class ChargedBodies:
    """ASGI middleware: each request has a BodyCharge, which `charge_of` finds."""

    def __init__(self, app: AsgiApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        charge = BodyCharge(self._budget, MAX_BODY_BYTES)
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
_MOST_DECODED = 7
"""What reading takes of memory besides the body, in its lengths, at most: ids in a list."""
_MAX_CALL_BYTES = 64 * 1024
"""The body of a call that is no inference and has no text: a list in Python takes thirty times its
JSON."""


async def json_body(*, may_be_empty: bool = False) -> Mapping[str, Any]:
    """The short body of a call, a JSON object; ApiError 400 where it is none (NaN is no JSON), 413
    where it is long, 503 where too much of all requests was being read."""
    data, charge = await _body()
    try:
        if len(data) > _MAX_CALL_BYTES:
            raise ApiError(413, f"the body is longer than {_MAX_CALL_BYTES} bytes")
        return {} if may_be_empty and not data else _object(data)
    finally:
        charge.end()


async def parsed_body(threads: TextThreads, parse: Callable[[bytes], T]) -> T:
    """What `parse` makes of the request's body; of a long one on a text thread. What that may take
    is charged before."""
    data, charge = await _body()
    try:
        if len(data) <= _INLINE_BYTES:
            return parse(data)
        charge.take_more(_MOST_DECODED * len(data))
        charge.check()
        # Of a request that is given up while it waits for a thread nothing is kept; a thread that
        # reads it then goes on, and what it reads stays charged so long.
        waiting, reading = [data], charge.move()
        del data
        try:
            return await threads.run(lambda: parse(waiting.pop()), on_end=reading.end)
        except ApiError:
            reading.end()
            raise
        finally:
            waiting.clear()
    finally:
        charge.end()


async def _body() -> tuple[bytes, BodyCharge]:
    body = BodyBuffer()
    try:
        # Quart would hold a body twice where it is asked for all of it.
        async with asyncio.timeout(request.body_timeout):
            async for part in request.body:
                body.add(part)
                if len(body) > MAX_BODY_BYTES:
                    raise RequestEntityTooLarge
    except TimeoutError:
        raise RequestTimeout from None
    # Quart's type of an ASGI scope is partly unknown.
    charge = charge_of(cast("Mapping[str, Any]", request.scope))
    charge.check()
    return body.take(), charge


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


def error_response(error: ApiError) -> Response:
    """`error` in OpenAI's format."""
    response = Response(error.body(), status=error.status, content_type=JSON)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


async def _on_api_error(error: ApiError) -> Response:
    return error_response(error)


async def _on_http_error(error: HTTPException) -> Response:
    """Unknown path, wrong method, body too large: werkzeug's words in OpenAI's format."""
    status = error.code or 500
    if status == 404:
        message = f"Unknown path: {request.method} {request.path[:200]}"
    else:
        message = error.description or "error"
    response = error_response(ApiError(status, message))
    if status == 405:
        allowed = getattr(error, "valid_methods", None) or ()
        response.headers["Allow"] = ", ".join(allowed)
    return response


async def _on_bug(error: Exception) -> Response:
    _log.error("error in a handler", exc_info=error)
    return error_response(ApiError(500, "internal error"))


def register_errors(app: Quart) -> None:
    """Answer every error of `app`'s routes, unknown paths included, in OpenAI's format."""
    app.register_error_handler(ApiError, _on_api_error)
    app.register_error_handler(HTTPException, _on_http_error)
    app.register_error_handler(Exception, _on_bug)
