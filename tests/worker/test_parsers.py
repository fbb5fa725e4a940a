"""Tool calls and reasoning of each model family, whole and in every cut, well-formed and not."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from xpyd_core.chats import Function
from xpyd_core.errors import UserError
from xpyd_worker.parsers import Part, ToolParser
from xpyd_worker.parsers.json_calls import JsonValue
from xpyd_worker.parsers.reasoning import Thinking, start_of
from xpyd_worker.parsers.registry import (
    REASONING_FAMILIES,
    TOOL_FAMILIES,
    ChatParser,
    find_parsers,
)
from xpyd_worker.parsers.tagged_calls import as_json

PARIS = {"city": 'Pa"ris', "n": [1, {"a": "}</tool_call>[TOOL_CALLS]"}], "ü": "é😀\n"}
LYON: dict[str, Any] = {}


class Parsed(NamedTuple):
    """What a client has of all parts of a text."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]


def joined(parts: Sequence[Part]) -> Parsed:
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    for kind, text in parts:
        if kind == "content":
            content += text
        elif kind == "reasoning":
            reasoning += text
        elif kind == "call":
            calls.append((text, ""))
        else:
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + text)
    return Parsed(content, reasoning, calls)


def fed(parser: ToolParser | ChatParser, pieces: Sequence[str]) -> Parsed:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return joined([*parts, *parser.finish()])


def cuts(text: str) -> list[list[str]]:
    """The text whole, character by character, cut once at each place, and at random ones."""
    rng = random.Random(text)
    some = [[text], list(text)]
    some += [[text[:at], text[at:]] for at in range(1, len(text))]
    for _ in range(20):
        places = sorted({0, len(text), *(rng.randrange(len(text) + 1) for _ in range(5))})
        some.append([text[a:b] for a, b in pairwise(places)])
    return some


def parse(make: Callable[[], ToolParser | ChatParser], text: str) -> Parsed:
    """What the parser makes of the text, which is the same in every cut."""
    whole = fed(make(), [text])
    for pieces in cuts(text):
        assert fed(make(), pieces) == whole, pieces
    return whole


def hermes(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def llama(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "parameters": arguments})


def compact(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def made(family: str) -> Callable[[], ToolParser]:
    """Makes the family's parser, for tools of which `f` has arguments of many types."""
    return lambda: TOOL_FAMILIES[family].make((F, Function(name="g")))


F = Function(
    name="f",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"}, "n": {"type": "integer"}, "x": {"type": "number"},
            "ok": {"type": "boolean"}, "list": {"type": "array"},
            "maybe": {"$ref": "#/$defs/maybe"},
            "kind": {"enum": ["a", "b"]}, "level": {"enum": [1, 2]}, "o": {"$ref": "#/$defs/o"},
            "cycle": {"$ref": "#/$defs/cycle"}, "two": {"type": ["integer", "string"]},
        },
        "$defs": {
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "o": {"type": "object"},
            "cycle": {"anyOf": [{"$ref": "#/$defs/cycle"}, {"type": "integer"}]},
        },
    },
)  # fmt: skip


def qwen(name: str, *arguments: tuple[str, str]) -> str:
    some = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{some}</function>\n</tool_call>"


def glm(name: str, *arguments: tuple[str, str]) -> str:
    some = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments
    )
    return f"<tool_call>{name}\n{some}</tool_call>"


TYPED = (
    *(("city", 'Pa"ris\n\\ é😀 </para <b>'), ("n", "5"), ("x", "1.50"), ("ok", "True")),
    *(("list", '[1, {"a": null}]'), ("maybe", "Null"), ("kind", "a"), ("level", "2"), ("o", "{}")),
    *(("cycle", "-7"), ("two", "seven"), ("other", "5")),
)
AS_VALUES: dict[str, Any] = {
    "city": 'Pa"ris\n\\ é😀 </para <b>', "n": 5, "x": 1.5, "ok": True, "list": [1, {"a": None}],
    "maybe": None, "kind": "a", "level": 2, "o": {}, "cycle": -7, "two": "seven", "other": "5",
}  # fmt: skip


