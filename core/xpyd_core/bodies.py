"""Reads the JSON of request bodies into structs, at a cost that the body's length bounds. Pure.

A member that a struct does not have is skipped: nothing is built of it, whatever it holds. Of the
others, a list or an object in Python takes up to thirty times its text, so a member is read only
where its text is short; `prompt` and `messages` may be long, and have bounds of their own
(`prompt_shape`). See docs/adr/0039.
"""

from __future__ import annotations

import codecs
import io
import math
import re
import reprlib
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import GenericAlias
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec import inspect

from xpyd_core.errors import ApiError

MAX_MEMBER_BYTES = 256 * 1024
"""The text of a list or an object that is not in `_LONGER`: 256 bad words of 128 escaped letters
take 200 KiB."""
_LONGER: Mapping[str, int] = {
    "allowed_token_ids": 1024 * 1024,
    "first_logprobs": 4 * 1024 * 1024,
    # Agents send the schemas of a hundred tools.
    "tools": 1024 * 1024,
    "documents": 4 * 1024 * 1024,
    # These have bounds of their own, or are texts mostly.
    **dict.fromkeys(
        ("prompt", "messages", "tokens", "kv_transfer_params", "continue_from"), sys.maxsize
    ),
}
_SHORT_BYTES = 64 * 1024
"""A body of at most so much is read at once, and read again to show what is wrong in it. Of a
longer one each member is read apart: of two members of one name a struct's decoder builds both."""
_SHOWN_CHARACTERS = 40
_HUGE = 10**5000
"""In place of a number that no parser makes."""
_BLANKS = re.compile(rb"[ \t\r\n]*+")
_PIECE_BYTES = 64 * 1024
_LIST, _TEXT = b'["'
_NOTHING = Annotated[int, msgspec.Meta(ge=1, le=0)]
_NOT_THERE = msgspec.Raw(b"")
NO_VALUE = msgspec.Raw(b"null")
"""A member that is not there, as a struct's default: absent and null mean the same."""

T = TypeVar("T")


def unread() -> Any:  # noqa: ANN401 - as msgspec.field
    """The default NO_VALUE of a member that is kept as its JSON; schemas do not show it."""
    return msgspec.field(default_factory=lambda: NO_VALUE)


def read(kind: type[T], raw: bytes | msgspec.Raw, name: str = "") -> T:
    """The value of type `kind` whose JSON is `raw`: a whole body, or the value of member `name`.

    Raises ApiError 400 that names the field, with `name` before it, and what is allowed.
    """
    try:
        if len(raw) > _SHORT_BYTES and _is_struct(kind):
            return _read_apart(kind, raw, name)
        return _decoder(kind).decode(raw)
    except msgspec.ValidationError as error:
        raise _refusal(kind, raw, str(error), name) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error


