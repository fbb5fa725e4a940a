"""JSON schemas of the shapes that collections have, made here from a fixed seed; and bad ones.

The shapes are those of jsonschemabench's parts: what people keep in repositories (easy, medium,
hard), Kubernetes' objects, Snowplow's events, a newspaper's articles, arguments of function calls.
Nothing is copied from there. Keywords that few engines follow are in as often as in such schemas.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
SEED = 24
_NAMES = (
    *("name", "version", "description", "type", "id", "url", "path"),
    *("title", "tags", "status", "owner", "region", "size", "count"),
    *("enabled", "timeout", "retries", "host", "port", "user", "email"),
    *("created", "updated", "kind", "level", "format", "source", "target"),
    *("rules", "options", "limits", "image", "command", "args", "labels"),
    *("mode", "priority", "weight", "category", "author", "license"),
)


@dataclass(frozen=True)
class Shape:
    """A schema, of the part `group`."""

    name: str
    group: str
    schema: Schema


def shapes(seed: int = SEED) -> list[Shape]:
    """All of them, the same for the same seed."""
    found: list[Shape] = []
    for group, (count, make) in _GROUPS.items():
        of_group = random.Random(f"{seed} {group}")
        found += [Shape(f"{group}-{n}", group, make(of_group, n)) for n in range(count)]
    return found


def renamed(schema: Mapping[str, Any], name: str) -> Schema:
    """The same schema in other words: new to every cache."""
    return {**schema, "title": name}


def _names(chance: random.Random, count: int) -> list[str]:
    return chance.sample(_NAMES, count)


def _scalar(chance: random.Random) -> Schema:
    return chance.choice(
        (
            lambda: {"type": "string", "description": "A short text that people read."},
            lambda: {"type": "string", "minLength": 1, "maxLength": chance.choice((16, 32, 64))},
            lambda: {"type": "string", "enum": _names(chance, chance.randint(2, 8))},
            lambda: {"type": "string", "pattern": chance.choice(_PATTERNS)},
            lambda: {"type": "string", "format": chance.choice(_FORMATS)},
            lambda: {"type": "integer", "minimum": 0, "maximum": chance.choice((10, 255, 65535))},
            lambda: {"type": "number"},
            lambda: {"type": "boolean", "default": False},
        )
    )()


_PATTERNS = ("^[a-z][a-z0-9-]{0,30}$", "^v?[0-9]+\\.[0-9]+\\.[0-9]+$", "^#[0-9a-fA-F]{6}$")
_FORMATS = ("date-time", "date", "email", "ipv4", "uuid")


def _object(chance: random.Random, properties: Mapping[str, Any], **more: Any) -> Schema:
    required = sorted(chance.sample(sorted(properties), max(1, len(properties) * 2 // 3)))
    return {"type": "object", "properties": dict(properties), "required": required, **more}


def _fields(chance: random.Random, count: int) -> dict[str, Schema]:
    return {name: _scalar(chance) for name in _names(chance, count)}


def _easy(chance: random.Random, _: int) -> Schema:
    fields = _fields(chance, chance.randint(2, 5))
    some: Schema = {"type": "array", "items": _scalar(chance), "maxItems": 4}
    return _object(chance, {**fields, "list": some}, additionalProperties=chance.random() < 0.5)


def _medium(chance: random.Random, number: int) -> Schema:
    defined = {name: _object(chance, _fields(chance, 3)) for name in ("entry", "rule", "place")}
    fields: dict[str, Schema] = _fields(chance, 6)
    fields["entries"] = {"type": "array", "items": {"$ref": "#/definitions/entry"}, "maxItems": 3}
    fields["place"] = {"$ref": "#/definitions/place"}
    fields["either"] = {"anyOf": [{"$ref": "#/definitions/rule"}, {"type": "null"}]}
    if number % 2:
        values = {"^[a-z]{1,8}$": {"type": ["string", "number", "boolean"]}}
        fields["map"] = {"type": "object", "patternProperties": values, "maxProperties": 3}
        fields["map"]["additionalProperties"] = False
    return _object(chance, fields, definitions=defined)


def _hard(chance: random.Random, number: int) -> Schema:
    names = [f"part{n}" for n in range(8)]
    defined = {
        name: _object(chance, {**_fields(chance, 5), "next": _next(chance, names)})
        for name in names
    }
    fields: dict[str, Schema] = {name: {"$ref": f"#/definitions/{name}"} for name in names[:4]}
    made = _object(chance, {**_fields(chance, 8), **fields}, definitions=defined)
    return made | _RARE[number % len(_RARE)]


def _next(chance: random.Random, names: list[str]) -> Schema:
    refers = [{"$ref": f"#/definitions/{name}"} for name in chance.sample(names, 2)]
    return {"anyOf": [{"type": "null"}, *refers]}


_RARE: tuple[Schema, ...] = (
    {},
    {"if": {"required": ["name"]}, "then": {"required": ["version"]}},
    {"minProperties": 2},
    {"not": {"required": ["forbidden"]}},
    {"allOf": [{"type": "object", "properties": {"kind": {"type": "string"}}}]},
    {"dependencies": {"name": ["version"]}},
    {"properties": {"one": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}},
    {"propertyNames": {"pattern": "^[a-z]+$"}},
)
"""What hard schemas have besides, one each: half of it is what engines may not follow."""


def _kubernetes(chance: random.Random, _: int) -> Schema:
    text: Schema = {"type": ["string", "null"], "description": "More info: see the reference."}
    labels: Schema = {"type": ["object", "null"], "additionalProperties": text}
    metadata = {"type": "object", "properties": {"name": text, "labels": labels}}
    quantity: Schema = {"anyOf": [{"type": "string", "maxLength": 8}, {"type": "integer"}]}
    port = {
        "containerPort": {"type": "integer", "format": "int32"},
        "protocol": {"type": ["string", "null"], "enum": ["TCP", "UDP", None]},
    }
    ports: Schema = {"type": ["array", "null"], "items": {"type": "object", "properties": port}}
    limits: Schema = {"type": ["object", "null"], "additionalProperties": quantity}
    container = {"name": text, "image": text, "ports": ports, "resources": {"type": "object"}}
    container["resources"] = {"type": "object", "properties": {"limits": limits}}
    for name in _names(chance, 12):
        container.setdefault(name, text if chance.random() < 0.7 else {"type": ["integer", "null"]})
    one: Schema = {"type": "object", "properties": container, "required": ["name"]}
    spec = {"containers": {"type": "array", "items": one, "minItems": 1, "maxItems": 2}}
    kind = chance.choice(("Pod", "Job", "Deployment"))
    properties = {
        "apiVersion": {"type": ["string", "null"], "enum": ["v1", "apps/v1", "batch/v1", None]},
        "kind": {"type": "string", "enum": [kind]},
        "metadata": metadata,
        "spec": {"type": "object", "properties": spec, "required": ["containers"]},
    }
    return {"type": "object", "properties": properties, "required": ["kind", "spec"]}


def _snowplow(chance: random.Random, number: int) -> Schema:
    fields: dict[str, Schema] = {}
    for name in _names(chance, chance.randint(5, 14)):
        fields[name] = chance.choice(
            (
                lambda: {"type": "string", "maxLength": chance.choice((32, 64, 255))},
                lambda: {"type": ["string", "null"], "maxLength": chance.choice((32, 64, 255))},
                lambda: {"type": "integer", "minimum": 0, "maximum": 2147483647},
                lambda: {"type": ["number", "null"], "minimum": -90, "maximum": 90},
                lambda: {"type": "string", "enum": _names(chance, 4)},
                lambda: {"type": "boolean"},
            )
        )()
    about = {"vendor": "org.example", "name": f"event_{number}", "format": "jsonschema"}
    return {
        "description": "Schema of an event",
        "self": about | {"version": "1-0-0"},
        **_object(chance, fields, additionalProperties=False),
    }


def _article(chance: random.Random, number: int) -> Schema:
    by = {"name": {"type": "string", "maxLength": 40}, "url": {"type": "string", "format": "uri"}}
    text = {"type": "string", "maxLength": 120}
    definitions: dict[str, Schema] = {
        "element": {
            "oneOf": [{"$ref": f"#/definitions/{kind}"} for kind in ("text", "image", "group")]
        },
        "author": {"type": "object", "properties": by, "required": ["name"]},
        "text": _typed("text", {"content": text}),
        "image": _typed("image", {"width": {"type": "integer", "minimum": 0}, "caption": text}),
        "group": _typed(
            "group",
            {"items": {"type": "array", "items": {"$ref": "#/definitions/element"}, "maxItems": 2}},
        ),
    }
    properties: dict[str, Schema] = {
        "type": {"type": "string", "enum": ["story"]},
        "version": {"type": "string", "pattern": "^0\\.[0-9]\\.[0-9]$"},
        "created_date": {"type": "string", "format": "date-time"},
        "headlines": _object(chance, {"basic": text, **_fields(chance, 2)}),
        "by": {"type": "array", "items": {"$ref": "#/definitions/author"}, "maxItems": 2},
        "elements": {"type": "array", "items": {"$ref": "#/definitions/element"}, "maxItems": 3},
        "additional": {"type": "object", "additionalProperties": {"type": ["string", "number"]}},
    }
    if number % 3 == 2:
        properties["names"] = {"type": "array", "items": text, "uniqueItems": True}
    return {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "definitions": definitions,
        "type": "object",
        "properties": properties,
        "required": ["type", "version", "elements"],
    }


def _typed(kind: str, properties: Mapping[str, Any]) -> Schema:
    fields = {"type": {"type": "string", "enum": [kind]}, **properties}
    closed = {"required": sorted(fields), "additionalProperties": False}
    return {"type": "object", "properties": fields, **closed}


def _function(chance: random.Random, number: int) -> Schema:
    """One in four has what a function does with a list of its own objects."""
    fields = {name: _argument(chance, name) for name in _names(chance, chance.randint(1, 4))}
    if number % 4 == 3:
        one = {name: _argument(chance, name) for name in _names(chance, 2)}
        items = {"type": "object", "properties": one, "required": sorted(one)}
        fields["items"] = {"type": "array", "items": items, "description": "What to do it with."}
    return {"type": "object", "properties": fields, "required": sorted(fields)}


def _argument(chance: random.Random, name: str) -> Schema:
    kind = chance.choice(("string", "string", "number", "integer", "boolean"))
    return {"type": kind, "description": f"The {name} of what is asked for."}


_Make = Callable[[random.Random, int], Schema]
_GROUPS: Mapping[str, tuple[int, _Make]] = {
    "github-easy": (8, _easy),
    "github-medium": (8, _medium),
    "github-hard": (8, _hard),
    "kubernetes": (6, _kubernetes),
    "snowplow": (8, _snowplow),
    "article": (6, _article),
    "function": (8, _function),
}


# --- bad ones


def bad_ones(number: int) -> dict[str, dict[str, Any]]:
    """Members of a chat's body, by name, that cost a compiler much or are wrong. Those of another
    `number` are new to every cache."""
    deep: Schema = {"type": "string"}
    for _ in range(60):
        deep = {"type": "object", "properties": {"in": deep}, "required": ["in"]}
    deeper: Schema = {"type": "string"}
    for _ in range(300):
        deeper = {"type": "array", "items": deeper}
    heavy = shapes(SEED + 1 + number)
    hard = [one.schema for one in heavy if one.group in ("github-hard", "kubernetes", "article")]
    enum = [f"value {number} {n:05}" for n in range(9000)]
    long = [f"{number} {n} {'x' * 40}" for n in range(60_000)]
    wide = {f"{name}{n}": _scalar(random.Random(n)) for n in range(24) for name in _NAMES}
    found = {
        "enum of 9,000": _asks({"enum": enum}),
        "enum of 60,000": _asks({"enum": long}),
        "60 deep": _asks(renamed(deep, f"{number}")),
        "300 deep": _asks(deeper),
        "980 properties": _asks(renamed(_object(random.Random(1), wide), f"{number}")),
        "wrong type": _asks({"type": "nothing", "title": f"{number}"}),
        "wrong tool": {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 7}}}],
            "tool_choice": "required",
        },
    }
    for n, regex in enumerate(
        (
            f"(x+x+)+y{number}",
            f"(.*a){{20}}{number}",
            f"(a|b)*a(a|b){{18}}{number}",
            f"((a{{1,60}}){{1,60}}){{1,60}}{number}",
        )
    ):
        found[f"regex {n + 1}"] = {"structured_outputs": {"regex": regex}}
    return found | {f"heavy {n + 1}": _asks(one) for n, one in enumerate(hard)}


def harmless(number: int) -> dict[str, Any]:
    """The same of a schema that costs nothing."""
    return _asks({"type": "object", "properties": {"a": {"type": "string"}}, "title": f"{number}"})


def _asks(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"response_format": response_format(schema)}


def response_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The member of a body that asks for a value of this schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
