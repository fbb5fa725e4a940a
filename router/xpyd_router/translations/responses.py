"""OpenAI's Responses: a request as a chat. `responses_items` reads its input, `responses_answers`
has the way back. Pure, but for the responses that it keeps.

Fields that vLLM knows besides OpenAI's go to the engines as they are. A field that would change
the answer and has no counterpart in a chat is refused by name, and so is what needs a store where
the router has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from xpyd_core.bodies import NO_VALUE, check_text, is_absent, read, refuse, unread
from xpyd_core.errors import ApiError
from xpyd_core.openai import MAX_LOGPROBS, MAX_NAME_CHARACTERS, MAX_TOKENS
from xpyd_router.translations.responses_answers import (
    Asked,
    Finished,
    ResponseEvents,
    refusal_body,
    response_of,
)
from xpyd_router.translations.responses_items import (
    MAX_ITEMS,
    Conversation,
    Members,
    Tools,
    chat_of,
    items_of,
    tool_members,
)
from xpyd_router.translations.responses_store import Kept, ResponseStore
from xpyd_router.translations.seam import ChatError, Events, Json, field

STORE_FLAG = "--responses-store-mib"
_MAX_METADATA = 16
_LOGPROBS = "message.output_text.logprobs"
_NO_STORE = f"this router keeps no responses (start it with {STORE_FLAG})"
_dumps = msgspec.json.encode


class _Format(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    description: str | None = None
    schema: msgspec.Raw = unread()
    strict: bool | None = None


class _Text(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    format: _Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class _Reasoning(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class _StreamOptions(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    include_obfuscation: bool | None = None


_Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Of tools that no response has: there is nothing to include.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
_Number = Annotated[float, Meta(ge=-2, le=2)]
_Text256 = Annotated[str, Meta(max_length=256)]


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/responses."""

    model: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)] | None,
        field("A name that GET /v1/models shows."),
    ] = None
    input: Annotated[
        msgspec.Raw,
        field(
            "A text, or items: message, function_call, function_call_output, reasoning. Contents "
            "are texts.",
            oneOf=[
                {"type": "string"},
                {
                    "type": "array",
                    "items": {"type": "object"},
                    "minItems": 1,
                    "maxItems": MAX_ITEMS,
                },
            ],
        ),
    ] = unread()
    instructions: Annotated[str | None, field("What the model is told first.")] = None
    previous_response_id: Annotated[
        str | None, field(f"The response that this one goes on from; needs {STORE_FLAG}.")
    ] = None
    store: Annotated[
        bool | None,
        field(f"Keep the response. Default: true with {STORE_FLAG}, else false."),
    ] = None
    stream: Annotated[bool | None, field("The answer as server-sent events.")] = None
    stream_options: Annotated[_StreamOptions | None, field("No padding is sent.")] = None
    background: Annotated[bool | None, field("Only false: a response ends with its request.")] = (
        None
    )
    max_output_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None,
        field("Tokens to generate at most, reasoning included."),
    ] = None
    max_tool_calls: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        field("Changes nothing: it bounds calls of the server's own tools."),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, field("0: greedy. Default: 1.")
    ] = None
    top_p: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, field("Default: 1.")] = None
    presence_penalty: Annotated[_Number | None, field("Of tokens in the output.")] = None
    frequency_penalty: Annotated[_Number | None, field("Of tokens in the output.")] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        field(f"With {_LOGPROBS} in include: of so many tokens at each place."),
    ] = None
    tools: Annotated[
        msgspec.Raw,
        field("Functions of the client.", type=["array", "null"], items={"type": "object"}),
    ] = unread()
    tool_choice: Annotated[
        msgspec.Raw,
        field(
            "none, auto, required, a function, or allowed_tools. Default: auto.",
            type=["string", "object", "null"],
        ),
    ] = unread()
    parallel_tool_calls: Annotated[bool | None, field("Default: true.")] = None
    text: Annotated[_Text | None, field("format: text, json_object or json_schema.")] = None
    reasoning: Annotated[
        _Reasoning | None,
        field("effort; with summary the reasoning is shown as its own summary."),
    ] = None
    include: Annotated[
        Annotated[list[_Include], Meta(max_length=16)] | None,
        field("Reasoning is never encrypted: it comes and is sent back as text."),
    ] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None, field("Only disabled, the default.")
    ] = None
    metadata: Annotated[
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=_MAX_METADATA),
        ]
        | None,
        field("Returned in the response."),
    ] = None
    service_tier: Annotated[
        Literal["auto", "default"] | None, field("Changes nothing: there is one tier.")
    ] = None
    user: Annotated[_Text256 | None, field("The session, as in a chat.")] = None
    prompt_cache_key: Annotated[_Text256 | None, field("The session, before `user`.")] = None
    safety_identifier: Annotated[_Text256 | None, field("Returned in the response.")] = None
    prompt_cache_retention: Annotated[
        Literal["in_memory"] | None, field("Prefixes are kept while there is room.")
    ] = None


