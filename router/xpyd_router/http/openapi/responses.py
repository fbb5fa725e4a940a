"""Schemas and examples of answers, event streams and errors.

Answers that the router writes itself are the structs of `http.shapes`; here are those of engines,
and every error of the router with its status and code.
"""

from __future__ import annotations

from typing import Any

from xpyd_core.errors import ApiError
from xpyd_router.http.openapi.errors import ERRORS, ErrorKind

Schema = dict[str, Any]
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}


def object_schema(required: Schema, optional: Schema | None = None, text: str = "") -> Schema:
    """An object with these members."""
    made: Schema = {"type": "object", "properties": {**required, **(optional or {})}}
    made["required"] = list(required)
    return {**made, "description": text} if text else made


def _nullable(schema: Schema) -> Schema:
    if "$ref" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_FINISH: Schema = {
    **_nullable(_TEXT),
    "description": "`stop`, `length`, `tool_calls`, or another of the engine's; null: the choice "
    "goes on.",
}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_EXTRAS: Schema = {
    "stop_reason": {"description": "What ended the choice: a text or a token's id."},
    "token_ids": {**_nullable(_IDS), "description": "With return_token_ids."},
    "prompt_token_ids": {**_nullable(_IDS), "description": "With return_token_ids."},
}
_TOKEN_LOGPROB: Schema = object_schema(
    {"token": _TEXT, "logprob": {"type": "number"}},
    {"bytes": _nullable({"type": "array", "items": {"type": "integer"}})},
)


_REASONING: Schema = {
    "reasoning_content": {**_nullable(_TEXT), "description": "What the model thought."},
    "reasoning": {**_nullable(_TEXT), "description": "The same, as vLLM names it."},
}


def _calls(*required: str) -> Schema:
    """`tool_calls` of a message or of a delta, in which a call's members come but once."""
    function = object_schema({}, {"name": _TEXT, "arguments": _TEXT}, "Arguments: JSON, as text.")
    members: Schema = {"index": _COUNT, "id": _TEXT, "type": _TEXT, "function": function}
    needed = {name: members[name] for name in required}
    return {"type": ["array", "null"], "items": object_schema(needed, members)}


def _named(of: str) -> Schema:
    kind, prefix = ("chat.completion", "chatcmpl") if of.startswith("Chat") else ("", "cmpl")
    name = kind + (".chunk" if of.endswith("Chunk") else "") if kind else "text_completion"
    return {
        "id": {
            "type": "string",
            "pattern": f"^{prefix}-[0-9a-f]{{32}}$",
            "description": "Random; the same in all chunks.",
        },
        "object": {"const": name},
        "created": {**_COUNT, "description": "Unix time."},
        "model": _TEXT,
    }


def _whole(of: str, choice: Schema) -> Schema:
    return object_schema(
        {
            **_named(of),
            "choices": {"type": "array", "items": choice, "minItems": 1},
            "usage": _ref("Usage"),
        },
    )


def _chunk(of: str, choice: Schema) -> Schema:
    return object_schema(
        {**_named(of), "choices": {"type": "array", "items": choice}},
        {"usage": _nullable(_ref("Usage"))},
        "One event of a stream. With include_usage the last has no choices and the usage.",
    )


def answer_schemas() -> dict[str, Schema]:
    """`components.schemas` of inference."""
    index, completion, chat = _COUNT, _ref("CompletionLogprobs"), _ref("ChatLogprobs")
    text = {"index": index, "text": _TEXT, "finish_reason": _FINISH}
    text_more = {"logprobs": _nullable(completion), **_EXTRAS}
    message = object_schema(
        {"role": {"const": "assistant"}, "content": _nullable(_TEXT)},
        {**_REASONING, "tool_calls": _calls("id", "type", "function")},
    )
    delta = object_schema(
        {},
        {
            "role": _TEXT,
            "content": _nullable(_TEXT),
            **_REASONING,
            "tool_calls": _calls("index", "function"),
        },
    )
    chat_more = {"logprobs": _nullable(chat), **_EXTRAS}
    return {
        "TokenizeAnswer": object_schema(
            {"count": _COUNT, "max_model_len": _COUNT, "tokens": _IDS},
            {"token_strs": _nullable({"type": "array", "items": _TEXT})},
            "`token_strs` with return_token_strs.",
        ),
        "DetokenizeAnswer": object_schema({"prompt": _TEXT}),
        "Usage": object_schema(
            {"prompt_tokens": _COUNT, "total_tokens": _COUNT},
            {
                "completion_tokens": _COUNT,
                "prompt_tokens_details": _nullable(_OBJECT),
                "completion_tokens_details": _nullable(_OBJECT),
            },
        ),
        "CompletionLogprobs": object_schema(
            {"tokens": {"type": "array", "items": _TEXT}},
            {
                "token_logprobs": {"type": "array", "items": {"type": ["number", "null"]}},
                "top_logprobs": {"type": ["array", "null"], "items": _nullable(_OBJECT)},
                "text_offset": {"type": "array", "items": _COUNT},
            },
        ),
        "ChatLogprobs": object_schema(
            {},
            {
                "content": {
                    "type": ["array", "null"],
                    "items": {
                        **_TOKEN_LOGPROB,
                        "properties": {
                            **_TOKEN_LOGPROB["properties"],
                            "top_logprobs": {"type": "array", "items": _TOKEN_LOGPROB},
                        },
                    },
                }
            },
        ),
        "Completion": _whole("Completion", object_schema(text, text_more)),
        "CompletionChunk": _chunk("CompletionChunk", object_schema(text, text_more)),
        "ChatCompletion": _whole(
            "ChatCompletion",
            object_schema(
                {"index": index, "message": message, "finish_reason": _FINISH}, chat_more
            ),
        ),
        "ChatCompletionChunk": _chunk(
            "ChatCompletionChunk",
            object_schema({"index": index, "delta": delta, "finish_reason": _FINISH}, chat_more),
        ),
    }