WRITTEN: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", hermes("f", PARIS), "", [("f", PARIS)]),
    ("hermes", "Let me see. \n" + hermes("f", PARIS), "Let me see.", [("f", PARIS)]),
    ("hermes", f"{hermes('f', PARIS)}\n{hermes('g', LYON)}\n", "", [("f", PARIS), ("g", LYON)]),
    ("hermes", hermes("f", PARIS) + "\nDone. ", "\nDone. ", [("f", PARIS)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "",
     [("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"id": [1], "name": "f", "arguments": null}', "", [("f", {})]),
    ("hermes", hermes("f", json.dumps(PARIS)), "", [("f", PARIS)]),
    ("hermes", hermes("f", PARIS).removesuffix("\n</tool_call>"), "", [("f", PARIS)]),
    ("hermes", hermes("f", LYON).removesuffix("</tool_call>") + hermes("g", LYON), "",
     [("f", LYON), ("g", LYON)]),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", "  plain text \n", "  plain text \n", []),
    ("llama3_json", llama("f", PARIS), "", [("f", PARIS)]),
    ("llama3_json", "\n" + llama("f", PARIS) + "; " + llama("g", LYON), "",
     [("f", PARIS), ("g", LYON)]),
    ("llama3_json", "<|python_tag|>" + llama("f", PARIS), "", [("f", PARIS)]),
    ("llama3_json", "Well. <|python_tag|>" + llama("f", PARIS), "Well.", [("f", PARIS)]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}', "",
     [("f", {"a": 1})]),
    ("llama3_json", '{"city": "Paris", "name": "x"}', '{"city": "Paris", "name": "x"}', []),
    ("llama3_json", " {} ", " {} ", []),
    ("llama3_json", 'An object: {"name": "f"}', 'An object: {"name": "f"}', []),
    ("mistral", f"[TOOL_CALLS][{compact('f', PARIS)}]", "", [("f", PARIS)]),
    ("mistral", f"[TOOL_CALLS] [{compact('f', PARIS)}, {compact('g', LYON)}] ", "",
     [("f", PARIS), ("g", LYON)]),
    ("mistral", f"Hm. [TOOL_CALLS]f{json.dumps(PARIS)}[TOOL_CALLS]g{{}}", "Hm.",
     [("f", PARIS), ("g", LYON)]),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]abc123456[ARGS]{json.dumps(PARIS)}", "", [("f", PARIS)]),
    ("mistral", "[ 1, 2 ]", "[ 1, 2 ]", []),
    ("qwen3_coder", qwen("f", *TYPED), "", [("f", AS_VALUES)]),
    ("qwen3_coder", "Well. \n" + qwen("g") + "\n" + qwen("f", ("n", "1")) + "\n", "Well.",
     [("g", {}), ("f", {"n": 1})]),
    ("qwen3_coder", "<function=f><parameter=city>a</parameter></function> End.", " End.",
     [("f", {"city": "a"})]),
    ("qwen3_coder", "<tool_call><function=f><parameter=city>\n\na\n\n<parameter=n>7</function>"
     "<function=g></tool_call>", "", [("f", {"city": "\na\n", "n": 7}), ("g", {})]),
    ("qwen3_coder", "Use <function= x> or <tool", "Use <function= x> or <tool", []),
    ("glm45", glm("f", *TYPED), "", [("f", AS_VALUES)]),
    ("glm45", "Well. " + glm("g") + glm("f", ("city", "\n a \n"), ("n", " 1 ")), "Well.",
     [("g", {}), ("f", {"city": "\n a \n", "n": 1})]),
    ("glm45", "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value></tool_call> End.", " End.",
     [("f", {"n": 1})]),
    ("glm45", glm("f", ("list", '["</arg_value></tool_call>", "\\""]'), ("o", "{'a</tool")), "",
     [("f", {"list": ["</arg_value></tool_call>", '"'], "o": "{'a</tool"})]),
    ("qwen3_coder", qwen("f", ("list", '["</parameter>"]'), ("o", '{"a": 1} or'), ("list", '["a')),
     "", [("f", {"o": '{"a": 1} or', "list": '["a'})]),
    ("glm45", "a </tool_call> b", "a </tool_call> b", []),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "calls"), WRITTEN)
