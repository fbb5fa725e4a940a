"""OpenAI's Responses as chats, and chats as responses: transcripts, refusals, and the store."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import jsonschema_rs
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_core.errors import ApiError
from xpyd_router.http.openapi.document import responses_request
from xpyd_router.request.client_request import parse_request
from xpyd_router.translations.responses import Responses
from xpyd_router.translations.responses_store import Kept, ResponseStore
from xpyd_router.translations.seam import ChatError, ChatReader, Translation

Json = dict[str, Any]
HEX = "0123456789abcdef"
NOW_S = 1234


def api(store_bytes: int = 0) -> Responses:
    store = ResponseStore(store_bytes) if store_bytes else None
    return Responses(store, lambda: NOW_S)


def read(served: Responses | None = None, **fields: Any) -> Translation:
    body = {"model": "m", "input": "Hi", **fields}
    return (served or api()).read(json.dumps(body).encode())


def chat_of(**fields: Any) -> Json:
    """The chat of a request, which the router can serve."""
    chat = read(**fields).chat
    parse_request("chat/completions", chat)
    return orjson.loads(chat)


def messages_of(*items: Json, **fields: Any) -> list[Json]:
    return chat_of(input=list(items), **fields)["messages"]


# Requests.


def test_a_text_is_a_users_message_and_a_stream_asks_for_its_usage() -> None:
    assert chat_of() == {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    assert chat_of(stream=True) == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_options_have_the_names_that_chats_have() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    made = chat_of(
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        parallel_tool_calls=False,
        user="u",
        prompt_cache_key="k",
        reasoning={"effort": "low"},
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        seed=3,
        top_k=4,
        chat_template_kwargs={"a": 1},
        metadata={"a": "b"},
        service_tier="auto",
        store=False,
        truncation="disabled",
    )
    del made["model"], made["messages"]
    assert made == {
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "parallel_tool_calls": False,
        "user": "u",
        "prompt_cache_key": "k",
        "reasoning_effort": "low",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        },
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 3,
        "top_k": 4,
        "chat_template_kwargs": {"a": 1},
    }
    assert chat_of(text={"format": {"type": "json_object"}})["response_format"] == {
        "type": "json_object"
    }
    assert "response_format" not in chat_of(text={"format": {"type": "text"}})


def test_what_an_assistant_thought_said_and_called_is_one_message() -> None:
    thought = {"type": "reasoning", "summary": []}
    assert messages_of(
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {**thought, "content": [{"type": "reasoning_text", "text": 'th"ink'}]},
        {
            "type": "message",
            "role": "assistant",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x":1}'},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "r2"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "r1"}],
        },
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in "de"]},
    ) == [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "reasoning_content": 'th"ink',
            "content": "b",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "r2"},
        {"role": "tool", "tool_call_id": "c1", "content": "r1"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": [{"type": "text", "text": t} for t in "de"]},
    ]


def test_a_call_alone_has_null_content_and_a_thought_alone_an_empty_one() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    summary = [{"type": "summary_text", "text": t} for t in ("x", "y")]
    thought = {"type": "reasoning", "summary": summary, "encrypted_content": "?"}
    first, second = messages_of(call, thought)
    assert first["content"] is None
    assert second == {"role": "assistant", "reasoning_content": "x\ny", "content": ""}


def test_what_the_model_is_told_before_the_first_turn_is_one_message() -> None:
    told = {"role": "developer", "content": [{"type": "input_text", "text": t} for t in "bc"]}
    user = {"role": "user", "content": "Hi"}
    later = {"role": "developer", "content": "d"}
    assert messages_of(told, {"role": "system", "content": "x"}, user, later, instructions="a") == [
        {"role": "system", "content": "a\n\nb\nc\n\nx"},
        user,
        {"role": "system", "content": "d"},
    ]


def test_an_image_is_the_chats_for_models_that_take_images() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    parts = [image, {**image, "detail": "low"}, {"type": "input_text", "text": "?"}]
    url = {"url": "data:image/png;base64,AA=="}
    assert messages_of({"role": "user", "content": parts})[0]["content"] == [
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {**url, "detail": "low"}},
        {"type": "text", "text": "?"},
    ]


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
OTHER = {"type": "function", "name": "g", "description": "G"}
CHAT_TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object"}, "strict": True},
    },
    {"type": "function", "function": {"name": "g", "description": "G"}},
]


@pytest.mark.parametrize(
    ("choice", "names", "wanted"),
    [
        (None, "fg", None),
        ("auto", "fg", "auto"),
        ("none", "fg", "none"),
        ("required", "fg", "required"),
        (
            {"type": "function", "name": "g"},
            "fg",
            {"type": "function", "function": {"name": "g"}},
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [OTHER]},
            "g",
            "required",
        ),
    ],
)
def test_tools_are_functions_of_the_chat(choice: Any, names: str, wanted: Any) -> None:
    made = chat_of(tools=[FUNCTION, OTHER], tool_choice=choice)
    assert made["tools"] == [one for one in CHAT_TOOLS if one["function"]["name"] in names]
    assert made.get("tool_choice") == wanted


def test_without_tools_a_choice_that_needs_none_is_left_out() -> None:
    assert "tool_choice" not in chat_of(tool_choice="auto", tools=[])
    with pytest.raises(ApiError) as caught:
        read(tool_choice="required")
    assert caught.value.param == "tool_choice"


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
REFUSED: list[tuple[Json, str]] = [
    ({"model": None}, "model"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": [{"id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input[0].content[0].type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
        "input[0].content[0].image_url",
    ),
    (
        {"input": [{"role": "system", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
    ),
    ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id"),
    ({"input": [{**CALL, "name": None}]}, "input[0].name"),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
    ({"input": [CALL, {"type": "function_call_output", "call_id": "d"}]}, "input[1].call_id"),
    ({"input": [CALL, {"type": "function_call_output", "call_id": "c"}]}, "input[1].output"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools[1].name"),
    ({"tools": [{**FUNCTION, "parameters": []}]}, "tools[0].parameters"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"tools": [FUNCTION], "tool_choice": "some"}, "tool_choice"),
    (
        {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "tools": [OTHER]}},
        "tool_choice.tools",
    ),
    ({"background": True}, "background"),
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ({"truncation": "auto"}, "truncation"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"conversation": "c"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"context_management": []}, "context_management"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"include": ["all"]}, "include"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[param for _, param in REFUSED])
def test_what_cannot_be_served_is_refused_by_name(fields: Json, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


@pytest.mark.parametrize("input_", [[{}] * 5000, [{"role": "user", "content": [{}] * 5000}]])
def test_so_many_items_or_parts_are_refused_before_they_are_read(input_: Any) -> None:
    with pytest.raises(ApiError, match="at most 4096"):
        read(input=input_)


def test_what_changes_nothing_is_taken() -> None:
    read(
        background=False,
        conversation=None,
        n=1,
        max_tool_calls=3,
        include=["file_search_call.results", "reasoning.encrypted_content"],
        stream_options={"include_obfuscation": False},
        reasoning={"summary": "auto", "effort": None},
        text={"verbosity": "medium"},
        unheard_of=True,
    )


# Answers.


def chunk(delta: Json, finish: str | None = None, **choice: Any) -> bytes:
    made = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **choice}
    head = {"id": f"chatcmpl-{HEX}", "object": "chat.completion.chunk", "created": 7, "model": "m"}
    return b"data: " + orjson.dumps({**head, "choices": [made], "usage": None}) + b"\n\n"


USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 7,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 3},
}
ROLE = chunk({"role": "assistant", "content": ""})
ENDING = b"data: " + orjson.dumps({"id": "x", "choices": [], "usage": USAGE}) + b"\n\n"
DONE = b"data: [DONE]\n\n"


def call_chunk(index: int, text: str, **head: Any) -> bytes:
    name = {"name": head.pop("name")} if "name" in head else {}
    function = {**name, "arguments": text}
    return chunk({"tool_calls": [{"index": index, **head, "function": function}]})


MIXED = [
    ROLE,
    *(chunk({"reasoning_content": text}) for text in ("Let me ", 'th"ink')),
    *(chunk({"content": text}) for text in ("He", "l\\lo ", "wörld\n")),
    call_chunk(0, "", id="call_1", type="function", name="f"),
    *(call_chunk(0, text) for text in ('{"a":', ' "b"}')),
    call_chunk(1, "", id="call_2", type="function", name="g"),
    call_chunk(1, "{}"),
    chunk({}, "tool_calls"),
    ENDING,
    DONE,
]


def streamed(data: bytes, cuts: list[int] | None = None, **fields: Any) -> list[Json]:
    """The events of a chat's stream that comes in these cuts."""
    reader = ChatReader(read(stream=True, **fields).events(), dict)
    places = sorted({0, len(data), *(cuts or [])})
    came = b"".join([reader.feed(data[a:b]) for a, b in pairwise(places)])
    return parsed(came)