def response_schemas() -> dict[str, Schema]:
    """`components.schemas` of /v1/responses."""
    items: Schema = {"type": "array", "items": object_schema({"type": _TEXT, "id": _TEXT})}
    return {
        "Response": object_schema(
            {
                "id": {"type": "string", "pattern": "^resp_[0-9a-f]{32}$"},
                "object": {"const": "response"},
                "created_at": {**_COUNT, "description": "Unix time."},
                "completed_at": _nullable(_COUNT),
                "status": {"enum": ["in_progress", "completed", "incomplete", "failed"]},
                "error": _nullable(object_schema({"code": _TEXT, "message": _TEXT})),
                "incomplete_details": _nullable(object_schema({"reason": _TEXT})),
                "model": _TEXT,
                "output": {**items, "description": "Items: reasoning, message, function_call."},
                "usage": _nullable(
                    object_schema(
                        {"input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT}
                    )
                ),
                "store": {"type": "boolean", "description": "Whether the router keeps it."},
            },
            text="It repeats the fields of its request, too.",
        ),
        "ResponseEvent": object_schema({"type": _TEXT, "sequence_number": _COUNT}),
        "ResponseItems": object_schema(
            {
                "object": {"const": "list"},
                "data": items,
                "first_id": {"type": ["string", "null"]},
                "last_id": {"type": ["string", "null"]},
                "has_more": {"type": "boolean"},
            }
        ),
        "ResponseTokens": object_schema(
            {"object": {"const": "response.input_tokens"}, "input_tokens": _COUNT}
        ),
    }


def named_event_schema(event: str) -> Schema:
    """As `event_schema`, of a stream whose events have names and no [DONE]."""
    data = {"contentMediaType": "application/json", "contentSchema": _ref(event)}
    return {
        "type": "object",
        "properties": {"event": _TEXT, "data": {**_TEXT, **data}},
        "required": ["data"],
    }


def event_schema(chunk: str) -> Schema:
    """Of each event of a stream, read as an object of its fields, as OpenAPI 3.2 has it and tools
    for 3.1 do: JSON in `data`, in the last one [DONE].
    """
    document: Schema = {"anyOf": [_ref(chunk), _ref("ErrorBody")]}
    return {
        "type": "object",
        "properties": {"data": _TEXT},
        "required": ["data"],
        "if": {"properties": {"data": {"const": "[DONE]"}}},
        "else": {
            "properties": {
                "data": {"contentMediaType": "application/json", "contentSchema": document}
            }
        },
    }


_ID = "f51573d36cde76ee3913bd1cc83f7362"


def answer_example(endpoint: str) -> dict[str, Any]:
    """A whole answer."""
    usage = {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}
    ending = {"logprobs": None, "finish_reason": "length"}
    if endpoint == "completions":
        choice: Schema = {"index": 0, "text": " city in the north", **ending}
        head = {"id": f"cmpl-{_ID}", "object": "text_completion"}
    else:
        message = {"role": "assistant", "content": "In California, on the"}
        choice = {"index": 0, "message": message, **ending}
        head = {"id": f"chatcmpl-{_ID}", "object": "chat.completion"}
    return {
        **head,
        "created": 1795325284,
        "model": "demo-model",
        "choices": [choice],
        "usage": usage,
    }


def stream_example(endpoint: str) -> str:
    """A stream of one token, as it is on the wire."""
    if endpoint == "completions":
        head = f'"id":"cmpl-{_ID}","object":"text_completion"'
        pieces = ['"text":" city","finish_reason":null', '"text":"","finish_reason":"length"']
    else:
        head = f'"id":"chatcmpl-{_ID}","object":"chat.completion.chunk"'
        pieces = [
            '"delta":{"role":"assistant","content":""},"finish_reason":null',
            '"delta":{"content":"In"},"finish_reason":null',
            '"delta":{},"finish_reason":"length"',
        ]
    rest = '"created":1795325284,"model":"demo-model"'
    events = [f'{{{head},{rest},"choices":[{{"index":0,{piece}}}]}}' for piece in pieces]
    return "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))


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
        "description": "Another refusal of the engine; its message, without its address.",
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


_CLIENTS_TAGS = frozenset(("Inference", "Models"))
_CLIENT_KEY = "A key of --api-key-file or --api-key, where the router has any"
CLIENT_KEYS: Schema = {
    "clientKey": {
        "type": "http",
        "scheme": "bearer",
        "description": f"{_CLIENT_KEY}, as OpenAI's clients send it.",
    },
    "clientKeyHeader": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": f"{_CLIENT_KEY}, as Anthropic's clients send it.",
    },
}


def with_keys(described: Schema) -> Schema:
    """The paths with what clients need for those that need a key; `{}`: a router without keys."""
    for operations in described.values():
        found: list[Schema] = [one for one in operations.values() if isinstance(one, dict)]
        for operation in found:
            if _CLIENTS_TAGS.intersection(operation["tags"]):
                operation["security"] = [{}, {"clientKey": []}, {"clientKeyHeader": []}]
    return described


def header_components() -> Schema:
    """The headers of answers, which `headers` names."""

    def header(text: str, schema: dict[str, Any]) -> dict[str, Any]:
        return {"description": text, "schema": schema, "required": True}

    text = {"type": "string", "minLength": 1}
    return {
        "RequestId": header("The client's own, else the response's id.", text),
        "RetryAfter": header("Seconds.", {"type": "integer", "minimum": 0}),
        "Allow": header("The methods that the path has.", text),
        "AuthenticateBearer": header("Bearer.", {"const": "Bearer"}),
    }
