"""The families of tool calls and of reasoning, and the parser of one choice that has one of each.

A family of our own is a line in `TOOL_FAMILIES` or `REASONING_FAMILIES`. Other packages add theirs
by entry points, in the groups `xpyd.tool_parsers` and `xpyd.reasoning_parsers`, whose values are
ToolFamily and ReasoningFamily objects. `--tool-call-parser` and `--reasoning-parser` name one;
`auto` takes the one whose marks the chat template has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from xpyd_core.chats import Function
from xpyd_core.errors import UserError
from xpyd_worker.grammar.spec import Concat, Made, Text, json_schema_part, schema_text
from xpyd_worker.grammar.spec import Part as GrammarPart
from xpyd_worker.parsers import Part, ToolParser
from xpyd_worker.parsers.reasoning import Start, Thinking, start_of
from xpyd_worker.parsers.tagged_calls import GLM45, QWEN3_CODER, Glm45, Qwen3Coder, Tags
from xpyd_worker.parsers.tagged_grammar import TaggedArguments
from xpyd_worker.parsers.tools import Hermes, Llama3Json, Mistral

AUTO, NONE = "auto", "none"
PROMPT_END_TOKENS = 16
"""Tokens of the prompt's end in which reasoning is opened or closed: tags and line feeds."""


@dataclass(frozen=True)
class ToolFamily:
    """How a model family writes tool calls."""

    make: Callable[[Sequence[Function]], ToolParser]
    """Makes the parser of a choice, by the tools that the request has."""
    trigger: str
    """The text that begins a call, or several."""
    call: tuple[str, str]
    """What is before a call's object and behind it: of a call that a grammar makes."""
    separator: str = ""
    """What is between two calls."""
    around: tuple[str, str] = ("", "")
    """What is before the first call and behind the last."""
    arguments: str = "arguments"
    """The member that holds the arguments."""
    tags: Tags | None = None
    """How a call is written whose arguments are no JSON object but text between tags."""
    is_triggered: bool = True
    """Whether calls begin with the trigger always; else one is all of an answer."""
    special: tuple[str, ...] = ()
    """Tokens that the parser needs to see, though they have no text otherwise."""
    signs: tuple[str, ...] = ()
    """What a chat template of the family has, all of them."""
    not_signs: tuple[str, ...] = ()
    """What it has not."""
    id_characters: int = 24
    """Characters of a call's id behind its prefix; below 10 there is no prefix."""

    def call_part(
        self, name: str, schema: Mapping[str, Any], place: str, *, closed: bool = False
    ) -> GrammarPart:
        """The grammar of one call of a tool. `schema`: of its arguments, `place`: of that in the
        request; nobody looks at it yet (spec.checked)."""
        before, behind = self.call
        if self.tags is not None:
            text = name.join(self.tags.name)
            make = TaggedArguments(self.tags, closed)
            arguments = Made(make, schema_text(schema, place), place)
            return Concat((Text(before + text), arguments, Text(self.tags.end + behind)))
        arguments = json_schema_part(schema, place, closed=closed)
        quoted = _quoted(name)
        head = Text(f'{before}{{"name": {quoted}, "{self.arguments}": ')
        return Concat((head, arguments, Text("}" + behind)))


@dataclass(frozen=True)
class ReasoningFamily:
    """How a model family marks its reasoning."""

    begin: str
    end: str
    start: Start = "either"
    """Where a text begins whose prompt neither opens nor closes the reasoning."""
    signs: tuple[str, ...] = ()
    """What a chat template of the family has, all of them."""

    def start_behind(self, prompt_end: str) -> Start:
        """Where the text behind a prompt with this end begins."""
        found = start_of(prompt_end, self.begin, self.end)
        return self.start if found == "either" else found


def _quoted(name: str) -> str:
    """The name as JSON."""
    return json.dumps(name, ensure_ascii=False)