def parsed(came: bytes) -> list[Json]:
    found: list[Json] = []
    for event in came.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        payload = orjson.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + payload["type"].encode()
        found.append(payload)
    return found


def text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def test_the_events_of_a_text_are_those_of_the_api() -> None:
    data = b"".join([ROLE, chunk({"content": "Hel"}), chunk({"content": "lo"}), chunk({}, "stop")])
    events = streamed(data + ENDING + DONE)
    response = events[0].pop("response")
    assert events[1].pop("response") == response
    assert response["status"] == "in_progress"
    assert response["output"] == []
    final = events[-1].pop("response")
    item = {"id": f"msg_{HEX}_0", "type": "message", "role": "assistant"}
    begun = {**item, "status": "in_progress", "content": []}
    done = {**item, "status": "completed", "content": [text_part("Hello")]}
    at = {"item_id": f"msg_{HEX}_0", "output_index": 0, "content_index": 0}
    assert events == [
        {"type": "response.created", "sequence_number": 0},
        {"type": "response.in_progress", "sequence_number": 1},
        {
            "type": "response.output_item.added",
            "sequence_number": 2,
            "output_index": 0,
            "item": begun,
        },
        {
            "type": "response.content_part.added",
            "sequence_number": 3,
            **at,
            "part": text_part(""),
        },
        {
            "type": "response.output_text.delta",
            "sequence_number": 4,
            **at,
            "delta": "Hel",
            "logprobs": [],
        },
        {
            "type": "response.output_text.delta",
            "sequence_number": 5,
            **at,
            "delta": "lo",
            "logprobs": [],
        },
        {
            "type": "response.output_text.done",
            "sequence_number": 6,
            **at,
            "text": "Hello",
            "logprobs": [],
        },
        {
            "type": "response.content_part.done",
            "sequence_number": 7,
            **at,
            "part": text_part("Hello"),
        },
        {
            "type": "response.output_item.done",
            "sequence_number": 8,
            "output_index": 0,
            "item": done,
        },
        {"type": "response.completed", "sequence_number": 9},
    ]
    assert final == {
        **response,
        "status": "completed",
        "completed_at": NOW_S,
        "output": [done],
        "usage": {
            "input_tokens": 5,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 3},
            "total_tokens": 12,
        },
    }
    assert (final["id"], final["created_at"], final["model"]) == (f"resp_{HEX}", 7, "m")


