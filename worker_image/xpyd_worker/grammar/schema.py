"""Checks a JSON schema before it is compiled, and names the place of what is wrong in it. Pure.

A keyword that would be ignored makes answers that are wrong, so each keyword is either one that the
compiler follows, or one that says nothing of the value (an annotation), or it is refused. Sizes are
bounded, since compiling costs by them (docs/adr/0065).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from math import inf, lcm, nextafter
from typing import Any, cast

import msgspec

from xpyd_core.bodies import refuse
from xpyd_worker.grammar.patterns import check_pattern, without_all_controls
from xpyd_worker.grammar.references import checked_references

MAX_SCHEMA_BYTES = 256 * 1024
MAX_DEPTH = 64
"""Schemas inside each other. OpenAI allows 10."""
MAX_ENUM = 10_000
MAX_PROPERTIES = 5000
"""Of the whole schema, as OpenAI."""
# Compiling costs by the squares of these: at each bound some tenths of a second.
MAX_PROPERTIES_OF_ONE = 1000
MAX_ALTERNATIVES = 500
MAX_CONJUNCTS = 16
MAX_MULTIPLE = 10_000
"""Of multipleOf, without its decimal point, and of those that hold together: an automaton with as
many states."""
MAX_EXACT = 2**53
"""Of a number in const and enum: the compiler reads numbers as floating point, which has not all
whole numbers above."""
_MOST_BITS = 2.0**63
"""Of a bound that whole numbers must reach: the compiler counts them in 64 bits."""
_SHOWN_PLACE = 200
_MOST_REFS = 8
"""Behind each other, from an alternative of oneOf to its schema."""

# Keywords by what their values hold.
_ONE = ("additionalProperties", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_OF_OBJECTS = frozenset(("properties", "patternProperties", "additionalProperties", "required"))
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LOWER = ("minimum", "exclusiveMinimum")
_TEXTS = ("$ref", "pattern", "format")
_IDS = ("$id", "id")
"""Where a schema inside another has one, its references are to itself."""
_VALUES = ("const", "enum", "default", "examples")
"""What these hold are values, whatever they look like."""
_TYPES = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
# What JSON Schema defines, and the compiler does not follow.
_UNSUPPORTED = frozenset(
    (
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
        *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedProperties", "unevaluatedItems", "$anchor", "additionalItems"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    )
)
_FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uuid", "uri"),
    )
)
# The compiler lets every minute have a leap second, every year a leap day, and there be a year 0:
# Python's dates begin with year 1, and so do validators that ask them. It bounds a host's labels,
# and not all of its name.
_TIME = "[^:]*:[^:]*:[0-5]"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAY = f"(?:{_YEAR}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_NARROWED = {
    "time": f"^{_TIME}",
    "date": f"^{_DAY}",
    "date-time": f"^{_DAY}{_TIME}",
    "hostname": "^.{1,253}$",
}
# Those that JSON Schema defines besides. Any other name is an annotation: no validator knows it.
_UNSUPPORTED_FORMATS = frozenset(
    (
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    )
)


def checked_schema(schema: object, field: str, *, closed: bool = False) -> str:
    """`schema` as JSON for the compiler. Raises ApiError 400 that names `field` and the place.

    `closed`: objects have no members but those that it names, whatever it says.
    """
    if isinstance(schema, str):
        schema = decoded(schema, field)
    if not isinstance(schema, dict) and schema is not True:
        raise refuse(field, "expected a JSON schema: an object, or true")
    nodes = list(_nodes(cast("object", schema), field))
    has_ids = any(isinstance(node.get(name), str) for _, node in nodes[1:] for name in _IDS)
    if any("oneOf" in node for _, node in nodes) and not has_ids:
        schema = _one_as_any(cast("object", schema), cast("dict[str, Any]", schema))
        nodes = list(_nodes(schema, field))
    whole = checked_references(cast("object", schema), nodes)
    properties = sum(len(node.get("properties", ())) for _, node in nodes)
    if properties > MAX_PROPERTIES:
        raise refuse(field, f"at most {MAX_PROPERTIES} properties, got {properties}")
    close = "all" if closed else "open" if _may_be_closed(nodes) else ""
    try:
        text = msgspec.json.encode(_normal(whole, close))
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise refuse(field, f"not a value of JSON: {error}") from None
    if len(text) > MAX_SCHEMA_BYTES:
        raise refuse(field, f"at most {MAX_SCHEMA_BYTES} bytes, got {len(text)}")
    return text.decode()


def decoded(text: str, field: str) -> object:
    """The schema that is written so."""
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
        if len(place) > _SHOWN_PLACE:  # names in it may be long
            place = f"{field}...{place[-_SHOWN_PLACE // 2 :]}"
        _check_node(node, place)
        yield place, node
        todo += [(one, where, depth + 1) for where, one in children(node, place)]


def _check_node(node: Mapping[str, Any], place: str) -> None:
    for keyword in _UNSUPPORTED & node.keys():
        if keyword != "uniqueItems" or node[keyword] is not False:
            raise refuse(f"{place}.{keyword}", "this keyword is not supported")
    for names, is_right, what in (
        (_COUNTS, _is_count, "a whole number from 0 on"),
        (_NUMBERS, _is_number, "a number"),
        (
            ("multipleOf",),
            _is_step,
            f"a number above 0, at most {MAX_MULTIPLE}, with as few digits",
        ),
        (_TEXTS, _is_text, "a text"),
        (("required",), _is_texts, "a list of texts"),
        (("type",), _is_type, f"one of {', '.join(sorted(_TYPES))}, or a list of these"),
        (("enum",), _is_enum, f"a list of 1 to {MAX_ENUM} values"),
    ):
        for keyword in names:
            if keyword in node and not is_right(node[keyword]):
                raise refuse(f"{place}.{keyword}", f"expected {what}")
    _check_sizes(node, place)
    most = len(set(cast("list[str]", node.get("required", [])))) + 1
    if node.get("minProperties", 0) > most:
        what = f"at most {most}, one more than `required` names: others may come twice"
        raise refuse(f"{place}.minProperties", what)
    if _common_step(node) > MAX_MULTIPLE:
        what = f"`multipleOf` of all of these together: at most {MAX_MULTIPLE}, without its point"
        raise refuse(f"{place}.allOf", what)
    for keyword, patterns in (
        ("pattern", (node.get("pattern", ""),)),
        ("patternProperties", node.get("patternProperties", ())),
    ):
        for pattern in patterns:
            check_pattern(pattern, f"{place}.{keyword}")
    if node.get("format") in _UNSUPPORTED_FORMATS:
        raise refuse(f"{place}.format", f"{node['format']!r} is not supported")


def _check_sizes(node: Mapping[str, Any], place: str) -> None:
    """ApiError 400 for a number that the compiler would take for another one."""
    for keyword in ("const", "enum"):
        if any(abs(one) > MAX_EXACT for one in _numbers_in(node.get(keyword))):
            what = "numbers beyond 2**53 are not supported: they would be rounded"
            raise refuse(f"{place}.{keyword}", what)
    for keyword in _NUMBERS:
        value = node.get(keyword, 0)
        if (value if keyword in _LOWER else -value) >= _MOST_BITS:
            raise refuse(f"{place}.{keyword}", "numbers of more than 63 bits are not supported")


def _numbers_in(value: object) -> Iterator[float]:
    """All numbers in a JSON value."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, list):
            todo += cast("list[object]", one)
        elif isinstance(one, dict):
            todo += cast("dict[str, object]", one).values()
        elif _is_number(one):
            yield cast("float", one)


