"""JSON answers of the routes in Quart."""

from __future__ import annotations

import orjson
from quart import Response

from xpyd_core.errors import ApiError


def json_reply(payload: object, status: int = 200) -> Response:
    """`payload` as JSON."""
    return Response(orjson.dumps(payload), status, content_type="application/json")


def error_reply(error: ApiError) -> Response:
    """An error in OpenAI's format."""
    response = Response(error.body(), error.status, content_type="application/json")
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response
