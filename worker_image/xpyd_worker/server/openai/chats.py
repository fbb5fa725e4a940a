"""A chat's messages and tools as the template, the parser and the grammar take them. Pure.

It must not know the model: whether its template has a place for tools, or how it writes calls, is
in the parsers that a caller brings. Why it is so: docs/adr/0068 and docs/adr/0091.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import msgspec

from xpyd_core.bodies import NO_VALUE, read, refuse
from xpyd_core.chats import ChosenTools, ContentPart, Function
from xpyd_core.chats import Message as ChatMessage
from xpyd_core.openai import ChatRequest, TokenizeRequest
from xpyd_worker.grammar.spec import (
    Concat,
    Grammar,
    OneOf,
    Part,
    Pattern,
    Text,
    Until,
    repeated,
    triggered_part,
)
from xpyd_worker.parsers.registry import (
    FALLBACK,
    ChatOptions,
    Parsers,
    ReasoningFamily,
    ToolFamily,
)

MAX_PARTS = 16_384
"""The most parts of the contents of all messages together."""
MAX_CALLS = 16_384
MAX_ARGUMENT_CHARACTERS = 4 * 1024 * 1024
"""Of the earlier calls of all messages together: as objects they take up to thirty times that."""
MOST_FORCED_CALLS = 8
"""Calls of an answer that must have some: a small model would write them until max_tokens."""
_EMPTY = (b"null", b"[]", b"{}", b'""', b"false", b"0")
_LONGEST_EMPTY = max(map(len, _EMPTY))
# What the call of the template has arguments for; a variable of that name would change the call.
_TAKEN_NAMES = frozenset(
    (
        *("messages", "conversation", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        *("tokenizer_kwargs", "processor_kwargs", "load_audio_from_video"),
    )
)
Message = dict[str, Any]
Templated = ChatRequest | TokenizeRequest


@dataclass(frozen=True)
class Conversation:
    """What a chat template is rendered with. `tools`: as the client wrote them."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    documents: tuple[dict[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def characters(self) -> int:
        """Characters of all contents."""
        return sum(len(message["content"]) for message in self.messages)

    @property
    def is_plain(self) -> bool:
        """Whether contents are all that can be long."""
        return not (self.tools or self.documents or self.variables) and not any(
            "tool_calls" in message or "reasoning_content" in message for message in self.messages
        )


class _Texts(msgspec.Struct, frozen=True, gc=False):
    """Members that go to the template as they were written."""

    tools: msgspec.Raw = NO_VALUE


def conversation_of(
    body: bytes, messages: Sequence[ChatMessage], templated: Templated
) -> Conversation:
    """The conversation of a body, whose fields were read. ApiError 400 names what is wrong."""
    continues = bool(templated.continue_final_message)
    generates = templated.add_generation_prompt is not False
    if continues and templated.add_generation_prompt is None:
        generates = False
    if continues and generates:
        raise refuse("continue_final_message", "not together with add_generation_prompt")
    found = as_messages(messages)
    if continues and (found[-1]["role"] != "assistant" or not found[-1]["content"]):
        raise refuse("continue_final_message", "needs an assistant's last message with content")
    for name in templated.chat_template_kwargs or ():
        if name in _TAKEN_NAMES:
            raise refuse("chat_template_kwargs", f"{name!r} is no variable of the template's own")
    return Conversation(
        messages=found,
        tools=_shown_tools(body, templated),
        documents=tuple(templated.documents or ()),
        variables=_variables(templated),
        add_generation_prompt=generates,
        continue_final_message=continues,
    )


def _shown_tools(body: bytes, templated: Templated) -> tuple[dict[str, Any], ...]:
    if not templated.tools or templated.tool_choice == "none":
        return ()
    return tuple(msgspec.json.decode(read(_Texts, body).tools, type=list[dict[str, Any]]))


def _variables(templated: Templated) -> Mapping[str, Any]:
    given = dict(templated.chat_template_kwargs or {})
    effort = templated.reasoning_effort
    if effort is None:
        return given
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **given}


