"""A coding agent's conversations as it sends them, through the real router, P and D.

tests/testdata/agents has what such an agent sends: what all requests of a conversation have in
common, what each turn adds, and what the model is to answer. The history behind a turn is what our
server answered to those before it, sent back as an agent sends it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types.beta import BetaMessage
from openai.types.responses import Response

from tests.router.fakes import Fleet
from tests.worker.replay import BLOCK, replayed
from tests.worker.server_fakes import ByteTokenizer, Running
from tests.worker.test_server_tools import parsers

FOLDER = Path(__file__).parents[1] / "testdata/agents"
LENGTH = 65536
OPENED, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"
MARK = {"type": "ephemeral"}
Json = dict[str, Any]


class Chats(ByteTokenizer):
    """Its template switches thinking at the prompt's end alone, as Qwen3's does."""

    def apply_chat_template(
        self, messages: Any, *, variables: Any = MappingProxyType({}), **options: Any
    ) -> list[int]:
        ids = super().apply_chat_template(messages, **options)
        if options.get("continue_final_message"):
            return ids
        return [*ids, *(OPENED if variables.get("enable_thinking", True) else CLOSED).encode()]


class Model:
    """Says what the turn at hand has it say, in the format of its family."""

    says = ""

    def __call__(self, _prompt: str, _choice: int) -> str:
        return self.says

    def will_say(self, answer: Mapping[str, Any]) -> None:
        thought = f"{answer['thinking']}\n</think>\n\n" if answer["thinking"] else ""
        calls = [
            json.dumps({"name": use["name"], "arguments": use["input"]}) for use in answer["uses"]
        ]
        written = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
        self.says = thought + "\n".join([answer["text"], *written])


def conversation(api: str) -> Json:
    return json.loads((FOLDER / f"{api}.json").read_text())


def served(model: Model) -> Any:
    of = {"parsers": parsers(), "tokenizer": Chats(), "max_model_len": LENGTH}
    return replayed(model, names=("chat",), served=of)


def prompt_of(engine: Running) -> bytes:
    """The last one, without what lets the model begin."""
    prompt = bytes(engine.engine.requests[-1].prompt)
    return prompt.removesuffix(CLOSED.encode()).removesuffix(OPENED.encode())


def blocks(prompt: bytes) -> int:
    """The tokens that the cache can have of a prompt that goes on behind it."""
    return len(prompt) // BLOCK * BLOCK


def expected(answer: Mapping[str, Any], kinds: tuple[str, str, str]) -> list[str]:
    counts = (bool(answer["thinking"]), bool(answer["text"]), len(answer["uses"]))
    return [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]


# --- Anthropic's Messages


def messages_client(made: Fleet, talk: Json) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=made.base,
        auth_token="x",
        default_headers=talk["headers"],
        default_query={"beta": "true"},  # older clients of the beta API send it
        max_retries=0,
    )


def marked(history: Sequence[Json], *, at: Sequence[int] = (-1, -3)) -> list[Json]:
    """With marks at the ends of these messages: the last one's and the last user's before it."""
    turns = deepcopy(list(history))
    for place in at:
        if len(turns) >= abs(place):
            turns[place]["content"][-1]["cache_control"] = MARK
    return turns


def user_turn(adds: Sequence[Json], before: Sequence[Json]) -> Json:
    """What a turn adds. Results belong to the uses of the answer before, by number."""
    uses = [one["id"] for turn in before[-1:] for one in turn["content"] if "input" in one]
    content = [
        {**one, "tool_use_id": uses[one["tool_use_id"]]} if "tool_use_id" in one else one
        for one in adds
    ]
    return {"role": "user", "content": content}


async def message_of(client: anthropic.AsyncAnthropic, talk: Json, **fields: Any) -> BetaMessage:
    """The whole of a stream, as the client's own model takes it."""
    async with client.beta.messages.stream(betas=talk["betas"], **fields) as stream:
        final = await stream.get_final_message()
    return BetaMessage.model_validate(final.to_dict())


def check_message(message: BetaMessage, answer: Mapping[str, Any]) -> None:
    kinds = [block.type for block in message.content]
    assert kinds == expected(answer, ("thinking", "text", "tool_use"))
    uses: list[Json] = []
    for block in message.content:
        if block.type == "tool_use":
            uses.append({"name": block.name, "input": block.input})
        elif block.type == "thinking":
            assert block.thinking.strip() == answer["thinking"]
        elif block.type == "text":
            assert block.text.strip() == answer["text"]
    assert uses == answer["uses"]
    assert message.stop_reason == ("tool_use" if uses else "end_turn")


