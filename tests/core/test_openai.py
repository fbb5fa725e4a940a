"""Request bodies as typed values: bounds, and errors that name the field."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec
import pytest

from xpyd_core import bodies
from xpyd_core.complaints import shown
from xpyd_core.errors import ApiError
from xpyd_core.openai import (
    ChatRequest,
    CompletionRequest,
    RoutedChat,
    RoutedCompletion,
    StreamOptions,
    body_schema,
)

Body = TypeVar("Body")
MANY_DIGITS = "a number that json does not write"
_USER = {"role": "user", "content": "x"}


def read(kind: type[Body], body: dict[str, Any], name: str = "") -> Body:
    text = json.dumps(body).replace(json.dumps(MANY_DIGITS), "9" * 5000)
    return bodies.read(kind, text.encode(), name)


def test_what_is_absent_or_null_has_no_value_and_unknown_fields_are_ignored() -> None:
    found = read(RoutedChat, {"model": "m", "n": None, "of_another_api": {"n": 0}})
    assert found == RoutedChat(model="m")


def test_integers_are_numbers_where_a_number_is_expected() -> None:
    assert read(CompletionRequest, {"prompt": "x", "temperature": 1}).temperature == 1.0


def test_prompts_are_texts_token_ids_or_lists_of_either() -> None:
    for prompt in ("a", [1, 2], ["a", "b"], [[1], [2, 3]]):
        assert read(CompletionRequest, {"prompt": prompt}).prompt == prompt


def test_messages_and_stream_options_become_values() -> None:
    chat = read(ChatRequest, {"messages": [{**_USER, "tool_calls": None}]})
    (message,) = chat.messages
    assert (message.role, message.content) == ("user", "x")
    assert message.tool_calls is None
    routed = read(RoutedChat, {"stream_options": {"include_usage": True}})
    assert routed.stream_options == StreamOptions(include_usage=True)


@pytest.mark.parametrize(
    ("kind", "body", "param", "message"),
    [
        (RoutedChat, {"n": True}, "n", "expected an integer, got True"),
        (RoutedChat, {"n": 1.0}, "n", "expected an integer, got 1.0"),
        (RoutedChat, {"n": 0}, "n", "must be 1 to 16384, got 0"),
        (
            RoutedChat,
            {"n": MANY_DIGITS},
            "n",
            "must be 1 to 16384, got a number of very many digits",
        ),
        (RoutedChat, {"seed": 2**63}, "seed", f"must be {-(2**63)} to {2**63 - 1}, got {2**63}"),
        (RoutedChat, {"stream_options": []}, "stream_options", "expected an object, got []"),
        (
            *(RoutedChat, {"stream_options": {"include_usage": 1}}),
            *("stream_options.include_usage", "expected true or false, got 1"),
        ),
        (RoutedCompletion, {"echo": "yes"}, "echo", "expected true or false, got 'yes'"),
        (RoutedCompletion, {"model": ""}, "model", "must not be empty"),
    ],
)
def test_what_the_router_reads_is_refused_by_name(
    kind: type[msgspec.Struct], body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(ApiError) as error:
        read(kind, body)
    assert (error.value.status, error.value.param) == (400, param)
    assert str(error.value) == f"{param}: {message}"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"temperature": 2.5}, "temperature", "must be 0 to 2, got 2.5"),
        ({"top_p": 0}, "top_p", "must be above 0 and at most 1, got 0"),
        ({"presence_penalty": -3}, "presence_penalty", "must be -2 to 2, got -3"),
        ({"stop": 3}, "stop", "expected a string or a list, got 3"),
        ({"stop": ["a", ""]}, "stop", "item 1: must not be empty"),
        ({"stop": ["a"] * 17}, "stop", "must have at most 16 items, got 17"),
        ({"logit_bias": {"1": 1, "2": "x"}}, "logit_bias", "item 2: expected a number, got 'x'"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 0)}, "logit_bias", "1024 members"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
        ({"prompt": 3}, "prompt", "expected a string or a list, got 3"),
        ({"prompt": ""}, "prompt", "must not be empty"),
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": [1, -1]}, "prompt", "item 1: must be 0 to 2147483647, got -1"),
        ({"prompt": [[1], []]}, "prompt", "item 1: must not be empty"),
        ({"prompt": [[1, 2**31]]}, "prompt", f"item 0.1: must be 0 to 2147483647, got {2**31}"),
    ],
)
def test_what_the_engine_reads_of_a_completion_is_refused_by_name(
    body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(ApiError) as error:
        read(CompletionRequest, {"prompt": "x", **body})
    assert error.value.param == param
    assert str(error.value).startswith(f"{param}: ")
    assert message in str(error.value)


def test_a_number_beyond_the_floats_is_refused_wherever_it_comes() -> None:
    for field in ("temperature", "logit_bias"):
        value = {"7": MANY_DIGITS} if field == "logit_bias" else MANY_DIGITS
        with pytest.raises(ApiError) as error:
            read(CompletionRequest, {"prompt": "x", field: value})
        assert error.value.param == field


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        ([], "messages", "must not be empty"),
        ("hello", "messages", "expected a list, got 'hello'"),
        (["hello"], "messages[0]", "expected an object, got 'hello'"),
        ([{"content": "x"}], "messages[0].role", "this field is missing"),
        (
            [_USER, {"role": "ai", "content": "x"}],
            "messages[1].role",
            "expected one of assistant, developer, system, tool, user, got 'ai'",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            *("messages[0].content[0].type", "expected one of refusal, text, got 'image_url'"),
        ),
        (
            [{"role": "user", "content": 3}],
            *("messages[0].content", "expected a string or a list, got 3"),
        ),
    ],
)
def test_a_message_is_refused_by_its_place(messages: object, param: str, message: str) -> None:
    with pytest.raises(ApiError) as error:
        read(ChatRequest, {"messages": messages})
    assert error.value.param == param
    assert str(error.value) == f"{param}: {message}"


def test_a_prefix_is_part_of_the_name() -> None:
    with pytest.raises(ApiError, match=r"^body\.n: expected an integer") as error:
        read(RoutedChat, {"n": "x"}, "body")
    assert error.value.param == "body.n"


def test_long_values_are_shown_short() -> None:
    assert len(shown("x" * 1000)) < 50
    assert len(shown([[0] * 1000] * 1000)) < 100


def test_the_schema_has_the_fields_of_both_readers_and_says_who_checks_each() -> None:
    schema = body_schema(RoutedCompletion, CompletionRequest)
    properties = schema["properties"]
    assert schema["required"] == ["prompt"]
    assert set(properties) == set(RoutedCompletion.__struct_fields__) | set(
        CompletionRequest.__struct_fields__
    )
    assert properties["n"] == {
        "type": ["integer", "null"],
        "minimum": 1,
        "maximum": 16_384,
        "description": "Choices for each prompt, at most 16384 of all; engines allow fewer.",
        "x-checked-by": "router",
    }
    assert properties["top_p"]["exclusiveMinimum"] == 0
    assert {"type": "null"} in properties["stop"]["anyOf"]
    assert all(each["x-checked-by"] in ("router", "engine") for each in properties.values())
    assert "$ref" not in str(schema)