def check_text(raw: bytes) -> None:
    """ApiError 400 for bytes that are no UTF-8: in a member that is skipped nothing else finds
    them."""
    if raw.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(raw), _PIECE_BYTES):
            decoder.decode(raw[start : start + _PIECE_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error.reason} in UTF-8") from None


def is_absent(member: msgspec.Raw) -> bool:
    """Whether the member is not there, or null."""
    return len(member) == len(b"null") and bytes(member) == b"null"


class PromptShape(NamedTuple):
    """What a `prompt` has, as far as that is known without reading it."""

    prompts: int
    """Texts or lists of ids; 1 where it is a text or a list of ids."""
    most_ids: int
    """A bound on the ids of all prompts; exact where all are numbers, 0 without any."""
    text_bytes: int
    """The JSON of the prompts that are texts."""


def prompt_shape(raw: msgspec.Raw, most_prompts: int) -> PromptShape:
    """The shape of a `prompt`. Raises ApiError as `prompt_items`."""
    if memoryview(raw)[0] != _LIST:
        return PromptShape(1, 0, len(raw))
    items = prompt_items(raw, most_prompts)
    ids = sum(map(most_ids_in, items))
    text_bytes = sum(len(item) for item in items if memoryview(item)[0] == _TEXT)
    return PromptShape(max(1, len(items)), ids, text_bytes)


def most_ids_in(item: msgspec.Raw) -> int:
    """A bound on the ids of one prompt; 0 where it is no list."""
    return bytes(item).count(b",") + 1 if memoryview(item)[0] == _LIST else 0


def prompt_items(raw: msgspec.Raw, most_prompts: int) -> Sequence[msgspec.Raw]:
    """The JSON of each prompt of a `prompt`, not copied: all of it where it is no list of prompts,
    none of an empty list.

    Raises ApiError 400 for more than `most_prompts`, and for an item that is no prompt.
    """
    view = memoryview(raw)
    blanks = _BLANKS.match(view, 1) if view[0] == _LIST else None
    if blanks is None:
        return (raw,)
    first = view[blanks.end()]
    if first not in (_LIST, _TEXT):
        return () if first == ord("]") else (raw,)
    items = list_items(msgspec.Raw, raw, most_prompts, "prompt", "prompts")
    for index, item in enumerate(items):
        if memoryview(item)[0] not in (_LIST, _TEXT):
            raise refuse("prompt", f"item {index}: expected a string or token ids")
    return items


def list_items(kind: type[T], raw: msgspec.Raw, most: int, name: str, what: str) -> list[T]:
    """The items of the list `name`; ApiError 400 for more than `most`."""
    if len(raw) > MAX_MEMBER_BYTES:
        _check_count(raw, most, refuse(name, f"at most {most} {what}"))
    items = read(list[kind], raw, name)
    if len(items) > most:
        raise refuse(name, f"at most {most} {what}")
    return items


def _check_count(raw: msgspec.Raw, most: int, too_many: ApiError) -> None:
    """`too_many` for a list of more than `most` items; no more than these are built."""
    try:
        _counter(most).decode(raw)
    except msgspec.ValidationError as error:
        # That of a list which is too short names no item.
        if " - at `$[" in str(error):
            raise too_many from None
    except RecursionError:
        pass  # who reads the list says so


@cache
def _counter(most: int) -> msgspec.json.Decoder[Any]:
    """Takes `most` items of a list as they are; what is behind them is an error that names it."""
    items = (*(msgspec.Raw,) * most, _NOTHING)
    return msgspec.json.Decoder(cast("type[Any]", GenericAlias(tuple, items)))


class BodyBuffer:
    """What has come of a body, held once: a list of its parts takes as much again to be joined."""

    __slots__ = ("_first", "_rest")

    def __init__(self) -> None:
        self._first = b""
        self._rest: io.BytesIO | None = None

    def __len__(self) -> int:
        return len(self._first) if self._rest is None else self._rest.tell()

    def add(self, part: bytes) -> None:
        """The next part; most bodies have but one, which is not copied."""
        if self._rest is None and not self._first:
            self._first = part
            return
        if self._rest is None:
            self._rest = io.BytesIO()
            self._rest.write(self._first)
            self._first = b""
        self._rest.write(part)

    def take(self) -> bytes:
        """All that came, which is not held here any more. A BytesIO gives its own bytes away."""
        first, rest = self._first, self._rest
        self._first, self._rest = b"", None
        return first if rest is None else rest.getvalue()


class LongBody:
    """A body in pieces: a client's bytes, which are not copied, and what is put behind them."""

    __slots__ = ("pieces",)

    def __init__(self, *pieces: bytes | memoryview) -> None:
        self.pieces = pieces

    def __len__(self) -> int:
        return sum(map(len, self.pieces))


class BodyBudget:
    """The memory that all open bodies of a process may take, with what becomes of them.

    A body is charged with the bytes that came, not with the length that its head names: a client
    that announces much and sends nothing holds nothing. Used in one event loop.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0

    def take(self, count: int) -> bool:
        """Charge `count` bytes, unless that would be too many."""
        if self.used_bytes + count > self._limit_bytes:
            return False
        self.used_bytes += count
        return True

    def give_back(self, count: int) -> None:
        """Charge them no more."""
        self.used_bytes -= count


class BodyCharge:
    """What one request's body is charged with; what is behind `most_bytes` nobody keeps."""

    def __init__(self, budget: BodyBudget, most_bytes: int) -> None:
        self._budget = budget
        self.most_bytes = most_bytes
        self._bytes = 0
        self.is_refused = False
        """Some of the body was thrown away."""

    def take(self, count: int) -> bool:
        """Charge what has come; False: it, and all that follows, is to be thrown away."""
        return self.take_more(min(count, self.most_bytes - self._bytes))

    def take_more(self, count: int) -> bool:
        """Charge what becomes of the body."""
        if self.is_refused or not self._budget.take(count):
            self.is_refused = True
            return False
        self._bytes += count
        return True

    def move(self) -> BodyCharge:
        """A charge with all of this one, for what outlives the request; this one has none then."""
        moved = BodyCharge(self._budget, self.most_bytes)
        moved._bytes, self._bytes = self._bytes, 0
        return moved

    def check(self) -> None:
        """ApiError 503 where some of the body was thrown away, or there is no room for it."""
        if self.is_refused:
            raise ApiError(503, "too many large requests are being read", retry_after_s=1)

    def end(self) -> None:
        """The body is not held any more. May be called again."""
        self._budget.give_back(self._bytes)
        self._bytes = 0


@cache
def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(kind)


class _Members(NamedTuple):
    """How the members of a struct are read apart."""

    texts: msgspec.json.Decoder[Any]
    """Each as its JSON."""
    types: Mapping[str, Any]
    """By the name in JSON."""
    limits: Mapping[str, int]
    """Bytes of those that are lists or objects."""
    names: Mapping[str, str]
    """In the struct, by those in JSON."""


@cache
def _members_of(kind: Any) -> _Members:  # noqa: ANN401 - any struct
    fields = msgspec.structs.fields(kind)
    described = cast("inspect.StructType", inspect.type_info(kind)).fields
    return _Members(
        msgspec.json.Decoder(
            msgspec.defstruct(
                "Texts",
                [(one.encode_name, msgspec.Raw, _NOT_THERE) for one in fields],
                gc=False,
                forbid_unknown_fields=kind.__struct_config__.forbid_unknown_fields,
            )
        ),
        {one.encode_name: one.type for one in fields},
        {
            one.encode_name: _LONGER.get(one.encode_name, MAX_MEMBER_BYTES)
            for one in described
            if any(isinstance(each, _CONTAINERS) for each in _alternatives(one.type))
        },
        {one.encode_name: one.name for one in fields},
    )


def _is_struct(kind: object) -> bool:
    """Whether `kind` is a struct's type."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _read_apart(kind: type[T], raw: bytes | msgspec.Raw, prefix: str) -> T:
    """As `read`, of a long object; of two members of one name only the last is looked at."""
    members = _members_of(kind)
    texts = members.texts.decode(raw)
    values: dict[str, Any] = {}
    for name, expected in members.types.items():
        text = getattr(texts, name)
        if text is _NOT_THERE:
            continue
        path = f"{prefix}.{name}".lstrip(".")
        limit = members.limits.get(name)
        if limit is not None and len(text) > limit:
            raise refuse(path, f"must have at most {limit} bytes of JSON")
        is_raw = getattr(expected, "__origin__", expected) is msgspec.Raw  # annotated, too
        values[members.names[name]] = text if is_raw else read(expected, text, path)
    try:
        return kind(**values)
    except TypeError:
        # A required member is missing: the decoder names it.
        return _decoder(kind).decode(b"{}")


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


def _refusal(kind: type[Any], raw: bytes | msgspec.Raw, message: str, prefix: str) -> ApiError:
    """The ApiError for msgspec's message; of that only the path and a missing name are used, and
    the rest where the value is too long to be read for a message."""
    place = re.search(r" - at `\$(.*)`$", message)
    steps = re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", place[1]) if place else []
    value: Any = None
    is_huge = "value out of range" in message or "Number out of range" in message
    is_short = len(raw) <= _SHORT_BYTES and not is_huge
    if is_short:
        try:
            value, steps = _followed(msgspec.json.decode(raw), steps)
        # Very deep, or a number of many digits; of two members of one name the first.
        except (RecursionError, msgspec.DecodeError, LookupError, TypeError, StopIteration):
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
    if not item or any(isinstance(one, inspect.StructType) for one in _alternatives(expected)):
        return refuse(name + item, complaint)
    # A number or a text has no name of its own: the parameter at fault is the list.
    return refuse(name, f"item {item[1:-1].replace('][', '.')}: {complaint}")


def _followed(
    value: Any,  # noqa: ANN401 - any JSON value
    steps: Sequence[tuple[str, str]],
) -> tuple[object, list[tuple[str, str]]]:
    """The value at the end of msgspec's path, and the path with the key that msgspec leaves out."""
    found: list[tuple[str, str]] = []
    for field, index in steps:
        key: Any = field or index
        if index == "...":
            key = next(name for name, one in value.items() if not _is_finite(one))
        value = value[int(key)] if index not in ("", "...") else value[key]
        found.append((field, "" if field else str(key)))
    return value, found


def _alternatives(expected: inspect.Type) -> list[inspect.Type]:
    """The types that a value may have, but for null."""
    if isinstance(expected, inspect.Metadata):
        return _alternatives(expected.type)
    if isinstance(expected, inspect.UnionType):
        found = [one for member in expected.types for one in _alternatives(member)]
        return [one for one in found if not isinstance(one, inspect.NoneType)]
    return [expected]


def _inside(expected: inspect.Type, field: str) -> inspect.Type:
    """The type of a struct's field, or of a list's or a dict's items: no field may be either."""
    for one in _alternatives(expected):
        if field and isinstance(one, inspect.StructType):
            return next(each.type for each in one.fields if each.encode_name == field)
        if not field and isinstance(one, inspect.ListType):
            return one.item_type
        if not field and isinstance(one, inspect.DictType):
            return one.value_type
    raise AssertionError(f"no {field or 'item'} in {expected}")  # the path is msgspec's own


def _complaint(expected: inspect.Type, value: object) -> str:
    """What is wrong with a value that has none of the types, or lies outside their bounds."""
    alternatives = _alternatives(expected)
    for one in alternatives:
        if isinstance(one, inspect.LiteralType):
            values = ", ".join(str(each) for each in one.values)
            return f"expected one of {values}, got {shown(value)}"
        if isinstance(one, inspect.IntType | inspect.FloatType) and _is_number(value):
            if isinstance(one, inspect.IntType) and isinstance(value, float):
                continue
            return f"must be {_range(one)}, got {shown(value)}"
        if isinstance(one, inspect.StrType) and isinstance(value, str):
            return _length_complaint(one, "characters", len(value))
        if isinstance(one, inspect.ListType) and isinstance(value, list):
            return _length_complaint(one, "items", len(cast("list[Any]", value)))
        if isinstance(one, inspect.DictType) and isinstance(value, dict):
            return _length_complaint(one, "members", len(cast("dict[str, Any]", value)))
    names = [_NAMES.get(type(one), "another value") for one in alternatives]
    return f"expected {' or '.join(dict.fromkeys(names))}, got {shown(value)}"


_CONTAINERS = (inspect.ListType, inspect.DictType, inspect.StructType)
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
    ends = (-math.inf if low is None else low, math.inf if bounds.le is None else bounds.le)
    low_text, high_text = (str(n) if isinstance(n, int) else f"{n:g}" for n in ends)
    if bounds.gt is not None:
        return f"above {low_text} and at most {high_text}"
    return f"{low_text} to {high_text}"


def _length_complaint(
    bounds: inspect.StrType | inspect.ListType | inspect.DictType, what: str, length: int
) -> str:
    least, most = bounds.min_length or 0, bounds.max_length
    if length < least:
        return "must not be empty" if least == 1 else f"must have at least {least} {what}"
    return f"must have at most {most} {what}, got {length}"