def kinds(events: list[Json]) -> list[str]:
    """Types of the events, without those that come again and again."""
    found = [event["type"].removeprefix("response.") for event in events]
    return [kind for kind, before in zip(found, ["", *found], strict=False) if kind != before]


OUTPUT = [
    {
        "id": f"rs_{HEX}_0",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": 'Let me th"ink'}],
    },
    {
        "id": f"msg_{HEX}_1",
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [text_part("Hel\\lo wörld\n")],
    },
    *(
        {
            "id": f"fc_{HEX}_{index}",
            "type": "function_call",
            "status": "completed",
            "call_id": f"call_{index - 1}",
            "name": name,
            "arguments": arguments,
        }
        for index, name, arguments in ((2, "f", '{"a": "b"}'), (3, "g", "{}"))
    ),
]


@given(st.lists(st.integers(0, len(b"".join(MIXED))), max_size=12))
def test_reasoning_text_and_calls_are_items_however_the_stream_is_cut(cuts: list[int]) -> None:
    events = streamed(b"".join(MIXED), cuts)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["output"] == OUTPUT
    assert [one["item"] for one in events if one["type"].endswith("item.done")] == OUTPUT
    part = ["content_part.added", "", "", "content_part.done"]
    item = ["output_item.added", *part, "output_item.done"]

    def of(name: str, expected: list[str]) -> list[str]:
        texts = iter((f"{name}.delta", f"{name}.done"))
        return [one or next(texts) for one in expected]

    call = ["output_item.added", "", "", "output_item.done"]
    assert kinds(events) == [
        "created",
        "in_progress",
        *of("reasoning_text", item),
        *of("output_text", item),
        *(2 * of("function_call_arguments", call)),
        "completed",
    ]


