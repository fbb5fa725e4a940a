"""The router's own errors.

XpydError
|-- CallFailed      an engine's fault; the request may succeed on another one
`-- EngineRefused   the request's fault; the engine's answer goes to the client
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection
from typing import Any, Literal, NamedTuple, cast

import orjson

from xpyd_core.errors import ApiError, XpydError

FailureCause = Literal[
    "connect", "reset", "incomplete", "timeout", "lost", "too_large", "refused", "status", "answer",
    "transfer",
]  # fmt: skip
BROKEN: frozenset[str] = frozenset({"connect", "reset", "incomplete", "lost"})
"""Causes after which an engine that is well may serve the same request: only the connection broke.
"""
TAKES_NO_MORE = frozenset({429, 503})
"""The statuses of an engine that drains or is full: another one may take the request."""
ABORTED = b'"finish_reason":"abort"'
"""In a vLLM's answer, with status 200: it is ending, and the request is not served. Inside a JSON
string the quotes would be escaped: this is a member."""
TRANSFER_FAILED = "kv_transfer_failed"
"""The code of a D to which the KV did not come: the pair's fault, of either of the two."""


class Answer(NamedTuple):
    """A whole HTTP answer."""

    status: int
    body: bytes
    content_type: str = "application/json"
    retry_after: str | None = None
    kv: str = ""
    """What D said of the KV (xpyd_core.kv_outcome); for the router alone."""


class CallFailed(XpydError):
    """A call to an engine that may succeed elsewhere. Holds no address: it may reach a client.

    `kv`: as in Answer, of a D to which the KV did not come.
    """

    def __init__(self, cause: FailureCause, kv: str = "") -> None:
        super().__init__(cause)
        self.cause: FailureCause = cause
        self.kv = kv


class EngineRefused(XpydError):
    """An engine's 4xx that is no 429: the request is at fault, so the client gets the answer."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"engine answered {answer.status}")
        self.answer = answer


_SHOWN_MODELS = 8


def unknown_model(model: str, known: Collection[str]) -> ApiError:
    """The refusal of a request for `model`; it names some of the models that are `known`."""
    names = heapq.nsmallest(_SHOWN_MODELS, known)
    served = ", ".join(f"`{name}`" for name in names) or "none"
    if len(known) > len(names):
        served += f" and {len(known) - len(names)} more"
    return ApiError(
        404,
        f"The model `{model[:200]}` does not exist. Served: {served}",
        param="model",
        code="model_not_found",
    )


def poisoned(refused_s: float) -> ApiError:
    """The refusal of a request that instances die of; 422, for clients try 5xx again."""
    return ApiError(
        422,
        "instances died while they had this request; the same request is refused for "
        f"{math.ceil(refused_s)} s",
        code="poisoned_request",
    )


def error_in(body: bytes) -> dict[str, Any] | None:
    """The error object of an OpenAI error answer."""
    try:
        document = orjson.loads(body)
        error = document["error"]
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return None
    return cast("dict[str, Any]", error) if isinstance(error, dict) else None