def _is_count(value: object) -> bool:
    return _is_number(value) and cast("float", value) >= 0 and cast("float", value) % 1 == 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_step(value: object) -> bool:
    if not (_is_number(value) and 0 < cast("float", value) <= MAX_MULTIPLE):
        return False
    return _digits(value)[0] <= MAX_MULTIPLE


def _digits(value: object) -> tuple[int, int]:
    """A number above 0 as a whole number, and how many of its digits are behind the point."""
    _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
    whole, exponent = int("".join(map(str, digits))), cast("int", exponent)
    return (whole * 10**exponent, 0) if exponent > 0 else (whole, -exponent)


def _common_step(node: Mapping[str, Any]) -> int:
    """What a number that fits all of `allOf` is a multiple of, without its point; 0: of nothing."""
    steps: list[tuple[int, int]] = []
    todo: list[object] = [node]
    while todo and len(steps) <= 2 * MAX_CONJUNCTS:
        one = todo.pop()
        if isinstance(one, dict):
            inner = cast("dict[str, Any]", one)
            if _is_step(inner.get("multipleOf")):
                steps.append(_digits(inner["multipleOf"]))
            some = inner.get("allOf")
            todo += cast("list[object]", some) if isinstance(some, list) else []
    if len(steps) < 2:
        return 0
    behind = max(places for _, places in steps)
    return lcm(*(whole * 10 ** (behind - places) for whole, places in steps))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, cast("list[object]", value)))


