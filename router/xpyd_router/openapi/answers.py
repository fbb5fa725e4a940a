"""Answers of the inference routes, which engines make and the router completes. Pure.

Only what every engine says is required: engines add fields, and the router passes them on.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}


def _object(required: Schema, optional: Schema | None = None, text: str = "") -> Schema:
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
    "description": "`stop`, `length`, or another of the engine's; null: it goes on.",
}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_EXTRAS: Schema = {
    "stop_reason": {"description": "What ended it: a text or a token's id."},
    "token_ids": {**_nullable(_IDS), "description": "With return_token_ids."},
    "prompt_token_ids": {**_nullable(_IDS), "description": "With return_token_ids."},
}
_TOKEN_LOGPROB: Schema = _object(
    {"token": _TEXT, "logprob": {"type": "number"}},
    {"bytes": _nullable({"type": "array", "items": {"type": "integer"}})},
)


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
    return _object(
        {
            **_named(of),
            "choices": {"type": "array", "items": choice, "minItems": 1},
            "usage": _ref("Usage"),
        },
    )


def _chunk(of: str, choice: Schema) -> Schema:
    return _object(
        {**_named(of), "choices": {"type": "array", "items": choice}},
        {"usage": _nullable(_ref("Usage"))},
        "One event of a stream. With include_usage the last has no choices and the usage.",
    )


def answer_schemas() -> dict[str, Schema]:
    """`components.schemas` of inference."""
    index, completion, chat = _COUNT, _ref("CompletionLogprobs"), _ref("ChatLogprobs")
    text = {"index": index, "text": _TEXT, "finish_reason": _FINISH}
    text_more = {"logprobs": _nullable(completion), **_EXTRAS}
    message = _object({"role": {"const": "assistant"}, "content": _nullable(_TEXT)})
    delta = _object({}, {"role": _TEXT, "content": _nullable(_TEXT)})
    chat_more = {"logprobs": _nullable(chat), **_EXTRAS}
    return {
        "Usage": _object(
            {"prompt_tokens": _COUNT, "total_tokens": _COUNT},
            {
                "completion_tokens": _COUNT,
                "prompt_tokens_details": _nullable(_OBJECT),
                "completion_tokens_details": _nullable(_OBJECT),
            },
        ),
        "CompletionLogprobs": _object(
            {"tokens": {"type": "array", "items": _TEXT}},
            {
                "token_logprobs": {"type": "array", "items": {"type": ["number", "null"]}},
                "top_logprobs": {"type": ["array", "null"], "items": _nullable(_OBJECT)},
                "text_offset": {"type": "array", "items": _COUNT},
            },
        ),
        "ChatLogprobs": _object(
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
        "Completion": _whole("Completion", _object(text, text_more)),
        "CompletionChunk": _chunk("CompletionChunk", _object(text, text_more)),
        "ChatCompletion": _whole(
            "ChatCompletion",
            _object({"index": index, "message": message, "finish_reason": _FINISH}, chat_more),
        ),
        "ChatCompletionChunk": _chunk(
            "ChatCompletionChunk",
            _object({"index": index, "delta": delta, "finish_reason": _FINISH}, chat_more),
        ),
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
    """A stream of one token, as it stands on the wire."""
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
