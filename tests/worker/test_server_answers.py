"""Answers of the API in OpenAI's formats, read by the official client, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.worker.server_fakes import EOS, Running, ScriptedEngine, say, serving


def client_of(server: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.AsyncClient(verify=False),  # reading the CA file takes long
    )


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def stream(server: Running, path: str, **body: Any) -> list[Any]:
    answer = await server.post(path, {"model": "fake", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


async def test_a_completion_has_text_usage_and_reason() -> None:
    async with serving() as server, client_of(server) as client:
        answer = await client.completions.create(model="fake", prompt="hi", max_tokens=5)
        assert answer.choices[0].text == "hello"
        assert answer.choices[0].finish_reason == "length"
        assert answer.object == "text_completion"
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 5)
        answer = await client.completions.create(model="alias", prompt="hi")
        assert (answer.choices[0].text, answer.model) == ("hello world", "alias")
        assert answer.choices[0].finish_reason == "stop"


async def test_a_chat_has_a_message() -> None:
    async with serving() as server, client_of(server) as client:
        answer = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}]
        )
        assert answer.choices[0].message.content == "hello world"
        assert answer.choices[0].message.role == "assistant"
        assert answer.id.startswith("chatcmpl-")
        assert answer.usage is not None
        assert answer.usage.total_tokens == len("user:hi\n") + 12
        # Without a number a chat may use all of the context.
        assert server.engine.requests[0].sampling.max_tokens == 200 - len("user:hi\n")


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_usage() -> None:
    async with serving() as server, client_of(server) as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
        first = chunks[0].choices[0].delta
        assert (first.role, first.content) == ("assistant", "")
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "hello world"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12
        assert {c.id for c in chunks} == {chunks[0].id}
        assert all(c.usage is None for c in chunks[:-1])


async def test_a_streamed_completion_has_no_usage_unless_asked() -> None:
    async with serving() as server:
        chunks = await stream(server, "/v1/completions", prompt="hi")
        assert "".join(c["choices"][0]["text"] for c in chunks) == "hello world"
        assert all("usage" not in c for c in chunks)
        running = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await stream(server, "/v1/completions", prompt="hi", stream_options=running)
        counts = [c["usage"]["completion_tokens"] for c in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 12


async def test_choices_of_several_prompts_stand_in_openais_order() -> None:
    def script(request: Any, choice: int) -> list[int]:
        return [*bytes(request.prompt), *str(choice).encode(), EOS]

    async with serving(ScriptedEngine(script)) as server:
        answer = await server.post("/v1/completions", {"prompt": ["a", "b"], "n": 2})
        body = answer.json()
        assert [c["text"] for c in body["choices"]] == ["a0", "a1", "b2", "b3"]
        assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
        # A prompt counts once for all its choices.
        assert body["usage"]["prompt_tokens"] == 2
        assert [r.first_choice for r in server.engine.requests] == [0, 2]
        chunks = await stream(server, "/v1/completions", prompt=["a", "b"], n=2)
        texts = ["", "", "", ""]
        for chunk in chunks:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == ["a0", "a1", "b2", "b3"]


async def test_a_stop_string_over_two_tokens_cuts_text_and_engine() -> None:
    async with serving(ScriptedEngine(say("hello world and more"))) as server:
        body = {"prompt": "hi", "max_tokens": 20, "stop": ["or", "zz"]}
        choice = (await server.post("/v1/completions", body)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("hello w", "stop")
        assert choice["stop_reason"] == "or"
        assert len(server.engine.aborted) == 1
        chunks = await stream(server, "/v1/completions", **body)
        assert "".join(c["choices"][0]["text"] for c in chunks) == "hello w"
        assert server.bridge.open_requests == 0


async def test_a_stop_string_of_one_choice_leaves_the_other_running() -> None:
    def script(_request: Any, choice: int) -> list[int]:
        return [*(b"aXb" if choice == 0 else b"abcdef"), EOS]

    async with serving(ScriptedEngine(script)) as server:
        answer = await server.post("/v1/completions", {"prompt": "p", "n": 2, "stop": "X"})
        assert [c["text"] for c in answer.json()["choices"]] == ["a", "abcdef"]
        assert [choices for _, choices in server.engine.aborted] == [(0,)]


async def test_a_stop_token_stays_in_the_ids_but_not_in_the_text() -> None:
    async with serving() as server:
        body = {"prompt": "hi", "stop_token_ids": [ord("o")], "return_token_ids": True}
        choice = (await server.post("/v1/completions", body)).json()["choices"][0]
        assert choice["text"] == "hell"
        assert choice["token_ids"] == list(b"hello")
        assert choice["prompt_token_ids"] == list(b"hi")
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord("o"))


@pytest.mark.parametrize("role", ["Prefill", "Decode", "Aggregated"])
async def test_a_stream_that_begins_under_the_routers_id_shows_the_prompts_ids(role: str) -> None:
    async with serving(role=role) as server:
        params: dict[str, Any] = {
            "continue_from": [[], []],
            "emit_from": [0, 0],
            "response_id": "cmpl-1",
        }
        asked: dict[str, Any] = {"return_token_ids": True, "n": 2, "max_tokens": 1}
        asked["kv_transfer_params"] = params
        chunks = await stream(server, "/v1/completions", prompt="hi", **asked)
        assert [c["choices"][0].get("prompt_token_ids") for c in chunks] == [[*b"hi"]] * 2
        chat = [{"role": "user", "content": "x"}]
        chunks = await stream(server, "/v1/chat/completions", messages=chat, **asked)
        assert [c.get("prompt_token_ids") for c in chunks] == [[*b"user:x\n"], None]
        assert {c["id"] for c in chunks} == {"cmpl-1"}
        # What the client has of one choice, it has not of the other.
        params |= {"continue_from": [[ord("h")], []], "emit_from": [1, 0]}
        chunks = await stream(server, "/v1/completions", prompt="hi", **asked)
        shown = {c["choices"][0]["index"]: c["choices"][0] for c in chunks}
        assert "prompt_token_ids" not in shown[0]
        assert shown[1]["prompt_token_ids"] == [*b"hi"]


async def test_return_token_ids_streams_every_id_once() -> None:
    async with serving(ScriptedEngine(say("é!"))) as server:
        chunks = await stream(server, "/v1/completions", prompt="hi", return_token_ids=True)
        ids = [i for c in chunks for i in c["choices"][0]["token_ids"]]
        assert ids == [*"é!".encode(), EOS]
        assert [c["choices"][0]["text"] for c in chunks] == ["", "é", "!", ""]
        assert chunks[0]["choices"][0]["prompt_token_ids"] == list(b"hi")
        chat = await stream(
            server,
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "x"}],
            return_token_ids=True,
        )
        assert chat[0]["prompt_token_ids"] == list(b"user:x\n")


async def test_completion_logprobs_are_parallel_lists() -> None:
    async with serving() as server:
        body = {"prompt": "hi", "max_tokens": 3, "logprobs": 2}
        logprobs = (await server.post("/v1/completions", body)).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["h", "e", "l"]
        assert logprobs["token_logprobs"] == [-0.5] * 3
        assert logprobs["top_logprobs"][0] == {"h": -0.5, "i": -1.5}
        assert logprobs["text_offset"] == [0, 1, 2]
        chunks = await stream(server, "/v1/completions", **body)
        parts = [c["choices"][0]["logprobs"] for c in chunks]
        assert [o for p in parts for o in p["text_offset"]] == [0, 1, 2]


async def test_chat_logprobs_hold_bytes_and_alternatives() -> None:
    async with serving(ScriptedEngine(say("é"))) as server, client_of(server) as client:
        answer = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "x"}],
            logprobs=True,
            top_logprobs=1,
            max_tokens=2,
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert [c.bytes for c in logprobs.content] == [[b] for b in "é".encode()]
        assert logprobs.content[0].top_logprobs[0].logprob == -0.5


async def test_echo_puts_the_prompt_in_front() -> None:
    async with serving() as server:
        body = {"prompt": "hi ", "max_tokens": 2, "echo": True, "logprobs": 0}
        choice = (await server.post("/v1/completions", body)).json()["choices"][0]
        assert choice["text"] == "hi he"
        assert choice["logprobs"]["tokens"] == ["h", "i", " ", "h", "e"]
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, -0.5, -0.5]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
        chunks = await stream(server, "/v1/completions", **body)
        assert "".join(c["choices"][0]["text"] for c in chunks) == "hi he"
        offsets = [o for c in chunks for o in c["choices"][0]["logprobs"]["text_offset"]]
        assert offsets == [0, 1, 2, 3, 4]


async def test_max_tokens_0_with_echo_scores_the_prompt_only() -> None:
    async with serving() as server:
        body = {"prompt": "hi", "max_tokens": 0, "echo": True, "logprobs": 1}
        answer = (await server.post("/v1/completions", body)).json()
        assert answer["choices"][0]["text"] == "hi"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["logprobs"]["tokens"] == ["h", "i"]
        assert answer["usage"]["completion_tokens"] == 0


async def test_the_developer_role_is_the_systems_where_the_template_has_none() -> None:
    async with serving() as server:
        messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": "x"}]
        await server.post("/v1/chat/completions", {"messages": messages})
        assert bytes(server.engine.requests[0].prompt) == b"system:be\nuser:x\n"


async def test_equal_seeds_and_random_ones_reach_the_engine() -> None:
    async with serving() as server:
        for seed in (7, -1, None, None):
            await server.post("/v1/completions", {"prompt": "a", "seed": seed})
        seeds = [r.sampling.seed for r in server.engine.requests]
        assert seeds[:2] == [7, 2**64 - 1]
        assert seeds[2] != seeds[3]


async def test_models_are_listed_with_their_context() -> None:
    async with serving() as server, client_of(server) as client:
        models = [model async for model in client.models.list()]
        assert [model.id for model in models] == ["fake", "alias"]
        card = (await server.client.get("/v1/models/alias")).json()
        assert card["max_model_len"] == 200
        assert (await server.client.get("/v1/models/other")).status_code == 404
