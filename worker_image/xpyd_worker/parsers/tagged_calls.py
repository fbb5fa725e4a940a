"""Tool calls whose arguments are text between tags. Pure.

`Tags` says how a family writes them. The value of an argument is plain text, which becomes JSON by
the type that the tool's schema gives it. Texts are put out as they come. Any other value is put out
when it is whole, since the first half of a number is another number. An argument that comes twice
is there twice in the JSON, whose readers take the last one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from xpyd_core.chats import Function
from xpyd_worker.parsers import Part
from xpyd_worker.parsers.json_calls import BLANKS, JsonValue
from xpyd_worker.parsers.reasoning import beginning_at_end
from xpyd_worker.parsers.tools import Machine, first_of

BEGIN, CLOSE = "<tool_call>", "</tool_call>"
_NAME = re.compile(r"[^\s<>]{1,256}")
_LONGEST_KEY = 1024
_MAX_SCHEMAS = 256
"""Looked at for the types of one argument."""
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_TEXT, _TEXT_OR_NULL = frozenset({"string"}), frozenset({"string", "null"})
_NESTED = frozenset({"object", "array"})
_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}


@dataclass(frozen=True)
class Tags:
    """What is before and behind a function's name, the name of an argument, and its value."""

    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    """What is behind the last argument."""
    has_line_feeds: bool = False
    """Whether a value stands on lines of its own: the line feeds around are no part of it."""

    @property
    def value_ends(self) -> tuple[str, ...]:
        """What a value ends at: models forget to close an argument before the next."""
        return (self.value[1], self.key[0], self.end)


QWEN3_CODER = Tags(
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    end="</function>",
    has_line_feeds=True,
)
GLM45 = Tags(
    name=("", ""),
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
    end=CLOSE,
)


