"""OpenAI's Responses: input items as the messages of a chat. Pure.

A chat has one message where Responses has several items: what an assistant thought, said and
called becomes one assistant's message, as it was when the model wrote it. Texts are copied as the
client wrote their JSON. The role `developer` becomes `system`: templates of open models drop what
they do not know. What has no counterpart in a chat is refused by its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from xpyd_core.bodies import NO_VALUE, is_absent, list_items, read, refuse
from xpyd_router.request.client_request import ChatBody, chat_body

MAX_ITEMS = 4096
"""As many as a chat may have messages."""
MAX_PARTS = 4096
"""Of one content."""
MAX_CALL_ID_CHARACTERS = 256
_QUOTE, _BRACKET = b'"['
_ROLES = ("user", "assistant", "system", "developer")
_SAID = ("input_text", "output_text", "text")
_THOUGHT = ("reasoning_text", "summary_text", "text")

_CallId = Annotated[str, Meta(min_length=1, max_length=MAX_CALL_ID_CHARACTERS)]
Members = list[tuple[str, bytes]]
"""Names of a JSON object, and the JSON of their values."""


class _Item(msgspec.Struct, frozen=True, gc=False):
    """An item of any type; other members are skipped."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: msgspec.Raw = NO_VALUE
    call_id: _CallId | None = None
    name: Annotated[str, Meta(min_length=1)] | None = None
    arguments: msgspec.Raw = NO_VALUE
    output: msgspec.Raw = NO_VALUE
    summary: msgspec.Raw = NO_VALUE
    encrypted_content: str | None = None


class _Part(msgspec.Struct, frozen=True, gc=False):
    type: str = ""
    text: msgspec.Raw = NO_VALUE
    refusal: msgspec.Raw = NO_VALUE
    image_url: msgspec.Raw = NO_VALUE
    detail: Literal["auto", "low", "high", "original"] | None = None


def object_of(members: Iterable[tuple[str, bytes]]) -> bytes:
    """The JSON object with these members, of which there is one at least; each is copied once."""
    pieces: list[bytes] = []
    for name, text in members:
        pieces += (b',"', name.encode(), b'":', text)
    pieces[0] = b'{"'
    pieces.append(b"}")
    return b"".join(pieces)


def chat_of(messages: Sequence[bytes], members: Members) -> ChatBody:
    """The chat of these messages and other members."""
    pieces: list[bytes] = [b"["]
    for message in messages:
        pieces += (message, b",")
    pieces[-1] = b"]"
    return chat_body(pieces, object_of(members))


