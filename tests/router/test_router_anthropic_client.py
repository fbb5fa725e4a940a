"""What users of Anthropic's client see: messages, streams, tools, and errors as classes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest

from tests.router.chat_engines import ChatEngine, content, reasoning, tool_call
from tests.router.fakes import Fleet, answer, fleet, pair, until

pytestmark = pytest.mark.usefixtures("both_ways")
HELLO: dict[str, Any] = {
    "model": "m",
    "max_tokens": 2000,
    "messages": [{"role": "user", "content": "hello"}],
}
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}


@asynccontextmanager
async def client_of(made: Fleet) -> AsyncGenerator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=made.base, api_key="x", max_retries=0) as client:
        yield client


async def test_a_message_and_its_stream_are_the_same() -> None:
    async with pair() as (made, p, d), client_of(made) as client:
        p.script = d.script = ChatEngine(content("one ", "two ", "three"))
        whole = await client.messages.create(**HELLO)
        assert whole._request_id == whole.id
        async with client.messages.stream(**HELLO) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert texts == ["one ", "two ", "three"]
        for message in (whole, final):
            assert [(b.type, getattr(b, "text", "")) for b in message.content] == [
                ("text", "one two three")
            ]
        assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
        assert whole.usage.input_tokens == 9


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_tool_is_used_in_two_turns(is_streamed: bool) -> None:
    async with fleet() as made, client_of(made) as client:
        engine = await made.engine("A")
        first = [*reasoning("I ", "look."), *content("Wait."), *tool_call("c1", "weather")]
        first += tool_call("c1", "weather", '{"pla', 'ce": "Rome"}')[1:]
        engine.script = ChatEngine(first, "tool_calls")
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        asked = {**HELLO, "tools": [TOOL], "thinking": thinking}
        if is_streamed:
            async with client.messages.stream(**asked) as stream:
                said = await stream.get_final_message()
        else:
            said = await client.messages.create(**asked)
        assert said.stop_reason == "tool_use"
        assert [block.type for block in said.content] == ["thinking", "text", "tool_use"]
        used = said.content[-1]
        assert used.type == "tool_use"
        assert (used.id, used.name, used.input) == ("c1", "weather", {"place": "Rome"})

        engine.script = ChatEngine(content("Sun."))
        result: Any = {"type": "tool_result", "tool_use_id": used.id, "content": "sun"}
        turns: Any = [
            *HELLO["messages"],
            {"role": "assistant", "content": said.content},
            {"role": "user", "content": [result]},
        ]
        again = await client.messages.create(**{**asked, "messages": turns})
        assert again.content[0].type == "text"
        sent = engine.calls[-1].body["messages"]
        assert [one["role"] for one in sent] == ["user", "assistant", "tool"]
        assert sent[1]["reasoning_content"] == "I look."
        assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"] == "c1"


async def test_tokens_and_models() -> None:
    async with fleet() as made, client_of(made) as client:
        (await made.engine("A")).script = answer(200, {"count": 7})
        counted = await client.messages.count_tokens(model="m", messages=HELLO["messages"])
        assert counted.input_tokens == 7
        assert [model.id async for model in client.models.list()] == ["m"]


async def test_the_beta_client_is_served_alike() -> None:
    async with fleet() as made, client_of(made) as client:
        engine = await made.engine("A")
        engine.script = ChatEngine(content("Hi"))
        said = await client.beta.messages.create(**HELLO, betas=["context-management-2025-06-27"])
        assert [block.type for block in said.content] == ["text"]
        engine.script = answer(200, {"count": 7})
        counted = await client.beta.messages.count_tokens(model="m", messages=HELLO["messages"])
        assert counted.input_tokens == 7


FAILURES: dict[str, tuple[Any, type[anthropic.APIStatusError]]] = {
    "wrong field": (
        answer(400, {"error": {"message": "no", "type": "x"}}),
        anthropic.BadRequestError,
    ),
    "engine's failure": (answer(500, {}), anthropic.InternalServerError),
    "busy": (answer(503, {}), anthropic.InternalServerError),
}


@pytest.mark.parametrize("case", FAILURES)
async def test_a_failure_is_the_class_that_users_catch(case: str) -> None:
    script, kind = FAILURES[case]
    async with fleet() as made, client_of(made) as client:
        (await made.engine("A")).script = script
        with pytest.raises(kind) as error:
            await client.messages.create(**HELLO)
        assert error.value.request_id


async def test_a_stream_that_fails_raises_in_the_loop_over_it() -> None:
    async with fleet() as made, client_of(made) as client:
        engine = await made.engine("A", is_ours=False, models=("m",))
        engine.script = ChatEngine(content("a", "b"), dies_at=1)
        async with client.messages.stream(**HELLO) as stream:
            texts = aiter(stream.text_stream)
            assert await anext(texts) == "a"
            with pytest.raises(anthropic.APIStatusError, match="generating instance failed"):
                await anext(texts)
        await until(lambda: engine.probes > 0)


async def test_the_tool_runner_goes_on_without_a_thread() -> None:
    @anthropic.beta_async_tool
    async def weather(place: str) -> str:
        """The weather of a place."""
        return f"sunny in {place}"

    async with fleet() as made, client_of(made) as client:
        engine = await made.engine("A")
        answers = [
            ChatEngine(tool_call("c1", "weather", '{"place": "Rome"}'), "tool_calls"),
            ChatEngine(content("It is sunny.")),
        ]
        engine.script = lambda *call: answers.pop(0)(*call)
        runner = client.beta.messages.tool_runner(**HELLO, tools=[weather])
        final = await runner.until_done()
        assert final is not None
        assert [getattr(block, "text", "") for block in final.content] == ["It is sunny."]
        assert "sunny in Rome" in str(engine.calls[-1].body)


async def test_models_are_listed_as_the_client_knows_them() -> None:
    async with fleet() as made, client_of(made) as client:
        await made.engine("A")
        page = await client.models.list()
        assert [(one.id, one.type, one.display_name) for one in page.data] == [("m", "model", "m")]
        assert page.data[0].created_at.year >= 2024
        assert not page.has_more
