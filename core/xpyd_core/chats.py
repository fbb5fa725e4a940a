"""Messages and tools of a chat, with their bounds: parts of the bodies that `openai` has. Pure.

Null counts as absent, unknown members are skipped, as everywhere in bodies.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from xpyd_core.bodies import unread

MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_DOCUMENTS = 1024
_FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class ContentPart(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A part of a message's content: a text, or in an assistant's what it refused with."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What a call calls. `arguments`: JSON, as a model wrote it."""

    name: _FunctionName
    arguments: str = ""


class ToolCall(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A call in an assistant's message."""

    function: CalledFunction
    id: Annotated[str, Meta(max_length=256)] | None = None
    type: Literal["function"] = "function"


_ToolCalls = Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)]


class Message(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A message of a chat. Only an assistant's may be without content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: Annotated[str, Meta(max_length=256)] | None = None
    tool_calls: _ToolCalls | None = None
    tool_call_id: Annotated[str, Meta(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    # Engines do not have these: they refuse what is not empty. By factories: the schema cannot
    # show such a default.
    function_call: msgspec.Raw = unread()
    audio: msgspec.Raw = unread()


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool is. `parameters`: the JSON schema of its arguments."""

    name: _FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a function among `tools`."""

    name: _FunctionName


class AllowedTool(msgspec.Struct, frozen=True, kw_only=True):
    """A function among `tools`."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True):
    """Those of `tools` that may be called, or one of which must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ChosenTools(msgspec.Struct, frozen=True, kw_only=True):
    """The only tool that is called, or those that may be."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None
