"""The fields that ask for structured output: what each becomes, and how it is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.worker.grammar_kit import BYTES, allowed_ids, matchers_of
from xpyd_core.errors import ApiError
from xpyd_worker.grammar.schema import checked_schema
from xpyd_worker.grammar.spec import (
    AnyText,
    Concat,
    Grammar,
    Json,
    OneOf,
    Pattern,
    Repeat,
    Rules,
    Text,
    Until,
    checked,
    json_schema_part,
)
from xpyd_worker.server.openai.params import parse_chat, parse_completion

OBJECT = Json('{"type":"object"}')
INTEGER = Json('{"type":"integer"}')
TAG = {"type": "tag", "begin": "<f>", "content": {"type": "any_text"}, "end": "</f>"}
STRUCTURES = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f"],
}
TRIGGERED = Concat(
    (
        Repeat(Concat((Until("<f"), Concat((Text("=a>"), Concat((INTEGER, Text("</f>")))))))),
        AnyText(("<f",)),
    )
)


def grammar(**fields: Any) -> Grammar | None:
    """The same of both endpoints."""
    completion = parse_completion(json.dumps({"prompt": "a", **fields}).encode())
    chat = parse_chat(
        json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode()
    )
    found = chat.options.grammar
    assert completion.options.grammar == found
    return None if found is None else replace(found, root=checked(found.root))


def format_of(**members: Any) -> Any:
    return {"response_format": {"type": "structural_tag", "format": members}}


@pytest.mark.parametrize(
    ("fields", "root", "field"),
    [
        ({"response_format": {"type": "json_object"}}, OBJECT, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            OBJECT,
            "response_format.json_schema.schema",
        ),
        ({"guided_json": {"type": "integer"}}, INTEGER, "guided_json"),
        ({"guided_json": '{"type": "integer"}'}, INTEGER, "guided_json"),
        ({"guided_json_object": True}, OBJECT, "guided_json_object"),
        ({"guided_regex": "a+"}, Pattern("a+"), "guided_regex"),
        ({"guided_choice": ["a", "b", "a"]}, OneOf((Text("a"), Text("b"))), "guided_choice"),
        ({"guided_grammar": "root ::= a"}, Rules("root ::= a"), "guided_grammar"),
        (
            {"guided_json": {"type": "integer"}, "guided_whitespace_pattern": " *"},
            Json('{"type":"integer"}', blanks=" *"),
            "guided_json",
        ),
        ({"structured_outputs": {"json": True}}, Json("true"), "structured_outputs.json"),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            Json('{"type":"object"}', spaces=False),
            "structured_outputs.json_object",
        ),
        (
            {"structured_outputs": {"choice": ["a"], "regex": None}},
            OneOf((Text("a"),)),
            "structured_outputs.choice",
        ),
        ({"response_format": STRUCTURES}, TRIGGERED, "response_format"),
        (
            {"structured_outputs": {"structural_tag": json.dumps(STRUCTURES)}},
            TRIGGERED,
            "structured_outputs.structural_tag",
        ),
        (format_of(**TAG), Concat((Text("<f>"), Until("</f>"))), "response_format"),
        (
            format_of(type="optional", content={"type": "regex", "pattern": "a"}),
            Repeat(Pattern("a"), 0, 1),
            "response_format",
        ),
        (
            format_of(type="sequence", elements=[{"type": "const_string", "value": "a"}]),
            Concat((Text("a"),)),
            "response_format",
        ),
        (
            format_of(type="tags_with_separator", tags=[TAG], separator="", at_least_one=True),
            Repeat(Concat((Text("<f>"), Until("</f>"))), 1),
            "response_format",
        ),
        (
            format_of(type="triggered_tags", tags=[TAG], triggers=["<"], stop_after_first=True),
            Concat(
                (
                    Repeat(Concat((Until("<"), Concat((Text("f>"), Until("</f>"))))), 0, 1),
                    AnyText(("<",)),
                )
            ),
            "response_format",
        ),
    ],
)
def test_a_field_becomes_this_grammar(fields: Any, root: Any, field: str) -> None:
    assert grammar(**fields) == Grammar(root, field)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "structured_outputs": None, "guided_json": None},
        {"guided_choice": [], "guided_json_object": False, "guided_decoding_backend": "auto"},
    ],
)
def test_without_these_fields_there_is_none(fields: Any) -> None:
    assert grammar(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.structures", "a list"),
        (format_of(type="qwen_xml_parameter"), "response_format.format.type", "not supported"),
        (format_of(type="or", elements=5), "response_format.format.elements", "a list"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json": False}}, "structured_outputs.json", "or true"),
        ({"guided_json": 5}, "guided_json", "an object"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_regex": ""}, "guided_regex", "empty"),
        ({"guided_choice": [""]}, "guided_choice", "item 0"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "only one of it"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "one"),
        ({"guided_json": {"not": {}}}, "guided_json.not", "not supported"),
        (
            {"guided_json": {"items": {"properties": {"a": {"if": {}}}}}},
            "guided_json.items.properties.a.if",
            "not supported",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_its_place(fields: Any, param: str, says: str) -> None:
    with pytest.raises(ApiError) as caught:
        grammar(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert says in str(caught.value)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"uniqueItems": True}, "s.uniqueItems"),
        ({"minProperties": 2}, "s.minProperties"),
        ({"required": ["a", "a"], "minProperties": 3}, "s.minProperties"),
        ({"anyOf": [{}, {"contains": {}}]}, "s.anyOf[1].contains"),
        ({"$defs": {"a": {"else": {}}}}, "s.$defs.a.else"),
        ({"patternProperties": {"^a": {"dependentRequired": {}}}}, "s.patternProperties.^a."),
        ({"items": [{}]}, "s.items"),
        ({"properties": {"a": 5}}, "s.properties.a"),
        ({"properties": []}, "s.properties"),
        ({"type": "text"}, "s.type"),
        ({"type": []}, "s.type"),
        ({"enum": []}, "s.enum"),
        ({"enum": list(range(10_001))}, "s.enum"),
        ({"required": "a"}, "s.required"),
        ({"required": [{}]}, "s.required"),
        ({"minLength": -1}, "s.minLength"),
        ({"maxItems": 1.5}, "s.maxItems"),
        ({"exclusiveMinimum": True}, "s.exclusiveMinimum"),
        ({"pattern": 5}, "s.pattern"),
        ({"format": "iri"}, "s.format"),
        ({"properties": {str(i): {} for i in range(1001)}}, "s.properties"),
        ({"allOf": [{}] * 17}, "s.allOf"),
        ({"anyOf": [{}] * 501}, "s.anyOf"),
        (nested(200), "s..."),
        ({"description": "x" * 300_000}, "s"),
        ("[" * 100_000, "s"),
        (None, "s"),
        (False, "s"),
        ({"const": 2**53 + 1}, "s.const"),
        ({"enum": [1, {"a": [-1e20]}]}, "s.enum"),
        ({"minimum": 2**63}, "s.minimum"),
        ({"exclusiveMaximum": -1e19}, "s.exclusiveMaximum"),
        ({"multipleOf": 0}, "s.multipleOf"),
        ({"multipleOf": 10_001}, "s.multipleOf"),
        ({"multipleOf": 9999.9999}, "s.multipleOf"),
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "s.allOf"),
        ({"multipleOf": 101, "allOf": [{"allOf": [{"multipleOf": 0.01}]}]}, "s.allOf"),
        ({"properties": {"a": {"pattern": "(a{1000}){1000}"}}}, "s.properties.a.pattern"),
        ({"pattern": "x(?:[a-z{}]{0,10}y|z){3000}"}, "s.pattern"),
        ({"patternProperties": {"a{99999}": {}}}, "s.patternProperties"),
        ({"items": {"$ref": "#/nope"}}, "s.items.$ref"),
        ({"items": [], "$ref": "#/items/1"}, "s."),
        ({"$ref": "#"}, "s.$ref"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "s.$defs."),
    ],
    ids=str,
)
def test_a_schema_that_cannot_be_followed_is_refused_with_the_place(
    schema: object, place: str
) -> None:
    with pytest.raises(ApiError) as caught:
        checked(json_schema_part(schema, "s"))
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith(place)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 99.99},
        {"multipleOf": 1e-5},
        {"multipleOf": 10000},
        {"allOf": [{"multipleOf": i} for i in (2, 3, 5, 7, 11)]},
        {"pattern": r"a{20000}|(?:[{}\]]{100}\{9{200}b){100}|c{5,}"},
        {"$defs": {"a/b%": {"items": {"$ref": "#"}}}, "$ref": "#/$defs/a~1b%25"},
        {"$id": "http://x/y", "$defs": {"a": {"$id": "z", "$ref": "#/nope"}}},
    ],
    ids=str,
)
def test_what_is_within_the_bounds_is_not_refused(schema: object) -> None:
    assert json.loads(checked_schema(schema, "s")) == schema


def test_bounds_that_floating_point_has_not_are_narrowed() -> None:
    """The compiler reads numbers as such: it would let the next number outside be an answer."""
    most, odd = 2**63 - 1, 2**53 + 1
    made = json.loads(checked_schema({"minimum": odd, "exclusiveMaximum": odd}, "s"))
    assert made == {"minimum": odd + 1, "exclusiveMaximum": odd - 1}
    made = json.loads(checked_schema({"minimum": -most - 1, "maximum": most}, "s"))
    assert made == {"minimum": 1024 - 2**63, "maximum": 2**63 - 1024}


CLOSED = {"additionalProperties": False}
ONE = {"properties": {"a": {}}}


@pytest.mark.parametrize(
    ("schema", "normal"),
    [
        (ONE, {**ONE, **CLOSED}),
        ({**ONE, "additionalProperties": True}, {**ONE, "additionalProperties": True}),
        ({**ONE, "required": ["b"]}, {**ONE, "required": ["b"]}),
        (
            {**ONE, "required": ["a"], "minProperties": 2},
            {**ONE, "required": ["a"], "minProperties": 2},
        ),
        ({"items": ONE}, {"items": {**ONE, **CLOSED}}),
        # What one part closes, the other may want.
        ({"allOf": [ONE]}, {"allOf": [ONE]}),
        ({"oneOf": [ONE]}, {"oneOf": [ONE]}),
        ({"anyOf": [ONE], "required": ["b"]}, {"anyOf": [ONE], "required": ["b"]}),
        ({"anyOf": [ONE]}, {"anyOf": [{**ONE, **CLOSED}]}),
        ({"uniqueItems": False, "x-guidance": {"lenient": True}}, {}),
        ({"format": "int32", "title": "t"}, {"title": "t"}),
    ],
)
def test_a_schema_goes_to_the_compiler_without_what_says_nothing(
    schema: object, normal: object
) -> None:
    assert json.loads(checked_schema(schema, "s")) == normal


def test_strict_closes_objects_whatever_the_schema_says() -> None:
    schema = {"allOf": [ONE], **ONE, "additionalProperties": True}
    asked = {"type": "json_schema", "json_schema": {"strict": True, "schema": schema}}
    found = grammar(response_format=asked)
    assert found is not None
    assert isinstance(found.root, Json)
    closed = {**ONE, **CLOSED}
    assert json.loads(found.root.schema) == {"allOf": [closed], **closed}


def node(**members: Any) -> dict[str, Any]:
    """An object that must have these members."""
    return {"type": "object", "properties": members, "required": list(members)}


SELF = {"$ref": "#"}
N = {"$ref": "#/$defs/n"}
INTEGER_SCHEMA = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (node(a=SELF), "s.properties.a"),
        (node(b={}, a={"anyOf": [SELF, SELF]}), "s.properties.a.anyOf[0]"),
        (node(a={"allOf": [{}, SELF]}), "s.properties.a.allOf[1]"),
        ({"type": "array", "minItems": 1, "items": SELF}, "s.items"),
        ({"type": "array", "minItems": 2, "prefixItems": [{}, SELF]}, "s.prefixItems[1]"),
        ({"type": "object", "required": ["x"], "additionalProperties": SELF}, "s.additional"),
        ({**node(a=N), "$defs": {"n": node(next=N)}}, "s.properties.a"),
        ({**N, "$defs": {"n": node(a=node(b=N))}}, "s"),
    ],
    ids=str,
)
def test_what_must_have_itself_inside_again_is_refused_with_the_place(
    schema: dict[str, Any], place: str
) -> None:
    """Its values have no end: an answer would run to max_tokens."""
    with pytest.raises(ApiError, match="without an end") as caught:
        checked_schema(schema, "s")
    assert (caught.value.param or "").startswith(place)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": SELF}},
        {"properties": {"a": SELF}, "required": ["a"]},  # or any text
        node(a={"anyOf": [SELF, {"type": "null"}]}),
        {"type": "array", "items": SELF},
        {"type": "array", "minItems": 1, "prefixItems": [{}], "items": SELF},
        {**node(a=N), "$defs": {"n": {"type": "object", "properties": {"next": N}}}},
    ],
    ids=str,
)
def test_what_may_have_itself_inside_is_not_refused(schema: dict[str, Any]) -> None:
    assert checked_schema(schema, "s")


def test_a_part_that_has_no_end_is_left_out_of_what_has_one() -> None:
    schema = {
        "type": "object",
        "properties": {"a": INTEGER_SCHEMA, "b": N, "c": {"anyOf": [N, INTEGER_SCHEMA]}},
        "required": ["a", "c"],
        "additionalProperties": False,
        "$defs": {"n": node(next=N)},
    }
    (matcher,) = matchers_of(json_schema_part(schema, "s"))
    written = BYTES.ids('{"a":1,"')
    assert matcher.accept(written)
    assert allowed_ids(matcher.mask().words()) == [ord("c")]
    assert matcher.accept(BYTES.ids('c":'))
    assert ord("{") not in allowed_ids(matcher.mask().words())