class TaggedCalls(Machine):
    """`<tool_call>`, the function's name, and its arguments between tags."""

    tags = GLM45

    def __init__(self, tools: Sequence[Function] = ()) -> None:
        super().__init__(tools)
        self._schema: Mapping[str, Any] = {}  # of the function's arguments
        self._name = ""
        self._key = ""
        self._types = frozenset[str]()
        self._value: list[str] = []  # so far, where it is not put out yet
        self._is_first = True  # no argument yet
        self._is_text = False  # the value is put out as it comes
        self._at_start = True  # of a value
        self._json: JsonValue | None = None  # what the value may be: tags in its texts are none

    # --- states

    def _opened(self) -> bool:
        self._is_marked = BEGIN in self._taken
        before = self.tags.name[0]
        if before and self._is_marked:
            if not self._skip_blanks():
                return self._no_call() if self._last else False
            found = self._next(before)
            if not found:
                return self._no_call() if found is None else False
            self._taken.append(before)
            self._rest = self._rest[len(before) :]
        self._state = self._named
        return True

    def _named(self) -> bool:
        """In the name."""
        closer = self.tags.name[1]
        if not closer and not self._skip_blanks():
            return self._no_call() if self._last else False
        name = _NAME.match(self._rest)
        if name is None:
            return self._no_call() if self._last or self._rest else False
        self._name, behind = name[0], self._rest[name.end() :]
        if not (behind or self._last):
            return False  # more of the name may come
        if not closer:  # the tag behind it says that it was a name
            self._taken.append(self._name)
            self._rest, self._state = behind, self._behind_name
            return True
        found = self._next(closer, text=behind)
        return self._begin_call(behind.removeprefix(closer)) if found else self._no_call()

    def _behind_name(self) -> bool:
        """Where the tag behind a name may come."""
        is_over = not self._skip_blanks() and self._last
        found = self._next(self.tags.key[0], self.tags.end)
        if found is None or is_over:
            return self._no_call()
        return self._begin_call(self._rest) if found else False

    def _begin_call(self, behind: str) -> bool:
        self._parts.append(Part("call", self._name))
        self._rest, self._taken = behind, []
        schemas = (tool.parameters for tool in self._tools if tool.name == self._name)
        self._schema = next(schemas, None) or {}
        self._is_first, self._state = True, self._between
        return True

    def _between(self) -> bool:
        """Where an argument may begin, or the call may end."""
        self._rest = self._rest.lstrip(BLANKS)
        key, end = self.tags.key[0], self.tags.end
        found = self._next(key, end, CLOSE)
        if not found:
            return self._wrong() if found is None else False
        self._rest = self._rest[len(found) :]
        if found == key:
            self._state = self._in_key
            return True
        self._argue("{}" if self._is_first else "}")
        self._is_behind_call = True
        self._state = self._content if found == CLOSE else self._closed
        return True

    def _in_key(self) -> bool:
        """In the name of an argument."""
        key, found, behind = self._rest.partition(self.tags.key[1])
        if len(key) > _LONGEST_KEY or (found and not key.strip()):
            return self._wrong()
        if not found:
            return self._wrong() if self._last else False
        self._taken, self._rest, self._key = [key, found], behind, key.strip()
        self._state = self._behind_key
        return True

    def _behind_key(self) -> bool:
        """Where an argument's value may begin."""
        before = self.tags.value[0]
        if before:
            self._skip_blanks()
            found = self._next(before)
            if not found:
                if found is None or self._last:
                    self._rest = "".join((*self._taken, self._rest))
                    return self._wrong()
                return False
        self._rest, self._taken = self._rest.removeprefix(before), []
        self._types = types_of(self._schema, self._key)
        self._value, self._at_start, self._is_text = [], True, False
        self._json = JsonValue() if self._types <= _NESTED else None
        self._state = self._in_value
        if self._types == _TEXT:
            self._begin_text()
        return True

    def _in_value(self) -> bool:
        ends, has_line_feeds = self.tags.value_ends, self.tags.has_line_feeds
        if has_line_feeds and self._at_start and self._rest:
            self._rest, self._at_start = self._rest.removeprefix("\n"), False
        if self._json is not None and not self._take_json(self._json):
            return False
        at, found = first_of(self._rest, ends)
        text = self._rest[: at if found else len(self._rest) - beginning_at_end(self._rest, *ends)]
        if has_line_feeds:
            text = text.removesuffix("\n")
        if text:
            self._say_value(text)
        if not found:
            self._rest = self._rest[len(text) :]
            return self._wrong() if self._last else False
        if self._is_text:
            self._argue('"')
        else:
            self._begin_value()
            self._argue(as_json("".join(self._value), self._types))
        # Of what it ends at only what closes the value is taken with it.
        self._rest, self._state = self._rest[at:].removeprefix(self.tags.value[1]), self._between
        return True

    def _take_json(self, value: JsonValue) -> bool:
        """Take an object or a list up to its end; whether it has one, or the text is none."""
        end = value.take(self._rest, 0)
        self._value.append(self._rest[:end])
        self._rest = self._rest[end:]
        if not (value.is_done or value.is_bad or self._last):
            return False
        if not value.is_done:
            self._rest, self._value = "".join((*self._value, self._rest)), []
        self._json = None
        return True

    def _closed(self) -> bool:
        rest = self._hold_blanks()
        found = self._next(CLOSE)
        if found == "":
            return False
        if found or (self._last and CLOSE.startswith(rest)):
            self._blanks.take()
            self._rest = rest.removeprefix(CLOSE) if found else ""
        self._state = self._content
        return True

    # --- steps

    def _next(self, *markers: str, text: str | None = None) -> str | None:
        """The marker at the front; "" where it may still come, None where none of them is."""
        text = self._rest if text is None else text
        found = next((one for one in markers if text.startswith(one)), None)
        may_come = not self._last and any(one.startswith(text) for one in markers)
        return "" if found is None and may_come else found

    def _wrong(self) -> bool:
        """The call goes wrong behind its name, or the text ends in it. Its arguments stay open, so
        that nobody takes them for whole: half of a file must not be written."""
        self.malformed += 1
        if self._last:
            self._rest = ""  # the beginning of a tag
        self._is_behind_call, self._state = True, self._content
        return True

    def _argue(self, text: str) -> None:
        if text:
            self._parts.append(Part("arguments", text))

    def _begin_value(self) -> None:
        self._argue(f"{'{' if self._is_first else ', '}{_quoted(self._key)}: ")
        self._is_first = False

    def _begin_text(self) -> None:
        self._begin_value()
        self._argue('"')
        self._is_text = True

    def _say_value(self, text: str) -> None:
        if not self._is_text:
            self._value.append(text)
            if self._types != _TEXT_OR_NULL:
                return
            text = "".join(self._value)
            if "null".startswith(text.lower()):
                return
            self._begin_text()
        self._argue(_quoted(text)[1:-1])


