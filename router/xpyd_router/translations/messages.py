"""Anthropic's Messages: the fields of a request, and the chat that is made of them. Pure.

`messages_prompt` has the messages and tools, `messages_answers` the way back.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Annotated, Literal

import msgspec
import orjson
from msgspec import Meta

from xpyd_core.bodies import check_text, is_absent, read, refuse, unread
from xpyd_core.errors import ApiError
from xpyd_core.openai import MAX_NAME_CHARACTERS, MAX_STOP_CHARACTERS, MAX_STOPS
from xpyd_core.openai import MAX_TOKENS as _MOST_TOKENS
from xpyd_router.request.client_request import ChatBody, Pieces, chat_body
from xpyd_router.translations.messages_answers import (
    MessageEvents,
    message_of,
    refusal_body,
)
from xpyd_router.translations.messages_prompt import (
    MAX_MESSAGES,
    Members,
    json_object,
    messages_of,
    tools_of,
)
from xpyd_router.translations.seam import ChatError, Events, Json, field

_LEAST_BUDGET = 1024
"""Anthropic's own bound for thinking.budget_tokens."""
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


class _Metadata(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    user_id: Annotated[str | None, field("The session, as `user` of a chat.")] = None


class _ToolChoice(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class _Format(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    type: Literal["json_schema"]
    schema: Annotated[msgspec.Raw, field("The answer's JSON schema.", type="object")]


class _OutputConfig(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


_Unread = Annotated[msgspec.Raw, field("Changes nothing.")]
_Refused = Annotated[None, field("Not served here: leave it out.")]


class CountRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/messages/count_tokens."""

    model: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)],
        field("A name that GET /v1/models shows."),
    ]
    messages: Annotated[
        msgspec.Raw,
        field(
            "Turns of `user`, `assistant` and `system`. Blocks: text, image, thinking, "
            "redacted_thinking, tool_use, tool_result. An assistant's turn at the end is "
            "continued.",
            type="array",
            minItems=1,
            maxItems=MAX_MESSAGES,
            items={"type": "object"},
        ),
    ]
    system: Annotated[
        msgspec.Raw, field("A text, or text blocks.", type=["string", "array", "null"])
    ] = unread()
    tools: Annotated[
        msgspec.Raw,
        field(
            "Tools of the client: name, description, input_schema, strict.",
            type=["array", "null"],
            items={"type": "object"},
        ),
    ] = unread()
    tool_choice: Annotated[_ToolChoice | None, field("Default: auto.")] = None
    thinking: Annotated[_Thinking | None, field("Default: disabled.")] = None
    output_config: Annotated[
        _OutputConfig | None,
        field("format: the answer is JSON of this schema. effort: of thinking, where it is on."),
    ] = None
    thread: Annotated[
        msgspec.Raw,
        field(
            "Not served here: no conversations are kept. Clients then send all messages.",
            type="null",
        ),
    ] = unread()
    speed: Annotated[Literal["standard"] | None, field("There is one speed.")] = None
    # No meaning here: prefixes are cached without a mark, and a router edits no history.
    cache_control: _Unread = unread()
    context_management: _Unread = unread()
    diagnostics: _Unread = unread()


class MessagesRequest(CountRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=_MOST_TOKENS)], field("Tokens to generate at most.")
    ]
    metadata: Annotated[_Metadata | None, field("user_id: the session.")] = None
    stop_sequences: Annotated[
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
            Meta(max_length=MAX_STOPS),
        ]
        | None,
        field("Texts that end the answer."),
    ] = None
    stream: Annotated[bool | None, field("The answer as server-sent events.")] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None, field("0: greedy. Default: 1.")
    ] = None
    top_k: Annotated[Annotated[int, Meta(ge=0, le=2**31 - 1)] | None, field("0: off.")] = None
    top_p: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, field("Default: 1.")] = None
    service_tier: Annotated[
        Literal["auto", "standard_only"] | None, field("Changes nothing: there is one tier.")
    ] = None
    container: _Refused = None
    inference_geo: _Refused = None
    mcp_servers: _Refused = None


class Messages:
    """seam.Api for /v1/messages."""

    name = "messages"
    id_prefix = "msg_"
    id_header = b"request-id"
    count_path = "count_tokens"

    def read(self, body: bytes, owner: str = "") -> MessagesTranslation:
        """See seam.Api."""
        with _own_names():
            check_text(body)
            return MessagesTranslation(read(MessagesRequest, body))

    def refusal(self, error: ChatError, request_id: str) -> bytes:
        """See seam.Api."""
        return refusal_body(error, request_id)

    def tokenize_body(self, body: bytes, owner: str = "") -> bytes:
        """See seam.Api."""
        with _own_names():
            check_text(body)
            messages, made = _prompt(read(CountRequest, body))
            return chat_body(messages, json_object(made)).raw

    def count_body(self, tokens: int) -> bytes:
        """See seam.Api."""
        return orjson.dumps({"input_tokens": tokens})


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


@contextmanager
def _own_names() -> Generator[None]:
    """What is refused here has the client's names already, and no field of a chat."""
    try:
        yield
    except ApiError as error:
        error.param = None
        raise


def _chat(request: MessagesRequest) -> ChatBody:
    messages, made = _prompt(request)
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
        made.append(("response_format", _response_format(config.format)))
    if request.stream:
        values |= {"stream": True, "stream_options": {"include_usage": True}}
    made += [(name, orjson.dumps(value)) for name, value in values.items() if value is not None]
    return chat_body(messages, json_object(made))


def _prompt(request: CountRequest) -> tuple[Pieces, Members]:
    """What makes the prompt, of a chat and of /tokenize: its messages, and other members."""
    if not is_absent(request.thread):
        raise ApiError(
            400,
            "thread: no conversations are kept here; send all messages with each request",
            code="thread_unsupported_request",
        )
    made: Members = [("model", orjson.dumps(request.model))]
    messages, is_continued = messages_of(request.system, request.messages)
    if is_continued:
        made += [("add_generation_prompt", b"false"), ("continue_final_message", b"true")]
    tools = tools_of(request.tools)
    if tools:
        texts = [text for _, text in tools]
        made.append(("tools", b"[" + b",".join(texts) + b"]"))
    made += _choice(request.tool_choice, [name for name, _ in tools])
    # Templates have one name or the other for it; what a template does not know changes nothing.
    is_on = _thinks(request)
    switches = {"enable_thinking": is_on, "thinking": is_on}
    made.append(("chat_template_kwargs", orjson.dumps(switches)))
    return messages, made


def _response_format(wanted: _Format) -> bytes:
    schema = bytes(wanted.schema)
    if not schema.startswith(b"{"):
        raise refuse("output_config.format.schema", "expected an object")
    return (
        b'{"type":"json_schema","json_schema":{"name":"answer","strict":true,"schema":%b}}' % schema
    )


def _thinks(request: CountRequest) -> bool:
    return request.thinking is not None and request.thinking.type != "disabled"


def _choice(choice: _ToolChoice | None, names: Sequence[str]) -> Members:
    if choice is None:
        return []
    if choice.type in ("any", "tool") and not names:
        raise refuse("tool_choice", f"type {choice.type!r} needs tools")
    value: object = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type)
    if choice.type == "tool":
        if choice.name not in names:
            raise refuse("tool_choice.name", "expected the name of one of the tools")
        value = {"type": "function", "function": {"name": choice.name}}
    made: Members = [("tool_choice", orjson.dumps(value))] if names else []
    if choice.disable_parallel_tool_use:
        made.append(("parallel_tool_calls", b"false"))
    return made
