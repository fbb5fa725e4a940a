"""Anthropic's Messages in the OpenAPI document: its paths, bodies, answers, events and errors."""

from __future__ import annotations

from typing import Any

from xpyd_core.openai import body_schema
from xpyd_router.http.openapi.responses import error_components, headers, object_schema
from xpyd_router.translations.messages import CountRequest, MessagesRequest

Json = dict[str, Any]
_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_ID = "f51573d36cde76ee3913bd1cc83f7362"
_TURN: Json = {"role": "user", "content": "Where is San Francisco?"}
_ASKED: Json = {"model": "demo-model", "max_tokens": 5, "messages": [_TURN]}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _body(kind: type[CountRequest]) -> Json:
    description = "Read as JSON, whatever the Content-Type. Fields that are not listed are refused."
    return {**body_schema(kind), "description": description, "additionalProperties": False}


def message_schemas() -> Json:
    """`components.schemas` of this API."""
    blocks = {"type": "array", "items": object_schema({"type": _TEXT})}
    error = object_schema({"type": _TEXT, "message": _TEXT})
    return {
        "MessagesRequest": _body(MessagesRequest),
        "CountTokensRequest": _body(CountRequest),
        "Message": object_schema(
            {
                "id": {"type": "string", "pattern": "^msg_[0-9a-f]{32}$"},
                "type": {"const": "message"},
                "role": {"const": "assistant"},
                "model": _TEXT,
                "content": {**blocks, "description": "Blocks: thinking, text, tool_use."},
                "stop_reason": {
                    "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal"]
                },
                "stop_sequence": {"type": ["string", "null"]},
                "usage": object_schema(
                    {
                        "input_tokens": {**_COUNT, "description": "Without those of the cache."},
                        "cache_creation_input_tokens": _COUNT,
                        "cache_read_input_tokens": _COUNT,
                        "output_tokens": _COUNT,
                    }
                ),
            }
        ),
        "MessageEvent": object_schema({"type": _TEXT}, text="The event's name is its type."),
        "MessageTokens": object_schema({"input_tokens": _COUNT}),
        "MessageError": {
            **object_schema(
                {"type": {"const": "error"}, "error": error}, text="As Anthropic writes it."
            ),
            "properties": {
                "type": {"const": "error"},
                "error": error,
                "request_id": {"type": ["string", "null"]},
            },
        },
    }


def _content(name: str, example: Json | None = None) -> Json:
    media: Json = {"schema": _ref(name)}
    return {"application/json": media if example is None else {**media, "example": example}}


def _errors(responses: Json) -> Json:
    """The refusals of another operation's `responses`, in Anthropic's format."""
    made: Json = {}
    known = error_components()
    for status, response in responses.items():
        if status != "200":
            found = known[response["$ref"].rpartition("/")[2]]
            made[status] = {**found, "content": _content("MessageError")}
    return made


def message_paths(inference: Json, text: Json) -> Json:
    """`paths` of this API; `inference` and `text` are the operations of a chat and of /tokenize,
    whose headers and refusals it shares."""
    whole: Json = {
        "id": f"msg_{_ID}",
        "type": "message",
        "role": "assistant",
        "model": "demo-model",
        "content": [{"type": "text", "text": "In California, on the"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 5,
        },
    }
    event = {"contentMediaType": "application/json", "contentSchema": _ref("MessageEvent")}
    events: Json = {
        "type": "object",
        "properties": {"event": _TEXT, "data": {**_TEXT, **event}},
        "required": ["data"],
    }
    counted: Json = {name: one for name, one in _ASKED.items() if name != "max_tokens"}
    answer: Json = {
        "description": "The message; with `stream` its events, the last one message_stop, or error "
        "where the stream fails.",
        "headers": headers({"X-Request-Id": "RequestId", "request-id": "RequestId"}),
        "content": {**_content("Message", whole), "text/event-stream": {"schema": events}},
    }
    count: Json = {"description": "The count.", "content": _content("MessageTokens")}
    return {
        "/v1/messages": {
            "post": {
                "operationId": "createMessage",
                "tags": ["Inference"],
                "summary": "Anthropic's messages, as chats.",
                "parameters": inference["parameters"],
                "requestBody": {"required": True, "content": _content("MessagesRequest", _ASKED)},
                "responses": {"200": answer, **_errors(inference["responses"])},
            }
        },
        "/v1/messages/count_tokens": {
            "post": {
                "operationId": "countMessageTokens",
                "tags": ["Models"],
                "summary": "Tokens of a message's prompt, by any instance of the model.",
                "requestBody": {
                    "required": True,
                    "content": _content("CountTokensRequest", counted),
                },
                "responses": {"200": count, **_errors(text["responses"])},
            }
        },
    }
