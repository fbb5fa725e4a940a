"""Schemas that are wrong, huge, deep or made to explode, by three APIs, through P and D: each gets
an answer of its API, valid or a 400 with the place as the client wrote it. Streams beside them go
on, and no engine is blamed.
"""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from dataclasses import dataclass

import jsonschema_rs
import pytest

from tests.e2e.harness import Fleet, fleet, http, wait_for
from tests.e2e.wholes import Json

BYSTANDERS = 4
ANSWER_S = 60.0


def nested(depth: int) -> Json:
    schema: Json = {"type": "string", "maxLength": 4}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubled(depth: int) -> Json:
    schema: Json = {"type": "string", "maxLength": 4}
    for _ in range(depth):
        schema = {"anyOf": [{"type": "array", "items": schema}, {"properties": {"a": schema}}]}
    return schema


def both(*schemas: Json) -> Json:
    return {"allOf": list(schemas)}


LOST: Json = {"$ref": "#/$defs/nowhere"}
CASES: dict[str, tuple[Json, str | None]] = {
    "a type that is none": ({"type": "text"}, ".type"),
    "a keyword that cannot be followed": ({"not": {}}, ".not"),
    "members that are no schemas": ({"properties": [1]}, ".properties"),
    "a reference to nothing": (LOST, ""),
    "a huge enum": ({"enum": [f"value {i}" for i in range(10_000)]}, None),
    "too huge an enum": ({"enum": [f"value {i}" for i in range(10_001)]}, ".enum"),
    "deeply nested": (nested(30), None),
    "too deeply nested": (nested(80), ""),
    "twice as large with each level": (doubled(6), None),
    "a thousand members": (
        {"type": "object", "properties": {f"m{i}": {"type": "null"} for i in range(1000)}},
        None,
    ),
    "a pattern of many states": ({"type": "string", "pattern": "^(.*a){30}$"}, None),
    "a pattern in a pattern": ({"type": "string", "pattern": "^(x?){500}x{500}$"}, None),
    "patterns that all hold": (both(*[{"pattern": f"{i}.*"} for i in range(16)]), ""),
    "more patterns that all hold": (
        both(*[both({"pattern": f"{i}.*"}, {"pattern": f"x{i}"}) for i in range(16)]),
        "",
    ),
    "steps that multiply": (both({"multipleOf": 9973}, {"multipleOf": 9967}), ""),
    "a step of many digits": ({"type": "number", "multipleOf": 9999.99}, ".multipleOf"),
}
"""The schema, and what its place in an error ends with; None: it is accepted."""


@dataclass(frozen=True)
class Way:
    """How an API takes a schema. `place`: where in the request."""

    path: str
    body: Json
    place: str


ASKED = [{"role": "user", "content": "x"}]
TOKENS = 24


