"""JSON character by character: a value, and an object that is a tool call. Pure.

Both take text in pieces of any cut and say at which character a value ends, or stops being JSON.
Nothing is nested in Python's own stack, so that depth costs a model nothing but its tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from xpyd_worker.parsers import Part

BLANKS = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")
_IS_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
# No number that means anything is longer, and no word.
_LONGEST_SCALAR = 4096


class JsonValue:
    """One JSON value, which may have blanks before it."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_bad = False
        """The text is no JSON from the character on that was not taken."""
        self._closers: list[str] = []  # of what is open, the innermost last
        self._want = "value"  # or "item?", "key", "key?", ":", ","
        self._inside = ""  # '"' a string, "\\" behind a backslash, "u" hex digits, "0" a scalar
        self._scalar: list[str] = []
        self._scalar_characters = 0
        self._digits = 0

    def take(self, text: str, at: int) -> int:
        """Take from text[at:]; the place behind what was taken."""
        while at < len(text) and not (self.is_done or self.is_bad):
            at = self._in_token(text, at) if self._inside else self._between(text, at)
        return at

    def _in_token(self, text: str, at: int) -> int:
        char = text[at]
        if self._inside == "0":
            return self._in_scalar(text, at)
        if self._inside == '"':
            plain = _PLAIN.match(text, at)
            if plain is not None:
                return plain.end()
            if char == '"':
                self._inside = ""
                self._string_ended()
            elif char == "\\":
                self._inside = char
            else:  # a control character
                self.is_bad = True
                return at
        elif self._inside == "\\":
            if char not in _ESCAPES and char != "u":
                self.is_bad = True
                return at
            self._inside, self._digits = ("u", 4) if char == "u" else ('"', 0)
        else:
            if char not in _HEX:
                self.is_bad = True
                return at
            self._digits -= 1
            self._inside = "u" if self._digits else '"'
        return at + 1

    def _in_scalar(self, text: str, at: int) -> int:
        more = _SCALAR.match(text, at)
        if more is not None and self._scalar_characters <= _LONGEST_SCALAR:
            self._scalar.append(more[0])
            self._scalar_characters += len(more[0])
            return more.end()
        if _IS_SCALAR.fullmatch("".join(self._scalar)) is None:
            self.is_bad = True
            return at
        self._inside, self._scalar, self._scalar_characters = "", [], 0
        self._value_ended()
        return at

    def _string_ended(self) -> None:
        if self._want in ("key", "key?"):
            self._want = ":"
        else:
            self._value_ended()

    def _value_ended(self) -> None:
        if self._closers:
            self._want = ","
        else:
            self.is_done = True

    def _between(self, text: str, at: int) -> int:
        char, want = text[at], self._want
        if char in BLANKS:
            return at + 1
        if want in ("value", "item?") and char != "]":
            return self._begin(char, at)
        if char == '"' and want in ("key", "key?"):
            self._inside = char
        elif char == ":" and want == ":":
            self._want = "value"
        elif char == "," and want == ",":
            self._want = "key" if self._closers[-1] == "}" else "value"
        elif self._closers and char == self._closers[-1] and want in ("item?", "key?", ","):
            self._closers.pop()
            self._value_ended()
        else:
            self.is_bad = True
            return at
        return at + 1

    def _begin(self, char: str, at: int) -> int:
        if char == '"':
            self._inside = char
        elif char == "{":
            self._closers.append("}")
            self._want = "key?"
        elif char == "[":
            self._closers.append("]")
            self._want = "item?"
        elif _SCALAR.match(char):
            self._inside = "0"
            return at
        else:
            self.is_bad = True
            return at
        return at + 1


