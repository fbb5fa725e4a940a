"""Writes a Grammar as llguidance reads it, for one tokenizer. Pure.

A JSON document of grammars: the first in Lark's notation, the others (JSON schemas, users' rules)
named in it. A special token is referred to by its id: its text in the answer would be other tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from xpyd_core.errors import UserError
from xpyd_worker.grammar.schema import objects_in
from xpyd_worker.grammar.spec import (
    AnyText,
    Concat,
    Json,
    Made,
    OneOf,
    Part,
    Pattern,
    Repeat,
    Rules,
    Text,
    Until,
)

_ANY = "(.|\\n)*"
_META = frozenset("\\.+*?()|[]{}^$/#&~-")
_CONTROLS = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v", "\f": "\\f"}
_ITEM, _KEY = ", ?", ": ?"


@dataclass(frozen=True)
class Document:
    """A grammar as the library reads it. `schemas`: those in it, with their places."""

    text: str
    schemas: tuple[tuple[str, object], ...]


def render(root: Part, special: Mapping[str, int]) -> Document:
    """The document of a grammar that is `checked`. `special`: ids of special tokens, by text.
    UserError for rules that are not in a known notation."""
    writer = _Writer(special)
    start = writer.part(root)
    grammars = writer.grammars
    if not isinstance(root, Json):  # of which the schema is all: to read Lark's takes longer
        lark = "\n".join((f"start: {start}", *writer.lines))
        grammars = [{"name": "answer", "lark_grammar": lark}, *grammars]
    return Document(json.dumps({"grammars": grammars}), tuple(writer.schemas))


class _Writer:
    def __init__(self, special: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self.grammars: list[dict[str, Any]] = []
        self.schemas: list[tuple[str, object]] = []
        self._special = special
        self._schemas: dict[Json, str] = {}
        longest_first = sorted((one for one in special if one), key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def part(self, part: Part) -> str:
        """The expression of a part; what it needs besides goes into `lines` and `grammars`."""
        match part:
            case Text(text):
                return self._sequence(text)
            case Json():
                # The schema of one call is that of the next.
                if part not in self._schemas:
                    schema = _schema(part)
                    self.schemas.append((part.place, schema))
                    self._schemas[part] = self._grammar({"json_schema": schema})
                return self._schemas[part]
            case Made():
                raise AssertionError("checked leaves none")
            case Pattern(regex):
                return self._terminal(f"/{_regex(regex)}/")
            case Rules(text):
                return self._grammar({"lark_grammar": _lark(text)})
            case Until():
                return self._until(part)
            case AnyText(without):
                return self._terminal(f"/{_ANY}/{self._but(without)}")
            case Concat(parts):
                return "(" + " ".join(map(self.part, parts)) + ")" if parts else '""'
            case OneOf(parts):
                return self._one_of(parts)
            case Repeat(one, least, most):
                return f"({self.part(one)}){_times(least, most)}"

    def _one_of(self, parts: Sequence[Part]) -> str:
        texts = [part.text for part in parts if isinstance(part, Text)]
        if len(texts) == len(parts) and all(self._pieces(one) == [one] for one in texts):
            return self._terminal(" | ".join(map(_literal, texts)))
        return "(" + " | ".join(map(self.part, parts)) + ")"

    def _but(self, without: Sequence[str]) -> str:
        """Behind an expression: what is not in its text. Special tokens never are."""
        words = [one for one in without if self._pieces(one) == [one]]
        never = "|".join(map(_escaped, words))
        return f" & ~/{_ANY}({never}){_ANY}/" if never else ""

    def _until(self, part: Until) -> str:
        first, *rest = self._pieces(part.end)
        body, but = f"({_regex(part.body)})" if part.body else _ANY, self._but(part.without)
        if first in self._special:
            head = f"{self._terminal(f'/{body}/{but}')} {self._token(first)}"
        else:
            end = _escaped(first)
            # The text before a later end is as the expression says, too, but it is not the first.
            once = f" & ~/{_ANY}{end}(.|\\n)+/" if part.body else ""
            # Lazy: it ends where the text first has the end.
            head = self._terminal(f"/{body}{end}/{but}{once}", lazy=True)
        return " ".join(("(" + head, *map(self._piece, rest))) + ")"

    def _sequence(self, text: str) -> str:
        return "(" + " ".join(map(self._piece, self._pieces(text))) + ")"

    def _piece(self, piece: str) -> str:
        return self._token(piece) if piece in self._special else _literal(piece)

    def _token(self, text: str) -> str:
        return f"<[{self._special[text]}]>"

    def _pieces(self, text: str) -> list[str]:
        """The text in pieces, special tokens apart; never none."""
        found: list[str] = []
        end = 0
        for match in self._split.finditer(text) if self._split else ():
            found += [text[end : match.start()], match[0]]
            end = match.end()
        return [one for one in (*found, text[end:]) if one] or [""]

    def _terminal(self, expression: str, *, lazy: bool = False) -> str:
        name = f"{'t' if lazy else 'T'}{len(self.lines)}"
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {expression}")
        return name

    def _grammar(self, members: dict[str, Any]) -> str:
        name = f"g{len(self.grammars)}"
        self.grammars.append({"name": name, **members})
        return f"@{name}"


def _times(least: int, most: int | None) -> str:
    match least, most:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
        case _:
            return f"{{{least},{'' if most is None else most}}}"


def _schema(part: Json) -> object:
    schema = json.loads(part.schema)
    if schema is True:
        schema = {}
    options: dict[str, Any] = {"whitespace_flexible": part.blanks is not None}
    if part.blanks is not None:
        options["whitespace_pattern"] = part.blanks
    elif part.spaces:
        options |= {"item_separator": _ITEM, "key_separator": _KEY}
    options |= _escapes(cast("object", schema))
    return {**cast("dict[str, Any]", schema), "x-guidance": options}


def _escapes(schema: object) -> dict[str, Any]:
    """Which escapes texts may have. All of them, but where members that have names may come among
    members that have none: these must have other names, and the compiler compares names as they are
    written. So there no character has a second spelling."""
    for node in objects_in(schema):
        has_names = node.get("properties") or node.get("patternProperties")
        if has_names and node.get("additionalProperties") is not False:
            return {"json_allowed_escapes": 'nrbtf\\"'}
    return {"json_allow_general_unicode_escapes": True}


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # the library raises plain exceptions for what it cannot read
        raise UserError(f"neither Lark nor GBNF: {error}") from error


def _regex(regex: str) -> str:
    from llguidance import regex_to_lark

    return regex_to_lark(regex, "")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """A pattern that matches the text itself, as Lark wants it between slashes."""
    return "".join(_CONTROLS.get(char) or (f"\\{char}" if char in _META else char) for char in text)
