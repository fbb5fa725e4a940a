"""The OpenAPI documents of both ports: paths, the operations of each, all that they refer to. Pure.

The bodies of the inference routes come from the structs that router and engine read them with. A
field is checked by the router, which acts on it, or by the engine, whose 400 the client then gets:
`x-checked-by` names which. Other fields go to the engines unread, so `additionalProperties` holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from xpyd_core.openai import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RoutedChat,
    RoutedCompletion,
    TokenizeRequest,
    body_schema,
)
from xpyd_router.http import shapes
from xpyd_router.http.openapi.messages import message_paths, message_schemas
from xpyd_router.http.openapi.responses import (
    CLIENT_KEYS,
    ENGINE_REFUSAL,
    answer_example,
    answer_schemas,
    error_components,
    error_responses,
    event_schema,
    header_components,
    headers,
    named_event_schema,
    response_schemas,
    stream_example,
    with_keys,
)
from xpyd_router.translations.responses import ResponsesRequest
from xpyd_router.translations.responses_items import MAX_PAGE

Json = dict[str, Any]
_BODY = (
    "Read as JSON, whatever the Content-Type. Fields that are not listed go to the engines "
    "unchanged."
)
_SET_BY_ROUTER: Json = {
    "type": "null",
    "description": "Set by the router, not by clients.",
    "x-checked-by": "router",
}


def completion_request() -> Json:
    """The body of POST /v1/completions."""
    return _body(RoutedCompletion, CompletionRequest)


def chat_request() -> Json:
    """The body of POST /v1/chat/completions."""
    return _body(RoutedChat, ChatRequest)


def _body(routed: type[msgspec.Struct], engine: type[msgspec.Struct]) -> Json:
    schema = body_schema(routed, engine)
    properties: Json = schema["properties"]
    properties["model"]["type"] = "string"  # engines alone do without it
    return {
        "type": "object",
        "description": _BODY,
        "properties": {**properties, "kv_transfer_params": _SET_BY_ROUTER},
        "required": ["model", *schema["required"]],
        "additionalProperties": True,
    }


def responses_request() -> Json:
    """The body of POST /v1/responses."""
    schema = body_schema(ResponsesRequest)
    schema["properties"]["model"]["type"] = "string"
    return {
        **schema,
        "description": "Fields that are not listed change nothing, but for those of vLLM's.",
        "required": ["model", "input"],
        "additionalProperties": True,
    }


def tokenize_request() -> Json:
    """The body of POST /tokenize."""
    return _text_body(TokenizeRequest)


def detokenize_request() -> Json:
    """The body of POST /detokenize."""
    return _text_body(DetokenizeRequest)


def _text_body(kind: type[msgspec.Struct]) -> Json:
    return {**body_schema(kind), "description": _BODY, "additionalProperties": True}


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


# A head may be broken or too long, whatever is asked for.
_ANY = (400, 431)
_INFERENCE = (*_ANY, 401, 404, 408, 413, 422, 429, 500, 502, 503, 504)
_TEXT = (*_ANY, 401, 404, 408, 413, 500, 502, 503, 504)
_ADMIN = (*_ANY, 401, 403)
_NAMES = {"completions": "Completion", "chat/completions": "ChatCompletion"}


def paths() -> Json:
    """`paths` of the port of clients."""
    chat = _inference("chat/completions", "createChatCompletion")
    tokenize = _text("Tokenize", "tokenize", {"prompt": "San Francisco is a"})
    return {
        "/v1/completions": {"post": _inference("completions", "createCompletion")},
        "/v1/chat/completions": {"post": chat},
        **message_paths(chat, tokenize),
        "/v1/responses": {"post": _responses()},
        "/v1/responses/{response_id}": {
            "parameters": [_RESPONSE],
            "get": _read("getResponse", "Inference", "Response", _KEPT, 401, 404),
            "delete": _read("deleteResponse", "Inference", "ResponseDeleted", _DELETED, 401, 404),
        },
        "/v1/responses/{response_id}/input_items": {
            "parameters": [_RESPONSE],
            "get": _input_items(),
        },
        "/v1/responses/input_tokens": {"post": _input_tokens(tokenize)},
        "/v1/responses/{response_id}/cancel": {
            "parameters": [_RESPONSE],
            "post": _read("cancelResponse", "Inference", "Response", _CANCEL, 401, 404),
        },
        "/tokenize": {"post": tokenize},
        "/detokenize": {"post": _text("Detokenize", "detokenize", {"tokens": [19, 11, 6]})},
        "/v1/models": {"get": _read("listModels", "Models", "ModelList", _MODELS, 401)},
        "/v1/models/{name}": {
            "parameters": [_path("name", "A model's name; it may have slashes in it.")],
            "get": _read("getModel", "Models", "Model", "One model.", 401, 404),
        },
        **_state_paths(),
    }


def _state_paths() -> Json:
    """Paths that both ports have."""
    return {
        "/health": {"get": _read("health", "State", "Alive", _HEALTH)},
        "/readiness": {"get": _readiness()},
        "/version": {"get": _read("version", "State", "Version", "The router's version.")},
        "/openapi.json": {"get": _plain("openapi", *_DOCUMENT, "application/json", "object")},
    }


def admin_paths() -> Json:
    """`paths` of the admin port."""
    return {
        **_state_paths(),
        "/metrics": {
            "get": _plain("metrics", *_METRICS, "text/plain", "string", _NAMES_OF_METRICS)
        },
        "/instances": {"get": _read("listInstances", "State", "Instances", _INSTANCES)},
        "/admin/state": {
            "get": _admin("adminState", "AdminState", "The router, and all instances."),
        },
        "/admin/instances/{name}": {
            "parameters": [_INSTANCE],
            "get": _admin("adminInstance", "AdminInstance", "One instance.", 404, 409),
        },
        "/admin/instances/{name}/cordon": {
            "parameters": [_INSTANCE],
            "post": _admin("cordon", "AdminInstance", _CORDON, 404, 409),
        },
        "/admin/instances/{name}/uncordon": {
            "parameters": [_INSTANCE],
            "post": _admin("uncordon", "AdminInstance", _UNCORDON, 404, 409),
        },
    }


_KEPT = "A response that the router keeps."
_ITEMS = "Items of the input of a response that the router keeps."
_DELETED = "The router keeps it no more."
_CANCEL = "Refused: a response that is kept has ended."
_MODELS = "The models that can be served now."
_HEALTH = "200 while the process works."
_INSTANCES = "The registry. It shows engine addresses: do not expose it to clients."
_CORDON = "The instance gets no new requests from this router; running ones go on."
_UNCORDON = "The instance gets requests again."
_METRICS = ("Prometheus' text format.", "The samples.")
_NAMES_OF_METRICS: Json = {
    "name": "name[]",
    "in": "query",
    "required": False,
    "description": "Only these metrics, as Prometheus' client libraries take them.",
    "schema": {"type": "array", "items": {"type": "string"}},
}
_DOCUMENT = ("This document.", "OpenAPI 3.1.")


_NAME = {"type": "string", "minLength": 1}


def _path(name: str, text: str, pattern: str = "") -> Json:
    schema = {"type": "string", "pattern": pattern} if pattern else _NAME
    return {"name": name, "in": "path", "required": True, "description": text, "schema": schema}


_RESPONSE = _path("response_id", "A response's id.", "^resp_[0-9a-f]{32}$")
_INSTANCE = _path("name", "The instance's HTTP address, or the name it gives itself.")


def _header(name: str, text: str) -> Json:
    return {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}


_CLIENT_HEADERS = [
    _header("X-Request-Id", "Returned, and used for nothing else."),
    _header("X-Session-Id", "The session, for --policy SessionAffinity."),
    _header(
        "X-Xpyd-Priority",
        "`High`, `Normal`, `Low` or a number; read where the router has limits.",
    ),
    _header("traceparent", "W3C trace context, for the engines."),
    _header("tracestate", "W3C trace state, sent with traceparent."),
]


def _schema(name: str) -> Json:
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}


def _answer(name: str, text: str) -> Json:
    return {"description": text, "content": {"application/json": _schema(name)}}


def _read(operation: str, tag: str, schema: str, text: str, *errors: int) -> Json:
    return {
        "operationId": operation,
        "tags": [tag],
        "summary": text,
        "responses": {"200": _answer(schema, text), **error_responses(*_ANY, *errors)},
    }


def _admin(operation: str, schema: str, text: str, *errors: int) -> Json:
    made = _read(operation, "Admin", schema, text, *_ADMIN, *errors)
    return {**made, "security": [{"adminKey": []}]}


def _readiness() -> Json:
    ready = "200 while requests may be sent to this router; without a pair they wait."
    made = _read("readiness", "State", "Ready", ready, 400)
    made["parameters"] = [
        {
            "name": "pairs",
            "in": "query",
            "description": "true: 200 only while an instance can serve a request now, too.",
            "schema": {"type": "string", "enum": ["true", "false"], "default": "false"},
        }
    ]
    made["responses"]["503"] = _answer(
        "NotReady", "The router drains or starts; with `pairs=true` also: no pair can be picked."
    )
    return made


def _plain(
    operation: str, text: str, answer: str, media: str, kind: str, *parameters: Json
) -> Json:
    """The operation of a GET whose answer is no struct of `shapes`."""
    made = _read(operation, "State", "Alive", text)
    if parameters:
        made["parameters"] = [*made.get("parameters", []), *parameters]
    content = {media: {"schema": {"type": kind}}}
    made["responses"]["200"] = {"description": answer, "content": content}
    return made


def _inference(endpoint: Literal["completions", "chat/completions"], operation: str) -> Json:
    name = _NAMES[endpoint]
    return {
        "operationId": operation,
        "tags": ["Inference"],
        "summary": f"OpenAI's {endpoint}, by a prefill and a decode instance.",
        "parameters": _CLIENT_HEADERS,
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {**_schema(f"{name}Request"), "examples": EXAMPLES[endpoint]}
            },
        },
        "responses": {
            "200": {
                "description": "The answer; with `stream` its events, each `data: ` and a "
                f"{name}Chunk, the last `data: [DONE]`. A stream that fails ends with an event "
                "of the error object instead.",
                "headers": headers({"X-Request-Id": "RequestId"}),
                "content": {
                    "application/json": {**_schema(name), "example": answer_example(endpoint)},
                    "text/event-stream": {
                        "schema": event_schema(f"{name}Chunk"),
                        "example": stream_example(endpoint),
                    },
                },
            },
            **error_responses(*_INFERENCE),
            "4XX": {"$ref": f"#/components/responses/{ENGINE_REFUSAL}"},
        },
    }


def _responses() -> Json:
    made = _inference("chat/completions", "createResponse")
    ask: Json = {"model": "demo-model", "input": "Where is San Francisco?", "max_output_tokens": 5}
    made["summary"] = "OpenAI's responses, as chats."
    made["requestBody"]["content"]["application/json"] = {
        **_schema("ResponsesRequest"),
        "examples": {"whole": {"summary": "A response", "value": ask}},
    }
    made["responses"]["200"] |= {
        "description": "The response; with `stream` its events, each with its type as its name. "
        "The last one has the response: completed, incomplete or failed.",
        "content": {
            "application/json": _schema("Response"),
            "text/event-stream": {"schema": named_event_schema("ResponseEvent")},
        },
    }
    return made


def _input_items() -> Json:
    made = _read("listInputItems", "Inference", "ResponseItems", _ITEMS, 404)
    made["parameters"] = [
        _query("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": 20}),
        _query("order", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
        _query("after", {"type": "string", "description": "The id of the item before the page."}),
    ]
    return made


def _query(name: str, schema: Json) -> Json:
    return {"name": name, "in": "query", "schema": schema}


def _input_tokens(text: Json) -> Json:
    """`text` is the operation of /tokenize, whose refusals it shares."""
    body = {**_schema("ResponsesRequest"), "example": {"model": "demo-model", "input": "Hello"}}
    return {
        "operationId": "countInputTokens",
        "tags": ["Models"],
        "summary": "Tokens of a response's prompt, by any instance of the model.",
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {**text["responses"], "200": _answer("ResponseTokens", "The count.")},
    }


def _text(name: str, operation: str, example: Json) -> Json:
    """A POST that any instance of a model answers."""
    body = {**_schema(f"{name}Request"), "example": example}
    return {
        "operationId": operation,
        "tags": ["Models"],
        "summary": f"vLLM's /{operation}, by any instance of the model.",
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {
            "200": _answer(f"{name}Answer", "The engine's answer."),
            **error_responses(*_TEXT),
            "4XX": {"$ref": f"#/components/responses/{ENGINE_REFUSAL}"},
        },
    }


_STATE_SHAPES = (shapes.Alive, shapes.Ready, shapes.NotReady, shapes.Version, shapes.ErrorBody)
_SHAPES = (*_STATE_SHAPES, shapes.ResponseDeleted, shapes.ModelList)
_ADMIN_SHAPES = (*_STATE_SHAPES, shapes.Instances, shapes.AdminState)
_ABOUT = """\
The HTTP entry of a fleet of LLM engines: OpenAI's inference API and whether the router serves. Its
admin port has metrics, instances and the admin API. Other methods of a path are answered 405 with
Allow, other paths 404, bytes that are not HTTP 400, each as an error object. A client that leaves
gets no answer; logs and metrics show it as 499."""
_ABOUT_ADMIN = """\
The admin port of a router, which is not for clients: metrics, the engines that the router knows,
and an admin API with a key of its own. docs/openapi/router.json has the port of clients."""
_ADMIN_KEY: Json = {
    "type": "http",
    "scheme": "bearer",
    "description": "A key of --admin-key-file.",
}
_TAGS = {
    "Inference": "OpenAI's inference routes. docs/engine.md has the engines' fields.",
    "Models": "Models that can be served now, and their tokenizers.",
    "State": "The state of the router, and on the admin port of its instances.",
    "Admin": "Instances with their loads, and cordons. Closed without --admin-key-file.",
}


def openapi_document(version: str, *, is_admin: bool = False) -> dict[str, Any]:
    """OpenAPI 3.1 of a router of this version: of the port of clients, or the admin port."""
    if is_admin:
        return _document(
            ("xpyd router, admin port", version, _ABOUT_ADMIN),
            tags=("State", "Admin"),
            paths=admin_paths(),
            schemas=_shape_schemas(_ADMIN_SHAPES),
            more={"securitySchemes": {"adminKey": _ADMIN_KEY}},
        )
    schemas = {
        **_shape_schemas(_SHAPES),
        **answer_schemas(),
        **message_schemas(),
        **response_schemas(),
        "ResponsesRequest": responses_request(),
        "CompletionRequest": completion_request(),
        "ChatCompletionRequest": chat_request(),
        "TokenizeRequest": tokenize_request(),
        "DetokenizeRequest": detokenize_request(),
    }
    return _document(
        ("xpyd router", version, _ABOUT),
        tags=("Inference", "Models", "State"),
        paths=with_keys(paths()),
        schemas=schemas,
        more={"securitySchemes": CLIENT_KEYS},
    )


def _shape_schemas(kinds: Sequence[type[msgspec.Struct]]) -> Json:
    _, made = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for schema in made.values():  # also what has a default is always there
        schema["required"] = list(schema["properties"])
    return made


def _document(
    about: tuple[str, str, str], *, tags: Sequence[str], paths: Json, schemas: Json, more: Json
) -> Json:
    """`about` is title, version and description; `more` are further components."""
    title, version, text = about
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "description": text},
        "tags": [{"name": name, "description": _TAGS[name]} for name in tags],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": error_components(),
            "headers": header_components(),
            **more,
        },
    }