# What a template has is asked in this order: the first family whose signs are there.
TOOL_FAMILIES: Mapping[str, ToolFamily] = MappingProxyType(
    {
        "hermes": ToolFamily(
            make=Hermes,
            trigger="<tool_call>",
            call=("<tool_call>\n", "\n</tool_call>"),
            separator="\n",
            special=("<tool_call>", "</tool_call>"),
            signs=("<tool_call>",),
            not_signs=("<function=", "<arg_key>"),
        ),
        "qwen3_coder": ToolFamily(
            make=Qwen3Coder,
            trigger="<tool_call>",
            call=("<tool_call>\n", "\n</tool_call>"),
            separator="\n",
            tags=QWEN3_CODER,
            special=("<tool_call>", "</tool_call>"),
            signs=("<tool_call>", "<function="),
        ),
        "glm45": ToolFamily(
            make=Glm45,
            trigger="<tool_call>",
            call=("<tool_call>", ""),
            separator="\n",
            tags=GLM45,
            special=("<tool_call>", "</tool_call>", *GLM45.key, *GLM45.value),
            signs=("<tool_call>", "<arg_key>"),
        ),
        "mistral": ToolFamily(
            make=Mistral,
            trigger="[TOOL_CALLS]",
            call=("", ""),
            separator=", ",
            around=("[TOOL_CALLS][", "]"),
            special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
            signs=("[TOOL_CALLS]",),
            id_characters=9,
        ),
        "llama3_json": ToolFamily(
            make=Llama3Json,
            trigger="<|python_tag|>",
            call=("", ""),
            separator="; ",
            arguments="parameters",
            is_triggered=False,
            special=("<|python_tag|>",),
            signs=("<|start_header_id|>", '"parameters"'),
        ),
    }
)
REASONING_FAMILIES: Mapping[str, ReasoningFamily] = MappingProxyType(
    {
        "deepseek_r1": ReasoningFamily(
            "<think>", "</think>", start="open", signs=("</think>", "\uff5cAssistant\uff5c")
        ),
        "qwen3": ReasoningFamily("<think>", "</think>", signs=("</think>",)),
    }
)
_ALIASES = {"qwen3_xml": "qwen3_coder", "glm47": "glm45"}
_REASONING_ALIASES = {"glm45": "qwen3"}
"""Other names that vLLM has for a family, by the flag."""
FALLBACK = TOOL_FAMILIES["hermes"]
"""For calls that a grammar makes of a model whose template has no place for tools."""


@dataclass(frozen=True)
class Parsers:
    """What a served model's chats are parsed by. `tools` None: calls cannot be told from text."""

    tools: ToolFamily | None = None
    reasoning: ReasoningFamily | None = None
    tools_name: str = ""
    """Of the family, for metrics and logs; "" where there is none."""
    reasoning_name: str = ""


NO_PARSERS = Parsers()

Family = TypeVar("Family", ToolFamily, ReasoningFamily)


def _known(
    own: Mapping[str, Family], group: str, kind: type[Family], chosen: str
) -> Mapping[str, Family]:
    """Our own families and, where `chosen` is none of them, the entry points'."""
    if chosen in (AUTO, NONE) or chosen in own:
        return own
    found = {point.name: point for point in entry_points(group=group)}
    if chosen not in found:
        names = ", ".join((AUTO, NONE, *own, *sorted(found)))
        raise UserError(f"{_FLAGS[group]}: {chosen!r} is not known; expected one of {names}")
    family: object = found[chosen].load()
    if not isinstance(family, kind):
        raise UserError(f"{_FLAGS[group]}: {chosen} of {group} is no {kind.__name__}")
    return {chosen: family}


_TOOLS, _REASONING = "xpyd.tool_parsers", "xpyd.reasoning_parsers"
_FLAGS: Mapping[str, str] = {_TOOLS: "--tool-call-parser", _REASONING: "--reasoning-parser"}
_KNOWS_TOOLS = re.compile(r"\btools\b")


def find_parsers(tools: str, reasoning: str, templates: Sequence[str]) -> Parsers:
    """The parsers that the two flags name, of a model with these chat templates. UserError for a
    name that is not known."""
    text = "\n".join(templates)
    name = tools = _ALIASES.get(tools, tools)
    reasoning = _REASONING_ALIASES.get(reasoning, reasoning)
    tool_families = _known(TOOL_FAMILIES, _TOOLS, ToolFamily, tools)
    reasoning_families = _known(REASONING_FAMILIES, _REASONING, ReasoningFamily, reasoning)
    if tools == AUTO:
        name = next((key for key, one in tool_families.items() if _fits(one, text)), NONE)
        if name == NONE and not _KNOWS_TOOLS.search(text):
            name = "hermes"
    thinks = reasoning
    if reasoning == AUTO:
        thinks = next((key for key, one in reasoning_families.items() if _fits(one, text)), NONE)
    return Parsers(
        tools=tool_families.get(name),
        reasoning=reasoning_families.get(thinks),
        tools_name="" if name == NONE else name,
        reasoning_name="" if thinks == NONE else thinks,
    )


