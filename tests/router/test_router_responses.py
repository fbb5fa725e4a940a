"""POST /v1/responses through the router, as users of OpenAI's client see it."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import orjson
import pytest
from pydantic import BaseModel

from tests.router.chat_engines import ChatEngine, content, reasoning, tool_call
from tests.router.fakes import Fleet, answer, fleet, pair, until
from xpyd_core.errors import UserError
from xpyd_router.command import command, read_config
from xpyd_router.keys.lines import line_of, new_key

pytestmark = pytest.mark.usefixtures("both_ways")
MIB = 1024 * 1024
TOOL: Any = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": False,
}
MIXED = [*reasoning("So", "..."), *content("I ", "look"), *tool_call("c1", "f", '{"a"', ":1}")]


@asynccontextmanager
async def client_of(made: Fleet) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{made.base}/v1", api_key="x", max_retries=0) as client:
        yield client


async def test_a_response_is_a_chat_to_the_engines() -> None:
    async with pair() as (made, p, d), client_of(made) as client:
        p.script = d.script = ChatEngine(content("one ", "two ", "three"), cached=4)
        response = await client.responses.create(
            model="m", instructions="Be kind.", input="Hi", max_output_tokens=50
        )
        assert response.output_text == "one two three"
        assert response.id.startswith("resp_")
        assert response._request_id == response.id
        assert response.status == "completed"
        assert response.usage is not None
        assert response.usage.input_tokens_details.cached_tokens == 4
        for call in (*p.calls, *d.calls):
            assert call.path == "/v1/chat/completions"
            assert call.body["messages"] == [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Hi"},
            ]
        name, labels = "xpyd_router_requests_total", {"endpoint": "responses", "status": "200"}
        await until(lambda: made.metric(name, **labels) == 1)


@pytest.mark.parametrize("is_ours", [True, False])
async def test_the_client_follows_a_stream_to_its_final_response(is_ours: bool) -> None:
    async with fleet() as made, client_of(made) as client:
        engine = await made.engine("A", is_ours=is_ours)
        engine.script = ChatEngine(MIXED, finish="tool_calls")
        asked: Any = {"model": "m", "input": "Hi", "tools": [TOOL], "reasoning": {"effort": "low"}}
        async with client.responses.stream(**asked) as stream:
            snapshots = [
                event.snapshot
                async for event in stream
                if event.type.endswith(".delta") and event.type != "response.reasoning_text.delta"
            ]
            final = await stream.get_final_response()
        assert snapshots == ["I ", "I look", '{"a"', '{"a":1}']
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        whole = await client.responses.create(**asked)
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
        assert whole.output_text == final.output_text == "I look"
        assert engine.calls[0].body["reasoning_effort"] == "low"
        call: Any = whole.output[2]
        assert (call.call_id, call.name, call.arguments) == ("c1", "f", '{"a":1}')


class Answer(BaseModel):
    a: int


async def test_a_format_is_the_chats_and_is_parsed_by_the_client() -> None:
    async with fleet() as made, client_of(made) as client:
        engine = await made.engine("A")
        engine.script = ChatEngine(content('{"a"', ":3}"))
        response = await client.responses.parse(model="m", input="Hi", text_format=Answer)
        assert response.output_parsed == Answer(a=3)
        asked = engine.calls[0].body["response_format"]
        assert (asked["type"], asked["json_schema"]["strict"]) == ("json_schema", True)
        assert asked["json_schema"]["schema"]["required"] == ["a"]


@pytest.mark.parametrize("at", [1, 2])
async def test_a_stream_whose_decode_instance_dies_is_one_whole_for_the_client(at: int) -> None:
    async with pair() as (made, p, d), client_of(made) as client:
        other, said = await made.engine("D"), content("one ", "two ", "three")
        p.script = ChatEngine(said)
        d.script = other.script = ChatEngine(said, dies_at=at)  # whichever comes first
        async with client.responses.stream(model="m", input="Hi") as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert d.served == other.served == 1
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert final.output_text == "one two three"
        await until(lambda: d.probes + other.probes > 0)


async def test_a_stream_that_nobody_can_go_on_with_fails_in_the_apis_form() -> None:
    async with fleet() as made, client_of(made) as client:
        for kind in "PD":
            engine = await made.engine(kind, is_ours=False)
            engine.script = ChatEngine(content("a", "b"), dies_at=1 if kind == "D" else None)
        stream = await client.responses.create(model="m", input="Hi", stream=True)
        events = [event async for event in stream]
        final: Any = events[-1]
        assert final.type == "response.failed"
        assert final.response.status == "failed"
        assert final.response.error.code == "server_error"
        await until(lambda: all(engine.probes for engine in made.engines if engine.calls))


async def test_refusals_are_openais_and_name_the_clients_field() -> None:
    async with pair() as (made, p, _), client_of(made) as client:
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.create(model="m", input="Hi", background=True)
        assert error.value.param == "background"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.create(model="other", input="Hi")
        assert missing.value.code == "model_not_found"
        said = {"message": "response_format: no", "type": "x", "param": "response_format"}
        p.script = answer(400, {"error": {**said, "code": None}})
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as error:
                await client.responses.create(model="m", input="Hi", stream=stream)
            assert error.value.param == "text.format"
            assert error.value.body == {**said, "code": None} | {
                "message": "text.format: no",
                "param": "text.format",
            }


async def test_responses_are_kept_shown_and_deleted_where_the_router_has_a_store() -> None:
    async with fleet(responses_store_bytes=MIB) as made, client_of(made) as client:
        engine = await made.engine("A")
        engine.script = ChatEngine(content("Hello"))
        first = await client.responses.create(model="m", input="Hi", instructions="Be kind.")
        again: Any = {"model": "m", "input": "And?", "previous_response_id": first.id}
        async with client.responses.stream(**again) as stream:
            second = await stream.get_final_response()
        assert engine.calls[1].body["messages"] == [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "And?"},
        ]
        assert second.previous_response_id == first.id
        shown = await client.responses.retrieve(first.id)
        assert shown.to_dict() == first.to_dict()
        with pytest.raises(openai.BadRequestError, match="has ended"):
            await client.responses.cancel(first.id)
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.create(**again)
        assert error.value.code == "previous_response_not_found"
        # What it went on from is in the response that goes on.
        third: Any = {**again, "previous_response_id": second.id}
        await client.responses.create(**third)
        assert len(engine.calls[-1].body["messages"]) == 5


async def test_a_kept_response_is_there_for_the_name_of_its_key_alone(tmp_path: Path) -> None:
    mine, again, other = (new_key() for _ in range(3))
    file = tmp_path / "keys.txt"
    lines = (line_of("a", mine, {}), line_of("a", again, {}), line_of("b", other, {}))
    file.write_text("\n".join(lines))
    async with fleet(responses_store_bytes=MIB, api_key_file=file) as made, client_of(made) as one:
        engine = await made.engine("A")
        engine.script = ChatEngine(content("Hello"))
        a, second, b = (one.with_options(api_key=key) for key in (mine, again, other))
        first = await a.responses.create(model="m", input="Hi")
        for ask in (b.responses.retrieve, b.responses.delete, b.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await ask(first.id)
        with pytest.raises(openai.NotFoundError):
            await b.responses.input_items.list(first.id)
        more: Any = {"model": "m", "input": "And?", "previous_response_id": first.id}
        with pytest.raises(openai.BadRequestError) as error:
            await b.responses.create(**more)
        assert error.value.code == "previous_response_not_found"
        with pytest.raises(openai.BadRequestError):
            await b.responses.input_tokens.count(**more)
        assert (await second.responses.retrieve(first.id)).id == first.id
        assert (await second.responses.create(**more)).previous_response_id == first.id
        await a.responses.delete(first.id)


async def test_the_items_of_a_kept_responses_input_come_in_pages() -> None:
    given: Any = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello é", "id": "mine", "type": None},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "So?"}]},
    ]
    async with fleet(responses_store_bytes=MIB) as made, client_of(made) as client:
        (await made.engine("A")).script = ChatEngine(content("Hello"))
        response = await client.responses.create(model="m", input=given)
        digits = response.id.removeprefix("resp_")
        shown = [
            one.to_dict() async for one in client.responses.input_items.list(response.id, limit=2)
        ]
        assert [one["id"] for one in shown] == [
            *(f"msg_{digits}0005", f"rs_{digits}0004", f"fco_{digits}0003", f"fc_{digits}0002"),
            *("mine", f"msg_{digits}0000"),
        ]
        done = {"status": "completed"}
        said = {"type": "output_text", "text": "Hello é", "annotations": []}
        assert shown[0] == {**given[5], **done, "type": "message", "id": shown[0]["id"]}
        assert shown[1] == {**given[4], **done, "summary": [], "id": shown[1]["id"]}
        assert shown[2] == {**given[3], **done, "id": shown[2]["id"]}
        assert shown[4] == {**given[1], **done, "type": "message", "content": [said]}
        first: Any = await client.responses.input_items.list(response.id, order="asc", limit=1)
        assert (first.first_id, first.last_id, first.has_more) == (shown[5]["id"],) * 2 + (True,)
        assert first.data[0].to_dict()["content"] == [{"type": "input_text", "text": "Hi"}]
        for wrong in ({"limit": 101}, {"limit": 0}, {"order": "up"}, {"after": "x"}):
            with pytest.raises(openai.BadRequestError) as error:
                await client.responses.input_items.list(response.id, **wrong)  # type: ignore[arg-type]
            assert error.value.param == next(iter(wrong))
        plain = await client.responses.create(model="m", input="Hi")
        items = await client.responses.input_items.list(plain.id)
        assert items.data[0].to_dict()["content"] == [{"type": "input_text", "text": "Hi"}]
        rest = await client.responses.input_items.list(plain.id, after=items.data[0].id or "")
        assert rest.data == []


async def test_tokens_of_a_responses_prompt_are_counted_by_an_engine() -> None:
    async with fleet(responses_store_bytes=MIB) as made, client_of(made) as client:
        engine = await made.engine("A")
        engine.script = ChatEngine(content("Hello"))
        first = await client.responses.create(model="m", input="Hi")
        engine.script = answer(200, {"count": 7, "max_model_len": 64, "tokens": [1] * 7})
        tool: Any = {"type": "function", "name": "f", "parameters": {}, "strict": None}
        asked: Any = {"previous_response_id": first.id, "reasoning": {"effort": "low"}}
        counted = await client.responses.input_tokens.count(
            model="m", input="And?", instructions="Be kind.", tools=[tool], **asked
        )
        assert counted.to_dict() == {"object": "response.input_tokens", "input_tokens": 7}
        assert engine.calls[-1].path == "/tokenize"
        assert engine.calls[-1].body == {
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": "And?"},
            ],
            "model": "m",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            "reasoning_effort": "low",
        }
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.input_tokens.count(model="m")
        assert error.value.param == "input"


async def test_without_a_store_each_use_of_it_says_the_flag() -> None:
    async with fleet() as made, client_of(made) as client:
        engine = await made.engine("A")
        engine.script = ChatEngine(content("Hello"))
        response = await client.responses.create(model="m", input="Hi")
        assert response.to_dict()["store"] is False
        for method in (
            *(client.responses.retrieve, client.responses.cancel, client.responses.delete),
            client.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError, match="--responses-store-mib"):
                await method(response.id)
        async with made.http.post(f"{made.base}/v1/responses/compact", json={}) as answered:
            assert answered.status == 404
        for fields in ({"store": True}, {"previous_response_id": response.id}):
            with pytest.raises(openai.BadRequestError, match="--responses-store-mib"):
                await client.responses.create(model="m", input="Hi", **fields)


async def test_events_come_as_the_engine_sends_its_chunks() -> None:
    async with fleet() as made:
        engine = await made.engine("A", is_ours=False)
        engine.script = ChatEngine(content("a", "b"))
        body = {"model": "m", "input": "Hi", "stream": True}
        response: aiohttp.ClientResponse
        async with made.http.post(f"{made.base}/v1/responses", json=body) as response:
            assert response.content_type == "text/event-stream"
            data = await response.read()
        assert data.endswith(b"\n\n")
        assert b"[DONE]" not in data
        kinds = [
            orjson.loads(event.partition(b"data: ")[2])["type"]
            for event in data.split(b"\n\n")[:-1]
        ]
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert kinds.count("response.output_text.delta") == 2


def test_the_flag_of_the_store_is_mebibytes_of_a_router_of_one_process() -> None:
    def read(*flags: str) -> int:
        parser = argparse.ArgumentParser()
        command.configure(parser)
        return read_config(parser.parse_args(["--kv-insecure", *flags])).responses_store_bytes

    assert read() == 0
    assert read("--responses-store-mib", "3") == 3 * MIB
    for wrong in (
        ("--processes", "2", "--responses-store-mib", "1"),
        ("--responses-store-mib=-1",),
    ):
        with pytest.raises(UserError, match="--responses-store-mib"):
            read(*wrong)
