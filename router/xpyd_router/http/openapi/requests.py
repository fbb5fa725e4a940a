"""Bodies of the inference routes. Pure.

A field is checked by the router, which must act on it, or by the engine, whose 400 the client then
gets; `x-checked-by` says by whom. Fields that stand in neither list go to the engines unread, so
`additionalProperties` is true. What engines take beyond these stands on docs/engine.md.
"""

from __future__ import annotations

from typing import Any

from xpyd_router.request.client_request import MAX_CHOICES, MAX_NAME_CHARACTERS

Schema = dict[str, Any]
_LARGEST_INT = 2**63 - 1
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_MOST_LOGPROBS = 20


def _field(schema: Schema, text: str, by: str = "engine") -> Schema:
    """`schema`, also null: as if the field were not there."""
    nullable = dict(schema)
    if isinstance(schema.get("type"), str):
        nullable["type"] = [schema["type"], "null"]
    elif "anyOf" in schema:
        nullable["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    return {**nullable, "description": text, "x-checked-by": by}


def _integer(least: int | None = None, most: int | None = None) -> Schema:
    made: Schema = {"type": "integer"}
    if least is not None:
        made["minimum"] = least
    if most is not None:
        made["maximum"] = most
    return made


def _number(least: float, most: float, *, above: bool = False) -> Schema:
    return {"type": "number", "exclusiveMinimum" if above else "minimum": least, "maximum": most}


def _texts(most: int, characters: int) -> Schema:
    item: Schema = {"type": "string", "minLength": 1, "maxLength": characters}
    return {"type": "array", "items": item, "maxItems": most}


def _or(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


_BOOLEAN: Schema = {"type": "boolean"}
_TEXT: Schema = {"type": "string"}
_64_BIT = _integer(-_LARGEST_INT - 1, _LARGEST_INT)
_STREAM_OPTIONS: Schema = {
    "type": "object",
    "properties": {
        "include_usage": _field(_BOOLEAN, "A last chunk with the usage.", "router"),
        "continuous_usage_stats": _field(
            _BOOLEAN, "With include_usage: the usage so far in every chunk.", "router"
        ),
    },
}
# What the router reads.
_ROUTER: Schema = {
    "model": {
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_NAME_CHARACTERS,
        "description": "A name that GET /v1/models shows.",
        "x-checked-by": "router",
    },
    "stream": _field(_BOOLEAN, "The answer as server-sent events.", "router"),
    "stream_options": _field(_STREAM_OPTIONS, "Only with stream.", "router"),
    "max_tokens": _field(
        _integer(0, 2**62),
        "Tokens to generate at most. 0 only with echo or prompt_logprobs. Without it 16 of a "
        "completion, of a chat what the context has room for.",
        "router",
    ),
    "min_tokens": _field(_integer(0, 2**62), "Not more than max_tokens.", "router"),
    "n": _field(
        _integer(1, MAX_CHOICES),
        f"Choices for each prompt, at most {MAX_CHOICES} of all; engines allow fewer.",
        "router",
    ),
    "seed": _field(_64_BIT, "Without one the router draws one.", "router"),
    "return_token_ids": _field(_BOOLEAN, "As in vLLM.", "router"),
    "kv_transfer_params": {
        "type": "null",
        "description": "Set by the router, not by clients.",
        "x-checked-by": "router",
    },
    "priority": _field(
        _64_BIT,
        "Lower goes first, where the router has limits; the header X-Xpyd-Priority wins over it. "
        "Engines refuse it unless they schedule by it.",
    ),
    "user": _field(_TEXT, "The session, for --policy SessionAffinity."),
    "prompt_cache_key": _field(_TEXT, "The session, before `user`."),
}
# What goes on to the engines; the ranges are our engines', which are OpenAI's or vLLM's.
_ENGINE: Schema = {
    "temperature": _field(_number(0, 2), "0: greedy. Default: 1."),
    "top_p": _field(_number(0, 1, above=True), "Default: 1."),
    "top_k": _field(_integer(-1, 2**31 - 1), "0 and -1: off."),
    "min_p": _field(_number(0, 1), "Default: 0, off."),
    "presence_penalty": _field(_number(-2, 2), "Of tokens in the output."),
    "frequency_penalty": _field(_number(-2, 2), "Of tokens in the output."),
    "repetition_penalty": _field(_number(0, 1e6, above=True), "Of tokens in prompt or output."),
    "stop": _field(
        _or({**_TEXT, "minLength": 1, "maxLength": 1024}, _texts(16, 1024)),
        "Texts that end the answer.",
    ),
    "stop_token_ids": _field(
        {"type": "array", "items": _TOKEN_ID, "maxItems": 256}, "Tokens that end the answer."
    ),
    "bad_words": _field(_texts(256, 128), "Words that do not come."),
    "ignore_eos": _field(_BOOLEAN, "Generate until max_tokens."),
    "skip_special_tokens": _field(_BOOLEAN, "Default: true."),
    "include_stop_str_in_output": _field(_BOOLEAN, "Stop texts are part of the answer."),
    "prompt_logprobs": _field(
        _integer(0, _MOST_LOGPROBS), "Log probabilities of the prompt; not with stream."
    ),
    "cache_salt": _field(
        {**_TEXT, "maxLength": 1024}, "Prefixes are shared only within one cache_salt."
    ),
}
_IDS: Schema = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_PROMPT: Schema = {
    **_or(
        {**_TEXT, "minLength": 1},
        _IDS,
        {"type": "array", "items": {**_TEXT, "minLength": 1}, "minItems": 1, "maxItems": 256},
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": 256},
    ),
    "description": "A text, token ids, or several of either.",
    "x-checked-by": "engine",
}
_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]},
        "content": _or(_TEXT, {"type": "array", "items": _PART}),
        "name": {"type": ["string", "null"], "maxLength": 256},
    },
    "required": ["role", "content"],
}


