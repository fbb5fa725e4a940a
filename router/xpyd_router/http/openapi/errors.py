"""The errors of the router, each a row of the table on its page (docs/router.md). Pure."""

from __future__ import annotations

from typing import NamedTuple


class ErrorKind(NamedTuple):
    """A row of the table on the router's page. `code` is OpenAI's machine-readable `code`."""

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
        "Prompt and output do not fit the model's context. From the engine.",
        "this model's context is 2048 tokens: your prompt has 4096 tokens",
        "prompt",
    ),
    ErrorKind(
        400,
        "grammar_failed",
        "The answer cannot go on as its schema, pattern or rules want it. From the engine.",
        "the answer cannot go on as the request's schema, pattern or rules want it",
    ),
    ErrorKind(
        400,
        "thread_unsupported_request",
        "Messages with `thread`: no conversations are kept. Clients then send all messages.",
        "thread: no conversations are kept here; send all messages with each request",
    ),
    ErrorKind(
        400,
        "previous_response_not_found",
        "`previous_response_id` names a response that the router does not keep.",
        "previous_response_id: no response 'resp_1' is kept in this router's process; send the "
        "conversation in input",
        "previous_response_id",
    ),
    ErrorKind(
        401,
        "invalid_api_key",
        "Clients need a key, and this one is missing or not valid.",
        "the API key is not valid",
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
    ErrorKind(
        404,
        None,
        "No such path, instance or kept response.",
        "no such path: GET /v1/nothing",
    ),
    ErrorKind(
        404,
        "model_not_found",
        "No engine serves this model.",
        "The model `other` does not exist. Served: `demo-model`",
        "model",
    ),
    ErrorKind(
        405,
        None,
        "The path has other methods; `Allow` lists them.",
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
        "rate_limit_exceeded",
        "A limit of the client's key is reached.",
        "this key's limit of 8 requests at once in this router is reached",
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
        "An engine failed in a stream that no other engine can continue: the stream's last event, "
        "behind status 200.",
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
        "No instance is ready.",
        "no prefill and decode instances are ready for this model",
    ),
    ErrorKind(
        503,
        "queue_timeout",
        "Over the limits, and no place became free in time.",
        "the router is busy: no place became free in time",
    ),
    ErrorKind(
        504,
        "timeout",
        "Engines did not answer in time.",
        "the instances did not answer in time, after one try",
    ),
)