_VLLMS = (
    *("top_k", "min_p", "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens"),
    *("include_stop_str_in_output", "cache_salt", "priority", "chat_template_kwargs"),
    *("structured_outputs", "include_reasoning", "kv_transfer_params"),
)
"""Fields of vLLM's Responses or chats: the chat has them as they are."""
_REFUSED = {
    "conversation": "no conversations are kept here: send them in input",
    "prompt": "no templates of prompts are kept here: send instructions and input",
    "context_management": "the router shortens no history",
    "moderation": "nothing is moderated here",
    "previous_input_messages": "send them in input",
    "enable_response_messages": "not supported",
    "n": "a response has one answer",
    "messages": "Responses has `input`; /v1/chat/completions has messages",
    "max_tokens": "Responses has `max_output_tokens`",
    "max_completion_tokens": "Responses has `max_output_tokens`",
    "response_format": "Responses has `text.format`",
    "reasoning_effort": "Responses has `reasoning.effort`",
}
"""Fields that would change the answer, and why they are not taken. What changes nothing is: null,
false, an `n` of 1."""
_Body = msgspec.defstruct(
    "_Body",
    [(name, msgspec.Raw, NO_VALUE) for name in (*_VLLMS, *_REFUSED)],
    bases=(ResponsesRequest,),
    frozen=True,
    kw_only=True,
)
"""All that is read of a body, at once."""


class Responses:
    """seam.Api for /v1/responses. `store` is None where no responses are kept."""

    name = "responses"
    id_prefix = "resp_"
    id_header = b""
    count_path = "input_tokens"

    def __init__(self, store: ResponseStore | None, wall_clock: Callable[[], float]) -> None:
        self.store = store
        self._clock = wall_clock

    def read(self, body: bytes, owner: str = "") -> ResponsesTranslation:
        """See seam.Api."""
        check_text(body)
        request = cast(ResponsesRequest, read(_Body, body))
        return ResponsesTranslation(request, self.store, self._clock, owner)

    def refusal(self, error: ChatError, request_id: str) -> bytes:
        """See seam.Api."""
        return refusal_body(error)

    def tokenize_body(self, body: bytes, owner: str = "") -> bytes:
        """See seam.Api."""
        check_text(body)
        request = cast(ResponsesRequest, read(_Body, body))
        conversation = _conversation(request, self.store, owner)
        made: Members = [("model", _dumps(request.model))]
        made += tool_members(Tools(request.tools), request.tool_choice)
        if request.reasoning is not None and request.reasoning.effort is not None:
            made.append(("reasoning_effort", _dumps(request.reasoning.effort)))
        made += _given(request, ("chat_template_kwargs",))
        return chat_of(conversation.messages(request.instructions), made).raw

    def count_body(self, tokens: int) -> bytes:
        """See seam.Api."""
        return _dumps({"object": "response.input_tokens", "input_tokens": tokens})


class ResponsesTranslation:
    """seam.Translation of one request."""

    def __init__(
        self,
        request: ResponsesRequest,
        store: ResponseStore | None,
        clock: Callable[[], float],
        owner: str,
    ) -> None:
        conversation = _conversation(request, store, owner)
        tools = Tools(request.tools)
        made: Members = [("model", _dumps(request.model))]
        made += tool_members(tools, request.tool_choice)
        made += _options(request)
        made += _given(request, _VLLMS)
        self.chat = chat_of(conversation.messages(request.instructions), made)
        keep = store is not None and request.store is not False
        self._asked = Asked(
            tail=_tail(request, tools, is_kept=keep),
            summarizes=_summary(request) is not None,
            shows_logprobs=_LOGPROBS in (request.include or ()),
            clock=clock,
            keep=partial(_keep, store, owner, conversation, items_of(request.input))
            if keep
            else None,
        )

    def whole(self, answer: Json) -> bytes:
        """See seam.Translation."""
        return response_of(self._asked, answer)

    def events(self) -> Events:
        """See seam.Translation."""
        return ResponseEvents(self._asked)


def _conversation(
    request: ResponsesRequest, store: ResponseStore | None, owner: str
) -> Conversation:
    """The conversation that the model is asked to go on with. ApiError 400 for a field that would
    change the answer, and cannot."""
    _check(request, store)
    before = _before(request.previous_response_id, store, owner)
    conversation = Conversation(before.system, before.turns, before.calls)
    conversation.take(request.input)
    return conversation


def _keep(
    store: ResponseStore | None,
    owner: str,
    conversation: Conversation,
    items: tuple[bytes, ...],
    finished: Finished,
) -> None:
    if store is not None:
        turns = (*conversation.turns, *finished.messages)
        calls = (*conversation.calls, *finished.calls)
        kept = Kept(finished.body, items, tuple(conversation.system), turns, calls, owner)
        store.put(finished.response_id, kept)


_NOTHING = Kept(b"", (), (), (), ())