class Conversation:
    """The messages of a chat, in the making: those of earlier responses, then the input's."""

    def __init__(
        self, system: Iterable[str] = (), turns: Iterable[bytes] = (), calls: Iterable[str] = ()
    ) -> None:
        self.system = list(system)
        """What is said to the model before the first turn."""
        self.turns = list(turns)
        """The messages behind it."""
        self.calls = set(calls)
        """Ids of all tool calls so far."""
        self._thought: list[bytes] = []
        self._said = b""
        self._called: list[bytes] = []

    def take(self, raw: msgspec.Raw) -> None:
        """The whole `input` of a request: a text, or items."""
        if memoryview(raw)[0] == _QUOTE:
            self._take_message("user", bytes(raw))
        else:
            if memoryview(raw)[0] != _BRACKET:
                raise refuse("input", "expected a string or a list of items")
            items = list_items(_Item, raw, MAX_ITEMS, "input", "items")
            if not items:
                raise refuse("input", "at least one item is needed")
            for index, item in enumerate(items):
                self._take_item(item, f"input[{index}]")
        self._end_turn()

    def messages(self, instructions: str | None) -> list[bytes]:
        """All messages; `instructions`, and what else is said to the model before the first turn,
        are one message: many templates take no second one."""
        system = [instructions, *self.system] if instructions else self.system
        if not system:
            return self.turns
        text = msgspec.json.encode("\n\n".join(system))
        return [object_of([("role", b'"system"'), ("content", text)]), *self.turns]

    def _take_item(self, item: _Item, place: str) -> None:
        kind = item.type or ("message" if item.role is not None else None)
        if kind == "message":
            if item.role not in _ROLES:
                raise refuse(f"{place}.role", f"expected one of {', '.join(_ROLES)}")
            images = item.role == "user"
            content = _content(item.content, f"{place}.content", images=images)
            self._take_message(item.role, content)
        elif kind == "function_call":
            self._take_call(item, place)
        elif kind == "function_call_output":
            self._take_output(item, place)
        elif kind == "reasoning":
            self._take_reasoning(item, place)
        elif kind == "item_reference":
            raise refuse(f"{place}.type", "no single items are kept here: send the item itself")
        else:
            known = "message, function_call, function_call_output, reasoning"
            shown = "this field is missing" if kind is None else f"{kind[:64]!r} is not supported"
            raise refuse(f"{place}.type", f"{shown}; expected one of {known}")

    def _take_message(self, role: str, content: bytes) -> None:
        if role == "assistant":
            if self._said or self._called:
                self._end_turn()
            self._said = content
            return
        self._end_turn()
        if role == "user":
            self._add([("role", b'"user"'), ("content", content)])
        elif not self.turns:
            self.system.append(_text_of(content))
        else:
            self._add([("role", b'"system"'), ("content", content)])

    def _take_call(self, item: _Item, place: str) -> None:
        if item.call_id is None or item.name is None:
            missing = "call_id" if item.call_id is None else "name"
            raise refuse(f"{place}.{missing}", "this field is missing")
        self.calls.add(item.call_id)
        arguments = _string(item.arguments, f"{place}.arguments")
        self._called.append(call_of(item.call_id, item.name, arguments))

    def _take_output(self, item: _Item, place: str) -> None:
        self._end_turn()
        if item.call_id is None:
            raise refuse(f"{place}.call_id", "this field is missing")
        if item.call_id not in self.calls:
            message = f"no function_call before it has the id {item.call_id[:64]!r}"
            raise refuse(f"{place}.call_id", message)
        content = _content(item.output, f"{place}.output")
        call_id = msgspec.json.encode(item.call_id)
        self._add([("role", b'"tool"'), ("tool_call_id", call_id), ("content", content)])

    def _take_reasoning(self, item: _Item, place: str) -> None:
        if self._said or self._called:
            self._end_turn()
        texts: list[bytes] = []
        for name, raw in (("content", item.content), ("summary", item.summary)):
            if not texts and not is_absent(raw):
                texts = _thoughts(raw, f"{place}.{name}")
        if not texts and item.encrypted_content:
            message = "only the server that made it can read it: leave the item out"
            raise refuse(f"{place}.encrypted_content", message)
        self._thought += texts

    def _end_turn(self) -> None:
        """Write the assistant's message that has gathered."""
        if self._said or self._thought or self._called:
            said, thought, called = self._said, self._thought, self._called
            self._said, self._thought, self._called = b"", [], []
            self._add(assistant(said, thought, called))

    def _add(self, members: Members) -> None:
        self.turns.append(object_of(members))


_KINDS = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""What the ids of items begin with, by type."""
MAX_PAGE, _PAGE = 100, 20


def items_of(raw: msgspec.Raw) -> tuple[bytes, ...]:
    """The items of an input that was read, as they were written; a text is one message."""
    if memoryview(raw)[0] == _QUOTE:
        return (b'{"role":"user","content":%b}' % bytes(raw),)
    return tuple(map(bytes, msgspec.json.decode(raw, type=list[msgspec.Raw])))


def item_page(items: Sequence[bytes], digits: str, query: Mapping[str, str]) -> bytes:
    """The list of items that a query asks for: `order`, `limit` and `after`. `digits`: of the
    response's id, for the ids of items that came without. ApiError 400 for a wrong query."""
    limit, order = query.get("limit", str(_PAGE)), query.get("order", "desc")
    if not re.fullmatch("[1-9][0-9]?|100", limit):
        raise refuse("limit", f"expected 1 to {MAX_PAGE}")
    if order not in ("asc", "desc"):
        raise refuse("order", "expected asc or desc")
    places = range(len(items)) if order == "asc" else range(len(items) - 1, -1, -1)
    if (after := query.get("after")) is not None:
        found = [
            n for n, place in enumerate(places) if _id_of(items[place], digits, place) == after
        ]
        if not found:
            raise refuse("after", "no item of this response's input has this id")
        places = places[found[0] + 1 :]
    shown = [_shown(items[place], digits, place) for place in places[: int(limit)]]
    ids = [msgspec.json.encode(one["id"]) for one in (shown[:1] + shown[-1:])] or [b"null"]
    page = b",".join(map(msgspec.json.encode, shown))
    has_more = b"true" if len(places) > len(shown) else b"false"
    return b'{"object":"list","data":[%b],"first_id":%b,"last_id":%b,"has_more":%b}' % (
        *(page, ids[0], ids[-1], has_more),
    )


