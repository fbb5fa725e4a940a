"""What an answer must look like, as a frozen tree of parts. Pure.

The fields that ask for structured output become a Grammar (fields.py), and so does a tool call that
must come. A Grammar says nothing of tokens: it is rendered for one tokenizer, in which a marker
such as `</think>` may be a token of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from xpyd_core.bodies import refuse
from xpyd_worker.grammar.patterns import check_pattern
from xpyd_worker.grammar.schema import MAX_SCHEMA_BYTES, checked_schema, decoded

MAX_PARTS = 1024
"""Parts of one grammar: tools and tags are many times fewer."""
MAX_PATTERN_CHARACTERS = 8192
MAX_RULES_CHARACTERS = 64 * 1024
MAX_CHOICES = 10_000
MAX_TEXT_CHARACTERS = 16 * 1024
_IS_SCHEMA = re.compile(r"[ \t\r\n]*(\{|true[ \t\r\n]*\Z)")


@dataclass(frozen=True)
class Text:
    """Exactly this text. Special tokens that the tokenizer has for parts of it are these tokens."""

    text: str


@dataclass(frozen=True)
class Json:
    """A JSON value. `schema`: a JSON schema, as JSON; nobody has looked at it before `checked`.
    `spaces`: one blank may follow a comma or a colon; without it none. `blanks`: a pattern of what
    may stand between any two parts of the value, instead of both. `closed`: objects have no members
    but those that the schema names, whatever it says. `place`: of the schema in the request."""

    schema: str
    spaces: bool = True
    blanks: str | None = None
    closed: bool = False
    place: str = field(default="", compare=False)


@dataclass(frozen=True)
class Made:
    """The part that `make` makes of a JSON schema and its place, which `checked` calls. It is a
    value that can be pickled and compared: equal ones make the same of the same schema."""

    make: Callable[[object, str], Part]
    schema: str
    place: str = field(default="", compare=False)


@dataclass(frozen=True)
class Pattern:
    """A text that this regular expression matches as a whole."""

    regex: str


@dataclass(frozen=True)
class Rules:
    """A text of this context-free grammar, in Lark's or GBNF's notation."""

    text: str


@dataclass(frozen=True)
class Until:
    """Any text up to the first `end`, and `end` itself. `body`: an expression that the text matches
    as a whole; "" for any. `without`: what is not in it."""

    end: str
    body: str = ""
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class AnyText:
    """Any text in which none of `without` is."""

    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class Concat:
    """One part behind the other."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class OneOf:
    """One of several."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Repeat:
    """The part again and again: `least` times at least; `most` None: without an end."""

    part: Part
    least: int = 0
    most: int | None = None


Part = Text | Json | Made | Pattern | Rules | Until | AnyText | Concat | OneOf | Repeat


@dataclass(frozen=True)
class Grammar:
    """What a whole answer must look like. `field` is the request's field that asks for it: errors
    name it. Equal grammars are compiled once."""

    root: Part
    field: str = "response_format"

    def after_reasoning(self, end: str, *, start: str = "") -> Grammar:
        """This grammar behind a reasoning that ends with `end`, such as `</think>`.

        `start` empty: the prompt has opened the reasoning already. Otherwise the model may open it
        with `start`, or answer at once. Up to two line feeds may be behind `end`.
        """
        behind = Concat((Until(end), Pattern(r"\n{0,2}"), self.root))
        if not start:
            return replace(self, root=behind)
        return replace(self, root=OneOf((Concat((Text(start), behind)), self.root)))


def json_schema_part(
    schema: object,
    field: str = "response_format.json_schema.schema",
    *,
    spaces: bool = True,
    blanks: str | None = None,
    closed: bool = False,
) -> Json:
    """A JSON value of `schema`: an object or a boolean, as Python values or as JSON text.

    `closed`: objects have no members but those that the schema names, whatever it says. Whether it
    is a schema that can be followed `checked` says. ApiError 400 for one that is too long.
    """
    return Json(schema_text(schema, field), spaces, blanks, closed, field)


def schema_text(schema: object, field: str) -> str:
    """The schema as JSON. ApiError 400 for one that is too long, or begins as none does."""
    if isinstance(schema, str):
        text = schema
    elif isinstance(schema, bytes | msgspec.Raw):
        text = bytes(schema).decode()
    else:
        try:
            text = msgspec.json.encode(schema).decode()
        except (OverflowError, TypeError, ValueError, RecursionError) as error:
            raise refuse(field, f"not a value of JSON: {error}") from None
    if len(text) > MAX_SCHEMA_BYTES:
        raise refuse(field, f"at most {MAX_SCHEMA_BYTES} bytes, got {len(text)}")
    if not _IS_SCHEMA.match(text):
        raise refuse(field, "expected a JSON schema: an object, or true")
    return text


def json_schema_grammar(
    schema: object, field: str = "response_format.json_schema.schema", *, closed: bool = False
) -> Grammar:
    """An answer that is one JSON value of `schema`; see `json_schema_part`."""
    return Grammar(json_schema_part(schema, field, closed=closed), field)


def tagged_grammar(
    tags: Sequence[Part],
    *,
    field: str,
    least: int = 1,
    most: int | None = None,
    separator: str = "",
) -> Grammar:
    """One of `tags` again and again, with `separator` between: what `tool_choice: required` wants.

    A tag is e.g. `Concat((Text("<call>"), json_schema_part(...), Text("</call>")))`.
    """
    one = tags[0] if len(tags) == 1 else OneOf(tuple(tags))
    return Grammar(repeated(one, least=least, most=most, separator=separator), field)


def repeated(one: Part, *, least: int = 0, most: int | None = None, separator: str = "") -> Part:
    """`one` from `least` to `most` times, with `separator` between."""
    if not separator:
        return one if least == most == 1 else Repeat(one, least, most)
    more = Repeat(
        Concat((Text(separator), one)),
        max(0, least - 1),
        None if most is None else most - 1,
    )
    some = one if most == 1 else Concat((one, more))
    return some if least else Repeat(some, 0, 1)


def triggered_part(
    tags: Mapping[str, Sequence[Part]],
    *,
    starts_with_tag: bool = False,
    most: int | None = None,
) -> Part:
    """Free text in which each trigger begins a tag: by trigger, what may be behind it. At most
    `most` tags; None: any number. With `starts_with_tag` no text comes before the first: it could
    take all the tokens that the answer may have. Where there may be one tag alone that is all."""
    behind = {
        trigger: parts[0] if len(parts) == 1 else OneOf(tuple(parts))
        for trigger, parts in tags.items()
    }
    if starts_with_tag:
        first = _any_of([Concat((Text(trigger), part)) for trigger, part in behind.items()])
        rest = None if most is None else most - 1
        return Concat((first, triggered_part(tags, most=rest))) if rest != 0 else first
    one = _any_of([Concat((Until(trigger), part)) for trigger, part in behind.items()])
    return Concat((Repeat(one, 0, most), AnyText(tuple(tags))))


def _any_of(parts: Sequence[Part]) -> Part:
    return parts[0] if len(parts) == 1 else OneOf(tuple(parts))


def check_parts(root: Part, field: str) -> None:
    """ApiError 400 for more than MAX_PARTS parts, or one that is too long."""
    todo: list[Part] = [root]
    count = 0
    while todo:
        part = todo.pop()
        count += 1
        if count > MAX_PARTS:
            raise refuse(field, f"at most {MAX_PARTS} parts")
        match part:
            case Concat(parts) | OneOf(parts):
                todo.extend(parts)
            case Repeat(one):
                todo.append(one)
            case Text(text) | Until(text) if len(text) > MAX_TEXT_CHARACTERS:
                raise refuse(field, f"a text has at most {MAX_TEXT_CHARACTERS} characters")
            case Pattern(regex) | Until(_, regex) if len(regex) > MAX_PATTERN_CHARACTERS:
                raise refuse(field, f"at most {MAX_PATTERN_CHARACTERS} characters of a pattern")
            case Pattern(regex):
                check_pattern(regex, field)
            case Rules(text) if len(text) > MAX_RULES_CHARACTERS:
                raise refuse(field, f"at most {MAX_RULES_CHARACTERS} characters of a grammar")
            case _:
                pass


def checked(root: Part) -> Part:
    """The same with each schema as the compiler wants it, and no part that is Made. ApiError 400
    names the place of what cannot be followed. For a large schema it takes some 100 ms."""
    match root:
        case Json(schema, place=place, closed=closed):
            return replace(root, schema=checked_schema(schema, place, closed=closed))
        case Made(make, schema, place):
            return checked(make(decoded(schema, place), place))
        case Concat(parts):
            return Concat(tuple(map(checked, parts)))
        case OneOf(parts):
            return OneOf(tuple(map(checked, parts)))
        case Repeat(one):
            return replace(root, part=checked(one))
        case _:
            return root


def schema_places(root: Part) -> list[str]:
    """Where in the request the schemas of a grammar are, in the order of its parts."""
    match root:
        case Json(place=place) | Made(place=place):
            return [place]
        case Concat(parts) | OneOf(parts):
            return [place for one in parts for place in schema_places(one)]
        case Repeat(one):
            return schema_places(one)
        case _:
            return []


def characters_of(root: Part) -> int:
    """Of all texts that a grammar holds."""
    match root:
        case Json(schema) | Made(_, schema):
            return len(schema)
        case Text(text) | Rules(text) | Pattern(text):
            return len(text)
        case Concat(parts) | OneOf(parts):
            return sum(map(characters_of, parts))
        case Repeat(one):
            return characters_of(one)
        case _:
            return 0


def with_places(root: Part, places: Iterator[str]) -> Part:
    """The same with other places, in that order."""
    match root:
        case Json() | Made():
            return replace(root, place=next(places))
        case Concat(parts):
            return Concat(tuple(with_places(one, places) for one in parts))
        case OneOf(parts):
            return OneOf(tuple(with_places(one, places) for one in parts))
        case Repeat(one):
            return replace(root, part=with_places(one, places))
        case _:
            return root
