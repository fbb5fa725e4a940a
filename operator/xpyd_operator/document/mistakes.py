"""Words pydantic's errors as the API server words its refusal of the same document.

A field that is out of bounds, missing, doubled or unknown therefore reads alike in `xpyd up` and in
`kubectl apply`. Rules bring their own text (`document.base`). Where a user needs more than the
server says, the addition follows the server's words. Fields and values that this version does not
support yet are listed here, so that users can tell them from misspellings.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from xpyd_operator.document.base import DUPLICATE, INT_OR_STRING, RULE

EXTRA = "extra_forbidden"
"""pydantic's error type for an unknown field."""
UNSUPPORTED_FIELDS = frozenset(
    {
        "spec.pools[].restartPolicy",
        "spec.router.gateway",
        "spec.autoscaling",
        "spec.deletion",
    }
)
"""Paths without list indexes."""

UNSUPPORTED_VALUES = {
    "spec.kvTransfer.transport": ("NCCL", "CUDAIPC", "NIXL"),
}
"""Path without list indexes -> values of its enum."""


_MAX_GIVEN = 60
_Loc = tuple[int | str, ...]
_Schema = dict[str, Any]
_TYPES = {
    "int_type": "integer",
    "string_type": "string",
    "bool_type": "boolean",
    "list_type": "array",
    "tuple_type": "array",
    "dict_type": "object",
    "model_type": "object",
    INT_OR_STRING: "integer,string",
}
"""pydantic's error type -> the schema's type that was expected."""


def describe_mistakes(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line for each mistake in a document of `model`, in the order of the fields."""
    details = error.errors(include_url=False)
    locs = [item["loc"] for item in details]
    return [
        _line(item, model)
        for item in details
        # pydantic counts only valid items, so a list with wrong ones also looks too short.
        if not (item["type"] == "too_short" and any(_below(loc, item["loc"]) for loc in locs))
    ]


def path_of(loc: _Loc) -> str:
    """('spec', 'pools', 1, 'role') -> spec.pools[1].role"""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "document"


def _below(loc: _Loc, above: _Loc) -> bool:
    return len(loc) > len(above) and loc[: len(above)] == above


def _line(item: ErrorDetails, model: type[BaseModel]) -> str:
    loc, path = item["loc"], path_of(item["loc"])
    if item["type"] == EXTRA:
        return f'unknown field "{path}"; {_about_unknown(loc, model)}'
    return f"{path}: {_words(item, path)}"


def _words(item: ErrorDetails, path: str) -> str:
    kind, given, context = item["type"], item["input"], item.get("ctx", {})
    if kind == RULE:
        return item["msg"]
    if kind == "missing":
        return "Required value"
    if kind in _TYPES:
        return _wrong_type(given, path, _TYPES[kind])
    if kind == "literal_error":
        return _unsupported(given, path, item["loc"], context["expected"])
    return _BOUNDS[kind](given, path, context)


def _wrong_type(given: object, path: str, expected: str) -> str:
    found = _type_of(given)
    return f'Invalid value: "{found}": {path} in body must be of type {expected}: "{found}"'


def _unsupported(given: object, path: str, loc: _Loc, expected: str) -> str:
    if not isinstance(given, str):
        return _wrong_type(given, path, "string")
    values = expected.replace(" or ", ", ").replace("'", '"')
    text = f"Unsupported value: {_quoted(given)}: supported values: {values}"
    unsupported = given in UNSUPPORTED_VALUES.get(_general(loc), ())
    return f"{text}; {given} is not supported by this version" if unsupported else text


def _out_of_bounds(given: object, path: str, words: str) -> str:
    shown = _quoted(given) if isinstance(given, str) else given
    return f"Invalid value: {shown}: {path} in body should {words}"


def _too_many(given: object, most: int) -> str:
    count = len(cast("list[Any]", given))
    return f"Too many: {count}: must have at most {most} items"


_BOUNDS: dict[str, Callable[[Any, str, dict[str, Any]], str]] = {
    "greater_than_equal": lambda given, path, c: _out_of_bounds(
        given, path, f"be greater than or equal to {c['ge']}"
    ),
    "less_than_equal": lambda given, path, c: _out_of_bounds(
        given, path, f"be less than or equal to {c['le']}"
    ),
    "string_unicode": lambda _given, _path, _c: "Invalid value: not Unicode text",
    "string_too_long": lambda _given, _path, c: (
        f"Too long: may not be more than {c['max_length']} bytes"
    ),
    "string_too_short": lambda given, path, c: _out_of_bounds(
        given, path, f"be at least {c['min_length']} chars long"
    ),
    "too_long": lambda given, _path, c: _too_many(given, c["max_length"]),
    "too_short": lambda given, path, c: _out_of_bounds(
        len(given), path, f"have at least {c['min_length']} items"
    ),
    DUPLICATE: lambda _given, _path, c: f"Duplicate value: {_key(c['key'], c['value'])}",
}


def _key(key: str, value: str) -> str:
    return json.dumps({key: value} if key else value, separators=(",", ":"), ensure_ascii=False)


def _quoted(text: str) -> str:
    shown = text if len(text) <= _MAX_GIVEN else f"{text[:_MAX_GIVEN]}..."
    return json.dumps(shown, ensure_ascii=False)


def _type_of(value: object) -> str:
    """The JSON type, as the API server names it."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _general(loc: _Loc) -> str:
    """The path without list indexes: spec.pools[].role"""
    text = path_of(tuple("[]" if isinstance(part, int) else part for part in loc))
    return text.replace(".[]", "[]")


def _about_unknown(loc: _Loc, model: type[BaseModel]) -> str:
    if _general(loc) in UNSUPPORTED_FIELDS:
        return "not supported by this version"
    above = loc[:-1]
    root: _Schema = model.model_json_schema(by_alias=True)
    return f"{path_of(above)} has {', '.join(_schema_at(above, root)['properties'])}"


def _schema_at(loc: _Loc, root: _Schema) -> _Schema:
    """The JSON schema of the field at `loc`."""
    node = root
    for part in loc:
        below = node["items"] if isinstance(part, int) else node["properties"][part]
        node = _resolve(below, root)
    return node


def _resolve(node: _Schema, root: _Schema) -> _Schema:
    for choice in node.get("anyOf", []):
        if choice.get("type") != "null":
            node = choice
    return root["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