def _is_type(value: object) -> bool:
    some = cast("list[object]", value) if isinstance(value, list) else [value]
    return bool(some) and all(isinstance(one, str) and one in _TYPES for one in some)


def _is_enum(value: object) -> bool:
    return isinstance(value, list) and 1 <= len(cast("list[object]", value)) <= MAX_ENUM


def children(node: Mapping[str, Any], place: str) -> Iterator[tuple[str, object]]:
    """What a schema has inside, with the place of each."""
    for keyword in _ONE:
        if keyword in node:
            yield f"{place}.{keyword}", node[keyword]
    for keyword in _LISTS:
        some = node.get(keyword, [])
        most = MAX_CONJUNCTS if keyword == "allOf" else MAX_ALTERNATIVES
        if not isinstance(some, list) or len(cast("list[object]", some)) > most:
            raise refuse(f"{place}.{keyword}", f"expected a list of at most {most} schemas")
        for index, one in enumerate(cast("list[object]", some)):
            yield f"{place}.{keyword}[{index}]", one
    for keyword in _MAPS:
        members = node.get(keyword, {})
        most = MAX_PROPERTIES_OF_ONE
        if not isinstance(members, dict) or len(cast("dict[str, object]", members)) > most:
            raise refuse(f"{place}.{keyword}", f"expected an object of at most {most} schemas")
        for name, one in cast("dict[str, object]", members).items():
            yield f"{place}.{keyword}.{name}", one


# --- oneOf: the compiler follows it only where it sees itself that the alternatives exclude each
# other, and it sees nothing behind a `$ref`. There it is the same as anyOf.


def _one_as_any(schema: object, root: Mapping[str, Any]) -> object:
    """A copy that has `anyOf` for each `oneOf` of which a value can fit one schema only."""
    if isinstance(schema, list):
        return [_one_as_any(one, root) for one in cast("list[object]", schema)]
    if not isinstance(schema, dict):
        return schema
    node = cast("dict[str, Any]", schema)
    made = {name: _one_as_any(value, root) for name, value in node.items() if name not in _VALUES}
    made |= {name: node[name] for name in _VALUES if name in node}
    if isinstance(node.get("oneOf"), list) and "anyOf" not in node and _is_apart(node, root):
        made["anyOf"] = made.pop("oneOf")
    return made


def _is_apart(node: Mapping[str, Any], root: Mapping[str, Any]) -> bool:
    """Whether a required property of the alternatives tells which of them a value can fit."""
    objects = [_behind_refs(one, root) for one in node["oneOf"]]
    tells = [_told(one) for one in objects]
    names = set(tells[0]).intersection(*tells[1:]) if tells else set[str]()
    return any(
        sum(len(told[name]) for told in tells) == len(set[str]().union(*(t[name] for t in tells)))
        for name in names
    )


