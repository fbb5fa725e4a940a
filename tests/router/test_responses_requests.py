"""OpenAI's Responses: requests as chats, and what is refused."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest

from tests.router.responses_kit import (
    FUNCTION,
    OTHER,
    Json,
    api,
    chat_of,
    messages_of,
    read,
)
from xpyd_core.errors import ApiError
from xpyd_router.http.openapi.document import responses_request


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
    ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
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