def _fits(family: ToolFamily | ReasoningFamily, template: str) -> bool:
    not_signs = family.not_signs if isinstance(family, ToolFamily) else ()
    has_all = all(sign in template for sign in family.signs)
    return has_all and not any(sign in template for sign in not_signs)


@dataclass(frozen=True)
class ChatOptions:
    """What a chat's answer may hold besides content. `choice` is of `tool_choice`, `named` where
    that is a function; `tools` are none where it is `none`. `allowed`: the names of those that may
    be called; empty for all."""

    tools: tuple[Function, ...] = ()
    choice: Literal["none", "auto", "required", "named"] = "none"
    allowed: tuple[str, ...] = ()
    parallel_tool_calls: bool = True
    include_reasoning: bool = True

    @property
    def most_calls(self) -> int | None:
        """How many calls the answer may have; None: any number."""
        return None if self.parallel_tool_calls and self.choice != "named" else 1

    @property
    def callable_names(self) -> tuple[str, ...]:
        """Of the tools that may be called."""
        return self.allowed or tuple(tool.name for tool in self.tools)

    @property
    def must_call(self) -> bool:
        """Whether an answer is calls, behind its reasoning, and has no content."""
        return self.choice in ("required", "named")


class ChatParser:
    """The parts of one choice's text: reasoning first, then content and tool calls."""

    def __init__(
        self,
        thinking: Thinking | None,
        tools: ToolParser | None,
        *,
        shows_reasoning: bool = True,
        most_calls: int | None = None,
        must_call: Sequence[str] = (),
    ) -> None:
        """`most_calls`: those behind them are dropped. `must_call`: an answer is calls of these,
        by a grammar; empty where it may be anything."""
        self._thinking = thinking
        self._tools = tools
        self._shows_reasoning = shows_reasoning
        self._most_calls = most_calls
        self._must_call = must_call
        self.calls = 0
        """Calls that were begun."""

    @property
    def thinks(self) -> bool:
        """Whether reasoning is told from the answer."""
        return self._thinking is not None

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._thinking is not None and self._thinking.is_inside

    @property
    def malformed(self) -> int:
        """See ToolParser."""
        return 0 if self._tools is None else self._tools.malformed

    def push(self, text: str) -> list[Part]:
        """What is certain with `text`, the next piece."""
        parts: list[Part] = []
        answer = text if self._thinking is None else self._thinking.push(text, parts)
        if answer:
            self._answer(answer, parts)
        return self._kept(parts)

    def finish(self) -> list[Part]:
        """The text has ended: what was held back."""
        parts: list[Part] = []
        was_reasoning = self.is_reasoning
        answer = "" if self._thinking is None else self._thinking.finish(parts)
        if answer:
            self._answer(answer, parts)
        if self._tools is not None:
            parts += self._tools.finish()
        if self._must_call and not was_reasoning:
            # The beginning of a call is no content, though nobody knows its name yet.
            parts = [part for part in parts if part.kind != "content"]
            if len(self._must_call) == 1 and not self.calls:
                parts = parts or [Part("call", self._must_call[0])]
        return self._kept(parts)

    def _answer(self, text: str, parts: list[Part]) -> None:
        if self._tools is None:
            parts.append(Part("content", text))
        else:
            parts += self._tools.push(text)

    def _kept(self, parts: list[Part]) -> list[Part]:
        kept: list[Part] = []
        for part in parts:
            self.calls += part.kind == "call"
            is_over = self._most_calls is not None and self.calls > self._most_calls
            if is_over and part.kind in ("call", "arguments"):
                continue
            if self._shows_reasoning or part.kind != "reasoning":
                kept.append(part)
        return kept
