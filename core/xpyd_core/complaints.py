"""What is wrong with the JSON of a request's body, in words: the 400 that names the field. Pure.

Of what msgspec says only the path, and a missing or unknown name, is used: the value is read again
to show it. `bodies` reads the bodies.
"""

from __future__ import annotations

import math
import re
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec import inspect

from xpyd_core.errors import ApiError

SHORT_BYTES = 64 * 1024
"""A body of at most so much is read at once, and read again to show what is wrong in it. Of a
longer one each member is read apart: of two members of one name a struct's decoder builds both."""
_SHOWN_CHARACTERS = 40
_HUGE = 10**5000
"""In place of a number that no parser makes."""


def refuse(name: str, message: str) -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, f"{name}: {message}", param=name)


def shown(value: object) -> str:
    """A value as an error message shows it: short, whatever the client sent."""
    try:
        is_long = isinstance(value, list | dict)
        text = reprlib.repr(cast("object", value)) if is_long else repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        return "a number of very many digits"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def refusal_of(kind: type[Any], raw: bytes | msgspec.Raw, message: str, prefix: str) -> ApiError:
    """The ApiError for msgspec's message; of that only the path and a missing name are used, and
    the rest where the value is too long to be read for a message."""
    place = re.search(r" - at `\$(.*)`$", message)
    steps = re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", place[1]) if place else []
    value: Any = None
    is_huge = "value out of range" in message or "Number out of range" in message
    is_short = len(raw) <= SHORT_BYTES and not is_huge
    if is_short:
        try:
            value, steps = _followed(msgspec.json.decode(raw), steps, _fits(message))
        except (RecursionError, msgspec.DecodeError):  # very deep, or a number of many digits
            is_short = False
        except (LookupError, TypeError, StopIteration):  # of two members of one name the first
            is_short = False
    if unknown := re.match(r"Object contains unknown field `(.*?)`", message, re.S):
        where = "".join(f".{field}" if field else f"[{index}]" for field, index in steps)
        path = f"{prefix}{where}.{unknown[1][:64]}".lstrip(".")
        return refuse(path, "this field is not known here; leave it out")
    expected, name, item = inspect.type_info(kind), prefix, ""
    for field, index in steps:
        expected = _inside(expected, field)
        if field:
            name, item = f"{name}{item}.{field}".lstrip("."), ""
        else:
            item = f"{item}[{index}]"
    if missing := re.match(r"Object missing required field `(\w+)`", message):
        return refuse(f"{name}{item}.{missing[1]}".lstrip("."), "this field is missing")
    if not name and not item:
        return ApiError(400, "the body must be a JSON object")
    if is_short or is_huge:
        complaint = _complaint(expected, _HUGE if is_huge else value)
    else:
        complaint = message.partition(" - at ")[0].replace("`", "").replace(" | null", "").lower()
    if not item or any(isinstance(one, inspect.StructType) for one in alternatives(expected)):
        return refuse(name + item, complaint)
    # A number or a text has no name of its own: the parameter at fault is the list.
    return refuse(name, f"item {item[1:-1].replace('][', '.')}: {complaint}")


def _followed(
    value: Any,  # noqa: ANN401 - any JSON value
    steps: Sequence[tuple[str, str]],
    fits: Callable[[object], bool],
) -> tuple[object, list[tuple[str, str]]]:
    """The value at the end of msgspec's path, and the path with the key that msgspec leaves out:
    the first one whose value does not fit."""
    found: list[tuple[str, str]] = []
    for field, index in steps:
        key: Any = field or index
        if index == "...":
            key = next(name for name, one in value.items() if not fits(one))
        value = value[int(key)] if index not in ("", "...") else value[key]
        found.append((field, "" if field else str(key)))
    return value, found


def _fits(message: str) -> Callable[[object], bool]:
    """Whether a member of an object is not the one that msgspec's message is about."""
    if not message.startswith("Expected `str`"):
        return _is_finite
    limit = re.match(r"Expected `str` of length <= (\d+)", message)
    most = int(limit[1]) if limit else sys.maxsize
    return lambda one: isinstance(one, str) and len(one) <= most


def alternatives(expected: inspect.Type) -> list[inspect.Type]:
    """The types that a value may have, but for null."""
    if isinstance(expected, inspect.Metadata):
        return alternatives(expected.type)
    if isinstance(expected, inspect.UnionType):
        found = [one for member in expected.types for one in alternatives(member)]
        return [one for one in found if not isinstance(one, inspect.NoneType)]
    return [expected]


def _inside(expected: inspect.Type, field: str) -> inspect.Type:
    """The type of a struct's field, or of a list's or a dict's items: no field may be either."""
    for one in alternatives(expected):
        if field and isinstance(one, inspect.StructType):
            return next(each.type for each in one.fields if each.encode_name == field)
        if not field and isinstance(one, inspect.ListType):
            return one.item_type
        if not field and isinstance(one, inspect.DictType):
            return one.value_type
    raise AssertionError(f"no {field or 'item'} in {expected}")  # the path is msgspec's own


def _complaint(expected: inspect.Type, value: object) -> str:
    """What is wrong with a value that has none of the types, or lies outside their bounds."""
    found = alternatives(expected)
    for one in found:
        if isinstance(one, inspect.LiteralType):
            values = ", ".join(str(each) for each in one.values)
            return f"expected one of {values}, got {shown(value)}"
        if isinstance(one, inspect.IntType | inspect.FloatType) and _is_number(value):
            if isinstance(one, inspect.IntType) and isinstance(value, float):
                continue
            return f"must be {_range(one)}, got {shown(value)}"
        if isinstance(one, inspect.StrType) and isinstance(value, str):
            if one.pattern is not None:
                return f"must match {one.pattern}, got {shown(value)}"
            return _length_complaint(one, "characters", len(value))
        if isinstance(one, inspect.ListType) and isinstance(value, list):
            return _length_complaint(one, "items", len(cast("list[Any]", value)))
        if isinstance(one, inspect.DictType) and isinstance(value, dict):
            return _length_complaint(one, "members", len(cast("dict[str, Any]", value)))
    names = [_NAMES.get(type(one), "another value") for one in found]
    return f"expected {' or '.join(dict.fromkeys(names))}, got {shown(value)}"


_NAMES: Mapping[type[inspect.Type], str] = {
    inspect.IntType: "an integer",
    inspect.FloatType: "a number",
    inspect.BoolType: "true or false",
    inspect.StrType: "a string",
    inspect.ListType: "a list",
    inspect.DictType: "an object",
    inspect.StructType: "an object",
    inspect.NoneType: "null",
}


def _is_number(value: object) -> bool:
    # True is an int in Python, not in JSON.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    """Whether `value` is finite, also for an integer beyond the floats, for which math's raises."""
    return _is_number(value) and abs(cast("float", value)) <= sys.float_info.max


def _range(bounds: inspect.IntType | inspect.FloatType) -> str:
    low = bounds.ge if bounds.ge is not None else bounds.gt
    if low is None and bounds.le is None:
        return "a finite number"
    low_text = _number(-math.inf if low is None else low)
    high_text = _number(math.inf if bounds.le is None else bounds.le)
    if bounds.gt is not None:
        return f"above {low_text} and at most {high_text}"
    return f"{low_text} to {high_text}"


def _number(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _length_complaint(
    bounds: inspect.StrType | inspect.ListType | inspect.DictType, what: str, length: int
) -> str:
    least, most = bounds.min_length or 0, bounds.max_length
    if length < least:
        return "must not be empty" if least == 1 else f"must have at least {least} {what}"
    return f"must have at most {most} {what}, got {length}"