class _Named(msgspec.Struct, frozen=True, gc=False):
    id: str | None = None
    type: str | None = None


def _id_of(item: bytes, digits: str, place: int) -> str:
    named = msgspec.json.decode(item, type=_Named)
    return named.id or f"{_KINDS[named.type or 'message']}_{digits}{place:04x}"


def _shown(item: bytes, digits: str, place: int) -> dict[str, Any]:
    """An item with what a client may leave out."""
    members = msgspec.json.decode(item, type=dict[str, msgspec.Raw])
    given = {name: value for name, value in members.items() if not is_absent(value)}
    kind = msgspec.json.decode(given["type"]) if "type" in given else "message"
    made: dict[str, Any] = {"status": "completed", **given, "type": kind}
    made["id"] = _id_of(item, digits, place)
    if kind == "reasoning":
        made.setdefault("summary", [])
    if kind == "message" and memoryview(given["content"])[0] == _QUOTE:
        part: dict[str, Any] = {"type": "input_text", "text": given["content"]}
        if bytes(given["role"]) == b'"assistant"':
            part |= {"type": "output_text", "annotations": []}
        made["content"] = [part]
    return made


def assistant(said: bytes, thought: Sequence[bytes], called: Sequence[bytes]) -> Members:
    """An assistant's message: what it said (JSON of a content, or nothing), thought (JSON strings)
    and called (`call_of`)."""
    made: Members = [("role", b'"assistant"')]
    if thought:
        inner = rb"\n".join([one[1:-1] for one in thought])
        made.append(("reasoning_content", b'"' + inner + b'"'))
    made.append(("content", said or (b"null" if called else b'""')))
    if called:
        made.append(("tool_calls", b"[" + b",".join(called) + b"]"))
    return made


def call_of(call_id: str, name: str, arguments: bytes) -> bytes:
    """A tool call of a chat; `arguments` is a JSON string."""
    function = object_of([("name", msgspec.json.encode(name)), ("arguments", arguments)])
    shown_id = msgspec.json.encode(call_id)
    return object_of([("id", shown_id), ("type", b'"function"'), ("function", function)])


def _parts(raw: msgspec.Raw, place: str) -> list[_Part]:
    if memoryview(raw)[0] != _BRACKET:
        raise refuse(place, "expected a string or a list of parts")
    return list_items(_Part, raw, MAX_PARTS, place, "parts")


def _thoughts(raw: msgspec.Raw, place: str) -> list[bytes]:
    """The JSON strings of a reasoning's content, or summary."""
    found: list[bytes] = []
    for index, part in enumerate(_parts(raw, place)):
        if part.type not in _THOUGHT:
            raise _unsupported(part, f"{place}[{index}]", _THOUGHT)
        found.append(_string(part.text, f"{place}[{index}].text"))
    return found


def _content(raw: msgspec.Raw, place: str, *, images: bool = True) -> bytes:
    """A chat message's content. A list of one text and that text are the same prompt."""
    if memoryview(raw)[0] == _QUOTE:
        return bytes(raw)
    texts: list[bytes] = []
    parts: list[bytes] = []
    for index, part in enumerate(_parts(raw, place)):
        inside = f"{place}[{index}]"
        if part.type == "input_image" and images:
            parts.append(_image(part, inside))
            continue
        if part.type in _SAID:
            texts.append(_string(part.text, f"{inside}.text"))
        elif part.type == "refusal":
            texts.append(_string(part.refusal, f"{inside}.refusal"))
        else:
            raise _unsupported(part, inside, (*_SAID, "input_image") if images else _SAID)
        parts.append(b'{"type":"text","text":%b}' % texts[-1])
    if len(parts) == len(texts) == 1:
        return texts[0]
    return b"[" + b",".join(parts) + b"]" if parts else b'""'


def _image(part: _Part, place: str) -> bytes:
    """The chat's part; whether the model takes images is the engine's to say."""
    inner = [("url", _string(part.image_url, f"{place}.image_url"))]
    if part.detail is not None:
        inner.append(("detail", msgspec.json.encode(part.detail)))
    return object_of([("type", b'"image_url"'), ("image_url", object_of(inner))])


def _unsupported(part: _Part, place: str, kinds: Sequence[str]) -> Exception:
    message = f"{part.type[:64]!r} is not supported; expected one of {', '.join(kinds)}"
    return refuse(f"{place}.type", message)


