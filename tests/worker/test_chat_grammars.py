"""What an answer must look like where a tool is to be called: each family's format, by schema."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.worker import test_grammar_texts as texts
from tests.worker.test_parsers import glm, parse, qwen
from xpyd_core.chats import Function
from xpyd_core.errors import ApiError
from xpyd_worker.grammar.spec import Grammar, checked, json_schema_grammar
from xpyd_worker.parsers.registry import (
    REASONING_FAMILIES,
    TOOL_FAMILIES,
    ChatOptions,
    Parsers,
)
from xpyd_worker.server.openai.chats import chat_grammar

_KINDS = {"ends": "whole", "may end": "whole", "goes on": "open", "no": "refused"}


def outcome(asked: Grammar | None, text: str) -> str:
    """Whether the text is a whole answer, may become one, or neither. The kit's vocabulary has the
    end of a reasoning as a token of its own."""
    assert asked is not None
    return _KINDS[texts.outcome(asked, *re.split("(</think>)", text))]


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Function(name="weather", parameters=CITY)
STRICT = Function(name="weather", parameters=CITY, strict=True)
CLOCK = Function(name="clock")
ANSWER = json_schema_grammar({"type": "integer"})


def grammar(
    family: str, prompt: str = "", *, reasoning: str | None = None, asked: Any = None, **chosen: Any
) -> Grammar | None:
    options = ChatOptions(**{"tools": (WEATHER, CLOCK), "choice": "required", **chosen})
    thinks = None if reasoning is None else REASONING_FAMILIES[reasoning]
    found = chat_grammar(options, Parsers(TOOL_FAMILIES[family], thinks), prompt, asked)
    return None if found is None else replace(found, root=checked(found.root))


def call(family: str, name: str, arguments: Any) -> str:
    """A call as the grammar writes it."""
    made = TOOL_FAMILIES[family]
    if made.tags is not None:
        texts = [(key, v if isinstance(v, str) else json.dumps(v)) for key, v in arguments.items()]
        return {"qwen3_coder": qwen, "glm45": glm}[family](name, *texts)
    before, behind = made.call
    said = json.dumps(arguments)
    return f'{before}{{"name": "{name}", "{made.arguments}": {said}}}{behind}'


def calls(family: str, *some: tuple[str, Any]) -> str:
    made = TOOL_FAMILIES[family]
    before, behind = made.around
    return before + made.separator.join(call(family, *one) for one in some) + behind


PARIS = ("weather", {"city": "Paris"})
NOW = ("clock", {})


@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_a_call_that_must_come_is_one_that_the_familys_parser_reads(family: str) -> None:
    required = grammar(family)
    for some in ([PARIS], [NOW], [PARIS, NOW, PARIS]):
        text = calls(family, *some)
        assert outcome(required, text) == "whole"
        parsed = parse(lambda: TOOL_FAMILIES[family].make((WEATHER, CLOCK)), text)
        assert parsed.content == ""
        assert [(name, json.loads(said)) for name, said in parsed.calls] == some
    for wrong in ("Hello", calls(family, ("weather", {"town": 5})), calls(family, ("other", {}))):
        assert outcome(required, wrong) == "refused"
    assert outcome(required, calls(family, *[NOW] * 9)) == "refused"
    one = grammar(family, parallel_tool_calls=False)
    assert outcome(one, calls(family, PARIS)) == "whole"
    assert outcome(one, calls(family, PARIS, NOW)) == "refused"
    named = grammar(family, choice="named", allowed=("clock",))
    assert outcome(named, calls(family, NOW)) == "whole"
    assert outcome(named, calls(family, PARIS)) == "refused"


@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_a_strict_tools_call_is_as_its_schema_says_where_the_model_makes_one(family: str) -> None:
    assert grammar(family, choice="auto") is None
    free = grammar(family, choice="auto", tools=(STRICT, CLOCK))
    assert outcome(free, "Hello, how are you?") == "whole"
    assert outcome(free, calls(family, PARIS)) == "whole"
    assert outcome(free, calls(family, ("clock", {"any": 1}))) == "whole"
    assert outcome(free, calls(family, ("weather", {"town": 5}))) == "refused"
    assert outcome(free, calls(family, ("weather", {"city": "x", "more": 1}))) == "refused"


def test_calls_come_behind_the_reasoning() -> None:
    said = calls("hermes", NOW)
    opened = grammar("hermes", "<|assistant|><think>\n", reasoning="qwen3")
    assert outcome(opened, f"hm, <tool_call></think>\n\n{said}") == "whole"
    assert outcome(opened, said) == "open"
    closed = grammar("hermes", "<think>\n\n</think>\n\n", reasoning="qwen3")
    assert outcome(closed, said) == "whole"
    assert outcome(closed, f"<think>hm</think>\n\n{said}") == "refused"
    either = grammar("hermes", "<|assistant|>", reasoning="qwen3")
    assert outcome(either, said) == "whole"
    assert outcome(either, f"<think>hm</think>\n\n{said}") == "whole"
    older = grammar("hermes", "<|assistant|>", reasoning="deepseek_r1")
    assert outcome(older, f"hm</think>\n\n{said}") == "whole"


@pytest.mark.parametrize("family", TOOL_FAMILIES)
@pytest.mark.parametrize("prompt", ["<|assistant|>", "<think>\n", "<think></think>"])
def test_free_text_with_strict_calls_may_be_behind_a_reasoning(family: str, prompt: str) -> None:
    free = grammar(family, prompt, reasoning="qwen3", choice="auto", tools=(STRICT, CLOCK))
    thought = {"<|assistant|>": "<think>\nhm\n</think>\n\n", "<think>\n": "hm</think>"}.get(
        prompt, ""
    )
    if prompt != "<think>\n":
        assert outcome(free, "Hello!") == "whole"
    assert outcome(free, f"{thought}Hello!") == "whole"
    assert outcome(free, thought + calls(family, PARIS, NOW)) == "whole"
    assert outcome(free, thought + calls(family, ("weather", {"town": 5}))) == "refused"


def test_an_answer_that_is_asked_for_may_be_a_call_where_the_model_chooses() -> None:
    either = grammar("hermes", choice="auto", asked=ANSWER)
    assert outcome(either, "17") == "whole"
    assert outcome(either, calls("hermes", NOW)) == "whole"
    assert outcome(either, "seventeen") == "refused"
    assert grammar("hermes", choice="none", tools=(), asked=ANSWER) == ANSWER
    with pytest.raises(ApiError, match=r"response_format.*tool_choice"):
        grammar("hermes", asked=ANSWER)


def test_a_wrong_schema_of_a_tool_is_refused_by_its_place() -> None:
    wrong = Function(name="f", parameters={"properties": {"a": {"not": {}}}})
    with pytest.raises(ApiError) as caught:
        grammar("hermes", tools=(CLOCK, wrong))
    assert caught.value.param == "tools[1].function.parameters.properties.a.not"
    assert grammar("hermes", tools=(CLOCK, wrong), choice="auto") is None


@pytest.mark.parametrize("family", ["hermes", "llama3_json", "qwen3_coder"])
def test_a_tool_whose_arguments_would_be_no_object_is_refused(family: str) -> None:
    for types in ("string", ["string", "null"]):
        with pytest.raises(ApiError) as caught:
            grammar(family, tools=(CLOCK, Function(name="f", parameters={"type": types})))
        assert caught.value.param == "tools[1].function.parameters.type"


TAGGED = ["qwen3_coder", "glm45"]
MANY = Function(
    name="many",
    parameters={
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 10},
            "kind": {"enum": ["a", 'b"', 3]},
            "maybe": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]},
            "code": {"$ref": "#/$defs/code"},
            "place": {"$ref": "#/$defs/place"},
            "any": {},
        },
        "required": ["n"],
        "$defs": {
            "code": {"type": "string", "pattern": "^[a-z]+[0-9]$"},
            "place": {
                "type": "object",
                "properties": {"x": {"type": "number"}},
                "required": ["x"],
            },
        },
    },
)


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(
    ("arguments", "is_allowed"),
    [
        ({"n": 10}, True), ({}, False), ({"n": 9}, False), ({"n": "10"}, True), ({"n": "x"}, False),
        ({"n": 10, "kind": 'b"'}, True), ({"n": 10, "kind": 3}, True),
        ({"n": 10, "kind": "c"}, False),
        ({"n": 10, "maybe": None}, True), ({"n": 10, "maybe": "a\nc"}, True),
        ({"n": 10, "maybe": "four"}, False), ({"n": 10, "code": "ab7"}, True),
        ({"n": 10, "code": "ab7c"}, False), ({"n": 10, "place": {"x": 1.5}}, True),
        ({"n": 10, "place": {"x": "y"}}, False), ({"n": 10, "other": 1}, False),
        ({"n": 10, "any": 'x < y\n\n"y" '}, True), ({"n": 10, "any": "</tool"}, True),
    ],
)  # fmt: skip
def test_an_argument_between_tags_is_what_its_schema_says(
    family: str, arguments: dict[str, Any], is_allowed: bool
) -> None:
    text = calls(family, ("many", arguments))
    required = grammar(family, tools=(MANY,))
    assert outcome(required, text) == ("whole" if is_allowed else "refused")
    if is_allowed:
        parsed = parse(lambda: TOOL_FAMILIES[family].make((MANY,)), text)
        ((_, said),) = parsed.calls
        assert json.loads(said) == {k: 10 if v == "10" else v for k, v in arguments.items()}


@pytest.mark.parametrize("family", TAGGED)
def test_what_the_parser_would_take_for_a_tag_is_in_no_argument(family: str) -> None:
    required = grammar(family, tools=(MANY,))
    tags = TOOL_FAMILIES[family].tags
    assert tags is not None
    for tag in tags.value_ends:
        for key in ("any", "maybe", "code"):
            text = calls(family, ("many", {"n": 10, key: f"{tag}1"}))
            assert outcome(required, text) == "refused", text


@pytest.mark.parametrize("family", TAGGED)
@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"anyOf": [{}]}, "anyOf"),
        ({"properties": {"a": {"not": {}}}}, "properties.a.not"),
        ({"properties": {"a>": {"type": "string"}, "a</arg_key>": {}}}, "properties.a"),
        ({"properties": {"a": {"enum": ["</parameter>", "</arg_value>"]}}}, "properties.a"),
        ({"properties": {"a": {"pattern": "a", "minLength": 2}}}, "properties.a.pattern"),
        (
            {"properties": {"a": {"minLength": 2, "anyOf": [{"type": "string"}]}}},
            "properties.a.anyOf",
        ),
        (
            {"properties": {"a": {"allOf": [{"type": "string"}, {"minLength": 2}]}}},
            "properties.a.allOf",
        ),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/a"}},
                "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}},
            },
            "properties.a.anyOf[0].anyOf[0]",
        ),
    ],
)
def test_a_schema_that_the_format_cannot_follow_is_refused_by_its_place(
    family: str, schema: dict[str, Any], place: str
) -> None:
    with pytest.raises(ApiError) as caught:
        grammar(family, tools=(Function(name="f", parameters=schema),))
    assert str(caught.value.param).startswith(f"tools[0].function.parameters.{place}")
