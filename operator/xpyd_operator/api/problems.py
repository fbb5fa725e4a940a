"""Turns what pydantic found into lines for a person: path, what was given, what is allowed. Pure.

What is allowed is read from the models' JSON schema, so that a bound is written down once.
"""

from __future__ import annotations

from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from xpyd_operator.api.fleet import InferenceFleet
from xpyd_operator.api.later import FIELDS, VALUES
from xpyd_operator.api.rules import DUPLICATE, RULE

_MAX_GIVEN = 60
_Loc = tuple[int | str, ...]
_Schema = dict[str, Any]


def problems(error: ValidationError) -> list[str]:
    """One line for each mistake, in the order of the document's fields."""
    details = error.errors(include_url=False)
    root: _Schema = InferenceFleet.model_json_schema(by_alias=True)
    locs = [item["loc"] for item in details]
    return [
        _line(item, root)
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


def _line(item: ErrorDetails, root: _Schema) -> str:
    loc, kind = item["loc"], item["type"]
    path = path_of(loc)
    if kind == DUPLICATE:
        return f"{path}: Duplicate value {item.get('ctx', {})['value']!r}"
    if kind == RULE:
        return f"{path}: {item['msg']}"
    general = path_of(tuple("[]" if isinstance(part, int) else part for part in loc))
    general = general.replace(".[]", "[]")
    if kind in ("extra_forbidden", "invalid_key"):
        return f"{path}: {_unknown(loc, general, root)}"
    if kind == "missing":
        return f"{path}: missing; {_allowed_at(loc, root)}"
    if item["input"] in VALUES.get(general, ()):
        what = f"{item['input']!r} is not supported by this version"
        return f"{path}: {what}; {_allowed_at(loc, root)}"
    return (
        f"{path}: given {_given(item['input'], secret='.env[' in path)}; {_allowed_at(loc, root)}"
    )


def _unknown(loc: _Loc, general: str, root: _Schema) -> str:
    if general in FIELDS:
        return "not supported by this version"
    above = loc[:-1]
    return f"unknown field; {path_of(above)} has {', '.join(_schema_at(above, root)['properties'])}"


def _given(value: object, *, secret: bool) -> str:
    """The value for a message: bounded, and never an environment variable's."""
    match value:
        case None:
            return "null"
        case dict():
            return "a map"
        case list():
            return f"a list of {len(cast('list[object]', value))}"
        case _ if secret:
            return f"a value of type {type(value).__name__}"
        case bool():
            return str(value).lower()
        case _:
            text = repr(value)
            return text if len(text) <= _MAX_GIVEN else f"{text[:_MAX_GIVEN]}..."


def _allowed_at(loc: _Loc, root: _Schema) -> str:
    """What may stand at `loc`, in words."""
    schema = _schema_at(loc, root)
    if "allowed" in schema:
        return f"expected {schema['allowed']}"
    if "enum" in schema or "const" in schema:
        return f"supported values: {', '.join(schema.get('enum') or [schema['const']])}"
    match schema.get("type"):
        case "integer":
            low, high = schema["minimum"], schema["maximum"]
            bounds = f"greater than or equal to {low} and less than or equal to {high}"
            return f"expected an integer {bounds}"
        case "string":
            size = _range(schema.get("minLength", 0), schema["maxLength"])
            return f"expected text of {size} characters"
        case "array":
            size = _range(schema.get("minItems", 0), schema["maxItems"])
            return f"expected a list of {size} items"
        case _ if "properties" in schema:
            return f"expected a map with {', '.join(schema['properties'])}"
        case _:
            return f"expected a map of at most {schema.get('maxProperties')} text values"


def _range(least: int, most: int) -> str:
    return f"{least} to {most}" if least else f"at most {most}"


def _schema_at(loc: _Loc, root: _Schema) -> _Schema:
    """The JSON schema of the field at `loc`; of the field above where `loc` is a free key."""
    node = root
    for part in loc:
        if isinstance(part, int):
            node = _resolve(node.get("items", {}), root)
        elif part in node.get("properties", {}):
            node = _resolve(node["properties"][part], root)
    return node


def _resolve(node: _Schema, root: _Schema) -> _Schema:
    """Follow a reference and the not-null side of an optional field; a field's own words win."""
    for choice in node.get("anyOf", []):
        if choice.get("type") != "null":
            node = {**choice, **{key: node[key] for key in ("allowed",) if key in node}}
    if "$ref" in node:
        target: _Schema = root["$defs"][node["$ref"].rpartition("/")[2]]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return node