def test_deltas_of_an_item_join_to_its_text() -> None:
    events = streamed(b"".join(MIXED))
    joined: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            joined[event["item_id"]] = joined.get(event["item_id"], "") + event["delta"]
    texts = {
        one["item_id"]: one.get("text", one.get("arguments"))
        for one in events
        if one["type"].endswith(("text.done", "arguments.done"))
    }
    assert joined == texts
    assert len(texts) == 4


def whole_chat(finish: str = "tool_calls", **message: Any) -> Json:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    head = {"id": f"chatcmpl-{HEX}", "object": "chat.completion", "created": 7, "model": "m"}
    return {**head, "choices": [choice], "usage": USAGE}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_whole_answer_is_the_response_at_the_end_of_its_stream(name: str) -> None:
    calls = [{"id": one["call_id"], "type": "function", "function": one} for one in OUTPUT[2:]]
    message = {name: 'Let me th"ink', "content": "Hel\\lo wörld\n", "tool_calls": calls}
    made = orjson.loads(read().whole(whole_chat(**message)))
    assert made == streamed(b"".join(MIXED))[-1]["response"]


def test_a_summary_that_is_asked_for_is_the_reasoning_itself() -> None:
    asked = {"summary": "auto"}
    events = streamed(b"".join(MIXED), reasoning=asked)
    assert kinds(events)[2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    assert events[3]["summary_index"] == 0
    said = [{"type": "summary_text", "text": 'Let me th"ink'}]
    item = events[-1]["response"]["output"][0]
    assert (item["summary"], item["content"]) == (said, [])
    whole = orjson.loads(
        read(reasoning=asked).whole(whole_chat(reasoning_content='Let me th"ink', content="x"))
    )
    assert whole["output"][0] == item
    assert whole["reasoning"] == {"effort": None, "summary": "auto"}


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
)
def test_an_answer_that_was_cut_off_is_incomplete(finish: str, reason: str) -> None:
    events = streamed(b"".join([*MIXED[:5], chunk({}, finish), ENDING, DONE]))
    final = events[-1]
    assert final["type"] == "response.incomplete"
    response = final["response"]
    assert response["status"] == "incomplete"
    assert response["completed_at"] is None
    assert response["incomplete_details"] == {"reason": reason}
    assert [one["status"] for one in response["output"]] == ["completed", "incomplete"]
    assert events[-2]["item"]["status"] == "incomplete"
    whole = orjson.loads(
        read().whole(whole_chat(finish, reasoning='Let me th"ink', content="Hel\\lo "))
    )
    assert whole == response


