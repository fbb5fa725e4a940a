"""The prompt of Anthropic's Messages as a chat's: its messages and its tools. Pure.

Texts are copied as the client wrote their JSON; nothing is built of them. Marks of `cache_control`
are left out, and a content of one text block is written as a text: requests that differ in such a
mark alone are the same chat, and find the same prefix in the cache. Neighbours of one role become
one turn, as in Anthropic's API. What has no counterpart in a chat is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec
import orjson

from xpyd_core.bodies import NO_VALUE, is_absent, read, refuse
from xpyd_core.errors import ApiError
from xpyd_router.request.client_request import Pieces

MAX_MESSAGES = 4096
"""As many as engines take."""
MAX_BLOCKS = 16_384
"""Content blocks of a request: each becomes an object in Python."""


MAX_TOOLS = 1024


_LEAST_BYTES = len('{:"",')
"""What an object has besides its only key."""


_TYPE = b'"type"'
_LEAST_BLOCK = len(_TYPE) + _LEAST_BYTES
"""Bytes of a block."""


_QUOTE, _BRACKET, _BRACE = b'"[{'


class _Message(msgspec.Struct, frozen=True, gc=False):
    role: Literal["user", "assistant", "system"]
    content: msgspec.Raw


class _Block(msgspec.Struct, frozen=True, gc=False):
    """A content block of any type; other members, such as cache_control, are skipped."""

    type: str
    text: msgspec.Raw = NO_VALUE
    thinking: msgspec.Raw = NO_VALUE
    id: msgspec.Raw = NO_VALUE
    name: msgspec.Raw = NO_VALUE
    input: msgspec.Raw = NO_VALUE
    tool_use_id: msgspec.Raw = NO_VALUE
    source: msgspec.Raw = NO_VALUE
    content: msgspec.Raw = NO_VALUE
    is_error: bool | None = None


class _Source(msgspec.Struct, frozen=True, gc=False):
    """Where an image is."""

    type: Literal["base64", "url"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None
    data: msgspec.Raw = NO_VALUE
    url: msgspec.Raw = NO_VALUE


_MESSAGES, _BLOCKS = list[_Message], list[_Block]


_decode_blocks = msgspec.json.Decoder(_BLOCKS).decode


class _Tool(msgspec.Struct, frozen=True, gc=False):
    name: msgspec.Raw = NO_VALUE
    description: msgspec.Raw = NO_VALUE
    input_schema: msgspec.Raw = NO_VALUE
    input_examples: msgspec.Raw = NO_VALUE
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


_Part = msgspec.Raw | bytes | memoryview
"""Of a content: a text's JSON string, or the object of a part that is none."""
_BEGINNINGS = {
    role: b'{"role":"%b","content":' % role.encode() for role in ("user", "assistant", "system")
}
Members = list[tuple[str, bytes]]
"""Names of a JSON object, and the JSON of their values."""


def json_object(members: Members) -> bytes:
    """The JSON of an object."""
    pieces: list[bytes] = [b"{"]
    for name, text in members:
        pieces += (b'"%b":' % name.encode(), text, b",")
    pieces[-1] = b"}" if members else b"{}"
    return b"".join(pieces)


def tools_of(raw: msgspec.Raw) -> list[tuple[str, bytes]]:
    """Each tool's name, and its JSON in a chat."""
    if is_absent(raw):
        return []
    _check_count(raw, b'"input_schema"', MAX_TOOLS, "tools", "tools")
    made: dict[str, bytes] = {}
    for index, tool in enumerate(read(list[_Tool], raw, "tools")):
        place = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            message = "only tools of the client are served: `custom`, with an input_schema"
            raise refuse(f"{place}.type", f"{tool.type[:64]!r} is not supported; {message}")
        function: Members = [("name", _text(tool.name, f"{place}.name"))]
        if not is_absent(tool.description):
            function.append(("description", _text(tool.description, f"{place}.description")))
        function.append(("parameters", _parameters(tool, place)))
        if tool.strict is not None:
            function.append(("strict", b"true" if tool.strict else b"false"))
        text = json_object([("type", b'"function"'), ("function", json_object(function))])
        name = msgspec.json.decode(tool.name, type=str)
        if name in made:
            raise refuse(f"{place}.name", f"another tool has the name {name[:64]!r}")
        made[name] = text
    return list(made.items())


def _parameters(tool: _Tool, place: str) -> bytes:
    """The schema of a tool's input, with what else a chat has no member for."""
    if tool.defer_loading:
        raise refuse(f"{place}.defer_loading", "tools are not searched here; leave it out")
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        raise refuse(f"{place}.allowed_callers", "only direct calls are served")
    schema, examples = bytes(tool.input_schema), tool.input_examples
    if schema[0] != _BRACE:
        raise refuse(f"{place}.input_schema", "expected an object, the schema of the input")
    if is_absent(examples):
        return schema
    if memoryview(examples)[0] != _BRACKET:
        raise refuse(f"{place}.input_examples", "expected a list")
    rest = schema[1:].lstrip()
    return b'{"examples":%b%b%b' % (bytes(examples), b"" if rest == b"}" else b",", rest)