def completion_request() -> Schema:
    """The body of POST /v1/completions."""
    own = {
        "prompt": _PROMPT,
        "echo": _field(_BOOLEAN, "The answer begins with the prompt.", "router"),
        "logprobs": _field(
            _integer(0, _MOST_LOGPROBS), "Log probabilities of so many tokens at each place."
        ),
    }
    return _body({**_head(), **own, **_rest()}, "prompt")


def chat_request() -> Schema:
    """The body of POST /v1/chat/completions."""
    own = {
        "messages": {
            "type": "array",
            "items": _MESSAGE,
            "minItems": 1,
            "maxItems": 4096,
            "description": "The chat so far.",
            "x-checked-by": "engine",
        },
        "max_completion_tokens": _field(
            _integer(0, 2**62), "As max_tokens, and wins over it.", "router"
        ),
        "logprobs": _field(_BOOLEAN, "Log probabilities of the answer's tokens."),
        "top_logprobs": _field(
            _integer(0, _MOST_LOGPROBS), "With logprobs: of so many tokens at each place."
        ),
    }
    return _body({**_head(), **own, **_rest()}, "messages")


def _head() -> Schema:
    return {"model": _ROUTER["model"]}


def _rest() -> Schema:
    return {name: schema for name, schema in (_ROUTER | _ENGINE).items() if name != "model"}


def _body(properties: Schema, required: str) -> Schema:
    return {
        "type": "object",
        "description": "Read as JSON, whatever Content-Type says. Fields that do not stand here "
        "go to the engines as they are.",
        "properties": properties,
        "required": ["model", required],
        "additionalProperties": True,
    }


EXAMPLES: dict[str, dict[str, Any]] = {
    "completions": {
        "whole": {
            "summary": "A completion",
            "value": {
                "model": "demo-model",
                "prompt": "San Francisco is a",
                "max_tokens": 5,
                "temperature": 0,
            },
        },
        "streamed": {
            "summary": "Streamed, with usage",
            "value": {
                "model": "demo-model",
                "prompt": "San Francisco is a",
                "max_tokens": 5,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        },
    },
    "chat/completions": {
        "whole": {
            "summary": "A chat",
            "value": {
                "model": "demo-model",
                "messages": [{"role": "user", "content": "Where is San Francisco?"}],
                "max_completion_tokens": 5,
            },
        },
    },
}