def _before(response_id: str | None, store: ResponseStore | None, owner: str) -> Kept:
    """The conversation that a request goes on from."""
    if response_id is None:
        return _NOTHING
    if store is None:
        raise refuse("previous_response_id", f"{_NO_STORE}; send the conversation in input")
    kept = store.get(response_id, owner)
    if kept is None:
        raise ApiError(
            400,
            f"previous_response_id: no response {response_id[:80]!r} is kept in this router's "
            "process; send the conversation in input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return kept


def _given(request: ResponsesRequest, names: Iterable[str]) -> Members:
    """Those of these fields of a _Body that are given."""
    found = [(name, value) for name in names if (value := getattr(request, name)) is not NO_VALUE]
    return [(name, bytes(value)) for name, value in found if not is_absent(value)]


def _check(request: ResponsesRequest, store: ResponseStore | None) -> None:
    """ApiError 400 for a field that would change the answer, and cannot."""
    for name, value in _given(request, _REFUSED):
        if value not in (b"false", b"1"):
            raise refuse(name, _REFUSED[name])
    if request.model is None:
        raise refuse("model", "you must provide the model's name as a string")
    if is_absent(request.input):
        raise refuse("input", "this field is missing")
    if request.background:
        raise refuse("background", "a response ends with its request here: leave it out")
    if request.store and store is None:
        raise refuse("store", f"{_NO_STORE}; leave it out or send false")
    if request.truncation == "auto":
        raise refuse("truncation", "the router shortens no history; leave it out or send disabled")
    if request.text is not None and request.text.verbosity not in (None, "medium"):
        raise refuse("text.verbosity", "engines cannot be told; leave it out or send medium")
    if _summary(request) == "concise":
        message = "nothing here writes summaries; auto and detailed show the reasoning itself"
        raise refuse("reasoning.summary", message)
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise refuse("stream_options.include_obfuscation", "no padding is sent here; send false")


def _summary(request: ResponsesRequest) -> str | None:
    said = request.reasoning
    return None if said is None else said.summary or said.generate_summary


def _options(request: ResponsesRequest) -> Members:
    """The chat's members besides prompt and tools."""
    values: list[tuple[str, Any]] = [
        ("max_completion_tokens", request.max_output_tokens),
        ("temperature", request.temperature),
        ("top_p", request.top_p),
        ("presence_penalty", request.presence_penalty),
        ("frequency_penalty", request.frequency_penalty),
        ("parallel_tool_calls", request.parallel_tool_calls),
        ("user", request.user),
        ("prompt_cache_key", request.prompt_cache_key),
        ("reasoning_effort", request.reasoning and request.reasoning.effort),
        ("response_format", _response_format(request.text)),
    ]
    if _LOGPROBS in (request.include or ()):
        values += [("logprobs", True), ("top_logprobs", request.top_logprobs or 0)]
    if request.stream:
        values += [("stream", True), ("stream_options", {"include_usage": True})]
    return [(name, _dumps(value)) for name, value in values if value is not None]


def _response_format(text: _Text | None) -> Json | None:
    format_ = None if text is None else text.format
    if format_ is None or format_.type == "text":
        return None
    if format_.type == "json_object":
        return {"type": "json_object"}
    if format_.name is None:
        raise refuse("text.format.name", "this field is missing")
    if is_absent(format_.schema):
        raise refuse("text.format.schema", "this field is missing")
    inner: Json = {"name": format_.name, "schema": format_.schema}
    if format_.description is not None:
        inner["description"] = format_.description
    if format_.strict is not None:
        inner["strict"] = format_.strict
    return {"type": "json_schema", "json_schema": inner}


def _tail(request: ResponsesRequest, tools: Tools, *, is_kept: bool) -> bytes:
    """What the response object repeats of its request, with the defaults."""
    text, reasoning = request.text, request.reasoning
    format_: Json = {"type": "text"}
    if text is not None and text.format is not None:
        format_ = {"type": text.format.type}
        if text.format.type == "json_schema":
            format_ |= {
                "name": text.format.name,
                "description": text.format.description,
                "schema": text.format.schema,
                "strict": bool(text.format.strict),
            }
    values: Json = {
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "temperature": _default(request.temperature, 1.0),
        "top_p": _default(request.top_p, 1.0),
        "presence_penalty": _default(request.presence_penalty, 0.0),
        "frequency_penalty": _default(request.frequency_penalty, 0.0),
        "top_logprobs": request.top_logprobs or 0,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": {"format": format_, "verbosity": "medium"},
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": _summary(request)},
        "truncation": "disabled",
        "store": is_kept,
        "background": False,
        "service_tier": "default",
        "metadata": request.metadata or {},
        "user": request.user,
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
        "tools": [msgspec.Raw(one) for one in tools.shown],
        "tool_choice": "auto" if is_absent(request.tool_choice) else request.tool_choice,
    }
    return _dumps(values)[1:-1]


def _default(value: float | None, default: float) -> float:
    return default if value is None else value