def as_messages(found: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Messages as templates take them: of several text parts, one text."""
    parts = sum(len(one.content) for one in found if isinstance(one.content, list))
    if parts > MAX_PARTS:
        raise refuse("messages", f"at most {MAX_PARTS} parts of content, got {parts}")
    calls = [call for one in found for call in one.tool_calls or ()]
    if len(calls) > MAX_CALLS:
        raise refuse("messages", f"at most {MAX_CALLS} calls, got {len(calls)}")
    characters = sum(len(call.function.arguments) for call in calls)
    if characters > MAX_ARGUMENT_CHARACTERS:
        raise refuse(
            "messages",
            f"at most {MAX_ARGUMENT_CHARACTERS} characters of arguments, got {characters}",
        )
    return tuple(_message(one, f"messages[{index}]") for index, one in enumerate(found))


def _message(found: ChatMessage, place: str) -> Message:
    for key in ("function_call", "audio"):
        text = getattr(found, key)
        if len(text) > _LONGEST_EMPTY or bytes(text) not in _EMPTY:
            raise refuse(f"{place}.{key}", "this engine does not support it yet")
    is_assistant = found.role == "assistant"
    if found.content is None and not is_assistant:
        raise refuse(f"{place}.content", f"expected a text or parts in a message of {found.role}")
    if found.tool_calls and not is_assistant:
        raise refuse(f"{place}.tool_calls", "only an assistant's message has calls")
    content = _text(found.content, f"{place}.content", is_assistant=is_assistant)
    if is_assistant and not content:
        content = found.refusal or ""
    message: Message = {"role": found.role, "content": content}
    if found.name is not None:
        message["name"] = found.name
    if found.role == "tool" and found.tool_call_id is not None:
        message["tool_call_id"] = found.tool_call_id
    if is_assistant and (reasoning := found.reasoning_content or found.reasoning):
        # transformers gives it to templates by both names; here they are the same everywhere.
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    if found.tool_calls:
        message["tool_calls"] = [
            {
                "type": "function",
                **({} if call.id is None else {"id": call.id}),
                "function": {
                    "name": call.function.name,
                    "arguments": parsed_arguments(call.function.arguments),
                },
            }
            for call in found.tool_calls
        ]
    return message


def _text(content: str | list[ContentPart] | None, place: str, *, is_assistant: bool) -> str:
    if not isinstance(content, list):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        if part.type == "refusal" and not is_assistant:
            raise refuse(f"{place}[{index}].type", "only an assistant's message has a refusal")
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise refuse(f"{place}[{index}].{part.type}", "this field is missing")
        texts.append(text)
    return "\n".join(texts)


def parsed_arguments(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """Arguments of an earlier call for templates, which write objects as JSON. What is no object,
    as of a call that was cut, stays the text that it is."""
    try:
        value = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return text
    return cast("dict[str, Any]", value) if isinstance(value, dict) else text


def chat_options(asked: ChatRequest) -> ChatOptions:
    """How tools may be called. ApiError 400 for a choice that the tools do not have."""
    tools, choice = asked.tools or (), asked.tool_choice
    if choice not in (None, "none", "auto") and not tools:
        raise refuse("tool_choice", "needs tools")
    kind: Literal["none", "auto", "required", "named"]
    allowed: tuple[str, ...] = ()
    if not tools or choice == "none":
        kind = "none"
    elif choice is None or isinstance(choice, str):
        kind = choice or "auto"
    else:
        kind, allowed = _chosen(choice, [tool.function.name for tool in tools])
    return ChatOptions(
        tools=() if kind == "none" else tuple(tool.function for tool in tools),
        choice=kind,
        allowed=allowed,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        include_reasoning=asked.include_reasoning is not False,
    )


def _chosen(
    choice: ChosenTools, names: Sequence[str]
) -> tuple[Literal["auto", "required", "named"], tuple[str, ...]]:
    """How the tools may be called that a choice names, and which these are."""
    if choice.type == "function":
        if choice.function is None:
            raise refuse("tool_choice.function", "this field is missing")
        if (name := choice.function.name) not in names:
            raise refuse("tool_choice.function.name", f"{name!r} is none of the tools")
        return "named", (name,)
    if (allowed := choice.allowed_tools) is None:
        raise refuse("tool_choice.allowed_tools", "this field is missing")
    for index, tool in enumerate(allowed.tools):
        if (name := tool.function.name) not in names:
            place = f"tool_choice.allowed_tools.tools[{index}].function.name"
            raise refuse(place, f"{name!r} is none of the tools")
    return allowed.mode, tuple(tool.function.name for tool in allowed.tools)


def check_tools(parsers: Parsers, options: ChatOptions) -> None:
    """ApiError 400 where calls could not be told from content."""
    if options.choice == "auto" and parsers.tools is None:
        raise refuse(
            "tools",
            "this engine does not know how its model writes calls; start it with "
            "--tool-call-parser, or ask for a call by tool_choice",
        )


def chat_grammar(
    options: ChatOptions, parsers: Parsers, prompt_end: str, asked: Grammar | None
) -> Grammar | None:
    """What the answer must look like: `asked` is of other fields. Calls that must come do so in the
    family's format, and whatever is asked for comes behind the reasoning."""
    family, thinks = parsers.tools or FALLBACK, parsers.reasoning
    start = "closed" if thinks is None else thinks.start_behind(prompt_end)
    is_free = options.choice == "auto" and asked is None
    if is_free and not (options.allowed or any(tool.strict for tool in options.tools)):
        return None
    if is_free:
        may_think = thinks if start == "either" else None
        grammar = Grammar(_free_or_calls(options, family, may_think), "tools")
    else:
        grammar = _answer_grammar(options, family, asked)
    if grammar is None or thinks is None or start == "closed":
        return grammar
    if start == "open":
        return grammar.after_reasoning(thinks.end)
    return grammar if is_free else grammar.after_reasoning(thinks.end, start=thinks.begin)


def _answer_grammar(
    options: ChatOptions, family: ToolFamily, asked: Grammar | None
) -> Grammar | None:
    if options.choice == "none":
        return asked
    if options.choice in ("required", "named"):
        if asked is not None:
            raise refuse(asked.field, "not together with a call that tool_choice asks for")
        return Grammar(_calls(options, family, MOST_FORCED_CALLS), "tool_choice")
    assert asked is not None, "what is free has a grammar of its own"
    return replace(asked, root=OneOf((_calls(options, family, MOST_FORCED_CALLS), asked.root)))


def _calls(options: ChatOptions, family: ToolFamily, most: int | None) -> Part:
    """One call or more of the tools that may be called."""
    some = _objects(options, family)
    one = some[0] if len(some) == 1 else OneOf(tuple(some))
    limit = options.most_calls or most
    before, behind = family.around
    calls = repeated(one, least=1, most=limit, separator=family.separator)
    return Concat((Text(before), calls, Text(behind))) if before else calls


def _objects(options: ChatOptions, family: ToolFamily) -> list[Part]:
    found: list[Part] = []
    for index, tool in enumerate(options.tools):
        if not options.allowed or tool.name in options.allowed:
            schema: dict[str, Any] = {"type": "object"}
            place = f"tools[{index}].function.parameters"
            if options.choice != "auto" or tool.strict:
                schema = _arguments_schema(tool, place)
            part = family.call_part(tool.name, schema, place, closed=bool(tool.strict))
            found.append(part)
    return found


def _arguments_schema(tool: Function, place: str) -> dict[str, Any]:
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    types = tool.parameters.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise refuse(f"{place}.type", "arguments are an object: expected 'object'")
    return {**tool.parameters, "type": "object"}


def _free_or_calls(
    options: ChatOptions, family: ToolFamily, thinks: ReasoningFamily | None
) -> Part:
    """Free text in which calls are of the tools, and those of strict ones as their schemas say.
    `thinks`: how the model may open its reasoning in it."""
    if not family.is_triggered:
        # A call is all of an answer, which begins with its brace.
        first = "{" if thinks is None else "{" + re.escape(thinks.begin[0])
        free = OneOf((_calls(options, family, None), Pattern(rf"([^{first}\s][\s\S]*)?")))
        if thinks is None:
            return free
        thought = Concat((Text(thinks.begin), Until(thinks.end), Pattern(r"\n{0,2}"), free))
        return OneOf((thought, free))
    behind: list[Part]
    if family.around[0]:
        before, after = (text.removeprefix(family.trigger) for text in family.around)
        bare = replace(family, around=("", ""))
        behind = [Concat((Text(before), _calls(options, bare, None), Text(after)))]
    else:
        start = family.call[0].removeprefix(family.trigger)
        bare = replace(family, call=(start, family.call[1]))
        behind = _objects(options, bare)
    if thinks is None:
        return triggered_part({family.trigger: behind}, most=options.most_calls)
    # Two branches, of which one is free text, would not be told apart by their first letters.
    return triggered_part({family.trigger: behind, thinks.begin: (Until(thinks.end),)})
