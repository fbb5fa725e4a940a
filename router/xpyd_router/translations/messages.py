"""Anthropic's Messages: a request as a chat. `messages_answers` has the way back. Pure.

Texts are copied as the client wrote their JSON; nothing is built of them. Marks of `cache_control`
are left out, and a content of one text block is written as a text: requests that differ in such a
mark alone are the same chat, and find the same prefix in the cache. What has no counterpart in a
chat is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta

from xpyd_core.bodies import NO_VALUE, check_text, is_absent, read, refuse
from xpyd_core.errors import ApiError, ProtocolError
from xpyd_core.openai import MAX_MESSAGES, MAX_NAME_CHARACTERS, MAX_STOP_CHARACTERS, MAX_STOPS
from xpyd_core.openai import MAX_TOKENS as _MOST_TOKENS
from xpyd_router.translations.messages_answers import MessageEvents, message_of, refusal_body
from xpyd_router.translations.seam import ChatError, Events, Json

MAX_BLOCKS = 16_384
"""Content blocks of a request: each becomes an object in Python."""
MAX_TOOLS = 1024
_LEAST_BUDGET = 1024
"""Anthropic's own bound for thinking.budget_tokens."""
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_LEAST_BYTES = len('{:"",')
"""What an object has besides its only key."""
_QUOTE, _BRACKET, _BRACE = b'"[{'


def _field(text: str, **schema: Any) -> Meta:  # noqa: ANN401 - any JSON value
    return Meta(description=text, extra_json_schema={"x-checked-by": "router", **schema})