def messages_of(system: msgspec.Raw, raw: msgspec.Raw) -> tuple[Pieces, bool]:
    """The JSON of a chat's messages in pieces, and whether the last one is to be continued."""
    turns = _Turns()
    if said := _texts(system, "system"):
        turns.write(b'{"role":"system","content":', *_content(said), b"}")
    if memoryview(raw)[0] != _BRACKET:
        raise refuse("messages", "expected a list")
    found = read(_MESSAGES, raw, "messages")
    if not 0 < len(found) <= MAX_MESSAGES:
        raise refuse("messages", f"expected 1 to {MAX_MESSAGES} messages, got {len(found)}")
    for index, message in enumerate(found):
        turns.begin(message.role, index)
        content = message.content
        if memoryview(content)[0] == _QUOTE:
            turns.texts.append(content)
            continue
        take = turns.takers[message.role]
        if len(content) > _LEAST_BLOCK * turns.room and bytes(content).count(_TYPE) > turns.room:
            raise refuse("messages", f"at most {MAX_BLOCKS} content blocks")
        blocks = _blocks(content, f"messages[{index}].content")
        if not blocks and message.role != "assistant":
            raise refuse(f"messages[{index}].content", "must not be empty")
        turns.room -= len(blocks)
        for number, block in enumerate(blocks):
            take(block, number)
    turns.end()
    if turns.role == "assistant" and turns.has_called:
        raise refuse(
            f"messages[{len(found) - 1}].content",
            "ends with tool_use: a user's message with its tool_result has to follow",
        )
    pieces = turns.pieces
    pieces[0:1] = [b"["]  # the comma before the first
    return [*pieces, b"]"], turns.role == "assistant"


class _Turns:
    """Writes the chat's messages, one turn after the other."""

    def __init__(self) -> None:
        self.pieces: list[_Part] = []
        self.room = MAX_BLOCKS
        """So many blocks more may come, those inside others counted."""
        self.role = ""
        """Of the turn that is written now, or was written last."""
        self.texts: list[_Part] = []
        self._thoughts: list[msgspec.Raw] = []
        self._calls: list[bytes] = []
        self._index = 0
        self.has_called = False
        """Whether the turn that was written last has tool_use."""
        self.takers: Mapping[str, Callable[[_Block, int], None]] = {
            "user": self.take_user,
            "assistant": self.take_assistant,
            "system": self.take_system,
        }

    def write(self, *pieces: _Part) -> None:
        """Add a message that has these pieces. They are copied once, with all others."""
        self.pieces.append(b",")
        self.pieces += pieces

    def begin(self, role: str, index: int) -> None:
        """The message with this index follows."""
        self._index = index
        if role != self.role:
            self.end()
            self.role = role

    def take_user(self, block: _Block, number: int) -> None:
        """A block of a user's message. Results of tools are messages of their own."""
        if block.type == "text" and memoryview(block.text)[0] == _QUOTE:
            self.texts.append(block.text)
            return
        place = f"messages[{self._index}].content[{number}]"
        if block.type == "tool_result":
            self.end()
            call_id = _text(block.tool_use_id, f"{place}.tool_use_id")
            parts = _texts(block.content, f"{place}.content", with_images=True)
            if memoryview(block.content)[0] == _BRACKET:
                self.room -= len(parts)
            content = _content(parts)
            if block.is_error:
                content = _marked(content)
            self.write(
                *(b'{"role":"tool","tool_call_id":', call_id, b',"content":', *content, b"}")
            )
        elif block.type == "image":
            self.texts.append(_image(block, place))
        else:
            raise _unsupported(block, place, "text, image, tool_result")

    def take_system(self, block: _Block, number: int) -> None:
        """A block of a system message in the midst of others."""
        if block.type != "text" or memoryview(block.text)[0] != _QUOTE:
            raise _unsupported(block, f"messages[{self._index}].content[{number}]", "text")
        self.texts.append(block.text)

    def take_assistant(self, block: _Block, number: int) -> None:
        """A block of an assistant's message."""
        if block.type == "text" and memoryview(block.text)[0] == _QUOTE:
            self.texts.append(block.text)
            return
        place = f"messages[{self._index}].content[{number}]"
        if block.type == "thinking":
            self._thoughts.append(_checked_text(block.thinking, f"{place}.thinking"))
        elif block.type == "tool_use":
            if memoryview(block.input)[0] != _BRACE:
                raise refuse(f"{place}.input", "expected an object")
            arguments = orjson.dumps(bytes(block.input).decode())
            name, call_id = _text(block.name, f"{place}.name"), _text(block.id, f"{place}.id")
            self._calls.append(
                b'{"id":%b,"type":"function","function":{"name":%b,"arguments":%b}}'
                % (call_id, name, arguments)
            )
        elif block.type != "redacted_thinking":  # which only the server that made it can read
            known = "text, thinking, redacted_thinking, tool_use"
            raise _unsupported(block, place, known)

    def end(self) -> None:
        """Write what has gathered."""
        texts, self.texts = self.texts, []
        if self.role != "assistant":
            if texts:
                self.write(_BEGINNINGS[self.role], *_content(texts), b"}")
            return
        thoughts, self._thoughts = self._thoughts, []
        calls, self._calls = self._calls, []
        self.has_called = bool(calls)
        if not (texts or thoughts or calls):
            return
        made: list[_Part] = [_BEGINNINGS[self.role], *(_content(texts) if texts else (b"null",))]
        if thoughts:
            inner = rb"\n".join([bytes(one)[1:-1] for one in thoughts])
            made += (b',"reasoning_content":"', inner, b'"')
        if calls:
            made += (b',"tool_calls":[', b",".join(calls), b"]")
        self.write(*made, b"}")


