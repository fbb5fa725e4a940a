"""Reads the JSON of request bodies into structs, at a cost that the body's length bounds. Pure.

A member that a struct does not have is skipped: nothing is built of it, whatever it holds. Of the
others, a list or an object in Python takes up to thirty times its text, so a member is read only
where its text is short; `prompt` and `messages` may be long, and have bounds of their own
(`prompt_shape`). See docs/adr/0039.
"""

from __future__ import annotations

import codecs
import io
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import GenericAlias
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import msgspec
from msgspec import inspect

from xpyd_core.complaints import SHORT_BYTES, alternatives, refusal_of, refuse
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
_BLANKS = re.compile(rb"[ \t\r\n]*+")
_PIECE_BYTES = 64 * 1024
_LIST, _TEXT = b'["'
_NOTHING = Annotated[int, msgspec.Meta(ge=1, le=0)]
_CONTAINERS = (inspect.ListType, inspect.DictType, inspect.StructType)
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
        if len(raw) > SHORT_BYTES and _is_struct(kind):
            return _read_apart(kind, raw, name)
        return _decoder(kind).decode(raw)
    except msgspec.ValidationError as error:
        raise refusal_of(kind, raw, str(error), name) from None
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
            if any(isinstance(each, _CONTAINERS) for each in alternatives(one.type))
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