def _told(schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Of an object's required properties that are one of several texts: these."""
    properties, required = schema.get("properties"), schema.get("required")
    if schema.get("type") != "object" or not isinstance(properties, dict):
        return {}
    found: dict[str, frozenset[str]] = {}
    for name in cast("list[str]", required) if isinstance(required, list) else []:
        one = cast("dict[str, Any]", properties).get(name)
        if isinstance(one, dict):
            known = cast("dict[str, Any]", one)
            texts = [known["const"]] if "const" in known else known.get("enum")
            if _is_texts(texts) and texts:
                found[name] = frozenset(cast("list[str]", texts))
    return found


def _behind_refs(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """What a schema refers to in its own document, itself where it refers to nothing; empty where
    that is not to be found."""
    for _ in range(_MOST_REFS):
        if not isinstance(schema, dict):
            return {}
        node = cast("dict[str, Any]", schema)
        if not isinstance(to := node.get("$ref"), str):
            return node
        # A pointer to a definition; any other one may go through an `$id` or be escaped.
        found = re.fullmatch(r"#/(\$defs|definitions)/([\w.-]+)", to, re.ASCII)
        part: object = root.get(found[1]) if found else None
        schema = (
            cast("dict[str, Any]", part).get(found[2]) if found and isinstance(part, dict) else None
        )
    return {}


def _may_be_closed(nodes: list[tuple[str, dict[str, Any]]]) -> bool:
    """Whether an object's own properties are all that another part of the schema may want of it.

    Then objects whose schema leaves further members open are taken as closed: what fits the closed
    schema fits the open one, and a small model comes to an end.
    """
    return not any("allOf" in node or "oneOf" in node or _is_mixed(node) for _, node in nodes)


def _is_mixed(node: Mapping[str, Any]) -> bool:
    """Whether a value must fit the node's own keywords and a schema that the node refers to."""
    refers = sum(keyword in node for keyword in ("$ref", "anyOf"))
    return refers > 0 and bool(refers > 1 or (node.keys() & _OF_OBJECTS))


def _normal(schema: object, close: str) -> object:
    """A copy without what says nothing. `close`: which objects are closed, `all`, those that leave
    it `open`, or none."""
    if not isinstance(schema, dict):
        return schema
    node = _plain(cast("dict[str, Any]", schema))
    for keyword in _ONE:
        if keyword in node:
            node[keyword] = _normal(node[keyword], close)
    for keyword in _LISTS:
        if keyword in node:
            node[keyword] = [_normal(one, close) for one in node[keyword]]
    for keyword in _MAPS:
        if keyword in node:
            members = cast("dict[str, object]", node[keyword])
            node[keyword] = {name: _normal(one, close) for name, one in members.items()}
    if "properties" in node and (close == "all" or (close and _is_open(node))):
        node["additionalProperties"] = False
    return node


def _plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with the node's own keywords as the compiler wants them."""
    node = dict(schema)
    for keyword in ("uniqueItems", "x-guidance"):  # the latter would be the compiler's options
        node.pop(keyword, None)
    for keyword in _COUNTS:
        if keyword in node:
            node[keyword] = int(node[keyword])  # the compiler knows no 2.0
    if "pattern" in node:
        node["pattern"] = without_all_controls(node["pattern"])
    if "patternProperties" in node:
        members = cast("dict[str, object]", node["patternProperties"])
        node["patternProperties"] = {without_all_controls(n): one for n, one in members.items()}
    for keyword in _NUMBERS:
        if keyword in node:
            node[keyword] = _narrowed(node[keyword], inf if keyword in _LOWER else -inf)
    if "format" in node and node["format"] not in _FORMATS:
        del node["format"]
    if node.get("format") in _NARROWED:
        node.setdefault("pattern", _NARROWED[node["format"]])
    return node


def _narrowed(bound: float, toward: float) -> float:
    """The bound, or the next one in that direction which floating point has."""
    if abs(bound) <= MAX_EXACT or isinstance(bound, float):
        return bound
    # Of the lowest of 64 bits it takes the magnitude, which has more.
    near = float(max(bound, 1024 - 2**63))
    is_wider = near < bound if toward > 0 else near > bound
    return nextafter(near, toward) if is_wider else near


def _is_open(node: Mapping[str, Any]) -> bool:
    """Whether the schema lets an object have members that it does not name, and needs none."""
    named = node["properties"].keys()
    says = "additionalProperties" in node or "patternProperties" in node
    needs = set(node.get("required", ())) <= named and node.get("minProperties", 0) <= len(named)
    return needs and not says


def objects_in(value: object) -> Iterator[dict[str, object]]:
    """Every object in a JSON value, itself among them."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, list):
            todo += cast("list[object]", one)
        elif isinstance(one, dict):
            node = cast("dict[str, object]", one)
            yield node
            todo += node.values()
