"""POST /v1/messages through the router: Anthropic's API in front of engines that have chats."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson
import pytest

from tests.router.chat_engines import ChatEngine, content, reasoning, tool_call
from tests.router.fakes import Fleet, answer, fleet, pair, until

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
            "content": [{"type": "text", "text": "Hi you", "citations": None}],
            "stop_reason": "end_turn",
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": {
                "input_tokens": 5,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 4,
                "cache_creation": None,
                "output_tokens": 2,
                "output_tokens_details": None,
                "server_tool_use": None,
                "service_tier": "standard",
                "inference_geo": None,
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
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
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


@pytest.mark.parametrize("at", [1, 2, 3, 5])
async def test_a_message_whose_d_dies_goes_on_at_another_as_one(at: int) -> None:
    said = ["a ", "b ", "c ", "d ", 'e"\n', "f"]
    async with pair() as (made, p, d):
        other = await made.engine("D")
        p.script = ChatEngine(content(*said))
        d.script = other.script = ChatEngine(content(*said), dies_at=at)  # whichever comes first
        async with await post(made, stream=True) as response:
            events = events_of(await response.read())
        assert texts_in(events) == "".join(said)
        kinds = [event["type"] for event in events]
        assert kinds.count("message_start") == kinds.count("message_stop") == 1
        assert kinds.count("content_block_start") == 1
        assert events[-2]["delta"]["stop_reason"] == "end_turn"
        assert (d.served, other.served) == (1, 1)
        await until(lambda: any(engine.probes for engine in made.engines))


async def test_a_stream_that_no_engine_can_go_on_with_ends_with_anthropics_error() -> None:
    async with fleet() as made:
        engine = await made.engine("A", is_ours=False, models=("m",))
        engine.script = ChatEngine(content("a", "b"), dies_at=1)
        async with await post(made, stream=True) as response:
            assert response.status == 200
            events = events_of(await response.read())
        await until(lambda: engine.probes > 0)
    assert texts_in(events) == "a"
    assert events[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "the generating instance failed"},
    }


async def refusal_of(response: aiohttp.ClientResponse) -> tuple[int, str, str]:
    async with response:
        body = await response.json()
        assert body["type"] == "error"
        assert body.get("request_id") == response.headers.get("request-id")
        return response.status, body["error"]["type"], body["error"]["message"]


BAD = {"error": {"message": "max_tokens: too many", "type": "BadRequestError", "code": 400}}


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_of_router_and_engine_are_anthropics(stream: bool) -> None:
    async with fleet(max_body_bytes=5000) as made:
        assert (await refusal_of(await post(made, stream=stream)))[:2] == (503, "overloaded_error")
        engine = await made.engine("A")
        engine.script = answer(400, BAD)
        kind = "invalid_request_error"
        assert await refusal_of(await post(made, stream=stream)) == (
            *(400, kind),
            "max_tokens: too many",
        )
        status, kind, message = await refusal_of(await post(made, stream=stream, foo=1))
        assert (status, kind) == (400, "invalid_request_error")
        assert message == "foo: this field is not known here; leave it out"
        found = await refusal_of(await post(made, stream=stream, model="n"))
        assert found[:2] == (404, "not_found_error")
        found = await refusal_of(await post(made, stream=stream, system="x" * 5000))
        assert found[:2] == (413, "request_too_large")
        engine.script = answer(500, {})
        found = await refusal_of(await post(made, stream=stream))
        assert found[:2] == (502, "api_error")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "messages", 405),
        ("PUT", "messages/count_tokens", 405),
        ("POST", "messages/batches", 404),
        ("GET", "messages/batches/x", 404),
    ],
)
async def test_other_paths_of_the_api_are_refused_in_its_format(
    method: str, path: str, status: int
) -> None:
    async with fleet() as made:
        found = await refusal_of(await made.http.request(method, f"{made.base}/v1/{path}"))
        assert found[0] == status
        async with made.http.get(f"{made.base}/v1/messagesx") as response:
            assert (await response.json())["error"]["type"] == "not_found_error"
            assert "type" not in await response.json()


async def test_an_answer_that_is_no_chat_is_the_engines_fault() -> None:
    async with fleet() as made:
        (await made.engine("A")).script = answer(200, {"choices": []})
        assert (await refusal_of(await post(made)))[:2] == (502, "api_error")


async def test_tokens_are_counted_by_an_engine() -> None:
    async with fleet() as made:
        engine = await made.engine("P")
        engine.script = answer(200, {"count": 7, "max_model_len": 64, "tokens": [1] * 7})
        body = {"model": "m", "messages": HELLO["messages"], "system": "S"}
        url = f"{made.base}/v1/messages/count_tokens"
        async with made.http.post(url, json=body, headers={"X-Request-Id": "mine"}) as response:
            assert (response.status, await response.json()) == (200, {"input_tokens": 7})
            assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"
        assert engine.calls[0].path == "/tokenize"
        assert [one["role"] for one in engine.calls[0].body["messages"]] == ["system", "user"]
        engine.script = answer(200, {"tokens": []})
        assert (await refusal_of(await made.http.post(url, json=body)))[0] == 502
        engine.script = answer(400, BAD)
        assert (await refusal_of(await made.http.post(url, json=body)))[0] == 400
        found = await refusal_of(await made.http.post(url, json={"model": "m"}))
        assert found == (400, "invalid_request_error", "messages: this field is missing")


async def test_metrics_and_access_log_know_messages_by_their_own_name() -> None:
    async with fleet() as made:
        (await made.engine("A")).script = ChatEngine(content("a", "b"))
        async with await post(made) as response:
            size = len(await response.read())
        async with await post(made, stream=True) as response:
            size += len(await response.read())
        name = "xpyd_router_requests_total"
        await until(lambda: made.metric(name, endpoint="messages", status="200") == 2)
        assert made.metric("xpyd_router_output_tokens_total", endpoint="messages") == 4
        assert made.metric("xpyd_router_response_bytes_total", endpoint="messages") == size


async def test_a_long_body_is_read_on_a_thread_and_served_alike() -> None:
    async with fleet() as made:
        engine = await made.engine("A")
        engine.script = ChatEngine(content("a"))
        text = "é" * 60_000
        async with await post(made, messages=[{"role": "user", "content": text}]) as response:
            assert response.status == 200
        assert engine.calls[0].body["messages"] == [{"role": "user", "content": text}]
