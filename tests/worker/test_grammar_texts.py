"""Which texts each part of a grammar takes, and where special tokens are tokens of their own."""

from __future__ import annotations

from typing import Any

import pytest

from tests.worker.grammar_kit import BYTES, EOS_TEXT, allowed_ids, matchers_of
from xpyd_core.errors import ApiError
from xpyd_worker.grammar.spec import (
    AnyText,
    Concat,
    Grammar,
    OneOf,
    Part,
    Pattern,
    Repeat,
    Rules,
    Text,
    Until,
    json_schema_grammar,
    json_schema_part,
    tagged_grammar,
    triggered_part,
)

ONE = json_schema_part({"const": 1}, "x")
CALL = Concat((Text("<call>\n"), ONE, Text("\n</call>")))
THINK = ("<think>why", "</think>")


def outcome(grammar: Grammar | Part, *texts: str) -> str:
    """Whether the texts are a whole answer: `ends` (only EOS may follow), `may end`, `goes on`, or
    `no`."""
    (matcher,) = matchers_of(grammar)
    if not matcher.accept(BYTES.ids(*texts)):
        return "no"
    if matcher.is_finished:
        return "ends"
    return "may end" if matcher.is_accepting else "goes on"


HOST = json_schema_part({"type": "string", "format": "hostname"}, "x")
LABEL = "a" * 63 + "."
DATE = json_schema_part({"type": "string", "format": "date"}, "x")
DATE_TIME = json_schema_part({"type": "string", "format": "date-time"}, "x")
OBJECT = json_schema_part(
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]}, "x"
)


STRING = json_schema_part({"type": "string"}, "x")
OPEN = json_schema_part(
    {"properties": {"a": {"type": "integer"}}, "additionalProperties": True, "type": "object"}, "x"
)