class _Metadata(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    user_id: Annotated[str | None, _field("The session, as `user` of a chat.")] = None


class _ToolChoice(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class _Format(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/messages/count_tokens."""

    model: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)],
        _field("A name that GET /v1/models shows."),
    ]
    messages: Annotated[
        msgspec.Raw,
        _field(
            "Turns of `user` and `assistant`. Blocks: text, thinking, redacted_thinking, "
            "tool_use, tool_result. An assistant's turn at the end is continued.",
            type="array",
            minItems=1,
            maxItems=MAX_MESSAGES,
            items={"type": "object"},
        ),
    ]
    system: Annotated[
        msgspec.Raw, _field("A text, or text blocks.", type=["string", "array", "null"])
    ] = msgspec.field(default_factory=lambda: NO_VALUE)
    tools: Annotated[
        msgspec.Raw,
        _field(
            "Tools of the client: name, description, input_schema, strict.",
            type=["array", "null"],
            items={"type": "object"},
        ),
    ] = msgspec.field(default_factory=lambda: NO_VALUE)
    tool_choice: Annotated[_ToolChoice | None, _field("Default: auto.")] = None
    thinking: Annotated[_Thinking | None, _field("Default: disabled.")] = None
    output_config: Annotated[
        _OutputConfig | None,
        _field("format: the answer is JSON of this schema. effort: of thinking, where it is on."),
    ] = None
    # No meaning here: prefixes are cached without a mark, and a router edits no history.
    cache_control: Annotated[msgspec.Raw, _field("Changes nothing.")] = msgspec.field(
        default_factory=lambda: NO_VALUE
    )
    context_management: Annotated[msgspec.Raw, _field("Changes nothing.")] = msgspec.field(
        default_factory=lambda: NO_VALUE
    )


class MessagesRequest(CountRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=_MOST_TOKENS)], _field("Tokens to generate at most.")
    ]
    metadata: Annotated[_Metadata | None, _field("user_id: the session.")] = None
    stop_sequences: Annotated[
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
            Meta(max_length=MAX_STOPS),
        ]
        | None,
        _field("Texts that end the answer."),
    ] = None
    stream: Annotated[bool | None, _field("The answer as server-sent events.")] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, _field("0: greedy. Default: 1.")
    ] = None
    top_k: Annotated[Annotated[int, Meta(ge=0, le=2**31 - 1)] | None, _field("0: off.")] = None
    top_p: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, _field("Default: 1.")] = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, _field("Changes nothing: there is one tier.")
    ] = None


class _Message(msgspec.Struct, frozen=True, gc=False):
    role: Literal["user", "assistant"]
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
    content: msgspec.Raw = NO_VALUE
    is_error: bool | None = None


_MESSAGES, _BLOCKS = list[_Message], list[_Block]
_decode_blocks = msgspec.json.Decoder(_BLOCKS).decode


class _Tool(msgspec.Struct, frozen=True, gc=False):
    name: msgspec.Raw = NO_VALUE
    description: msgspec.Raw = NO_VALUE
    input_schema: msgspec.Raw = NO_VALUE
    type: str | None = None
    strict: bool | None = None


class Messages:
    """seam.Api for /v1/messages."""

    name = "messages"
    id_prefix = "msg_"
    id_header = b"request-id"

    def read(self, body: bytes) -> MessagesTranslation:
        """See seam.Api."""
        check_text(body)
        return MessagesTranslation(read(MessagesRequest, body))

    def refusal(self, error: ChatError, request_id: str) -> bytes:
        """See seam.Api."""
        return refusal_body(error, request_id)


class MessagesTranslation:
    """seam.Translation of one request."""

    def __init__(self, request: MessagesRequest) -> None:
        self.chat = _chat(request)

    def whole(self, answer: Json) -> bytes:
        """See seam.Translation."""
        return message_of(answer)

    def events(self) -> Events:
        """See seam.Translation."""
        return MessageEvents()


def tokenize_body(body: bytes) -> bytes:
    """The body of /tokenize for the one of count_tokens; ApiError 400 for a wrong one."""
    check_text(body)
    return _object(_prompt(read(CountRequest, body)))


def count_answer(body: bytes) -> bytes:
    """count_tokens' answer for that of /tokenize; ProtocolError where it is none."""
    try:
        return orjson.dumps({"input_tokens": int(orjson.loads(body)["count"])})
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError) as error:
        raise ProtocolError("an engine's answer has no count of tokens") from error


_Members = list[tuple[str, bytes]]
"""Names of a JSON object, and the JSON of their values."""


def _object(members: _Members) -> bytes:
    return b"{" + b",".join([b'"%b":%b' % (name.encode(), text) for name, text in members]) + b"}"


def _chat(request: MessagesRequest) -> bytes:
    made = _prompt(request)
    made.append(("max_tokens", b"%d" % request.max_tokens))
    thinking, config = request.thinking, request.output_config
    if thinking is not None and thinking.budget_tokens is not None:
        budget = thinking.budget_tokens
        if not _LEAST_BUDGET <= budget < request.max_tokens:
            message = f"expected {_LEAST_BUDGET} to {request.max_tokens - 1}, below max_tokens"
            raise refuse("thinking.budget_tokens", message)
    values: Json = {
        "temperature": request.temperature,
        "top_k": request.top_k,
        "top_p": request.top_p,
        "stop": request.stop_sequences or None,
        "user": request.metadata and request.metadata.user_id,
    }
    if config is not None and config.effort is not None and _thinks(request):
        values["reasoning_effort"] = _EFFORTS[config.effort]
    if thinking is not None and thinking.display == "omitted":
        values["include_reasoning"] = False
    if config is not None and config.format is not None:
        schema = {"name": "answer", "schema": config.format.schema, "strict": True}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    if request.stream:
        values |= {"stream": True, "stream_options": {"include_usage": True}}
    made += [(name, orjson.dumps(value)) for name, value in values.items() if value is not None]
    return _object(made)


def _prompt(request: CountRequest) -> _Members:
    """What makes the prompt: of a chat, and of /tokenize."""
    made: _Members = [("model", orjson.dumps(request.model))]
    turns = _Turns()
    system = _texts(request.system, "system")
    if system:
        turns.messages.append(_object([("role", b'"system"'), ("content", _content(system))]))
    _take_messages(turns, request.messages)
    made.append(("messages", b"[" + b",".join(turns.messages) + b"]"))
    if turns.role == "assistant":
        made += [("add_generation_prompt", b"false"), ("continue_final_message", b"true")]
    tools = _tools(request.tools)
    if tools:
        texts = [text for _, text in tools]
        made.append(("tools", b"[" + b",".join(texts) + b"]"))
    made += _choice(request.tool_choice, [name for name, _ in tools])
    # Templates have one name or the other for it; what a template does not know changes nothing.
    is_on = _thinks(request)
    switches = {"enable_thinking": is_on, "thinking": is_on}
    made.append(("chat_template_kwargs", orjson.dumps(switches)))
    return made


def _thinks(request: CountRequest) -> bool:
    return request.thinking is not None and request.thinking.type != "disabled"


def _choice(choice: _ToolChoice | None, names: Sequence[str]) -> _Members:
    if choice is None:
        return []
    if choice.type in ("any", "tool") and not names:
        raise refuse("tool_choice", f"type {choice.type!r} needs tools")
    value: object = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if choice.type == "tool":
        if choice.name not in names:
            raise refuse("tool_choice.name", "expected the name of one of the tools")
        value = {"type": "function", "function": {"name": choice.name}}
    made = [("tool_choice", orjson.dumps(value))] if names else []
    if choice.disable_parallel_tool_use:
        made.append(("parallel_tool_calls", b"false"))
    return made


def _tools(raw: msgspec.Raw) -> list[tuple[str, bytes]]:
    """Each tool's name, and its JSON in a chat."""
    if is_absent(raw):
        return []
    _check_count(raw, b'"input_schema"', MAX_TOOLS, "tools", "tools")
    made: list[tuple[str, bytes]] = []
    for index, tool in enumerate(read(list[_Tool], raw, "tools")):
        place = f"tools[{index}]"
        if tool.type not in (None, "custom"):
            message = "only tools of the client are served: `custom`, with an input_schema"
            raise refuse(f"{place}.type", f"{tool.type[:64]!r} is not supported; {message}")
        function: _Members = [("name", _text(tool.name, f"{place}.name"))]
        if not is_absent(tool.description):
            function.append(("description", _text(tool.description, f"{place}.description")))
        schema = tool.input_schema
        if memoryview(schema)[0] != _BRACE:
            raise refuse(f"{place}.input_schema", "expected an object, the schema of the input")
        function.append(("parameters", bytes(schema)))
        if tool.strict is not None:
            function.append(("strict", b"true" if tool.strict else b"false"))
        text = _object([("type", b'"function"'), ("function", _object(function))])
        made.append((msgspec.json.decode(tool.name, type=str), text))
    return made


def _take_messages(turns: _Turns, raw: msgspec.Raw) -> None:
    _check_count(raw, b'"type"', MAX_BLOCKS, "messages", "content blocks")
    found = read(_MESSAGES, raw, "messages")
    if not 0 < len(found) <= MAX_MESSAGES:
        raise refuse("messages", f"expected 1 to {MAX_MESSAGES} messages, got {len(found)}")
    for index, message in enumerate(found):
        turns.begin(message.role, index)
        content = message.content
        if memoryview(content)[0] == _QUOTE:
            turns.texts.append(content)
            continue
        take = turns.take_user if message.role == "user" else turns.take_assistant
        for number, block in enumerate(_blocks(content, f"messages[{index}].content")):
            take(block, number)
    turns.end()


class _Turns:
    """The chat's messages. Neighbours of one role become one, as in Anthropic's API."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.role = ""
        """Of the turn that is written now, or was written last."""
        self.texts: list[msgspec.Raw] = []
        self._thoughts: list[msgspec.Raw] = []
        self._calls: list[bytes] = []
        self._index = 0

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
            content = _content(_texts(block.content, f"{place}.content"))
            if block.is_error:
                content = _marked(content)
            self.messages.append(
                b'{"role":"tool","tool_call_id":%b,"content":%b}' % (call_id, content)
            )
        else:
            raise _unsupported(block, place, "text, tool_result")

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
        if self.role == "user":
            if texts:
                self.messages.append(b'{"role":"user","content":%b}' % _content(texts))
            return
        thoughts, self._thoughts = self._thoughts, []
        calls, self._calls = self._calls, []
        if not (texts or thoughts or calls):
            return
        made = b'{"role":"assistant","content":%b' % (_content(texts) if texts else b"null")
        if thoughts:
            inner = rb"\n".join([bytes(one)[1:-1] for one in thoughts])
            made += b',"reasoning_content":"%b"' % inner
        if calls:
            made += b',"tool_calls":[%b]' % b",".join(calls)
        self.messages.append(made + b"}")


def _blocks(raw: msgspec.Raw, place: str) -> list[_Block]:
    if memoryview(raw)[0] != _BRACKET:
        raise refuse(place, "expected a string or a list of content blocks")
    try:
        return _decode_blocks(raw)
    except (msgspec.DecodeError, RecursionError):
        return read(_BLOCKS, raw, place)  # which says what is wrong


def _texts(raw: msgspec.Raw, place: str) -> list[msgspec.Raw]:
    """The JSON strings of a text, or of a list of text blocks."""
    if is_absent(raw):
        return []
    if memoryview(raw)[0] == _QUOTE:
        return [raw]
    found: list[msgspec.Raw] = []
    for index, block in enumerate(_blocks(raw, place)):
        if block.type != "text":
            raise _unsupported(block, f"{place}[{index}]", "text")
        found.append(_checked_text(block.text, f"{place}[{index}].text"))
    return found


def _content(texts: Sequence[msgspec.Raw]) -> bytes:
    """A chat message's content. A list of one text and that text are the same prompt."""
    if not texts:
        return b'""'
    if len(texts) == 1:
        return bytes(texts[0])
    parts = [b'{"type":"text","text":%b}' % bytes(text) for text in texts]
    return b"[" + b",".join(parts) + b"]"


_ERROR = b"Error: "


def _marked(content: bytes) -> bytes:
    """The content of a tool's message that failed: a chat has no member that says so."""
    if content.startswith(b'"'):
        return b'"' + _ERROR + content[1:]
    return b'[{"type":"text","text":"Error:"},' + content[1:]


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