class Qwen3Coder(TaggedCalls):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, as
    Qwen3-Coder writes it; it may leave out `<tool_call>`."""

    tags = QWEN3_CODER
    begins = (BEGIN, QWEN3_CODER.name[0])


class Glm45(TaggedCalls):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, as GLM from
    4.5 on writes it."""

    tags = GLM45
    begins = (BEGIN,)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The types that an argument's value may have; a text where the schema does not say."""
    return types_in(schema, _member(schema.get("properties"), key))


def types_in(root: Mapping[str, Any], schema: object) -> frozenset[str]:
    """The types of a schema inside `root`, to which its references are."""
    found: set[str] = set()
    seen: set[int] = set()
    todo = [schema]
    while todo and len(seen) < _MAX_SCHEMAS:
        value = todo.pop()
        if not isinstance(value, dict) or id(cast("object", value)) in seen:
            continue
        node = cast("dict[str, Any]", value)
        seen.add(id(node))
        types = node.get("type")
        found.update(one for one in listed(types) or [types] if isinstance(one, str))
        consts = [node["const"]] if "const" in node else []
        found.update(map(_type_of, [*listed(node.get("enum")), *consts]))
        for keyword in ("anyOf", "oneOf", "allOf"):
            todo += listed(node.get(keyword))
        todo.append(referred(root, node.get("$ref")))
    return frozenset(found) or _TEXT


def listed(value: object) -> list[object]:
    """The value, if it is a list; else none."""
    return cast("list[object]", value) if isinstance(value, list) else []


def _member(value: object, key: str) -> object:
    return cast("dict[str, object]", value).get(key) if isinstance(value, dict) else None


def referred(root: object, reference: object) -> object:
    """The schema that `#/a/b` means; None for another reference."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found = root
    for name in reference[2:].split("/"):
        found = _member(found, name.replace("~1", "/").replace("~0", "~"))
    return found


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    for kinds, name in (
        (bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"),
    ):  # fmt: skip
        if isinstance(value, kinds):
            return name
    return "object"


def as_json(value: str, types: frozenset[str]) -> str:
    """The JSON that a value is, of the first type that it fits in vLLM's order: null, integer,
    number, boolean, object or array, text. What fits none is JSON if it can be, else a text."""
    text = value.strip()
    if "null" in types and text.lower() == "null":
        return "null"
    if "integer" in types and (number := _integer(text)):
        return number
    if "number" in types and (number := _number(text)):
        return number
    if "boolean" in types and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    may_be_any = types & _NESTED or "string" not in types
    return text if may_be_any and _is_json(text) else _quoted(value)


def _integer(text: str) -> str:
    try:
        return str(int(text))
    except ValueError:  # no number, or one of thousands of digits
        return ""


def _number(text: str) -> str:
    try:
        number = float(text)
    except ValueError:
        return ""
    if not math.isfinite(number):
        return ""
    return text if _NUMBER.fullmatch(text) else json.dumps(number)


def _is_json(text: str) -> bool:
    value = JsonValue()
    # A number ends where something else comes.
    return value.take(text + " ", 0) >= len(text) and value.is_done
