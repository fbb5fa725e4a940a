"""The whole document. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from xpyd_router.openapi.answers import answer_schemas
from xpyd_router.openapi.errors import error_components
from xpyd_router.openapi.operations import paths
from xpyd_router.openapi.requests import chat_request, completion_request
from xpyd_router.serving import shapes

_SHAPES = (
    *(shapes.ModelList, shapes.Alive, shapes.Ready, shapes.NotReady, shapes.Version),
    *(shapes.Instances, shapes.AdminState, shapes.ErrorBody),
)
_ABOUT = """\
The HTTP entry of a fleet of LLM engines: OpenAI's inference API, the router's state, and an admin
API with a key of its own. Other methods of a path are answered 405 with Allow, other paths 404,
what is no HTTP 400, each as an error object. A client that leaves gets no answer; logs and metrics
show it as 499."""
_TAGS = {
    "Inference": "OpenAI's. The engines' fields stand on docs/engine.md.",
    "Models": "What can be served now.",
    "State": "Of the router.",
    "Admin": "Who is in the fleet with what to do, and cordons. Closed without --admin-key-file.",
}


def openapi_document(version: str) -> dict[str, Any]:
    """OpenAPI 3.1 of a router of this version."""
    _, made = msgspec.json.schema_components(_SHAPES, ref_template="#/components/schemas/{name}")
    for schema in made.values():  # also what has a default is always there
        schema["required"] = list(schema["properties"])
    schemas = {
        **made,
        **answer_schemas(),
        "CompletionRequest": completion_request(),
        "ChatCompletionRequest": chat_request(),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "xpyd router", "version": version, "description": _ABOUT},
        "tags": [{"name": name, "description": text} for name, text in _TAGS.items()],
        "paths": paths(),
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "responses": error_components(),
            "headers": _headers(),
            "securitySchemes": {
                "adminKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A key of --admin-key-file.",
                }
            },
        },
    }


def _headers() -> dict[str, Any]:
    def header(text: str, schema: dict[str, Any]) -> dict[str, Any]:
        return {"description": text, "schema": schema, "required": True}

    text = {"type": "string", "minLength": 1}
    return {
        "RequestId": header("The client's own, else the response's id.", text),
        "RetryAfter": {
            **header("Seconds.", {"type": "integer", "minimum": 0}),
            "required": False,
            "description": "Seconds. Always there, but for an engine's own 429 without it.",
        },
        "Allow": header("The methods that the path has.", text),
        "AuthenticateBearer": header("Bearer.", {"const": "Bearer"}),
    }
