"""POST /v1/messages through the router: Anthropic's API in front of engines that have chats."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson
import pytest

from tests.router.chat_engines import ChatEngine, content, reasoning, tool_call
from tests.router.fakes import Fleet, fleet, pair

pytestmark = pytest.mark.usefixtures("both_ways")
HELLO: dict[str, Any] = {
    "model": "m",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "hello"}],
}


async def post(
    made: Fleet, path: str = "messages", headers: dict[str, str] | None = None, **body: Any
) -> aiohttp.ClientResponse:
    return await made.http.post(f"{made.base}/v1/{path}", json={**HELLO, **body}, headers=headers)


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream; each is named as its type."""
    found: list[dict[str, Any]] = []
    for event in data.split(b"\n\n")[:-1]:
        name, line = event.split(b"\n")
        payload = orjson.loads(line.removeprefix(b"data: "))
        assert name == b"event: " + payload["type"].encode()
        found.append(payload)
    return found


def texts_in(events: list[dict[str, Any]]) -> str:
    return "".join(e["delta"].get("text", "") for e in events if e["type"] == "content_block_delta")


async def test_a_message_is_a_chat_to_the_engine_and_an_anthropic_message_to_the_client() -> None:
    async with fleet() as made:
        engine = await made.engine("A")
        engine.script = ChatEngine(content("Hi", " you"), cached=4)
        async with await post(made, system="Be kind.", headers={"X-Api-Key": "k"}) as response:
            assert response.status == 200
            message = await response.json()
            assert response.headers["request-id"] == response.headers["x-request-id"]
        assert message["id"].startswith("msg_")
        assert message["id"] == response.headers["request-id"]
        assert {**message, "id": ""} == {
            "id": "",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [{"type": "text", "text": "Hi you"}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "usage": {
                "input_tokens": 5,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 4,
                "output_tokens": 2,
            },
        }
        call = engine.calls[0]
        assert call.path == "/v1/chat/completions"
        assert call.body["messages"] == [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "hello"},
        ]
        assert call.body["max_tokens"] == 50
        assert "x-api-key" not in call.headers


async def test_a_stream_has_anthropics_events_in_their_order() -> None:
    async with fleet() as made:
        engine = await made.engine("A", is_ours=False, models=("m",))
        engine.script = ChatEngine(
            [*reasoning("So", "..."), *content("I", " look"), *tool_call("c1", "f", '{"a"', ":1}")],
            finish="tool_calls",
        )
        async with await post(made, stream=True) as response:
            assert response.content_type == "text/event-stream"
            events = events_of(await response.read())
    assert [event["type"] for event in events] == [
        *("message_start", "ping"),
        *("content_block_start", *["content_block_delta"] * 3, "content_block_stop"),
        *("content_block_start", *["content_block_delta"] * 2, "content_block_stop"),
        *("content_block_start", *["content_block_delta"] * 2, "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["input_tokens"] == 9


@pytest.mark.parametrize("stream", [False, True])
async def test_through_a_pair_the_first_token_is_ps_and_the_message_is_one(stream: bool) -> None:
    async with pair() as (made, p, d):
        p.script = d.script = ChatEngine(content("one ", "two ", "three"))
        async with await post(made, stream=stream) as response:
            if stream:
                events = events_of(await response.read())
                assert texts_in(events) == "one two three"
                assert events[0]["message"]["usage"]["input_tokens"] == 9  # P counted them
            else:
                assert (await response.json())["content"][0]["text"] == "one two three"
        assert (p.served, d.served) == (1, 1)
