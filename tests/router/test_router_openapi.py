"""The published document says what the code has: routes, errors, fields, examples."""

from __future__ import annotations

import ast
import json
import re
import time
from pathlib import Path
from typing import Any

import jsonschema_rs
import orjson
import pytest
import schemathesis

import xpyd_router
from tests.router.fakes import fleet
from xpyd_core import __version__
from xpyd_core.errors import ApiError
from xpyd_router.admission import _REFUSALS
from xpyd_router.http.app import admin_app, quart_app
from xpyd_router.http.openapi.document import chat_request, completion_request, openapi_document
from xpyd_router.http.openapi.errors import ERRORS
from xpyd_router.request.client_request import ENDPOINTS, parse_request
from xpyd_router.translations import make_apis
from xpyd_router.translations.messages import Messages
from xpyd_router.translations.responses import Responses
from xpyd_worker.server.openai.params import parse_chat, parse_completion

DOCUMENT = openapi_document(__version__)
ADMIN = openapi_document(__version__, is_admin=True)
ROUTER = Path(xpyd_router.__file__).parent
# Calls whose status is no literal: where, and which statuses they give.
COMPUTED: dict[str, set[tuple[int, str | None]]] = {
    "http/app.py": {(404, None), (405, None), (408, None), (413, None)},
    "http/protocol.py": {(400, None), (431, None)},
    "admission.py": {(status, code) for status, code, _ in _REFUSALS.values()},
    "request/attempt.py": set(),  # an engine's own 4xx, which is 4XX in the document
}
SAID_BY_ENGINES = {(400, "context_length_exceeded"), (400, "grammar_failed")}


@pytest.mark.parametrize("document", [DOCUMENT, ADMIN], ids=["clients", "admin"])
def test_the_document_is_openapi(document: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(document).validate()
    names = set(re.findall(r'"#/(components/[^"]+)"', json.dumps(document)))
    for name in names:
        found: Any = document
        for part in name.split("/"):
            found = found[part]


async def test_a_router_publishes_it() -> None:
    async with fleet() as f:
        async with f.http.get(f"{f.base}/openapi.json") as response:
            assert response.content_type == "application/json"
            assert await response.json() == DOCUMENT
        async with f.http.get(f"{f.admin}/openapi.json") as response:
            assert await response.json() == ADMIN
        async with f.http.get(f"{f.base}/version") as response:
            assert await response.json() == {"version": __version__}


@pytest.mark.parametrize("document", [DOCUMENT, ADMIN], ids=["clients", "admin"])
async def test_every_route_is_described_and_no_other(document: dict[str, Any]) -> None:
    found: set[tuple[str, str]] = set()

    async with fleet() as fleet_:
        state = fleet_.router.state
        app = admin_app(state) if document is ADMIN else quart_app(state, make_apis(time.time))
        for rule in app.url_map.iter_rules():
            path = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule)
            # Every path has OPTIONS, and with GET also HEAD.
            methods = set(rule.methods or ()) - {"OPTIONS", "HEAD"}
            found.update((path, method.lower()) for method in methods)
    described = {
        (path, method)
        for path, item in document["paths"].items()
        for method in item
        if method != "parameters"
    }
    assert found == described


def raised() -> set[tuple[int, str | None]]:
    """Status and code of every ApiError in the router's source."""
    found: set[tuple[int, str | None]] = set()
    for path in ROUTER.rglob("*.py"):
        where = str(path.relative_to(ROUTER))
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ApiError"):
                continue
            codes = [k.value for k in node.keywords if k.arg == "code"]
            if isinstance(node.args[0], ast.Constant):
                code = ast.literal_eval(codes[0]) if codes else None
                found.add((node.args[0].value, code))
            elif where != "http/openapi/responses.py":  # examples of the document itself
                assert where in COMPUTED, f"{where}:{node.lineno}: which statuses are these?"
                found |= COMPUTED[where]
    return found


def test_every_error_of_the_code_is_listed_and_no_other() -> None:
    assert {(kind.status, kind.code) for kind in ERRORS} == raised() | SAID_BY_ENGINES


def test_every_error_of_inference_is_an_answer_of_it() -> None:
    elsewhere = {403, 405, 409}
    wanted = {str(kind.status) for kind in ERRORS} - {str(s) for s in elsewhere}
    for endpoint in ENDPOINTS:
        responses = DOCUMENT["paths"][f"/v1/{endpoint}"]["post"]["responses"]
        assert set(responses) == wanted | {"200", "4XX"}


def test_the_table_of_errors_on_the_page_is_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs/router.md").read_text()
    section = page.partition("\n## Errors\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d{3}(?:, \d{3})*) \| (?:`(\w+)`)? *\|", section, re.M)
    found = {(int(one), code or None) for statuses, code in rows for one in statuses.split(", ")}
    assert found == {(kind.status, kind.code) for kind in ERRORS}