async def test_an_agents_messages_are_answered_whole_and_hit_the_cache_as_they_grow() -> None:
    talk, model, history = conversation("messages"), Model(), list[Json]()
    async with served(model) as (made, engines), messages_client(made, talk) as client:
        (p,) = engines["Prefill"]
        before = b""
        for turn in talk["turns"]:
            history.append(user_turn(turn["adds"], history))
            fields = {**talk["request"], **turn["fields"], "messages": marked(history)}
            counted = await client.beta.messages.count_tokens(
                betas=talk["betas"],
                **{k: v for k, v in fields.items() if k not in ("max_tokens", "metadata")},
            )
            model.will_say(turn["answer"])
            message = await message_of(client, talk, **fields)
            check_message(message, turn["answer"])
            prompt, used = prompt_of(p), message.usage
            assert prompt.startswith(before), "the marks that moved are in the prompt"
            assert used.cache_read_input_tokens == blocks(before)
            assert used.input_tokens + blocks(before) == counted.input_tokens
            assert counted.input_tokens == len(p.engine.requests[-1].prompt)
            history.append({"role": "assistant", "content": message.to_dict()["content"]})
            before = prompt


@pytest.mark.parametrize("at", [(), (-1,), (0,), (-2, -3)])
async def test_a_turn_whose_marks_alone_moved_has_the_same_prompt(at: tuple[int, ...]) -> None:
    talk, model = conversation("messages"), Model()
    first, second = talk["turns"][:2]
    uses = [
        {"type": "tool_use", "id": f"t{i}", **use} for i, use in enumerate(first["answer"]["uses"])
    ]
    history = [user_turn(first["adds"], ()), {"role": "assistant", "content": uses}]
    history.append(user_turn(second["adds"], history))
    model.will_say(second["answer"])
    async with served(model) as (made, engines), messages_client(made, talk) as client:
        fields = {**talk["request"], **second["fields"]}
        await message_of(client, talk, **fields, messages=marked(history))
        tools = deepcopy(fields["tools"])
        tools[-1]["cache_control"] = MARK
        moved = {
            **fields,
            "tools": tools,
            "system": [
                {k: v for k, v in block.items() if k != "cache_control"}
                for block in fields["system"]
            ],
        }
        again = await message_of(client, talk, **moved, messages=marked(history, at=at))
        (p,) = engines["Prefill"]
        one, other = (request.prompt for request in p.engine.requests)
        assert list(one) == list(other)
        assert again.usage.cache_read_input_tokens == (len(one) - 1) // BLOCK * BLOCK


async def test_an_agents_requests_beside_the_conversation_are_answered() -> None:
    talk, model = conversation("messages"), Model()
    async with served(model) as (made, _), messages_client(made, talk) as client:
        for aside in talk["asides"]:
            model.says = aside["says"]
            request = dict(aside["request"])
            needed = {name: request.pop(name) for name in ("model", "max_tokens", "messages")}
            # The client has no arguments for all that agents send.
            said = await client.beta.messages.create(
                betas=talk["betas"], **needed, extra_body=request
            )
            message = BetaMessage.model_validate(said.to_dict())
            assert [getattr(block, "text", "") for block in message.content] == [aside["text"]]
            assert message.stop_reason == aside["stop_reason"], aside["why"]


# --- OpenAI's Responses


def responses_client(made: Fleet, talk: Json) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{made.base}/v1", api_key="x", default_headers=talk["headers"], max_retries=0
    )


def items_of(adds: Sequence[Json], before: Sequence[Json]) -> list[Json]:
    """What a turn adds. Outputs belong to the last calls, by number from the first of these."""
    calls = [one["call_id"] for one in before if one["type"] == "function_call"]
    outputs = [one for one in adds if "call_id" in one]
    last = calls[len(calls) - len(outputs) :]
    return [{**one, "call_id": last[one["call_id"]]} if "call_id" in one else one for one in adds]


def sent_back(output: Sequence[Any]) -> list[Json]:
    """Items as an agent keeps them: without what only the server's store would need."""
    items = [item.to_dict() for item in output]
    kept = [{k: v for k, v in item.items() if k not in ("id", "status")} for item in items]
    return [
        {**item, "encrypted_content": None} if item["type"] == "reasoning" else item
        for item in kept
    ]


def check_response(response: Response, answer: Mapping[str, Any]) -> None:
    kinds = [item.type for item in response.output]
    assert kinds == expected(answer, ("reasoning", "message", "function_call"))
    uses = [
        {"name": item.name, "input": json.loads(item.arguments)}
        for item in response.output
        if item.type == "function_call"
    ]
    assert uses == answer["uses"]
    assert response.output_text.strip() == answer["text"]
    assert (response.status, response.store) == ("completed", False)


async def test_an_agents_responses_are_answered_whole_and_hit_the_cache_as_they_grow() -> None:
    talk, model, items = conversation("responses"), Model(), list[Json]()
    async with served(model) as (made, engines), responses_client(made, talk) as client:
        (p,) = engines["Prefill"]
        before = b""
        for turn in talk["turns"]:
            items += items_of(turn["adds"], items)
            model.will_say(turn["answer"])
            fields = {**talk["request"], **turn["fields"], "input": items}
            async with client.responses.stream(**fields) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_response()
            response = Response.model_validate(final.to_dict())
            check_response(response, turn["answer"])
            assert [event.sequence_number for event in events] == list(range(len(events)))
            prompt, used = prompt_of(p), response.usage
            assert prompt.startswith(before), "what came back is not what was sent"
            assert used is not None
            assert used.input_tokens == len(p.engine.requests[-1].prompt)
            assert used.input_tokens_details.cached_tokens == blocks(before)
            items += sent_back(response.output)
            before = prompt
