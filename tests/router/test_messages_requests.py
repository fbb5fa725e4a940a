"""A body of Anthropic's Messages as a chat: what each part becomes, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from xpyd_core.errors import ApiError
from xpyd_router.request.client_request import parse_request
from xpyd_router.translations.messages import Messages
from xpyd_router.translations.messages_prompt import MAX_BLOCKS

BASE: dict[str, Any] = {
    "model": "m",
    "max_tokens": 2048,
    "messages": [{"role": "user", "content": "hi"}],
}
WEATHER = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}
FUNCTION = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": WEATHER["input_schema"],
    },
}
OFF = {"enable_thinking": False, "thinking": False}
ON = {"enable_thinking": True, "thinking": True}


def text(said: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **more}


def image(**source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def tool_use(call_id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": "weather", "input": arguments}


def result(call_id: str, content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **more}


def call(call_id: str, arguments: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def chat_bytes(**changes: Any) -> bytes:
    body = {name: value for name, value in {**BASE, **changes}.items() if value is not None}
    return Messages().read(json.dumps(body).encode()).chat.raw


def chat(**changes: Any) -> dict[str, Any]:
    raw = chat_bytes(**changes)
    parse_request("chat/completions", raw)  # what the router reads of it
    return orjson.loads(raw)


def messages(*turns: Any, **changes: Any) -> list[dict[str, Any]]:
    return chat(messages=list(turns), **changes)["messages"]


def refused(**changes: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        chat(**changes)
    assert error.value.status == 400
    return error.value


def place_of(error: ApiError) -> str:
    assert error.param is None
    return error.message.partition(": ")[0]


def test_a_plain_message_is_a_plain_chat() -> None:
    assert chat() == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2048,
        "chat_template_kwargs": OFF,
    }


FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sampling": (
        {"temperature": 0.5, "top_k": 4, "top_p": 0.5},
        {"temperature": 0.5, "top_k": 4, "top_p": 0.5},
    ),
    "stops": ({"stop_sequences": ["END", "\n\n"]}, {"stop": ["END", "\n\n"]}),
    "no stops": ({"stop_sequences": []}, {}),
    "stream": (
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
    ),
    "session": ({"metadata": {"user_id": "u"}}, {"user": "u"}),
    "thinking": (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"chat_template_kwargs": ON},
    ),
    "thinking between tools": (
        {"thinking": {"type": "between_tools"}},
        {"chat_template_kwargs": ON},
    ),
    "adaptive thinking": ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": ON}),
    "no thinking": ({"thinking": {"type": "disabled"}}, {}),
    "thinking that is not shown": (
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        {"chat_template_kwargs": ON, "include_reasoning": False},
    ),
    "effort": (
        {"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}},
        {"chat_template_kwargs": ON, "reasoning_effort": "high"},
    ),
    "effort of no thinking": ({"output_config": {"effort": "low"}}, {}),
    "schema": (
        {"output_config": {"format": {"type": "json_schema", "schema": {"minimum": 10**30}}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": {"minimum": 1e30}, "strict": True},
            }
        },
    ),
    "tools": ({"tools": [WEATHER]}, {"tools": [FUNCTION]}),
    "custom tool": (
        {"tools": [{**WEATHER, "type": "custom", "cache_control": {"type": "ephemeral"}}]},
        {"tools": [FUNCTION]},
    ),
    "strict tool": (
        {"tools": [{"name": "f", "input_schema": {}, "strict": True}]},
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
            ]
        },
    ),
    "tool with examples": (
        {
            "tools": [
                {
                    "name": "f",
                    "input_schema": {"type": "object"},
                    "input_examples": [{"a": 1}],
                    "defer_loading": False,
                    "allowed_callers": ["direct"],
                    "eager_input_streaming": True,
                },
                {"name": "g", "input_schema": {}, "input_examples": []},
            ]
        },
        {
            "tools": [
                {"type": "function", "function": {"name": name, "parameters": parameters}}
                for name, parameters in (
                    ("f", {"examples": [{"a": 1}], "type": "object"}),
                    ("g", {"examples": []}),
                )
            ]
        },
    ),
    "auto": (
        {"tools": [WEATHER], "tool_choice": {"type": "auto"}},
        {"tools": [FUNCTION], "tool_choice": "auto"},
    ),
    "any": (
        {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "one tool": (
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}},
        {
            "tools": [FUNCTION],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        },
    ),
    "no tool": (
        {"tools": [WEATHER], "tool_choice": {"type": "none"}},
        {"tools": [FUNCTION], "tool_choice": "none"},
    ),
    "what changes nothing": (
        {
            "service_tier": "auto",
            "cache_control": {"type": "ephemeral"},
            "context_management": {"edits": []},
            "diagnostics": {"previous_message_id": "msg_1"},
            "speed": "standard",
            "tools": [],
        },
        {},
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_each_field_has_its_meaning_in_a_chat(case: str) -> None:
    given, wanted = FIELDS[case]
    assert chat(**given) == {**chat(), **wanted}


def test_a_system_prompt_is_a_text_or_blocks() -> None:
    hi = {"role": "user", "content": "hi"}
    assert chat(system="Be kind.")["messages"] == [{"role": "system", "content": "Be kind."}, hi]
    assert chat(system=[text("A"), text("B")])["messages"] == [
        {"role": "system", "content": [text("A"), text("B")]},
        hi,
    ]
    assert chat(system=[])["messages"] == [hi]


def test_a_system_message_may_be_between_turns() -> None:
    said = messages(
        user(text("a")), {"role": "system", "content": [text("S")]}, assistant(text("b"))
    )
    assert [(one["role"], one["content"]) for one in said] == [
        ("user", "a"),
        ("system", "S"),
        ("assistant", "b"),
    ]


def test_a_tools_turn_becomes_calls_and_messages_of_results() -> None:
    assert messages(
        user(text("Here and there?")),
        assistant(
            {"type": "thinking", "thinking": "Two\nplaces.", "signature": "x"},
            text("I look."),
            tool_use("c1", place="here"),
            tool_use("c2"),
        ),
        user(result("c1", "sun"), result("c2", [text("rain"), text("wind")]), text("Thanks.")),
    ) == [
        {"role": "user", "content": "Here and there?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Two\nplaces.",
            "tool_calls": [call("c1", '{"place": "here"}'), call("c2", "{}")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": [text("rain"), text("wind")]},
        {"role": "user", "content": "Thanks."},
    ]


def test_what_a_user_says_before_a_result_stays_before_it() -> None:
    said = messages(user(text("Look:"), result("c1", "sun"), text("Well?")))
    assert [one["content"] for one in said] == ["Look:", "sun", "Well?"]


def test_a_result_that_is_an_error_or_empty_says_so() -> None:
    said = messages(
        assistant(tool_use("c1")),
        user(result("c1", "no file", is_error=True)),
        user(result("c2", [text("a"), text("b")], is_error=True), result("c3")),
    )
    assert said[0] == {"role": "assistant", "content": None, "tool_calls": [call("c1", "{}")]}
    assert [one["content"] for one in said[1:]] == [
        "Error: no file",
        [text("Error:"), text("a"), text("b")],
        "",
    ]


def test_images_are_parts_which_engines_take_or_refuse() -> None:
    near = image(type="base64", media_type="image/png", data="iVBO")
    far = image(type="url", url="https://example.org/a.png")
    urls = ["data:image/png;base64,iVBO", "https://example.org/a.png"]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    assert messages(user(near), assistant(tool_use("c")), user(result("c", [text("a"), far]))) == [
        {"role": "user", "content": parts[:1]},
        {"role": "assistant", "content": None, "tool_calls": [call("c", "{}")]},
        {"role": "tool", "tool_call_id": "c", "content": [text("a"), parts[1]]},
    ]


def test_neighbours_of_one_role_are_one_turn() -> None:
    assert messages(
        user(text("a")), {"role": "user", "content": "b"}, assistant(text("c")), assistant()
    )[:2] == [
        {"role": "user", "content": [text("a"), text("b")]},
        {"role": "assistant", "content": "c"},
    ]


def test_an_assistants_turn_at_the_end_is_continued() -> None:
    said = chat(messages=[user(text("Sun in Greek?")), assistant(text("The answer is ("))])
    assert said["continue_final_message"] is True
    assert said["add_generation_prompt"] is False
    assert "continue_final_message" not in chat()


def test_thinking_that_only_its_server_can_read_is_left_out() -> None:
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    assert messages(user(text("a")), assistant(redacted, text("b")), user(text("c"))) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]


def test_requests_that_differ_in_marks_of_the_cache_are_the_same_chat() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    plain = chat_bytes(
        system="S",
        tools=[WEATHER],
        messages=[{"role": "user", "content": "a"}, assistant(tool_use("c")), user(result("c"))],
    )
    marked = chat_bytes(
        system=[text("S", **mark)],
        tools=[{**WEATHER, **mark}],
        messages=[
            user(text("a", **mark)),
            assistant({**tool_use("c"), **mark}),
            user(result("c", **mark)),
        ],
    )
    assert marked == plain


@pytest.mark.parametrize("said", ["\\", '"', "\u2028", "é\n\t", "a\u0000b", "😀"])
def test_texts_come_through_as_they_are(said: str) -> None:
    found = messages(
        user(text(said)),
        assistant({"type": "thinking", "thinking": said}, tool_use("c", place=said)),
        user(result("c", said)),
        system=said,
    )
    assert [found[0]["content"], found[1]["content"], found[3]["content"]] == [said] * 3
    assert found[2]["reasoning_content"] == said
    arguments = found[2]["tool_calls"][0]["function"]["arguments"]
    assert orjson.loads(arguments) == {"place": said}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no model": ({"model": None}, "model", "missing"),
    "no max_tokens": ({"max_tokens": None}, "max_tokens", "missing"),
    "no room": ({"max_tokens": 0}, "max_tokens", "must be 1"),
    "no messages": ({"messages": None}, "messages", "missing"),
    "empty messages": ({"messages": []}, "messages", "1 to 4096"),
    "messages of another type": ({"messages": {}}, "messages", "a list"),
    "unknown field": ({"foo": 1}, "foo", "not known"),
    "hot": ({"temperature": 1.5}, "temperature", "0 to 1"),
    "role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "user"),
    "call of a system message": (
        {"messages": [{"role": "system", "content": [tool_use("c")]}]},
        "messages[0].content[0].type",
        "'tool_use'",
    ),
    "container": ({"container": "c"}, "container", "null"),
    "MCP": ({"mcp_servers": [{"type": "url"}]}, "mcp_servers", "null"),
    "place": ({"inference_geo": "us"}, "inference_geo", "null"),
    "fast": ({"speed": "fast"}, "speed", "standard"),
    "deferred tool": (
        {"tools": [{**WEATHER, "defer_loading": True}]},
        "tools[0].defer_loading",
        "not searched",
    ),
    "tool of code": (
        {"tools": [{**WEATHER, "allowed_callers": ["code_execution_20250825"]}]},
        "tools[0].allowed_callers",
        "direct",
    ),
    "examples": ({"tools": [{**WEATHER, "input_examples": {}}]}, "tools[0].input_examples", "list"),
    "content": ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "string"),
    "image of nowhere": (
        {"messages": [user(text("a"), {"type": "image", "source": {}})]},
        "messages[0].content[1].source.type",
        "missing",
    ),
    "image of a file": (
        {"messages": [user(image(type="file", file_id="x"))]},
        "messages[0].content[0].source.type",
        "base64, url",
    ),
    "image of no type": (
        {"messages": [user(image(type="base64", data="x"))]},
        "messages[0].content[0].source.media_type",
        "missing",
    ),
    "image of an assistant": (
        {"messages": [assistant(image(type="url", url="x"))]},
        "messages[0].content[0].type",
        "'image'",
    ),
    "document": ({"messages": [user({"type": "document"})]}, "messages[0].content[0].type", "doc"),
    "document of a result": (
        {"messages": [user(result("c", [{"type": "document"}]))]},
        "messages[0].content[0].content[0].type",
        "'document'",
    ),
    "result without call": (
        {"messages": [user({"type": "tool_result", "content": "x"})]},
        "messages[0].content[0].tool_use_id",
        "string",
    ),
    "call of a user": (
        {"messages": [user(tool_use("c"))]},
        "messages[0].content[0].type",
        "'tool_use'",
    ),
    "call without input": (
        {"messages": [assistant({"type": "tool_use", "id": "c", "name": "f"})]},
        "messages[0].content[0].input",
        "object",
    ),
    "text without text": (
        {"messages": [user({"type": "text"})]},
        "messages[0].content[0].text",
        "string",
    ),
    "server tool": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0].type",
        "'web_search_20250305'",
    ),
    "tool without schema": ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "object"),
    "tool twice": ({"tools": [WEATHER, WEATHER]}, "tools[1].name", "another tool"),
    "tool without name": ({"tools": [{"input_schema": {}}]}, "tools[0].name", "string"),
    "any of no tools": ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
    "unknown tool": (
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}},
        "tool_choice.name",
        "one of the tools",
    ),
    "small budget": (
        {"thinking": {"type": "enabled", "budget_tokens": 1}},
        "thinking.budget_tokens",
        "1024 to 2047",
    ),
    "large budget": (
        {"thinking": {"type": "enabled", "budget_tokens": 2048}},
        "thinking.budget_tokens",
        "below max_tokens",
    ),
    "schema that is none": (
        {"output_config": {"format": {"type": "json_schema", "schema": 1}}},
        "output_config.format.schema",
        "object",
    ),
    "thread": ({"thread": {"type": "create"}}, "thread", "all messages"),
    "no content": ({"messages": [user()]}, "messages[0].content", "empty"),
    "no result": ({"messages": [assistant(tool_use("c"))]}, "messages[0].content", "tool_result"),
    "system image": ({"system": [{"type": "image"}]}, "system[0].type", "'image'"),
    "too many blocks": (
        {"messages": [user(*[text("")] * (MAX_BLOCKS + 1))]},
        "messages",
        "content blocks",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_chat_has_no_word_for_is_refused_by_name(case: str) -> None:
    changes, name, words = REFUSED[case]
    error = refused(**changes)
    assert (place_of(error), words in error.message) == (name, True), error.message


def test_blocks_inside_results_count_with_those_of_other_messages() -> None:
    half: list[dict[str, Any]] = [text("")] * (MAX_BLOCKS // 2)
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c", "content": half}
    error = refused(messages=[user(result), user(*half)])
    assert (place_of(error), "content blocks" in error.message) == ("messages", True)
    assert len(chat(messages=[user(*half), user(*half)])["messages"][0]["content"]) == MAX_BLOCKS


def test_an_unknown_field_of_a_long_body_is_refused_too() -> None:
    long = [{"role": "user", "content": "x" * 100_000}]
    assert place_of(refused(messages=long, foo=1)) == "foo"
    assert chat(messages=long)["messages"] == long


def test_count_tokens_asks_for_the_prompt_of_the_same_chat() -> None:
    body = {"model": "m", "messages": BASE["messages"], "system": "S", "tools": [WEATHER]}
    asked = orjson.loads(Messages().tokenize_body(orjson.dumps(body)))
    assert asked.items() <= chat(**body).items()
    assert "max_tokens" not in asked
    with pytest.raises(ApiError, match="max_tokens: this field is not known"):
        Messages().tokenize_body(orjson.dumps(BASE))