def validator(schema: dict[str, Any]) -> Any:
    return jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def examples() -> list[tuple[dict[str, Any], Any]]:
    """Each example with its schema."""
    found: list[tuple[dict[str, Any], Any]] = []

    def look(node: Any) -> None:
        if isinstance(node, dict):
            if "schema" in node:
                values = [one["value"] for one in node.get("examples", {}).values()]
                values += [node["example"]] if "example" in node else []
                found.extend((node["schema"], value) for value in values)
            for value in node.values():
                look(value)

    look(DOCUMENT)
    return found


def test_examples_fit_their_schemas() -> None:
    found = examples()
    assert len(found) > 25
    for schema, value in found:
        if isinstance(value, str):  # a stream: the schema is of each event
            events = value.split("\n\n")[:-1]
            assert events[-1] == "data: [DONE]"
            inner = schema["else"]["properties"]["data"]["contentSchema"]
            for event in events[:-1]:
                validator(inner).validate(json.loads(event.removeprefix("data: ")))
        else:
            validator(schema).validate(value)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_requests_of_the_examples_are_taken(endpoint: Any) -> None:
    parse = parse_completion if endpoint == "completions" else parse_chat
    content = DOCUMENT["paths"][f"/v1/{endpoint}"]["post"]["requestBody"]["content"]
    for example in content["application/json"]["examples"].values():
        ask = parse_request(endpoint, orjson.dumps(example["value"]))
        parse(ask.raw)


def test_messages_of_the_examples_are_taken() -> None:
    for path, read in (
        ("/v1/messages", Messages().read),
        ("/v1/messages/count_tokens", Messages().tokenize_body),
        ("/v1/responses/input_tokens", Responses(None, lambda: 0).tokenize_body),
    ):
        content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]
        read(orjson.dumps(content["application/json"]["example"]))


def test_messages_are_checked_as_the_document_says() -> None:
    fields = DOCUMENT["components"]["schemas"]["MessagesRequest"]["properties"]
    turn = {"role": "user", "content": "x"}
    body = {"model": "m", "max_tokens": 5, "messages": [turn]}
    for name, schema in fields.items():
        wrong = [value for value in ANY_VALUES if not validator(schema).is_valid(value)]
        assert len(wrong) > 5 or schema.get("description") == "Changes nothing."
        for value in wrong:
            with pytest.raises(ApiError) as error:
                Messages().read(json.dumps({**body, name: value}).encode())
            assert error.value.message.startswith(name), (name, value)


BODIES = {"completions": completion_request(), "chat/completions": chat_request()}
WRONG: dict[str, tuple[Any, ...]] = {
    "boolean": (0, 1, "true", [], {}),
    "integer": (True, 1.5, "1", [1], {}),
    "object": (True, 1, "x", []),
    "string": (1, True, ["m"], {}, ""),
    "null": ({}, {"seed": 1}, [], True, 0),
}


@pytest.mark.parametrize("endpoint", BODIES)
def test_the_router_checks_what_the_document_says_that_it_checks(endpoint: Any) -> None:
    fields = BODIES[endpoint]["properties"]
    checked = {name: s for name, s in fields.items() if s["x-checked-by"] == "router"}
    assert len(checked) >= 9
    for name, schema in checked.items():
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        values = list(WRONG[kinds[0]])
        if "minimum" in schema and name != "seed":  # any integer is a seed: it goes on as it is
            values.append(schema["minimum"] - 1)
        if name == "n":
            values.append(schema["maximum"] + 1)
        for value in values:
            body = {"model": "m", "stream": name == "stream_options", name: value}
            with pytest.raises(ApiError) as error:
                parse_request(endpoint, orjson.dumps(body))
            assert (error.value.status, error.value.param) == (400, name), value
        if "null" in kinds:
            parse_request(endpoint, orjson.dumps({"model": "m", name: None}))


ANY_VALUES: tuple[Any, ...] = (
    *(True, 0, 1, -3, 1.5, 1e9, 2**70, "", "x", "x" * 2000),
    *([], [""], [-1], [1.5], [[]], [{}], ["x"] * 300, [1] * 300, {}, {"x": 1}),
)


@pytest.mark.parametrize("endpoint", BODIES)
def test_our_engines_check_what_the_document_says_that_engines_check(endpoint: Any) -> None:
    fields = BODIES[endpoint]["properties"]
    checked = {name: s for name, s in fields.items() if s["x-checked-by"] == "engine"}
    parse = parse_completion if endpoint == "completions" else parse_chat
    body = {"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    for name, schema in checked.items():
        wrong = [value for value in ANY_VALUES if not validator(schema).is_valid(value)]
        assert len(wrong) > 5
        for value in wrong:
            with pytest.raises(ApiError) as error:
                parse(json.dumps({**body, name: value}).encode())
            assert error.value.status == 400
            assert (error.value.param or "").startswith(name), (name, value)


@pytest.mark.parametrize("name", ["include_usage", "continuous_usage_stats"])
def test_it_checks_the_options_of_streams(name: str) -> None:
    body = {"model": "m", "stream": True, "stream_options": {name: 1}}
    with pytest.raises(ApiError, match=name):
        parse_request("completions", orjson.dumps(body))
