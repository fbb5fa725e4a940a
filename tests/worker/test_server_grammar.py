"""Structured output over HTTP: what reaches the engine, what is refused, and that nobody waits."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.worker.grammar_kit import allowed_ids
from tests.worker.server_fakes import (
    EOS,
    ByteTokenizer,
    Running,
    ScriptedEngine,
    say,
    serving,
    until,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
UUID = "93923d63113b4b338973f24d19d4bf11"
PAIR = f"___prefill_addr_10.0.1.2:21001___decode_addr_10.0.1.3:22001_{UUID}"


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    if path == COMPLETIONS:
        return {"prompt": "hi", **fields}
    return {"messages": [{"role": "user", "content": "hi"}], **fields}


def next_of(server: Running, choice: int = 0) -> list[int]:
    """What the grammar of the last request lets a choice begin with."""
    return allowed_ids(server.engine.requests[-1].matchers[choice].mask().words())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("field", "value", "first"),
    [
        ("response_format", {"type": "json_object"}, "{"),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "{",
        ),
        ("structured_outputs", {"choice": ["yes", "no"]}, "ny"),
        ("guided_regex", "[a-c]x", "abc"),
    ],
)
async def test_each_choice_gets_its_place_in_the_grammar(
    path: str, field: str, value: Any, first: str
) -> None:
    async with serving() as server:
        answer = await server.post(path, body_of(path, n=2, **{field: value}))
        assert answer.status_code == 200, answer.text
        (request,) = server.engine.requests
        assert len(request.matchers) == 2
        assert request.matchers[0] is not request.matchers[1]
        assert [chr(i) for i in next_of(server, 1)] == list(first)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": {"not": {}}}, "guided_json.not"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"$ref": "#/$defs/a"}},
                }
            },
            "response_format.json_schema.schema.$ref",
        ),
    ],
)
async def test_what_cannot_be_followed_is_a_400_with_its_place(
    path: str, fields: dict[str, Any], param: str
) -> None:
    async with serving() as server:
        answer = await server.post(path, body_of(path, **fields))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert not server.engine.requests


async def test_a_request_without_a_grammar_has_no_matchers() -> None:
    async with serving() as server:
        await server.post(CHAT, body_of(CHAT, response_format={"type": "text"}))
        assert server.engine.requests[0].matchers == ()


async def test_d_stands_in_the_grammar_behind_what_each_choice_put_out() -> None:
    async with serving(ScriptedEngine(say("2")), role="Decode") as server:
        params = {"seed": 3, "continue_from": [[97], [98, 49]], "emit_from": [0, 1]}
        body = {"prompt": "hi", "n": 2, "guided_regex": "a[12]|b1[89]"}
        answer = await server.client.post(
            COMPLETIONS, json={**body, "kv_transfer_params": params}, headers={"X-Request-Id": PAIR}
        )
        assert answer.status_code == 200, answer.text
        assert [chr(i) for i in next_of(server)] == ["1", "2"]
        assert [chr(i) for i in next_of(server, 1)] == ["8", "9"]


async def test_ids_that_do_not_follow_the_grammar_are_refused() -> None:
    async with serving(role="Decode") as server:
        params = {"seed": 3, "continue_from": [[97]], "emit_from": [0]}
        body = {"prompt": "hi", "guided_regex": "b", "kv_transfer_params": params}
        answer = await server.client.post(COMPLETIONS, json=body, headers={"X-Request-Id": PAIR})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "kv_transfer_params.continue_from"


class SlowTokenizer(ByteTokenizer):
    """One that a grammar's compilation waits for."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def to_json(self) -> str:
        self.begun.set()
        assert self.go_on.wait(30)
        return super().to_json()


async def test_while_a_grammar_is_compiled_others_are_served() -> None:
    tokenizer = SlowTokenizer()
    async with serving(tokenizer=tokenizer) as server:
        waiting = asyncio.create_task(
            server.post(COMPLETIONS, body_of(COMPLETIONS, guided_regex="a"))
        )
        await until(tokenizer.begun.is_set)
        other = await server.post(COMPLETIONS, body_of(COMPLETIONS))
        assert other.status_code == 200
        assert not waiting.done()
        tokenizer.go_on.set()
        assert (await waiting).status_code == 200
        assert next_of(server) == [ord("a")]