def test_an_answer_without_text_is_an_empty_message() -> None:
    events = streamed(b"".join([ROLE, chunk({}, "stop"), ENDING, DONE]))
    response = events[-1]["response"]
    assert [one["content"] for one in response["output"]] == [[text_part("")]]
    assert orjson.loads(read().whole(whole_chat("stop", content=None))) == response
    thought = orjson.loads(read().whole(whole_chat("length", reasoning="x", content=None)))
    assert [one["type"] for one in thought["output"]] == ["reasoning"]


def test_a_stream_that_fails_ends_with_the_failed_response() -> None:
    error = {"error": {"message": "all died", "type": "server_error", "param": None, "code": "x"}}
    said = b"data: " + orjson.dumps(error) + b"\n\n"
    events = streamed(b"".join([*MIXED[:5], said]))
    final = events[-1]
    assert final["type"] == "response.failed"
    response = final["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "all died"}
    assert [one["status"] for one in response["output"]] == ["incomplete", "incomplete"]


def test_a_response_repeats_what_was_asked_for() -> None:
    schema = {"type": "object"}
    fields: Json = {
        "instructions": "Be brief.",
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 99,
        "max_tool_calls": 2,
        "parallel_tool_calls": False,
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "high", "summary": "detailed"},
    }
    format_ = {"type": "json_schema", "name": "x", "schema": schema}
    made = orjson.loads(
        read(**fields, tools=[FUNCTION, OTHER], text={"format": format_}).whole(
            whole_chat(content="x")
        )
    )
    assert {name: made[name] for name in fields} == fields
    assert made["text"] == {
        "format": {**format_, "strict": False, "description": None},
        "verbosity": "medium",
    }
    assert made["tools"] == [
        {**FUNCTION, "description": None},
        {**OTHER, "parameters": None, "strict": None},
    ]
    assert (made["store"], made["background"], made["truncation"]) == (False, False, "disabled")


def scored(text: str) -> Json:
    return {"token": text, "logprob": -0.5, "bytes": list(text.encode())}


def test_log_probabilities_that_are_asked_for_come_with_their_text() -> None:
    asked: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    entries = [{**scored(text), "top_logprobs": [scored(text)]} for text in ("a", "", "b", "b")]
    data = [ROLE, *(chunk({"content": e["token"]}, logprobs={"content": [e]}) for e in entries)]
    events = streamed(b"".join([*data, chunk({}, "stop"), ENDING, DONE]), **asked)
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [one["delta"] for one in deltas] == ["a", "b", "b"]
    assert [one["logprobs"] for one in deltas] == [entries[:1], entries[1:3], entries[3:]]
    response = events[-1]["response"]
    assert response["output"][0]["content"][0]["logprobs"] == entries
    answer = whole_chat("stop", content="abb")
    answer["choices"][0]["logprobs"] = {"content": entries}
    assert orjson.loads(read(**asked).whole(answer)) == response


def test_an_engines_error_names_the_field_that_the_client_wrote() -> None:
    error = ChatError(400, "response_format: no", param="response_format", code="x")
    assert orjson.loads(api().refusal(error, "")) == {
        "error": {
            "message": "text.format: no",
            "type": "invalid_request_error",
            "param": "text.format",
            "code": "x",
        }
    }
    inside = ChatError(400, "messages[3].role: no", param="messages[3].role")
    assert orjson.loads(api().refusal(inside, ""))["error"]["message"] == "input: no"
    other = ChatError(404, "no such model", "not_found_error", "model", "model_not_found")
    assert orjson.loads(api().refusal(other, ""))["error"] == {
        "message": "no such model",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }


# The store.