def _text_of(content: bytes) -> str:
    """The text of a chat message's content, as engines join its parts."""
    if content.startswith(b'"'):
        return msgspec.json.decode(content, type=str)
    parts = msgspec.json.decode(content, type=list[dict[str, str]])
    return "\n".join(part["text"] for part in parts)


def _string(raw: msgspec.Raw, place: str) -> bytes:
    if memoryview(raw)[0] != _QUOTE:
        raise refuse(place, "this field is missing" if is_absent(raw) else "expected a string")
    return bytes(raw)


Choice = Literal["none", "auto", "required"]


class _Function(msgspec.Struct, frozen=True, gc=False):
    type: str = ""
    name: Annotated[str, Meta(min_length=1, max_length=MAX_CALL_ID_CHARACTERS)] | None = None
    description: str | None = None
    parameters: msgspec.Raw = NO_VALUE
    strict: bool | None = None


MAX_TOOLS = 1024


class Tools:
    """The functions of a request: for the chat, and as the response shows them."""

    def __init__(self, raw: msgspec.Raw) -> None:
        self.shown: list[bytes] = []
        self._chat: dict[str, bytes] = {}
        if is_absent(raw):
            return
        if memoryview(raw)[0] != _BRACKET:
            raise refuse("tools", "expected a list")
        for index, function in enumerate(list_items(_Function, raw, MAX_TOOLS, "tools", "tools")):
            self._add(function, f"tools[{index}]")

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(self._chat)

    def chat(self, names: Iterable[str]) -> bytes:
        """The tools of these names, for a chat."""
        return b"[" + b",".join([self._chat[name] for name in names]) + b"]"

    def _add(self, function: _Function, place: str) -> None:
        if function.type != "function":
            message = "this router runs no tools of its own; expected function"
            raise refuse(f"{place}.type", f"{function.type[:64]!r} is not supported: {message}")
        if function.name is None:
            raise refuse(f"{place}.name", "this field is missing")
        if function.name in self._chat:
            raise refuse(f"{place}.name", f"another tool has the name {function.name[:64]!r}")
        schema = function.parameters
        if not is_absent(schema) and memoryview(schema)[0] != ord("{"):
            raise refuse(f"{place}.parameters", "expected an object, the schema of the arguments")
        name, description = msgspec.json.encode(function.name), None
        if function.description is not None:
            description = msgspec.json.encode(function.description)
        strict = msgspec.json.encode(function.strict)
        made: Members = [("name", name)]
        made += [("description", description)] if description is not None else []
        made += [] if is_absent(schema) else [("parameters", bytes(schema))]
        made += [] if function.strict is None else [("strict", strict)]
        self._chat[function.name] = object_of(
            [("type", b'"function"'), ("function", object_of(made))]
        )
        shown: Members = [("type", b'"function"'), ("name", name)]
        shown.append(("description", description or b"null"))
        self.shown.append(object_of([*shown, ("parameters", bytes(schema)), ("strict", strict)]))


class _ToolChoice(msgspec.Struct, frozen=True, gc=False):
    type: str = ""
    name: str | None = None
    mode: Choice = "auto"
    tools: list[_Function] = []


def tool_members(tools: Tools, raw: msgspec.Raw) -> Members:
    """`tools` and `tool_choice` of the chat."""
    names = tools.names
    if is_absent(raw):
        return [("tools", tools.chat(names))] if names else []
    if memoryview(raw)[0] == _QUOTE:
        wanted: object = read(cast(Any, Choice), raw, "tool_choice")
    else:
        choice = read(_ToolChoice, raw, "tool_choice")
        if choice.type == "function":
            if choice.name not in names:
                raise refuse("tool_choice.name", "expected the name of one of the tools")
            wanted = {"type": "function", "function": {"name": choice.name}}
        elif choice.type == "allowed_tools":
            allowed = {one.name for one in choice.tools}
            if strange := allowed.difference(names):
                shown = ", ".join(sorted(str(one)[:64] for one in strange))
                raise refuse("tool_choice.tools", f"these are not in tools: {shown}")
            wanted, names = choice.mode, tuple(name for name in names if name in allowed)
        else:
            message = f"{choice.type[:64]!r} is not supported; expected function or allowed_tools"
            raise refuse("tool_choice.type", message)
    if not names:
        if wanted in ("none", "auto"):
            return []
        raise refuse("tool_choice", "needs tools")
    return [("tools", tools.chat(names)), ("tool_choice", msgspec.json.encode(wanted))]