def test_calls_are_read_as_the_family_writes_them_in_every_cut(
    family: str, text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    parser = made(family)()
    fed(parser, [text])
    assert parser.malformed == 0
    parsed = parse(made(family), text)
    assert parsed.content == content
    assert [(name, json.loads(arguments)) for name, arguments in parsed.calls] == calls


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "<tool_call>\nnot JSON\n</tool_call>"),
        ("hermes", 'Hi <tool_call>{"name": 5, "arguments": {}}</tool_call> there'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 01}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"na'),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>[1]</tool_call>"),
        ("llama3_json", "<|python_tag|>search.call(query='x')"),
        ("llama3_json", '<|python_tag|>{"query": "x"}'),
        ("mistral", "[TOOL_CALLS] nothing here"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS][1, 2]"),
        ("mistral", "[TOOL_CALLS]" + "f" * 2000 + "{}"),
        ("qwen3_coder", "<tool_call>\nnot a function\n</tool_call>"),
        ("qwen3_coder", '<tool_call>\n{"name": "f"}\n</tool_call>'),
        ("qwen3_coder", "Hi <tool_call><function=></function></tool_call> there"),
        ("qwen3_coder", "<tool_call><function=" + "f" * 300 + "></function></tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f"),
        ("qwen3_coder", "<tool_call>"),
        ("glm45", "<tool_call>"),
        ("glm45", "<tool_call> f "),
        ("glm45", "<tool_call>look around</tool_call>"),
        ("glm45", "<tool_call><arg_key>a</arg_key></tool_call>"),
        ("glm45", '<tool_call>{"name": "f"}</tool_call>'),
    ],
)
def test_what_only_looks_like_a_call_is_text_and_counted(family: str, text: str) -> None:
    assert parse(made(family), text) == Parsed(text, "", [])
    parser = made(family)()
    fed(parser, [text])
    assert parser.malformed == 1


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call>', "]}</tool_call>",
         [("f", '{"a": 1')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut', "", [("f", '{"a": "cut')]),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}, x', "x", [("f", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]f{"a": tru, "b"', ', "b"', [("f", '{"a": tru')]),
        ("qwen3_coder", "<function=f><parameter=city>a</parameter> and <b>", "and <b>",
         [("f", '{"city": "a"')]),
        ("qwen3_coder", "<function=f><parameter=city>\nhalf\n</para", "",
         [("f", '{"city": "half')]),
        ("qwen3_coder", "<function=f><parameter=city>a</parameter><parameter=n>12", "",
         [("f", '{"city": "a"')]),
        ("qwen3_coder", "<function=f><parameter=ci", "", [("f", "")]),
        ("qwen3_coder", "<function=f><parameter=>1", ">1", [("f", "")]),
        ("glm45", "<tool_call>f<arg_key>city</arg_key>a</arg_value></tool_call>",
         "city</arg_key>a</arg_value></tool_call>", [("f", "")]),
        ("glm45", "<tool_call>f<arg_key>maybe</arg_key><arg_value>nul", "", [("f", "")]),
        ("glm45", "<tool_call>f<arg_key>" + "k" * 1025 + "</arg_key>",
         "k" * 1025 + "</arg_key>", [("f", "")]),
    ],
)  # fmt: skip
def test_a_call_that_goes_wrong_behind_its_name_ends_there(
    family: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert parse(made(family), text) == Parsed(content, "", calls)
    parser = made(family)()
    fed(parser, [text])
    assert parser.malformed == 1


PIECES = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>"),
    *("</think>", '{"name": "f"', ', "arguments": ', ', "parameters": ', "{}", "}", "[", "]", '"'),
    *("\\", "\\u", "00", "e9", ":", ",", ";", " ", "\n", "true", "1.5e3", "-", "é", "name", "<"),
    *("<function=", "<parameter=", "</parameter>", "</function>", "f", "city", "n", "maybe", ">"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "null"),
)


