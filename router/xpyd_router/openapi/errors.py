"""Every error that the router answers: status, code, and when. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from xpyd_core.errors import ApiError


class ErrorKind(NamedTuple):
    """One row of the table on the router's page. `code` is OpenAI's machine-readable `code`."""

    status: int
    code: str | None
    when: str
    message: str
    """As a client may see it."""
    param: str | None = None


ERRORS: tuple[ErrorKind, ...] = (
    ErrorKind(
        400,
        None,
        "The request is wrong; `param` names the field.",
        "temperature: expected a number, got 'hot'",
        "temperature",
    ),
    ErrorKind(
        400,
        "context_length_exceeded",
        "Prompt and output do not fit the model's context. Said by the engine.",
        "this model's context is 2048 tokens: your prompt has 4096 tokens",
        "prompt",
    ),
    ErrorKind(
        401,
        None,
        "The admin API, without a key or with a wrong one.",
        "Authorization: expected Bearer and a key of --admin-key-file",
    ),
    ErrorKind(
        403,
        None,
        "The router has no admin keys.",
        "the admin API is closed: start the router with --admin-key-file",
    ),
    ErrorKind(404, None, "No such path, or no such instance.", "no such path: GET /v1/nothing"),
    ErrorKind(
        404,
        "model_not_found",
        "No engine serves this model.",
        "The model `other` does not exist.",
        "model",
    ),
    ErrorKind(
        405,
        None,
        "Another method; `Allow` says which.",
        "DELETE is not allowed here",
    ),
    ErrorKind(
        408,
        None,
        "The body did not come within a minute.",
        "the request body did not come in time",
    ),
    ErrorKind(
        409,
        None,
        "Several instances have that name.",
        "2 instances have this name: say the http_address",
    ),
    ErrorKind(
        413,
        None,
        "The body is longer than `--max-body-bytes`.",
        "the request body is too long",
    ),
    ErrorKind(
        422,
        "poisoned_request",
        "Instances died while they had this request; it is refused for 5 minutes.",
        "instances died while they had this request; the same request is refused for 300 s",
    ),
    ErrorKind(
        429,
        "queue_full",
        "Over the limits, and no room in the queue.",
        "too many requests: the router is busy and its queue is full",
    ),
    ErrorKind(
        429,
        "displaced",
        "A request of higher priority took the place in the full queue.",
        "too many requests: one of higher priority took this one's place in the full queue",
    ),
    ErrorKind(
        431,
        None,
        "The head, or a header that is forwarded, is too long.",
        "header X-Trace: longer than 8000 bytes",
    ),
    ErrorKind(500, None, "A defect of the router.", "internal error of the router"),
    ErrorKind(
        502,
        "upstream_failed",
        "Three tries failed.",
        "the instances failed, after 3 tries",
    ),
    ErrorKind(
        502,
        "decode_failed",
        "An engine that nobody can go on for failed in a stream: the stream's last event, behind "
        "status 200.",
        "the generating instance failed",
    ),
    ErrorKind(
        503,
        None,
        "All engines drain.",
        "the instances take no requests, after 16 tries",
    ),
    ErrorKind(
        503,
        "no_instances",
        "Nobody is ready.",
        "no prefill and decode instances are ready for this model",
    ),
    ErrorKind(
        503,
        "queue_timeout",
        "Over the limits, and its turn did not come in time.",
        "the router is busy: no place became free in time",
    ),
    ErrorKind(
        504,
        "timeout",
        "Engines did not answer in time.",
        "the instances did not answer in time, after one try",
    ),
)
_NAMES = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    408: "RequestTimeout",
    409: "Conflict",
    413: "ContentTooLarge",
    422: "Poisoned",
    429: "TooManyRequests",
    431: "HeadTooLong",
    500: "InternalError",
    502: "BadGateway",
    503: "Unavailable",
    504: "GatewayTimeout",
}
ENGINE_REFUSAL = "EngineRefusal"
_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": "AuthenticateBearer"},
    405: {"Allow": "Allow"},
    429: {"Retry-After": "RetryAfter"},
    503: {"Retry-After": "RetryAfter"},
}


def headers(names: dict[str, str]) -> dict[str, Any]:
    """References to components: the header's name -> the component's."""
    return {name: {"$ref": f"#/components/headers/{what}"} for name, what in names.items()}


def error_responses(*statuses: int) -> dict[str, Any]:
    """References for an operation's `responses`."""
    return {str(s): {"$ref": f"#/components/responses/{_NAMES[s]}"} for s in sorted(statuses)}


def error_components() -> dict[str, Any]:
    """`components.responses`: one per status, with an example for each of its codes."""
    made = {name: _response(status) for status, name in _NAMES.items()}
    made[ENGINE_REFUSAL] = {
        "description": "The engine refused the request in another way; its words, without its "
        "address.",
        "content": _content({}),
    }
    return made


def _response(status: int) -> dict[str, Any]:
    kinds = [kind for kind in ERRORS if kind.status == status]
    made: dict[str, Any] = {
        "description": " ".join(
            kind.when if kind.code is None else f"`{kind.code}`: {kind.when}" for kind in kinds
        ),
        "content": _content({kind.code or "error": _example(kind) for kind in kinds}),
    }
    if status in _HEADERS:
        made["headers"] = headers(_HEADERS[status])
    return made


def _content(examples: dict[str, Any]) -> dict[str, Any]:
    media: dict[str, Any] = {"schema": {"$ref": "#/components/schemas/ErrorBody"}}
    if examples:
        media["examples"] = examples
    return {"application/json": media}


def _example(kind: ErrorKind) -> dict[str, Any]:
    kind_of = ApiError(kind.status, kind.message).type
    error = {"message": kind.message, "type": kind_of, "param": kind.param, "code": kind.code}
    return {"summary": kind.when, "value": {"error": error}}