def made_to_explode(number: int) -> dict[str, Any]:
    """Fields that cost a compilation as much as the bounds let them, each time others."""
    names = [f"{number} {i}" for i in range(1000)]
    many = {name: {"type": "string", "maxLength": 9} for name in names}
    kinds: list[dict[str, Any]] = [
        {"guided_json": {"type": "object", "properties": many, "required": names}},
        {"guided_json": {"enum": [f"{name} {i}" for name in names for i in range(8)]}},
        {"guided_json": {"allOf": [{"pattern": f"[a-z]{{{i + number}}}"} for i in range(16)]}},
        {"guided_json": {"type": "integer", "multipleOf": 9900 + number}},
    ]
    return kinds[number % len(kinds)]


@pytest.mark.patience(60)
async def test_while_grammars_made_to_explode_are_compiled_or_refused_others_are_served() -> None:
    async with serving() as server:
        heavy = [
            asyncio.create_task(
                server.post(COMPLETIONS, body_of(COMPLETIONS, **made_to_explode(number)))
            )
            for number in range(8)
        ]
        # That the loop does not stand still meanwhile is held by the test with the slow tokenizer:
        # how many answers fit in between is a matter of the machine.
        while not all(task.done() for task in heavy):
            other = await server.post(COMPLETIONS, body_of(COMPLETIONS))
            assert other.status_code == 200
        answers = [task.result() for task in heavy]
        # Where others want the cores, some are asked to come again.
        busy = [one for one in answers if "too busy" in one.text]
        assert {one.status_code for one in busy} <= {503}
        assert {one.status_code for one in answers if one not in busy} == {200, 400}


@pytest.mark.patience(60)
async def test_new_grammars_and_answers_do_not_wait_for_compilations_that_never_end() -> None:
    """Two of them at once: threads that compile cannot be ended."""
    async with serving() as server:
        await server.post(COMPLETIONS, body_of(COMPLETIONS, guided_regex="the tokenizer is read"))
        hang = [
            asyncio.create_task(
                server.post(COMPLETIONS, body_of(COMPLETIONS, guided_grammar=f"start: %json {one}"))
            )
            for one in (
                '{"type": "number", "multipleOf": 9999.9999}',
                '{"type": "number", "multipleOf": 9999.9997}',
            )
        ]
        await asyncio.sleep(0)
        for regex in ("a", "b"):
            other = await server.post(COMPLETIONS, body_of(COMPLETIONS, guided_regex=regex))
            assert other.status_code == 200
        assert not any(task.done() for task in hang)
        for answer in await asyncio.gather(*hang):
            # 503: other tests have the cores, so that it did not use up its CPU time.
            assert answer.status_code in (400, 503)
            assert answer.json()["error"]["param"] == "guided_grammar"


async def test_metrics_count_compilations_hits_and_refusals() -> None:
    async with serving() as server:
        for regex in ("a", "a", "("):
            await server.post(COMPLETIONS, body_of(COMPLETIONS, guided_regex=regex))
        text = (await server.client.get("/metrics")).text
        assert "xpyd_engine_grammar_compiled_total 2.0" in text
        assert "xpyd_engine_grammar_cache_hits_total 1.0" in text
        assert "xpyd_engine_grammar_failures_total 1.0" in text
        assert "xpyd_engine_grammar_compile_seconds_count 2.0" in text


async def test_where_an_answer_is_complete_eos_alone_may_follow() -> None:
    async with serving() as server:
        await server.post(COMPLETIONS, body_of(COMPLETIONS, guided_regex="ab?"))
        (matcher,) = server.engine.requests[0].matchers
        assert matcher.accept(b"a")
        assert allowed_ids(matcher.mask().words()) == [ord("b"), EOS]