@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_whatever_a_model_writes_nothing_raises_and_no_cut_changes_it(family: str) -> None:
    for seed in range(150):
        rng = random.Random(seed)
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12)))

        def make() -> ChatParser:
            return ChatParser(Thinking("<think>", "</think>", "either"), made(family)())

        whole = fed(make(), [text])
        assert fed(make(), list(text)) == whole, text
        at = rng.randrange(len(text) + 1)
        assert fed(make(), [text[:at], text[at:]]) == whole, text


def test_arguments_come_as_they_are_written() -> None:
    def pieces_of(family: str, said: str) -> list[str]:
        parser = made(family)()
        seen = [part for char in said for part in parser.push(char)]
        return [part.text for part in seen if part.kind == "arguments"]

    assert pieces_of("hermes", hermes("f", {"city": "Paris"})) == list('{"city": "Paris"}')
    texts = ['{"city": ', '"', *"Paris", '"', ', "n": ', "17", "}"]
    said = (("city", "Paris"), ("n", "17"))
    assert pieces_of("qwen3_coder", qwen("f", *said)) == texts
    assert pieces_of("glm45", glm("f", *said)) == texts


@pytest.mark.parametrize(
    ("types", "value", "read"),
    [
        ("integer", "12345678901234567890", "12345678901234567890"), ("integer", "07", "7"),
        ("integer", "5.0", "5.0"), ("integer", "five", '"five"'),
        ("integer", "1" * 5000, "1" * 5000),
        ("number", ".5", "0.5"), ("number", "1e3", "1e3"), ("number", "nan", '"nan"'),
        ("boolean", "FALSE", "false"), ("boolean", "1", "true"), ("boolean", "yes", '"yes"'),
        ("object", " {'a': 1} ", '" {\'a\': 1} "'), ("object", "[" * 9999, f'"{"[" * 9999}"'),
        ("array", " [1,\n2] ", "[1,\n2]"), ("null", "none", '"none"'), ("null", "", '""'),
        ("integer string", "7", "7"), ("integer string", "7.5", '"7.5"'),
        ("null integer", "null", "null"), ("object string", "{", '"{"'),
    ],
)  # fmt: skip
def test_a_value_between_tags_has_the_type_that_its_schema_says(
    types: str, value: str, read: str
) -> None:
    assert as_json(value, frozenset(types.split())) == read


@pytest.mark.parametrize(
    ("text", "is_json"),
    [
        ("[]", True), ('{"a":[1,-0.5e+3,null,{"b":"\\u00e9"}]}', True), ('"x"', True),
        ("[1,]", False), ('{"a" 1}', False), ("{1:2}", False), ("[01]", False), ('["\n"]', False),
        ('["\\x"]', False), ("[nul]", False), ("]", False), ('{"a":1,}', False),
        ('["\\u00g0"]', False),
    ],
)  # fmt: skip
def test_a_json_value_ends_or_is_found_to_be_none(text: str, is_json: bool) -> None:
    value = JsonValue()
    assert (value.take(text, 0) == len(text), value.is_done, value.is_bad) == (
        is_json,
        is_json,
        not is_json,
    )


REASONED = [
    ("either", "<think>\nwell\n\n</think>\n\nHello", "well", "Hello"),
    ("either", "\n<think>well</think>Hello", "well", "Hello"),
    ("either", "Hello <think>", "", "Hello <think>"),
    ("either", " <thin", "", " <thin"),
    ("open", "well, </thi\n</think>\n\nHello\n", "well, </thi", "Hello\n"),
    ("open", "<think>well</think>", "well", ""),
    ("open", "<think><think>well", "<think>well", ""),
    ("open", "\nnever closed ", "never closed", ""),
    ("closed", "Hello <think>", "", "Hello <think>"),
    ("either", "<think></think>x</think>", "", "x</think>"),
]