def ways(schema: Json) -> dict[str, Way]:
    inside = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
    form = {"name": "x", "schema": schema}
    chat = {"messages": ASKED, "max_tokens": TOKENS}
    response = {"input": "x", "max_output_tokens": TOKENS}
    tool = {"name": "f", "parameters": inside}
    use = {"name": "f", "input_schema": inside}
    return {
        "chat": Way(
            "chat/completions",
            {**chat, "response_format": {"type": "json_schema", "json_schema": form}},
            "response_format.json_schema.schema",
        ),
        "chat's tool": Way(
            "chat/completions",
            {**chat, "tools": [{"type": "function", "function": tool}], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        "message": Way(
            "messages",
            {**chat, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
            "output_config.format.schema",
        ),
        "message's tool": Way(
            "messages",
            {**chat, "tools": [use], "tool_choice": {"type": "any"}},
            "tools[0].input_schema",
        ),
        "response": Way(
            "responses",
            {**response, "text": {"format": {"type": "json_schema", **form}}},
            "text.format.schema",
        ),
        "response's tool": Way(
            "responses",
            {**response, "tools": [{"type": "function", **tool}], "tool_choice": "required"},
            "tools[0].parameters",
        ),
    }


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(tmp_path_factory.mktemp("hostile"), prefill=1, decode=1) as running:
        yield running


def text_of(path: str, answer: Json) -> str | None:
    """The text of a whole answer that has ended by itself; None for calls, and for what was cut."""
    if path == "messages":
        texts = [one["text"] for one in answer["content"] if one["type"] == "text"]
        return texts[0] if answer["stop_reason"] == "end_turn" else None
    if path == "responses":
        texts = [part["text"] for item in answer["output"] for part in item.get("content", ())]
        return texts[0] if answer["status"] == "completed" and texts else None
    choice = answer["choices"][0]
    return choice["message"]["content"] if choice["finish_reason"] == "stop" else None


def check(schema: Json, place: str | None, way: Way, status: int, body: bytes) -> None:
    answer = json.loads(body)
    if status == 200:
        assert place is None
        text = text_of(way.path, answer)
        if text is not None:
            jsonschema_rs.validate(schema, json.loads(text))
        return
    error = answer["error"]
    assert status == 400, answer
    assert error["type"] == "invalid_request_error"
    assert set(answer) == ({"type", "error", "request_id"} if way.path == "messages" else {"error"})
    if place is None:
        # Refused before it begins, with the place; or it could not go on.
        said = error["message"]
        assert said.startswith(way.place) or "smaller" in said, answer
    else:
        said, _, _ = error["message"].partition(": ")
        # Of schemas each of which can be compiled, but not all of them at once, none is at fault.
        assert said.startswith(way.place) or (said == "tool_choice" and not place), answer
        assert said.endswith(place), answer


def bystander(url: str, stop: list[bool]) -> list[str]:
    """The texts of streams, one after another, until told to stop."""
    found: list[str] = []
    body = {"model": "demo", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 200}
    while not stop:
        status, raw = http(f"{url}/v1/completions", {**body, "ignore_eos": True, "stream": True})
        events = raw.decode().split("\n\n")
        assert (status, events[-2:]) == (200, ["data: [DONE]", ""])
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        found.append("".join(one["text"] for chunk in chunks for one in chunk["choices"]))
    return found


@pytest.mark.parametrize(
    "is_soak",
    [
        pytest.param(False, marks=pytest.mark.slow, id="by two ways each"),
        pytest.param(True, marks=pytest.mark.soak, id="by every way"),
    ],
)
@pytest.mark.long
def test_whatever_a_schema_is_made_for_its_client_alone_has_it(
    pair: Fleet, *, is_soak: bool
) -> None:
    url, stop = pair.router.url, list[bool]()
    with concurrent.futures.ThreadPoolExecutor(BYSTANDERS) as threads:
        streams = [threads.submit(bystander, url, stop) for _ in range(BYSTANDERS)]
        try:
            for number, (name, (schema, place)) in enumerate(CASES.items()):
                by = [*ways(schema).items()]
                # By turns of each API; three ways on is a tool's schema for an answer's.
                for how, way in by if is_soak else by[number % 3 :: 3]:
                    asked = {"model": "demo", "temperature": 0, **way.body}
                    status, body = http(f"{url}/v1/{way.path}", asked, timeout_s=ANSWER_S)
                    try:
                        check(schema, place, way, status, body)
                    except AssertionError as error:
                        raise AssertionError(f"{name}, {how}: {body[:600]!r}") from error
        finally:
            stop.append(True)
        texts = [text for stream in streams for text in stream.result(ANSWER_S)]
    assert len(set(texts)) == 1
    router = pair.router
    errors = {k: v for k, v in router.metrics().items() if "_engine_errors_total" in k and v}
    assert errors == {}
    assert router.metric("xpyd_router_engine_retries_total") == 0
    for engine in pair.engines:
        assert "Traceback" not in engine.log
        wait_for(
            "an idle engine", lambda one=engine: not one.metric("xpyd_engine_requests_running")
        )
