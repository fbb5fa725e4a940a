"""A chat template, rendered as transformers renders it, which is what engines do. Child only.

Templates are another's program: the sandbox forbids access to Python's insides and changes of what
they are given, `range` ends at 100,000, and what is put out is bounded here. Time and memory are
bounded by `child`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from xpyd_router.tokens.prompts import Conversation, Refused

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class _Generation(Extension):
    """`{% generation %}`: marks what the assistant said; it is rendered as if unmarked."""

    tags = {"generation"}  # noqa: RUF012 - as Extension

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """`dict` without what could be reached through the type."""

    def __call__(self, *args: Any, **members: Any) -> dict[Any, Any]:  # noqa: ANN401 - as dict
        return dict(*args, **members)

    def fromkeys(self, keys: Any, value: object = None) -> dict[Any, Any]:  # noqa: ANN401 - as dict
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace` without names that begin with an underscore."""

    def __init__(*args: Any, **attributes: Any) -> None:  # noqa: ANN401 - as Namespace
        self, *rest = args
        members = dict(*rest, **attributes)
        for name in members:
            _check_name(name)
        Namespace.__init__(self, members)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own writes HTML's entities.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson

    def strftime_now(form: str) -> str:
        return now().strftime(form)

    names: dict[str, Any] = environment.globals
    names["raise_exception"] = _raise_exception
    names["strftime_now"] = strftime_now
    names["dict"] = _Dict()
    names["namespace"] = _Namespace
    return environment


class ChatTemplates:
    """The templates of one checkpoint, compiled when first used."""

    def __init__(
        self,
        sources: dict[str, str],
        variables: dict[str, str],
        *,
        max_characters: int,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._sources = sources
        self._variables = variables
        self._max_characters = max_characters
        self._environment = _environment(now)
        self._compiled: dict[str, Template] = {}

    def render(self, given: Conversation) -> str:
        """The conversation as text; Refused where the template refuses, fails or does not end."""
        name = "tool_use" if given.tools and "tool_use" in self._sources else "default"
        source = self._sources.get(name)
        if source is None:
            raise Refused("the model has no chat template")
        messages = given.messages
        if given.continue_final_message:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": last["content"] + _TAG}]
        try:
            template = self._compiled.get(name)
            if template is None:
                template = self._compiled[name] = self._environment.from_string(source)
            pieces = template.generate(
                {
                    **self._variables,
                    **given.variables,
                    "messages": messages,
                    "tools": given.tools,
                    "documents": given.documents,
                    "add_generation_prompt": given.add_generation_prompt,
                }
            )
            text = self._bounded(pieces)
        except Refused:
            raise
        except Exception as error:  # a template may raise whatever it likes
            raise Refused(f"the chat template fails: {type(error).__name__}") from error
        if given.continue_final_message:
            text = _continued(text, given.messages[-1]["content"])
        return text

    def _bounded(self, pieces: Any) -> str:  # noqa: ANN401 - jinja's iterator of str
        found: list[str] = []
        characters = 0
        for piece in cast("list[str]", pieces):
            characters += len(piece)
            if characters > self._max_characters:
                raise Refused(f"the chat template gives more than {self._max_characters}")
            found.append(piece)
        return "".join(found)


def _continued(text: str, last: str) -> str:
    """`text` up to the end of the last message, which the tag marks."""
    tag = _TAG.strip()
    if last.strip() not in text or tag not in text:
        raise Refused("continue_final_message: the template changes the last message")
    end = text.rindex(tag)
    # Where the template cut the tag's space, it would have cut the message's, too.
    return text[:end] if text[end : end + len(_TAG)] == _TAG else text[:end].rstrip()