def _blocks(raw: msgspec.Raw, place: str) -> list[_Block]:
    if memoryview(raw)[0] != _BRACKET:
        raise refuse(place, "expected a string or a list of content blocks")
    try:
        return _decode_blocks(raw)
    except (msgspec.DecodeError, RecursionError):
        return read(_BLOCKS, raw, place)  # which says what is wrong


def _texts(raw: msgspec.Raw, place: str, *, with_images: bool = False) -> list[_Part]:
    """The parts of a text, or of a list of text blocks."""
    if is_absent(raw):
        return []
    if memoryview(raw)[0] == _QUOTE:
        return [raw]
    found: list[_Part] = []
    for index, block in enumerate(_blocks(raw, place)):
        if block.type == "image" and with_images:
            found.append(_image(block, f"{place}[{index}]"))
            continue
        if block.type != "text":
            known = "text, image" if with_images else "text"
            raise _unsupported(block, f"{place}[{index}]", known)
        found.append(_checked_text(block.text, f"{place}[{index}].text"))
    return found


def _image(block: _Block, place: str) -> bytes:
    """The part of a chat's content. Whether the model can see is the engine's to say."""
    source = read(_Source, block.source, f"{place}.source")
    if source.type == "url":
        url = bytes(_checked_text(source.url, f"{place}.source.url"))
    else:
        if source.media_type is None:
            raise refuse(f"{place}.source.media_type", "this field is missing")
        data = bytes(_checked_text(source.data, f"{place}.source.data"))
        url = b'"data:%b;base64,%b' % (source.media_type.encode(), data[1:])
    return b'{"type":"image_url","image_url":{"url":%b}}' % url


def _content(parts: Sequence[_Part]) -> list[_Part]:
    """A chat message's content, in pieces. A list of one text and that text are the same prompt."""
    if not parts:
        return [b'""']
    if len(parts) == 1 and memoryview(parts[0])[0] == _QUOTE:
        return [parts[0]]
    made: list[_Part] = []
    for part in parts:
        if memoryview(part)[0] == _QUOTE:
            made += (b',{"type":"text","text":', part, b"}")
        else:
            made += (b",", part)
    made[0] = b"[" + bytes(made[0])[1:]
    return [*made, b"]"]


_ERROR = b"Error: "


def _marked(content: Sequence[_Part]) -> list[_Part]:
    """The content of a tool's message that failed: a chat has no member that says so."""
    first, *rest = content
    if memoryview(first)[0] == _QUOTE:
        return [b'"' + _ERROR, memoryview(first)[1:], *rest]
    return [b'[{"type":"text","text":"Error:"},', memoryview(first)[1:], *rest]


def _checked_text(raw: msgspec.Raw, place: str) -> msgspec.Raw:
    if memoryview(raw)[0] != _QUOTE:
        raise refuse(place, "expected a string")
    return raw


def _text(raw: msgspec.Raw, place: str) -> bytes:
    """A name or an id, as JSON."""
    text = bytes(_checked_text(raw, place))
    if text == b'""':
        raise refuse(place, "must not be empty")
    return text


def _check_count(raw: msgspec.Raw, key: bytes, most: int, place: str, what: str) -> None:
    """ApiError for more than `most` of what has `key` each, before anything is built of them. The
    key is not found in texts, whose quotes are escaped."""
    if memoryview(raw)[0] != _BRACKET:
        raise refuse(place, "expected a list")
    if len(raw) > (len(key) + _LEAST_BYTES) * most and bytes(raw).count(key) > most:
        raise refuse(place, f"at most {most} {what}")


def _unsupported(block: _Block, place: str, known: str) -> ApiError:
    if block.type == "text":
        return refuse(f"{place}.text", "expected a string")
    return refuse(f"{place}.type", f"{block.type[:64]!r} is not supported; expected one of {known}")
