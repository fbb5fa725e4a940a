"""Checks a JSON schema before it is compiled, and names the place of what is wrong in it. Pure.

A keyword that would be ignored makes answers that are wrong, so each keyword is either one that the
compiler follows, or one that says nothing of the value (an annotation), or it is refused. Sizes are
bounded, since compiling costs by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec

from xpyd_core.bodies import refuse

MAX_SCHEMA_BYTES = 256 * 1024
MAX_DEPTH = 64
"""Schemas inside each other. OpenAI allows 10."""
MAX_ENUM = 10_000
MAX_PROPERTIES = 5000
"""Of the whole schema, as OpenAI."""

# Keywords by what their values hold.
_ONE = ("additionalProperties", "additionalItems", "items", "contentSchema")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = frozenset(
    (
        *("type", "enum", "const", "$ref", "required"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minItems", "maxItems", "minProperties", "maxProperties"),
    )
)
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "example", "deprecated"),
        *("readOnly", "writeOnly", "$comment", "$schema", "$id", "id", "contentMediaType"),
        *("contentEncoding", "strict", "nullable"),
    )
)
_KNOWN = frozenset((*_ONE, *_LISTS, *_MAPS)) | _VALUES | _ANNOTATIONS
# What JSON Schema defines, and neither of the above follows.
_UNSUPPORTED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedProperties", "unevaluatedItems", "$anchor"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    )
)


def checked_schema(schema: object, field: str, *, closed: bool = False) -> str:
    """`schema` as JSON for the compiler. Raises ApiError 400 that names `field` and the place."""
    if isinstance(schema, str | bytes | msgspec.Raw):
        schema = _decoded(schema, field)
    if not isinstance(schema, dict | bool):
        raise refuse(field, "expected a JSON schema: an object or a boolean")
    nodes = list(_nodes(cast("Any", schema), field))
    properties = sum(len(node.get("properties", ())) for _, node in nodes)
    if properties > MAX_PROPERTIES:
        raise refuse(field, f"at most {MAX_PROPERTIES} properties, got {properties}")
    text = msgspec.json.encode(_closed(schema, nodes) if closed else schema)
    if len(text) > MAX_SCHEMA_BYTES:
        raise refuse(field, f"at most {MAX_SCHEMA_BYTES} bytes, got {len(text)}")
    return text.decode()


def _decoded(text: str | bytes | msgspec.Raw, field: str) -> object:
    if len(text) > MAX_SCHEMA_BYTES:
        raise refuse(field, f"at most {MAX_SCHEMA_BYTES} bytes, got {len(text)}")
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise refuse(field, f"at most {MAX_DEPTH} schemas inside each other") from None
    except msgspec.DecodeError as error:
        raise refuse(field, f"not valid JSON: {error}") from None


def _nodes(root: object, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema that is an object, with its place, checked."""
    todo: list[tuple[object, str, int]] = [(root, field, 0)]
    while todo:
        value, place, depth = todo.pop()
        if isinstance(value, bool):
            continue
        if not isinstance(value, dict):
            raise refuse(place, "expected a JSON schema: an object or a boolean")
        if depth > MAX_DEPTH:
            raise refuse(place, f"at most {MAX_DEPTH} schemas inside each other")
        node = cast("dict[str, Any]", value)
        _check_node(node, place)
        yield place, node
        todo += [(one, where, depth + 1) for where, one in _children(node, place)]


def _check_node(node: Mapping[str, Any], place: str) -> None:
    for keyword in node:
        if keyword in _UNSUPPORTED:
            raise refuse(f"{place}.{keyword}", "this keyword is not supported")
    enum = node.get("enum", ())
    if not isinstance(enum, list | tuple) or len(cast("list[Any]", enum)) > MAX_ENUM:
        raise refuse(f"{place}.enum", f"expected a list of at most {MAX_ENUM} values")


def _children(node: Mapping[str, Any], place: str) -> Iterator[tuple[str, object]]:
    for keyword in _ONE:
        if keyword in node:
            yield f"{place}.{keyword}", node[keyword]
    for keyword in _LISTS:
        some = node.get(keyword, [])
        if not isinstance(some, list):
            raise refuse(f"{place}.{keyword}", "expected a list of schemas")
        for index, one in enumerate(cast("list[object]", some)):
            yield f"{place}.{keyword}[{index}]", one
    for keyword in _MAPS:
        members = node.get(keyword, {})
        if not isinstance(members, dict):
            raise refuse(f"{place}.{keyword}", "expected an object of schemas")
        for name, one in cast("dict[str, object]", members).items():
            yield f"{place}.{keyword}.{name}", one


def _closed(schema: object, nodes: list[tuple[str, dict[str, Any]]]) -> object:
    """The schema with objects closed. The nodes are the schema's own."""
    for _, node in nodes:
        if "properties" in node:
            node["additionalProperties"] = False
    return schema
