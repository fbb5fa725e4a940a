"""Bodies of the inference routes, from the structs that router and engine read them with. Pure.

A field is checked by the router, which acts on it, or by the engine, whose 400 the client then
gets: `x-checked-by` names which. Other fields go to the engines unread, so `additionalProperties`
is true.
"""

from __future__ import annotations

from typing import Any

import msgspec

from xpyd_core.openai import (
    ChatRequest,
    CompletionRequest,
    RoutedChat,
    RoutedCompletion,
    body_schema,
)

Schema = dict[str, Any]
_ABOUT = (
    "Read as JSON, whatever Content-Type says. Fields that are not listed go to the engines "
    "unchanged."
)
_SET_BY_ROUTER: Schema = {
    "type": "null",
    "description": "Set by the router, not by clients.",
    "x-checked-by": "router",
}


def completion_request() -> Schema:
    """The body of POST /v1/completions."""
    return _body(RoutedCompletion, CompletionRequest)


def chat_request() -> Schema:
    """The body of POST /v1/chat/completions."""
    return _body(RoutedChat, ChatRequest)


def _body(routed: type[msgspec.Struct], engine: type[msgspec.Struct]) -> Schema:
    schema = body_schema(routed, engine)
    properties: Schema = schema["properties"]
    properties["model"]["type"] = "string"  # engines alone do without it
    return {
        "type": "object",
        "description": _ABOUT,
        "properties": {**properties, "kv_transfer_params": _SET_BY_ROUTER},
        "required": ["model", *schema["required"]],
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