NAME_KEYS = frozenset({"name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


class CallObject:
    """A JSON object with a function's name and its arguments, in either order.

    The name is put out when it is whole, arguments as they come from then on. `keys`: an object
    with another key is no call; None: other keys are skipped.
    """

    def __init__(self, keys: Collection[str] | None = None) -> None:
        self.is_done = False
        self.is_bad = False
        """It is no call: no JSON, or without a name. What was put out stays."""
        self.has_begun = False
        """Its name was put out."""
        self._before: list[str] = []
        self._keys = keys
        self._want = "{"  # or "key?", "key", ":", "value", ","
        self._value: JsonValue | None = None
        self._raw: list[str] = []  # of the value, where it is not streamed
        self._key = ""
        self._is_streamed = False
        self._has_arguments = False
        self._held: list[str] = []  # arguments that came before the name

    @property
    def text(self) -> str:
        """All that was taken before it began."""
        return "".join(self._before)

    def take(self, text: str, at: int, parts: list[Part]) -> int:
        """Take from text[at:]; the place behind what was taken. What is certain goes to `parts`."""
        start = at
        while at < len(text) and not (self.is_done or self.is_bad):
            if self._value is not None:
                at = self._in_value(self._value, text, at, parts)
            elif text[at] in BLANKS:
                at += 1
            else:
                at = self._between(text[at], at, parts)
        if not self.has_begun:
            self._before.append(text[start:at])
        return at

    def _between(self, char: str, at: int, parts: list[Part]) -> int:
        want = self._want
        if char == '"' and want in ("key?", "key"):
            self._value, self._raw = JsonValue(), []
            return at
        if want == "value":
            self._begin_value(char)
            return at
        if char == "{" and want == "{":
            self._want = "key?"
        elif char == ":" and want == ":":
            self._want = "value"
        elif char == "," and want == ",":
            self._want = "key"
        elif char == "}" and want in ("key?", ","):
            self._end(parts)
            return at if self.is_bad else at + 1
        else:
            self.is_bad = True
            return at
        return at + 1

    def _begin_value(self, char: str) -> None:
        is_arguments = self._key in ARGUMENT_KEYS and not self._has_arguments
        if self._key in NAME_KEYS and not self.has_begun and char != '"':
            self.is_bad = True
        if is_arguments:
            self._has_arguments = True
        else:
            self._key = self._key if self._key in NAME_KEYS and not self.has_begun else ""
        self._is_streamed = is_arguments and char in "{["
        self._value, self._raw = JsonValue(), []

    def _in_value(self, value: JsonValue, text: str, at: int, parts: list[Part]) -> int:
        end = value.take(text, at)
        if self._is_streamed:
            self._argue(text[at:end], parts)
        else:
            self._raw.append(text[at:end])
        if value.is_bad:
            self.is_bad = True
        elif value.is_done:
            self._value = None
            self._value_ended(parts)
        return end

    def _value_ended(self, parts: list[Part]) -> None:
        if self._want != "value":
            self._key, self._want = _string("".join(self._raw)), ":"
            if self._keys is not None and self._key not in self._keys:
                self.is_bad = True
            return
        self._want = ","
        if self._key in NAME_KEYS:
            self._begin(_string("".join(self._raw)), parts)
        elif self._key in ARGUMENT_KEYS and not self._is_streamed:
            self._argue(_unquoted("".join(self._raw)), parts)
        self._is_streamed = False

    def _begin(self, name: str, parts: list[Part]) -> None:
        if not name or not is_text(name):
            self.is_bad = True
            return
        self.has_begun = True
        parts.append(Part("call", name))
        if self._held:
            parts.append(Part("arguments", "".join(self._held)))
            self._held = []

    def _argue(self, piece: str, parts: list[Part]) -> None:
        if not self.has_begun:
            self._held.append(piece)
        elif piece:
            parts.append(Part("arguments", piece))

    def _end(self, parts: list[Part]) -> None:
        if not self.has_begun:
            self.is_bad = True
            return
        if not self._has_arguments:
            parts.append(Part("arguments", "{}"))
        self.is_done = True


def _string(raw: str) -> str:
    """The value of a JSON string that was found to be one."""
    return str(json.loads(raw))


def _unquoted(raw: str) -> str:
    """Arguments that are no object: JSON in a string is unpacked, null is none."""
    if raw == "null":
        return "{}"
    text = _string(raw) if raw.startswith('"') else raw
    return text if is_text(text) else raw


def is_text(text: str) -> bool:
    """Whether it can be sent: JSON's escapes can make half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
