"""A grammar of calls whose arguments are text between tags, from the schema of a tool. Pure.

The values that it allows are those that `tagged_calls` reads as values of the schema. An argument
that is a text has no quotes, and is any text up to its tag; any other is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from xpyd_core.bodies import refuse
from xpyd_worker.grammar.schema import checked_schema
from xpyd_worker.grammar.spec import (
    Concat,
    OneOf,
    Part,
    Pattern,
    Repeat,
    Text,
    Until,
    json_schema_part,
)
from xpyd_worker.parsers.tagged_calls import Tags, listed, referred, types_in

_MOST_REFERENCES = 16
"""Schemas inside each other that one argument refers to."""
_OF_TEXTS = frozenset(("minLength", "maxLength", "pattern"))
_OF_WHOLES = frozenset(
    (
        *("$ref", "allOf", "anyOf", "oneOf", "enum", "const", "patternProperties"),
        *("minProperties", "maxProperties"),
    )
)
_UNREADABLE = "cannot be followed in the format of this model's calls"


@dataclass(frozen=True)
class TaggedArguments:
    """The arguments that a tool's schema allows, each between its tags, in the schema's order."""

    tags: Tags
    closed: bool = False

    def __call__(self, schema: object, place: str) -> Part:
        """ApiError 400 names the place of what cannot be followed. The `format` of a text is
        not."""
        checked_schema(schema, place, closed=self.closed)  # what no format of calls could follow
        node = cast("Mapping[str, Any]", schema)
        for keyword in sorted(_OF_WHOLES & node.keys()):
            raise refuse(f"{place}.{keyword}", _UNREADABLE)
        return _Writer(self.tags, node, closed=self.closed).arguments(place)


class _Writer:
    def __init__(self, tags: Tags, root: Mapping[str, Any], *, closed: bool) -> None:
        self._tags = tags
        self._root = root
        self._closed = closed
        self._feed = "\n" if tags.has_line_feeds else ""
        # Models of one family write a line feed between tags, or none.
        self._gap = Text("\n") if tags.has_line_feeds else Pattern(r"\n?")

    def arguments(self, place: str) -> Part:
        properties: Mapping[str, Any] = self._root.get("properties", {})
        required: Sequence[str] = self._root.get("required", ())
        names = list(dict.fromkeys((*properties, *required)))
        if not names and self._root.get("additionalProperties") is not False and not self._closed:
            key = Pattern(r"[^\s<>]{1,64}")
            return Concat((self._gap, Repeat(self._argument(key, self._text({}, place)))))
        some: list[Part] = [self._gap]
        for name in names:
            where = f"{place}.properties.{name}"
            if name != name.strip() or not name or self._has_tag(name, self._tags.key[1]):
                raise refuse(where, _UNREADABLE)
            one = self._argument(Text(name), self._value(properties.get(name, {}), where, 0))
            some.append(one if name in required else Repeat(one, 0, 1))
        return Concat(tuple(some))

    def _argument(self, key: Part, value: Part) -> Part:
        before, behind = self._tags.key
        opened = self._tags.value[0]
        gap = (self._gap, Text(opened)) if opened else ()
        return Concat(
            (Text(before), key, Text(behind + ("" if gap else self._feed)), *gap, value, self._gap)
        )

    def _has_tag(self, text: str, *more: str) -> bool:
        return any(tag in text for tag in (*self._tags.value_ends, *more))

    def _value(self, schema: object, place: str, depth: int) -> Part:
        """A value, and the tag behind it."""
        close = Text(self._feed + self._tags.value[1])
        types = types_in(self._root, schema)
        node = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
        if depth > _MOST_REFERENCES:
            raise refuse(place, _UNREADABLE)
        if "string" not in types:
            return Concat((self._json(node, place), close))
        parts = node.keys() & {"$ref", "anyOf", "oneOf", "allOf"}
        if len(parts) + bool(node.keys() & _OF_TEXTS) > 1 and parts:
            raise refuse(f"{place}.{min(parts)}", _UNREADABLE)
        if "$ref" in node:
            return self._value(referred(self._root, node["$ref"]), place, depth + 1)
        if "const" in node or "enum" in node:
            values = [node["const"]] if "const" in node else listed(node["enum"])
            texts = [one if isinstance(one, str) else json.dumps(one) for one in values]
            if any(map(self._has_tag, texts)):
                raise refuse(place, _UNREADABLE)
            return Concat((OneOf(tuple(map(Text, texts))), close))
        for keyword in ("anyOf", "oneOf", "allOf"):
            some = listed(node.get(keyword))
            if some and (keyword != "allOf" or len(some) == 1):
                each = (
                    self._value(one, f"{place}.{keyword}[{n}]", depth + 1)
                    for n, one in enumerate(some)
                )
                return OneOf(tuple(each))
            if some:
                raise refuse(f"{place}.{keyword}", _UNREADABLE)
        text = self._text(node, place)
        others = sorted(types - {"string"})
        if not others:
            return text
        return OneOf((Concat((self._json({**node, "type": others}, place), close)), text))

    def _json(self, node: dict[str, Any], place: str) -> Part:
        kept = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return json_schema_part({**kept, **node}, place, closed=self._closed)

    def _text(self, node: Mapping[str, Any], place: str) -> Part:
        """A text, and the tag behind it."""
        least, most = int(node.get("minLength", 0)), node.get("maxLength")
        end, *without = self._tags.value_ends
        body = ""
        if least or most is not None:
            body = rf"(.|\n){{{least},{'' if most is None else int(most)}}}"
        if "pattern" in node:
            if body:
                raise refuse(f"{place}.pattern", f"{_UNREADABLE} with a length")
            body = _whole(node["pattern"])
        return Until(end, body and f"{body}{self._feed}", tuple(without))


def _whole(pattern: str) -> str:
    """An expression of whole texts in which JSON Schema's pattern is found."""
    has_end = pattern.endswith("$") and not pattern.endswith(r"\$")
    inner = pattern.removeprefix("^")
    before = "" if pattern.startswith("^") else r"(.|\n)*"
    behind = "" if has_end else r"(.|\n)*"
    return f"{before}({inner[:-1] if has_end else inner}){behind}"
