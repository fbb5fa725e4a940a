"""Bodies in, JSON answers and errors in OpenAI's format out: what every route shares."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import orjson
from quart import Quart, Response, request
from werkzeug.exceptions import HTTPException

from xpyd_core.errors import ApiError
from xpyd_worker.server.bodies import BodyCharge, charge_of
from xpyd_worker.server.text_threads import TextThreads

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