def test_a_response_goes_on_from_one_that_is_kept() -> None:
    served = api(100_000)
    first = read(
        served,
        instructions="Be brief.",
        input=[{"role": "developer", "content": "Told."}, {"role": "user", "content": "Hi"}],
        tools=[FUNCTION, OTHER],
    )
    calls = [{"id": one["call_id"], "function": one} for one in OUTPUT[2:]]
    made = orjson.loads(first.whole(whole_chat(reasoning="Hm", content="Yes", tool_calls=calls)))
    assert made["store"] is True
    results = [
        {"type": "function_call_output", "call_id": f"call_{i}", "output": "ok"} for i in (1, 2)
    ]
    goes_on = {"previous_response_id": made["id"], "instructions": "Be long."}
    second = orjson.loads(read(served, input=results, **goes_on).chat)["messages"]
    items = [
        {"role": "developer", "content": "Told."},
        {"role": "user", "content": "Hi"},
        *made["output"],
        *results,
    ]
    assert second == messages_of(*items, instructions="Be long.")
    assert second[0]["content"] == "Be long.\n\nTold."
    assert second[2]["reasoning_content"] == "Hm"


def test_a_stream_is_kept_at_its_end_and_not_where_it_fails_or_must_not_be() -> None:
    served = api(100_000)
    assert served.store is not None
    reader = ChatReader(read(served, stream=True).events(), dict)
    for event in MIXED[:-1]:
        reader.feed(event)
    assert len(served.store) == 0
    final = parsed(reader.feed(DONE))[-1]["response"]
    kept = served.store.get(f"resp_{HEX}")
    assert kept is not None
    assert orjson.loads(kept.body) == final
    served.store.remove(f"resp_{HEX}")
    read(served, store=False).whole(whole_chat(content="x"))
    assert len(served.store) == 0


def test_a_response_that_is_not_kept_is_an_error_of_its_own() -> None:
    with pytest.raises(ApiError) as caught:
        read(api(100_000), previous_response_id="resp_x")
    assert caught.value.status == 400
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(ApiError, match="--responses-store-mib"):
        read(previous_response_id="resp_x")


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 6000)), max_size=30))
def test_the_store_never_takes_more_than_its_limit(puts: list[tuple[str, int]]) -> None:
    store = ResponseStore(10_000)
    for name, size in puts:
        store.put(name, Kept(bytes(size), (), (b"x",) * (size % 5), ()))
        assert store.used_bytes <= 10_000
    for name in "abcdef":
        store.remove(name)
    assert store.used_bytes == 0


def test_the_response_that_was_used_longest_ago_goes_first() -> None:
    store, kept = ResponseStore(10_000), Kept(bytes(2000), (), (), ())
    for name in "abc":
        assert store.put(name, kept)
    assert store.get("a") is kept
    assert store.put("d", kept)
    assert [name for name in "abcd" if store.get(name)] == ["a", "c", "d"]
    assert not store.put("e", Kept(bytes(20_000), (), (), ()))
    assert store.get("e") is None


# The document.

SCHEMA = responses_request()
ANY_VALUES: tuple[Any, ...] = (
    *(True, 0, -3, 1.5, 1e9, 2**70, "", "x", "x" * 2000, [], [""], [-1], [[]], ["x"] * 300),
    *({}, {"x": 1}, {"x": "y" * 600}, {str(n): "x" for n in range(20)}, {"format": 1}),
)


@pytest.mark.parametrize("name", SCHEMA["properties"])
def test_the_router_takes_of_a_field_what_the_document_says(name: str) -> None:
    schema = SCHEMA["properties"][name]
    assert schema["description"]
    fits = jsonschema_rs.Draft202012Validator({**schema, "$defs": {}})
    wrong = [value for value in ANY_VALUES if not fits.is_valid(value)]
    assert len(wrong) > 5
    for value in wrong:
        with pytest.raises(ApiError) as caught:
            read(api(100_000), **{name: value})
        assert caught.value.status == 400
        assert (caught.value.param or "").startswith(name), (name, value)