@pytest.mark.parametrize(("start", "text", "reasoning", "content"), REASONED)
def test_reasoning_is_parted_from_the_answer_in_every_cut(
    start: Any, text: str, reasoning: str, content: str
) -> None:
    def make() -> ChatParser:
        return ChatParser(Thinking("<think>", "</think>", start), None)

    assert parse(make, text) == Parsed(content, reasoning, [])


def test_the_prompts_end_says_whether_reasoning_is_open() -> None:
    assert start_of("<|assistant|>\n<think>\n", "<think>", "</think>") == "open"
    assert start_of("<think>\n\n</think>\n\n", "<think>", "</think>") == "closed"
    assert start_of("say <think> please<|assistant|>", "<think>", "</think>") == "either"
    assert REASONING_FAMILIES["deepseek_r1"].start_behind("<|assistant|>") == "open"
    assert REASONING_FAMILIES["qwen3"].start_behind("<|assistant|>") == "either"


def test_calls_are_looked_for_behind_the_reasoning_only() -> None:
    def make() -> ChatParser:
        return ChatParser(Thinking("<think>", "</think>", "either"), made("hermes")())

    text = f"<think>\n{hermes('no', {})}\n</think>\n\n{hermes('f', PARIS)}"
    parsed = parse(make, text)
    assert parsed.reasoning == hermes("no", {})
    assert parsed.content == ""
    assert [name for name, _ in parsed.calls] == ["f"]


def test_reasoning_can_be_left_out_and_calls_behind_the_first() -> None:
    def make() -> ChatParser:
        return ChatParser(
            Thinking("<think>", "</think>", "open"),
            made("hermes")(),
            shows_reasoning=False,
            most_calls=1,
        )

    parsed = parse(make, f"well</think>{hermes('f', LYON)}\n{hermes('g', LYON)}")
    assert parsed == Parsed("", "", [("f", "{}")])


TEMPLATES = [
    ("{{ tools }}<tool_call>{% if enable_thinking %}<think></think>", "hermes", "qwen3"),
    ("{{ tools }} [TOOL_CALLS]", "mistral", None),
    ('{{ tools }}<|start_header_id|> {"name": .., "parameters": ..}', "llama3_json", None),
    ("<\uff5cAssistant\uff5c></think>", "hermes", "deepseek_r1"),
    ("{{ messages }}", "hermes", None),
    ("{{ tools }}<tool_call><function=x>", "qwen3_coder", None),
    ("{{ tools }}<tool_call>{name}<arg_key><think></think>", "glm45", "qwen3"),
    ("{{ tools }}", None, None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_families_are_found_in_the_template(
    template: str, tools: str | None, reasoning: str | None
) -> None:
    found = find_parsers("auto", "auto", [template])
    assert found.tools is (tools and TOOL_FAMILIES[tools])
    assert found.tools_name == (tools or "")
    assert found.reasoning is (reasoning and REASONING_FAMILIES[reasoning])
    assert find_parsers("none", "none", [template]).tools is None


def test_a_family_has_the_other_names_that_vllm_gives_it() -> None:
    for name, family in (("qwen3_xml", "qwen3_coder"), ("glm47", "glm45")):
        found = find_parsers(name, "glm45", [])
        assert (found.tools, found.tools_name) == (TOOL_FAMILIES[family], family)
        assert found.reasoning is REASONING_FAMILIES["qwen3"]


def test_a_parser_that_is_not_known_is_refused_with_the_names_of_those_that_are() -> None:
    with pytest.raises(
        UserError, match=r"--tool-call-parser: 'x' is not known.*hermes, qwen3_coder"
    ):
        find_parsers("x", "auto", [])
    with pytest.raises(UserError, match=r"--reasoning-parser: 'x' is not known.*qwen3"):
        find_parsers("auto", "x", [])
