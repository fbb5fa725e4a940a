"""The fields of a request that ask for structured output, as one Grammar. Pure.

OpenAI's `response_format`, vLLM's `structured_outputs`, and the `guided_*` that came before it. A
field that is not understood is refused by name: an answer without it would be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from xpyd_core.bodies import is_absent, read, refuse
from xpyd_core.complaints import shown
from xpyd_core.openai import Generation, ResponseFormat, StructuredOutputs
from xpyd_worker.grammar.spec import (
    MAX_CHOICES,
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
    check_parts,
    json_schema_part,
    repeated,
    triggered_part,
)

_ANY_OBJECT = {"type": "object"}
_MAX_DEPTH = 32
_QUOTE = ord('"')


def grammar_of(body: Generation) -> Grammar | None:
    """What the body asks for; None where it asks for nothing. ApiError 400 names the field. Its
    schemas are not looked at (spec.checked)."""
    found = [
        one
        for one in (
            _response_format(body.response_format),
            _structured_outputs(body.structured_outputs),
            *_guided(body),
        )
        if one is not None
    ]
    if len(found) > 1:
        raise refuse(found[1].field, f"only one of it and {found[0].field} may be given")
    if not found:
        return None
    check_parts(found[0].root, found[0].field)
    return found[0]


def _response_format(wanted: ResponseFormat | None) -> Grammar | None:
    field = "response_format"
    match None if wanted is None else wanted.type:
        case "json_object":
            return Grammar(json_schema_part(_ANY_OBJECT, field), field)
        case "json_schema":
            assert wanted is not None
            asked = wanted.json_schema
            if asked is None:
                raise refuse(f"{field}.json_schema", "this field is missing")
            field = f"{field}.json_schema.schema"
            schema = _ANY_OBJECT if is_absent(asked.schema) else asked.schema
            return Grammar(json_schema_part(schema, field, closed=bool(asked.strict)), field)
        case "structural_tag":
            assert wanted is not None
            names = ("format", "structures", "triggers")
            members = {name: _decoded(getattr(wanted, name), f"{field}.{name}") for name in names}
            return Grammar(_structural_tag(members, field), field)
        case _:
            return None


def _structured_outputs(wanted: StructuredOutputs | None) -> Grammar | None:
    if wanted is None:
        return None
    root = "structured_outputs"
    names = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
    given = [
        name
        for name in names
        if (value := getattr(wanted, name)) not in (None, False) and value != msgspec.Raw(b"null")
    ]
    if len(given) != 1:
        raise refuse(root, f"give exactly one of {', '.join(names)}")
    field = f"{root}.{given[0]}"
    blanks = wanted.whitespace_pattern
    match given[0]:
        case "json" | "json_object":
            part: Part = json_schema_part(
                _schema_of(wanted.json, field) if given[0] == "json" else _ANY_OBJECT,
                field,
                spaces=not wanted.disable_any_whitespace,
                blanks=blanks,
                closed=bool(wanted.disable_additional_properties),
            )
        case "regex":
            part = Pattern(wanted.regex or "")
        case "choice":
            part = _choice(wanted.choice or ())
        case "grammar":
            part = Rules(wanted.grammar or "")
        case _:
            part = _structural_tag(_decoded(wanted.structural_tag, field), field)
    return Grammar(part, field)


def _guided(body: Generation) -> list[Grammar]:
    found: list[Grammar] = []
    blanks = body.guided_whitespace_pattern
    if not is_absent(body.guided_json):
        field = "guided_json"
        schema = _schema_of(body.guided_json, field)
        found.append(Grammar(json_schema_part(schema, field, blanks=blanks), field))
    if body.guided_json_object:
        field = "guided_json_object"
        found.append(Grammar(json_schema_part(_ANY_OBJECT, field, blanks=blanks), field))
    if body.guided_regex is not None:
        found.append(Grammar(Pattern(body.guided_regex), "guided_regex"))
    if body.guided_choice:
        found.append(Grammar(_choice(body.guided_choice), "guided_choice"))
    if body.guided_grammar is not None:
        found.append(Grammar(Rules(body.guided_grammar), "guided_grammar"))
    return found


def _choice(texts: Sequence[str]) -> Part:
    return OneOf(tuple(Text(one) for one in dict.fromkeys(texts)))


def _schema_of(raw: msgspec.Raw, field: str) -> object:
    """A member that is a schema, or the text of one."""
    return read(str, raw, field) if memoryview(raw)[0] == _QUOTE else raw


def _decoded(raw: msgspec.Raw, field: str) -> object:
    """A member that is a value of JSON, or the text of one."""
    value: object = read(cast("type[object]", Any), raw, field)
    if isinstance(value, str):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise refuse(field, f"not valid JSON: {error}") from None
    return value


# --- structural tags


def _structural_tag(found: object, field: str) -> Part:
    """Both forms: `structures` and `triggers`, and the newer `format`."""
    members = _object(found, field)
    if members.get("format") is not None:
        return _format(members["format"], f"{field}.format", 0)
    structures = _list(members.get("structures"), f"{field}.structures")
    triggers = [
        _text(one, f"{field}.triggers")
        for one in _list(members.get("triggers"), f"{field}.triggers")
    ]
    tags: list[tuple[str, Part]] = []
    for index, one in enumerate(structures):
        place = f"{field}.structures[{index}]"
        tag = _object(one, place)
        schema = tag.get("schema")
        body = json_schema_part(_ANY_OBJECT if schema is None else schema, f"{place}.schema")
        end = _text(tag.get("end"), f"{place}.end")
        tags.append((_text(tag.get("begin"), f"{place}.begin"), Concat((body, Text(end)))))
    return _triggered(tags, triggers, field)


def _triggered(
    tags: Sequence[tuple[str, Part]],
    triggers: Sequence[str],
    field: str,
    *,
    starts_with_tag: bool = False,
    most: int | None = None,
) -> Part:
    by_trigger: dict[str, list[Part]] = {}
    for begin, behind in tags:
        trigger = next((one for one in triggers if one and begin.startswith(one)), None)
        if trigger is None:
            raise refuse(field, f"no trigger for the tag that begins with {begin[:40]!r}")
        rest = begin[len(trigger) :]
        parts = by_trigger.setdefault(trigger, [])
        parts.append(Concat((Text(rest), behind)) if rest else behind)
    if not by_trigger:
        raise refuse(field, "has no tag")
    return triggered_part(by_trigger, starts_with_tag=starts_with_tag, most=most)


def _format(found: object, field: str, depth: int) -> Part:
    """One format of the newer form."""
    if depth > _MAX_DEPTH:
        raise refuse(field, f"at most {_MAX_DEPTH} formats inside each other")
    members = _object(found, field)
    kind = members.get("type")
    if kind in ("triggered_tags", "tags_with_separator"):
        return _tags(members, field, depth, is_triggered=kind == "triggered_tags")
    part = _whole(kind, members, field) or _made_of_others(kind, members, field, depth)
    if part is None:
        raise refuse(f"{field}.type", f"{shown(kind)} is not supported")
    return part


def _whole(kind: object, members: Mapping[str, Any], field: str) -> Part | None:
    """A format that has no other inside."""
    match kind:
        case "const_string":
            return Text(_text(members.get("value"), f"{field}.value"))
        case "json_schema":
            return json_schema_part(members.get("json_schema"), f"{field}.json_schema")
        case "regex":
            return Pattern(_text(members.get("pattern"), f"{field}.pattern"))
        case "grammar":
            return Rules(_text(members.get("grammar"), f"{field}.grammar"))
        case "any_text":
            return AnyText(_texts(members.get("excludes", []), f"{field}.excludes"))
        case _:
            return None


def _made_of_others(
    kind: object, members: Mapping[str, Any], field: str, depth: int
) -> Part | None:
    if kind in ("sequence", "or"):
        some = enumerate(_list(members.get("elements"), f"{field}.elements"))
        parts = tuple(_format(one, f"{field}.elements[{i}]", depth + 1) for i, one in some)
        return Concat(parts) if kind == "sequence" else OneOf(parts)
    if kind in ("optional", "star", "plus"):
        content = _format(members.get("content"), f"{field}.content", depth + 1)
        return Repeat(content, int(kind == "plus"), 1 if kind == "optional" else None)
    if kind == "tag":
        begin, behind = _tag(members, field, depth)
        return Concat((Text(begin), behind))
    return None


def _tag(members: Mapping[str, Any], field: str, depth: int) -> tuple[str, Part]:
    """How a tag begins, and what is behind that."""
    begin = _text(members.get("begin"), f"{field}.begin")
    end = _text(members.get("end"), f"{field}.end")
    inside = _format(members.get("content"), f"{field}.content", depth + 1)
    if inside == AnyText() and end:
        return begin, Until(end)
    return begin, Concat((inside, Text(end))) if end else inside


def _tags(members: Mapping[str, Any], field: str, depth: int, *, is_triggered: bool) -> Part:
    least = int(bool(members.get("at_least_one")))
    most = 1 if members.get("stop_after_first") else None
    tags = [
        _tag(_object(one, f"{field}.tags[{i}]"), f"{field}.tags[{i}]", depth + 1)
        for i, one in enumerate(_list(members.get("tags"), f"{field}.tags"))
    ]
    if is_triggered:
        triggers = _texts(members.get("triggers"), f"{field}.triggers")
        return _triggered(tags, triggers, field, starts_with_tag=least > 0, most=most)
    if not tags:
        raise refuse(f"{field}.tags", "has no tag")
    whole = [Concat((Text(begin), behind)) for begin, behind in tags]
    one: Part = whole[0] if len(whole) == 1 else OneOf(tuple(whole))
    separator = _text(members.get("separator"), f"{field}.separator")
    return repeated(one, least=least, most=most, separator=separator)


def _object(found: object, field: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise refuse(field, "expected an object")
    return cast("Mapping[str, Any]", found)


def _list(found: object, field: str) -> list[Any]:
    if not isinstance(found, list):
        raise refuse(field, "expected a list")
    some = cast("list[Any]", found)
    if len(some) > MAX_CHOICES:
        raise refuse(field, f"at most {MAX_CHOICES} items")
    return some


def _text(found: object, field: str) -> str:
    if not isinstance(found, str):
        raise refuse(field, "expected a text")
    return found


def _texts(found: object, field: str) -> tuple[str, ...]:
    return tuple(_text(one, field) for one in _list(found, field))