@pytest.mark.parametrize(
    ("grammar", "text", "is_like"),
    [
        (Text('a"b\n\\é/'), ['a"b\n\\Ã©/'], "ends"),
        (Text("ab"), ["a"], "goes on"),
        (Text("ab"), ["b"], "no"),
        (Pattern(r"\d{3}-[a-z/]+\n"), ["123-a/\n"], "ends"),
        (Pattern("^abc$"), ["abc"], "ends"),
        (json_schema_part({"type": "string", "maxLength": 2.0}, "x"), ['"ab"'], "ends"),
        (Pattern("a+"), ["aa"], "may end"),
        (Rules('start: "a" b+\nb: "x" | "y"\n'), ["axy"], "may end"),
        (Rules('root ::= "a" b+\nb ::= "x" | "y"\n'), ["axy"], "may end"),
        (OneOf((Text("yes"), Text("no"), Text("nope"))), ["no"], "may end"),
        (OneOf((Text("yes"), Text("no"), Text("nope"))), ["nope"], "ends"),
        (OneOf((Text("yes"), Text("no"))), ["maybe"], "no"),
        (AnyText(), ["a\n/"], "may end"),
        (AnyText(("<call>",)), ["a <cal"], "may end"),
        (AnyText(("<call>",)), ["a <call>"], "no"),
        (Until("</a>"), ["b</</a>"], "ends"),
        (Concat((Until("</a>"), Text("x"))), ["b</a>y"], "no"),
        (Repeat(Text("ab"), 2, 3), ["ababab"], "ends"),
        (Repeat(Text("ab"), 2, 3), ["ab"], "goes on"),
        (Repeat(Text("ab"), 0, 1), [""], "may end"),
        (OBJECT, ['{"a": 1}'], "ends"),
        (OBJECT, ['{"a":1, "b":[1,2]}'], "ends"),
        (OBJECT, ['{"a":  1}'], "no"),
        (OBJECT, ['{"a":1,"c":2}'], "no"),
        (STRING, ['"\\ud83d\\uDE00 \\u00e9\\u0001\\n"'], "ends"),
        (STRING, ['"\\ud83d"'], "no"),
        (STRING, ['"\\ude00'], "no"),
        (OPEN, ['{"b": "x", "\\u0063": 1}'], "no"),
        # It would be `a`, which is a number.
        (OPEN, ['{"\\u0061": "x"}'], "no"),
        (OPEN, ['{"a": 1, "b\\n": "\\t"}'], "ends"),
        (OBJECT, ['{\n"a":1}'], "no"),
        (json_schema_part({"const": {"a": [1, 2]}}, "x", spaces=False), ['{"a": 1}'], "no"),
        (json_schema_part({"const": {"a": 1}}, "x", blanks="\n?"), ['{\n"a":\n1}'], "ends"),
        (json_schema_part(True, "x"), ["[null]"], "ends"),
        (HOST, [f'"{LABEL * 3}{"a" * 61}"'], "ends"),
        (HOST, [f'"{LABEL * 3}{"a" * 62}"'], "no"),
        (DATE, ['"0000-05-12"'], "no"),
        (DATE, ['"0000-02-29"'], "no"),
        (DATE, ['"0400-02-29"'], "ends"),
        (DATE, ['"1000-05-12"'], "ends"),
        (DATE, ['"2021-02-29"'], "no"),
        (DATE, ['"2024-02-29"'], "ends"),
        (DATE, ['"2000-02-29"'], "ends"),
        (DATE, ['"1900-02-29"'], "no"),
        (DATE, ['"1900-02-28"'], "ends"),
        (DATE, ['"1900-12-30"'], "ends"),
        (DATE_TIME, ['"2021-02-29T10:00:00Z"'], "no"),
        (DATE_TIME, ['"2021-12-29T10:00:60Z"'], "no"),
        (DATE_TIME, ['"2021-12-29T10:00:59Z"'], "ends"),
        (json_schema_part('{"type": "null"}', "x"), ["null"], "ends"),
        (tagged_grammar([CALL], field="x"), ["<call>\n1\n</call>"], "may end"),
        (tagged_grammar([CALL], field="x", most=1), ["<call>\n1\n</call>"], "ends"),
        (
            tagged_grammar([CALL], field="x", separator="\n"),
            ["<call>\n1\n</call>\n<call>\n1\n</call>"],
            "may end",
        ),
        (tagged_grammar([CALL], field="x", separator="\n"), ["<call>\n1\n</call><"], "no"),
        (tagged_grammar([CALL], field="x", least=0, separator="\n"), [""], "may end"),
        (tagged_grammar([CALL], field="x"), ["hi"], "no"),
        (triggered_part({"<call>": [Concat((ONE, Text(";")))]}), ["hi <call>1;yes"], "may end"),
        (triggered_part({"<call>": [Concat((ONE, Text(";")))]}), ["hi"], "may end"),
        (triggered_part({"<call>": [Concat((ONE, Text(";")))]}), ["hi <call>2"], "no"),
        (triggered_part({"<call>": [ONE]}, starts_with_tag=True, most=1), ["<call>1"], "ends"),
        (triggered_part({"<call>": [ONE]}, starts_with_tag=True, most=1), ["hi"], "no"),
        (
            triggered_part({"<call>": [ONE]}, starts_with_tag=True),
            ["<call>1 or <call>1"],
            "may end",
        ),
        (triggered_part({"<call>": [ONE]}, starts_with_tag=True, most=2), ["<call>1"], "may end"),
        (Grammar(ONE).after_reasoning("</think>"), ["why", "</think>", "\n\n1"], "ends"),
        (Grammar(ONE).after_reasoning("</think>"), ["1"], "goes on"),
        (Grammar(ONE).after_reasoning("</think>", start="<think>"), ["1"], "ends"),
        (Grammar(ONE).after_reasoning("</think>", start="<think>"), [*THINK, "1"], "ends"),
        (Grammar(ONE).after_reasoning("</think>", start="<think>"), [*THINK, "\n2"], "no"),
        (Grammar(ONE).after_reasoning("</think>", start="<think>"), ["why"], "no"),
        # Of a special token the text is not the token.
        (Text("</think>"), ["<"], "no"),
        (Text("a</think>b"), ["a", "</think>", "b"], "ends"),
        (Until("\n</think>b"), ["a\n", "</think>", "b"], "ends"),
        (Until("\n</think>b"), ["a", "</think>"], "no"),
        (Until("</think>", "(a|b)+"), ["ab", "</think>"], "ends"),
        (Until("</think>", "(a|b)+"), ["abc"], "no"),
        (Until("</t>", without=("<a>",)), ["x</a><a", "</t>"], "ends"),
        (Until("</t>", without=("<a>",)), ["x<a>"], "no"),
        (Until("</t>", ".{2,9}", ("<a>",)), ["abc</t>"], "ends"),
        (Until("</t>", ".{2,9}"), ["a</t>b</t>"], "no"),
        (ONE, ["1", EOS_TEXT], "ends"),
        (Text("ab"), ["a", EOS_TEXT], "no"),
    ],
)
def test_a_grammar_takes_these_texts_only(grammar: Any, text: list[str], is_like: str) -> None:
    assert outcome(grammar, *text) == is_like


