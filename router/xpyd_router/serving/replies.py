"""JSON answers of the routes in Quart."""

from __future__ import annotations

import msgspec
from quart import Response

from xpyd_core.errors import ApiError
from xpyd_router.serving.shapes import Shape


def json_reply(payload: Shape, status: int = 200) -> Response:
    """`payload` as JSON."""
    return Response(msgspec.json.encode(payload), status, content_type="application/json")


def error_reply(error: ApiError) -> Response:
    """An error in OpenAI's format."""
    response = Response(error.body(), error.status, content_type="application/json")
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response
