"""Tool calls and reasoning through the real router: replay engines play them on P and D."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.fakes import Fleet, HttpEngine, answer, pair
from tests.worker.replay import replayed
from tests.worker.test_parsers import PARIS, compact, glm, hermes, llama, qwen
from tests.worker.test_server_tools import OTHER, TOOL, join, parsers

THOUGHT = "<think>\nwell, é\n</think>\n\n"
TEXTS = [(key, one if isinstance(one, str) else json.dumps(one)) for key, one in PARIS.items()]
PLAYED = {
    "hermes": f"{THOUGHT}Now.\n{hermes('f', PARIS)}\n{hermes('g', PARIS)}",
    "llama3_json": f"{llama('f', PARIS)}; {llama('g', PARIS)}",
    "mistral": f"[TOOL_CALLS][{compact('f', PARIS)}, {compact('g', PARIS)}]",
    "qwen3_coder": "\n".join(qwen(name, *TEXTS) for name in "fg"),
    "glm45": THOUGHT + "".join(glm(name, *TEXTS) for name in "fg"),
}
CALLS = [("f", PARIS), ("g", PARIS)]
# Where a call has texts between tags, the tool says what is none.
_LIST = {"type": "object", "properties": {"n": {"type": "array"}}}
TOOLS = [{**one, "function": {**one["function"], "parameters": _LIST}} for one in (TOOL, OTHER)]
THINKS = {"hermes": "qwen3", "glm45": "qwen3"}


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and arguments, of an answer's message or of joined deltas."""
    some = [call.get("function", call) for call in message["tool_calls"]]
    return [(call["name"], json.loads(call["arguments"])) for call in some]


async def asked(fleet: Fleet, **body: Any) -> dict[str, Any]:
    return await fleet.json("chat/completions", model="fake", max_tokens=1000, **body)


async def streamed(fleet: Fleet, **body: Any) -> tuple[dict[str, Any], str | None]:
    events = await fleet.events("chat/completions", model="fake", max_tokens=1000, **body)
    assert events.pop() == "[DONE]"
    return join(events)


@pytest.mark.parametrize("family", PLAYED)
async def test_calls_come_through_p_and_d_whole_and_streamed(family: str) -> None:
    served = parsers(family, THINKS.get(family))
    async with replayed(PLAYED[family], served={"parsers": served}) as (fleet, _):
        body = await asked(fleet, tools=TOOLS)
        choice = body["choices"][0]
        assert (calls_of(choice["message"]), choice["finish_reason"]) == (CALLS, "tool_calls")
        joined, finish = await streamed(fleet, tools=TOOLS)
        assert (calls_of(joined), finish) == (CALLS, "tool_calls")
        for name in ("content", "reasoning_content", "reasoning"):
            assert (joined.get(name) or None) == choice["message"].get(name)


@pytest.mark.parametrize("family", PLAYED)
async def test_a_stream_that_another_d_goes_on_with_joins_to_the_same_whole(family: str) -> None:
    said = PLAYED[family]
    served = parsers(family, THINKS.get(family))
    places = range(1, len(said.encode()), len(said) // 12)
    async with replayed(said, decode=2, served={"parsers": served}) as (fleet, engines):
        expected, _ = await streamed(fleet, tools=TOOLS)
        for place in places:
            for one in engines["Decode"]:
                one.engine.executor.fails_at = {place}
            joined, finish = await streamed(fleet, tools=TOOLS)
            failed = [one for one in engines["Decode"] if not one.engine.executor.fails_at]
            assert failed, place
            assert finish == "tool_calls"
            assert _without_ids(joined) == _without_ids(expected), place


def _without_ids(joined: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in joined["tool_calls"]]
    return {**joined, "tool_calls": calls}


async def test_what_p_said_besides_content_is_the_streams_first_chunk() -> None:
    call = {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": ""}}

    async with pair() as (fleet, p, _):
        await _let_say(p, message={"content": None}, delta={"reasoning": "a", "tool_calls": [call]})
        events = await fleet.events("chat/completions", max_tokens=1000)
        joined, _ = join(events[:-1])
        assert joined["reasoning"] == "a"
        assert joined["tool_calls"][0]["name"] == "f"
        # Of an engine that gives no delta it is the message's.
        message = {"content": "c", "reasoning": "b", "tool_calls": [{**call, "index": 0}]}
        await _let_say(p, message=message)
        joined, _ = join((await fleet.events("chat/completions", max_tokens=1000))[:-1])
        assert (joined["reasoning"], len(joined["tool_calls"])) == ("b", 1)
        assert joined["content"].startswith("c")


async def test_an_answer_that_ends_at_p_is_without_what_p_says_for_streams() -> None:
    async with pair() as (fleet, p, _):
        await _let_say(
            p,
            message={"role": "assistant", "content": None, "reasoning": "a"},
            delta={"reasoning": "a"},
            finish="stop",
        )
        body = await fleet.json("chat/completions", max_tokens=1000)
        assert body["choices"][0]["message"]["reasoning"] == "a"
        assert "delta" not in body["choices"][0]


async def _let_say(p: HttpEngine, *, finish: str = "length", **choice: Any) -> None:
    """Have P answer with this choice."""
    transfer = {
        "transfer": ["granted"],
        "decode_incarnation": "d-inc",
        "prompt_digest": ["ab" * 32],
    }
    p.script = answer(
        200,
        {
            "model": "m",
            "choices": [{"index": 0, "token_ids": [0], "finish_reason": finish, **choice}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
            "kv_transfer_params": transfer,
        },
    )


async def test_the_usage_of_a_stream_that_ends_at_p_counts_its_reasoning() -> None:
    async with replayed("", served={"parsers": parsers()}) as (fleet, engines):
        events = await fleet.events(
            "chat/completions", model="fake", stream_options={"include_usage": True}
        )
        assert not engines["Decode"][0].engine.requests
        assert events[-2]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