@pytest.mark.parametrize(
    ("pattern", "forbidden", "allowed"),
    [
        (r"^[^\"\\]{2}$", [r'"a\""', r'"\\a"'], ['"ab"', r'"\n\t"', '"-]"']),
        (r"^--[^/\\:*?\"<>|]$", [r'"--\""', r'"--\\"'], ['"--a"', r'"--\n"']),
        (r"^[^-\"]$", [r'"\""', '"-"'], ['"a"', r'"\\"']),
        (r"^[^]\"]$", [r'"\""', '"]"'], ['"a"', r'"\\"']),
        (r"^[^ -~]$", [r'"\""', r'"\\"', '"a"'], [r'"\n"', '"é"']),
        (r"^[\x00-\x1f]$", [r'"\""', r'"\\"'], [r'"\n"', r'"\u001f"']),
        (r"^[\u0000-!]$", [r'"\""', r'"\\"'], ['"!"', r'"\r"']),
        (r"^[a-z&&[^b]]$", ['"b"'], ['"a"']),
        (r"^[\w--[^b]]$", ['"a"'], ['"b"']),
    ],
)
def test_a_pattern_takes_no_quote_or_backslash_that_it_excludes(
    pattern: str, forbidden: list[str], allowed: list[str]
) -> None:
    """The library takes a class with all control characters for one that has these, too."""
    for schema in (
        {"type": "string", "pattern": pattern},
        {"patternProperties": {pattern: {}}, "type": "object", "additionalProperties": False},
    ):
        part = json_schema_part(schema, "x")
        head, end = ("{", ": 1}") if "patternProperties" in schema else ("", "")
        for text in forbidden:
            said = f"{head}{text}{end}".encode().decode("latin-1")
            assert outcome(part, said) == "no", text
        for text in allowed:
            said = f"{head}{text}{end}".encode().decode("latin-1")
            assert outcome(part, said) == "ends", text


def test_a_mask_has_a_bit_for_each_token_that_may_come() -> None:
    (matcher,) = matchers_of(Text("ab"), target=BYTES.target(320))
    words = matcher.mask().words()
    assert len(words) >= 320 // 8
    assert allowed_ids(words) == [ord("a")]
    assert matcher.accept([ord("a")])
    assert allowed_ids(matcher.mask().words()) == [ord("b")]


def test_where_an_answer_may_end_eos_is_in_the_mask() -> None:
    (matcher,) = matchers_of(Pattern("a?"))
    (eos,) = BYTES.ids(EOS_TEXT)
    assert allowed_ids(matcher.mask().words()) == [ord("a"), eos]


@pytest.mark.parametrize(
    ("grammar", "place", "says"),
    [
        (Pattern("("), "the_field", "unclosed group"),
        (Pattern("a(?=b)"), "the_field", "look-around"),
        (Rules("nonsense"), "the_field", "neither Lark nor GBNF"),
        (Rules("start: nope"), "the_field", "unknown name"),
        (
            json_schema_part({"minLength": 5, "maxLength": 3, "type": "string"}, "x"),
            "x.maxLength",
            "minLength",
        ),
        (json_schema_part({"$ref": "http://a/b"}, "x"), "x.$ref", "http://a/b"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    grammar: Part, place: str, says: str
) -> None:
    with pytest.raises(ApiError) as caught:
        matchers_of(Grammar(grammar, "the_field"))
    assert caught.value.status == 400
    assert caught.value.param == place
    assert says in str(caught.value)


def test_choices_begin_behind_what_they_put_out() -> None:
    one, two = matchers_of(Text("abc"), [BYTES.ids("a"), BYTES.ids("ab")])
    assert allowed_ids(one.mask().words()) == [ord("b")]
    assert allowed_ids(two.mask().words()) == [ord("c")]


def test_ids_that_do_not_follow_the_grammar_are_refused() -> None:
    with pytest.raises(ApiError, match=r"^kv_transfer_params.continue_from: "):
        matchers_of(Text("abc"), [BYTES.ids("a"), BYTES.ids("b")])


def test_a_schema_of_python_values_is_not_changed() -> None:
    schema: dict[str, Any] = {"properties": {"a": {"format": "ours"}}, "uniqueItems": False}
    json_schema_grammar(schema, closed=True)
    assert schema == {"properties": {"a": {"format": "ours"}}, "uniqueItems": False}


def _tagged(**more: Any) -> dict[str, Any]:
    """A union that its member `k` tells apart, as pydantic writes it."""
    kinds = {
        name: {
            "type": "object",
            "properties": {"k": {"const": name, "type": "string"}, name: {"type": "integer"}},
            "required": ["k", name],
            **more,
        }
        for name in ("a", "b")
    }
    return {"$defs": kinds, "oneOf": [{"$ref": f"#/$defs/{name}"} for name in kinds]}


def test_alternatives_that_a_member_tells_apart_may_stand_behind_references() -> None:
    assert outcome(json_schema_grammar(_tagged()), '{"k":"b","b":1}') == "ends"
    assert outcome(json_schema_grammar(_tagged()), '{"k":"b","a":1') == "no"


@pytest.mark.parametrize(
    "schema",
    [
        _tagged(required=["a"]),
        _tagged(required=["b"]),
        _tagged(type=["object", "null"]),
        _tagged() | {"$defs": {name: {**_tagged()["$defs"]["a"]} for name in ("a", "b")}},
        _tagged(**{"$id": "other"}),
    ],
    ids=["may be left out", "one only", "or null", "same value", "another document"],
)
def test_alternatives_that_are_not_told_apart_stay_one_of(schema: dict[str, Any]) -> None:
    """Which the compiler follows where it sees by itself that they exclude each other."""
    with pytest.raises(ApiError, match="oneOf"):
        matchers_of(json_schema_grammar(schema))
