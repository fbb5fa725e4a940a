"""Answers: what the client gets of what P and D sent. Pure.

With continuation the router itself writes the first chunks of a stream, made of P's answer, and the
whole end when every choice ended at its first token. What D streams is relayed; only the token ids
that the client did not ask for are removed. Here too: events cut out of a stream, token counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import orjson

from xpyd_core.errors import ProtocolError
from xpyd_router.errors import TRANSFER_FAILED, FailureCause
from xpyd_router.request.client_request import InferenceRequest

_PROMPT = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,12})\b')
_OUTPUT = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,12})\b')


def tokens_in(body: bytes) -> tuple[int | None, int | None]:
    """Tokens of prompt and output in an OpenAI answer; None for what it does not say.

    Inside a JSON string the quotes would be escaped: what is found is a key.
    """
    start = body.rfind(b'"usage"')
    if start < 0:
        return None, None
    prompt, output = _PROMPT.search(body, start), _OUTPUT.search(body, start)
    return int(prompt[1]) if prompt else None, int(output[1]) if output else None


DONE = b"data: [DONE]\n\n"
OUTPUT_DETAILS = "completion_tokens_details"
"""What a usage says of an output besides its length."""
MAX_EVENT_BYTES = 16 * 1024 * 1024
_MAX_PARAMS_BYTES = 1024 * 1024
"""Of what P says for D. Block ids of a prompt of a million tokens take 0.4 MiB."""


class EventSplitter:
    """Collects bytes until an event is whole (a blank line ends it)."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = b""

    @property
    def is_empty(self) -> bool:
        """Nothing of an event is kept: what comes now begins one."""
        return not self._rest

    def push(self, data: bytes) -> list[bytes]:
        """The events that `data` completes, each ending in one blank line (`\\n\\n`).

        Raises ProtocolError when one grows past the bound.
        """
        rest = self._rest + data if self._rest else data
        if rest.find(b"\r") >= 0:  # for bytes, `in` makes an exception first, and drops it
            # A cut may part \r from \n: keep it back until its partner is here.
            keep = b"\r" if rest.endswith(b"\r") else b""
            rest = rest[: len(rest) - len(keep)].replace(b"\r\n", b"\n") + keep
        events = rest.split(b"\n\n")
        self._rest = events.pop()
        if len(self._rest) > self._max_event_bytes:
            raise ProtocolError(f"a stream event is longer than {self._max_event_bytes} bytes")
        return [event + b"\n\n" for event in events if event.strip()]


def event_data(event: bytes) -> bytes:
    """The payload of an event: its `data:` lines joined; empty for a comment."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:"]
    return b"\n".join(lines)


def encode_event(payload: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """One event with `payload` as JSON."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


Json = dict[str, Any]


class Head(msgspec.Struct, frozen=True, gc=False):
    """What every chunk and answer of one response shares; made by the router."""

    response_id: str
    created: int


@dataclass(frozen=True)
class FirstChoice:
    """One choice of P's answer: the token behind what it continued."""

    index: int
    text: str
    """Empty where there is none, or a chat says something else."""
    token_ids: tuple[int, ...]
    logprobs: object
    finish_reason: str
    extras: Json
    """stop_reason and, where asked for, the prompt's ids: passed on as they are."""
    delta: Json | None = None
    """What a chat says besides content, too: reasoning, tool calls; as a chunk says it."""


@dataclass(frozen=True)
class PrefillAnswer:
    """P's answer, checked. `transfer` and the others are opaque: D gets them as they came."""

    document: Json
    model: str
    choices: tuple[FirstChoice, ...]
    usage: Json
    transfer: Json
    not_sent: tuple[str, ...] = ()
    """Why P sends no KV, for each prompt of which it sends none; not D's."""

    @property
    def is_over(self) -> bool:
        """Whether every choice ended at this token; `length` means that it goes on."""
        return all(choice.finish_reason != "length" for choice in self.choices)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ProtocolError(f"prefill answer: {what}")


def _objects(value: object, what: str) -> list[Json]:
    _require(isinstance(value, list), f"{what} is no list")
    items = cast("list[object]", value)
    _require(all(isinstance(item, dict) for item in items), f"{what} holds no objects")
    return cast("list[Json]", items)


def _text(choice: Json, is_chat: bool) -> str:
    if not is_chat:
        text = choice.get("text")
    else:
        message = choice.get("message")
        _require(isinstance(message, dict), "message is no object")
        text = cast(Json, message).get("content") or ""
    _require(isinstance(text, str), "text is no string")
    return cast(str, text)


def _delta(choice: Json, is_chat: bool) -> Json | None:
    """What a chat says besides content. Our engines give it; of others it is their message."""
    delta = choice.get("delta")
    if not is_chat:
        return None
    if isinstance(delta, dict):
        return cast(Json, delta)
    message = cast(Json, choice["message"])
    said: Json = {name: message[name] for name in _REASONING if message.get(name)}
    if calls := message.get("tool_calls"):
        calls = _objects(calls, "tool_calls")
        said["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    if said and message.get("content"):
        said["content"] = message["content"]
    return said or None


_REASONING = ("reasoning_content", "reasoning")


def _first_choice(choice: Json, index: int, is_chat: bool) -> FirstChoice:
    _require(choice.get("index") == index, "choices are not in order")
    ids = choice.get("token_ids")
    _require(isinstance(ids, list) and len(cast("list[object]", ids)) > 0, "token_ids is missing")
    token_ids = tuple(cast("list[int]", ids))
    _require(all(type(i) is int for i in token_ids), "token_ids holds no integers")
    finish = choice.get("finish_reason") or "length"
    _require(isinstance(finish, str), "finish_reason is no string")
    return FirstChoice(
        index=index,
        text=_text(choice, is_chat),
        token_ids=token_ids,
        logprobs=choice.get("logprobs"),
        finish_reason=finish,
        extras={k: choice[k] for k in ("stop_reason", "prompt_token_ids") if k in choice},
        delta=_delta(choice, is_chat),
    )


def parse_prefill_answer(request: InferenceRequest, body: bytes) -> PrefillAnswer:
    """P's answer to a body with kv_transfer_params; ProtocolError says what is missing."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ProtocolError("prefill answer: not JSON") from error
    _require(isinstance(document, dict), "no object")
    choices = _objects(document.get("choices"), "choices")
    _require(bool(choices), "no choices")
    transfer = document.get("kv_transfer_params")
    _require(isinstance(transfer, dict), "kv_transfer_params is missing")
    usage = document.get("usage")
    return PrefillAnswer(
        document=document,
        model=str(document.get("model") or request.model),
        choices=tuple(_first_choice(c, i, request.is_chat) for i, c in enumerate(choices)),
        usage=cast(Json, usage) if isinstance(usage, dict) else {},
        transfer={
            name: cast(Json, transfer)[name]
            for name in ("transfer", "decode_incarnation", "prompt_digest")
            if name in transfer
        },
        not_sent=_not_sent(cast(Json, transfer)),
    )


def parse_params_answer(
    request: InferenceRequest, body: bytes, names: Sequence[str] | None = None
) -> PrefillAnswer:
    """The answer of a P that names the KV in its kv_transfer_params: all of these, or those of
    `names`. Nothing, null included, means that P keeps no KV. It has no choices.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ProtocolError("prefill answer: not JSON") from error
    _require(isinstance(document, dict), "no object")
    said = cast(object, document.get("kv_transfer_params") or {})
    _require(isinstance(said, dict), "kv_transfer_params is no object")
    transfer, usage = cast(Json, said), document.get("usage")
    if names is not None:
        transfer = {name: transfer[name] for name in names if name in transfer}
    _check_passable(transfer)
    return PrefillAnswer(
        document=document,
        model=str(document.get("model") or request.model),
        choices=(),
        usage=cast(Json, usage) if isinstance(usage, dict) else {},
        transfer=transfer,
        not_sent=_not_sent(cast(Json, said)),
    )


def _check_passable(transfer: Json) -> None:
    """ProtocolError for what could not be written into D's body, or would make D refuse it: P is at
    fault then, not the request."""
    try:
        size_bytes = len(orjson.dumps({"kv_transfer_params": transfer}))
    except orjson.JSONEncodeError as error:
        raise ProtocolError("prefill answer: kv_transfer_params is nested too deep") from error
    _require(size_bytes <= _MAX_PARAMS_BYTES, "kv_transfer_params is too long")


def parse_vllm_choice(
    request: InferenceRequest, document: Json
) -> tuple[FirstChoice, tuple[int, ...]]:
    """The only choice of vLLM's answer with return_token_ids, and the prompt's ids."""
    choices = _objects(document.get("choices"), "choices")
    _require(len(choices) == 1, "not one choice")
    ids = (document if request.is_chat else choices[0]).get("prompt_token_ids")
    _require(isinstance(ids, list), "prompt_token_ids is missing")
    prompt_ids = tuple(cast("list[int]", ids))
    _require(all(type(i) is int for i in prompt_ids), "prompt_token_ids holds no integers")
    return _first_choice(choices[0], 0, request.is_chat), prompt_ids


def _not_sent(transfer: Json) -> tuple[str, ...]:
    """P's words; `not_sent` where it gives none. What is malformed is D's to refuse."""
    states, reasons = transfer.get("transfer"), transfer.get("reason")
    if not isinstance(states, list) or "none" not in states:
        return ()
    words = cast("list[object]", reasons) if isinstance(reasons, list) else []
    return tuple(str(one) for one in words if one) or ("not_sent",)


def _base(request: InferenceRequest, head: Head, model: str) -> Json:
    return {
        "id": head.response_id,
        "object": "chat.completion.chunk" if request.is_chat else "text_completion",
        "created": head.created,
        "model": model,
    }


def _counted(usage: Json, generated: int) -> Json:
    """The usage of a stream so far; `usage` counts its prompt, and what else is known."""
    total = usage.get("prompt_tokens", 0) + generated
    return {"usage": {**usage, "completion_tokens": generated, "total_tokens": total}}


def role_events(request: InferenceRequest, head: Head, model: str, usage: Json) -> bytes:
    """What a chat stream begins with: one role delta per choice. `usage` counts the prompt."""
    base = _base(request, head, model)
    chunks = (
        _with_usage(request, {**base, "choices": [_role(i)]}, usage) for i in range(request.choices)
    )
    return b"".join(map(encode_event, chunks))


def _role(index: int) -> Json:
    """The choice that a chat stream begins with."""
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _with_usage(request: InferenceRequest, chunk: Json, usage: Json, generated: int = 0) -> Json:
    """`chunk` with what the client wants of the tokens so far: all, null, or nothing."""
    if request.wants_running_usage:
        return chunk | _counted(usage, generated)
    return chunk | {"usage": None} if request.include_usage else chunk


def end_of_stream(
    request: InferenceRequest, head: Head, model: str, usage: Json, generated: int
) -> bytes:
    """What follows the last choice's end: usage where it was asked for, and [DONE]."""
    if not request.include_usage:
        return DONE
    counted = _counted(usage, generated)
    return encode_event({**_base(request, head, model), "choices": [], **counted}) + DONE


class ChunkWriter:
    """Writes the chunks of a stream that the router makes itself, out of one answer of P.

    `usage` counts the prompt. As engines do, every chunk has `usage` when the client asked for it:
    null, or with continuous_usage_stats the tokens of all choices so far.
    """

    def __init__(
        self, request: InferenceRequest, head: Head, answer: PrefillAnswer, usage: Json
    ) -> None:
        self._ask = request
        self._head = head
        self._answer = answer
        self._usage = usage
        self._base = _base(request, head, answer.model)

    def role(self) -> list[bytes]:
        """What a chat stream begins with: one role delta per choice. Nothing for completions."""
        if not self._ask.is_chat:
            return []
        events: list[bytes] = []
        for choice in self._answer.choices:
            chunk = self._chunk([_role(choice.index)], 0)
            if self._ask.wants_token_ids and "prompt_token_ids" in self._answer.document:
                chunk["prompt_token_ids"] = self._answer.document["prompt_token_ids"]
            events.append(encode_event(chunk))
        return events

    def content(self, generated: int) -> list[bytes]:
        """P's tokens, one chunk per choice that has something to show. `generated`: the number of
        tokens of all choices so far, those of earlier tries included.
        """
        pieces = (self._piece(choice) for choice in self._answer.choices)
        return [encode_event(self._chunk([p], generated)) for p in pieces if p is not None]

    def finish(self, generated: int) -> list[bytes]:
        """The end where all choices ended at P: finish reasons, usage if asked, [DONE]."""
        events: list[bytes] = []
        for choice in self._answer.choices:
            piece: Json = {"index": choice.index, "logprobs": None}
            piece |= {"delta": {}} if self._ask.is_chat else {"text": ""}
            piece["finish_reason"] = choice.finish_reason
            if "stop_reason" in choice.extras:
                piece["stop_reason"] = choice.extras["stop_reason"]
            events.append(encode_event(self._chunk([piece], generated)))
        usage, model = self._usage, self._answer.model
        if details := self._answer.usage.get(OUTPUT_DETAILS):  # of what it replayed, too
            usage = {**usage, OUTPUT_DETAILS: details}
        return [*events, end_of_stream(self._ask, self._head, model, usage, generated)]

    def _chunk(self, choices: list[Json], generated: int) -> Json:
        chunk = {**self._base, "choices": choices}
        return _with_usage(self._ask, chunk, self._usage, generated)

    def _piece(self, choice: FirstChoice) -> Json | None:
        """One choice of the first content chunk; None where it would be empty."""
        request = self._ask
        is_silent = not choice.text and choice.delta is None and choice.logprobs is None
        if is_silent and not request.wants_token_ids:
            return None
        piece: Json = {"index": choice.index, "logprobs": choice.logprobs, "finish_reason": None}
        if request.is_chat:
            piece["delta"] = choice.delta or {"content": choice.text}
        else:
            piece["text"] = choice.text
        if request.wants_token_ids:
            piece["token_ids"] = choice.token_ids
            if "prompt_token_ids" in choice.extras:
                piece["prompt_token_ids"] = choice.extras["prompt_token_ids"]
        return piece


def whole_answer(request: InferenceRequest, head: Head, answer: PrefillAnswer) -> bytes:
    """P's answer as the client's, where every choice ended at its first token."""
    document = {k: v for k, v in answer.document.items() if k != "kv_transfer_params"}
    document |= {"id": head.response_id, "created": head.created}
    ids = () if request.wants_token_ids else ("token_ids", "prompt_token_ids")
    for name in ids:
        document.pop(name, None)
    for choice in _objects(document["choices"], "choices"):
        for name in ("delta", *ids):
            choice.pop(name, None)
    return orjson.dumps(document)


def _says_nothing(choice: Json) -> bool:
    if choice.get("finish_reason") is not None or choice.get("logprobs") is not None:
        return False
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return not any(cast(Json, delta).values())
    return not choice.get("text")


def chunk_of(event: bytes) -> Json | None:
    """The chunk with choices in `event`; None for an event of another form."""
    try:
        chunk = orjson.loads(event_data(event))
        _objects(chunk["choices"], "choices")
    except (orjson.JSONDecodeError, ProtocolError, KeyError, TypeError):
        return None
    return chunk


def without_token_ids(chunk: Json, *, keep: bool = False) -> bytes | None:
    """`chunk` as an event without token ids; None where nothing would be left in it."""
    choices = cast("list[Json]", chunk["choices"])
    if not keep:
        for choice in choices:
            choice.pop("token_ids", None)
        if choices and all(_says_nothing(c) for c in choices) and not chunk.get("usage"):
            return None
    return encode_event(chunk)


def behind_ids(chunk: Json, head: Head, usage: Json, generated: int) -> bytes | None:
    """A chunk of an engine that takes what was sent for the prompt, as the client gets it: with
    the response's id, without role and ids. `usage` counts the prompt, `generated` what was sent
    before this engine. None where nothing is left."""
    chunk.pop("prompt_token_ids", None)
    chunk |= {"id": head.response_id, "created": head.created}
    if isinstance(said := chunk.get("usage"), dict):
        more = cast(Json, said).get("completion_tokens") or 0
        chunk |= _counted(usage, generated + more)
    choices = cast("list[Json]", chunk["choices"])
    for choice in choices:
        choice.pop("prompt_token_ids", None)
        if isinstance(delta := choice.get("delta"), dict):
            cast(Json, delta).pop("role", None)
    return without_token_ids(chunk)


def text_in(choice: Json) -> str | None:
    """The text of a streamed choice; None where it holds another kind of output, too."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return choice.get("text") or ""
    said = cast(Json, delta)
    if any(value for name, value in said.items() if name not in ("role", "content")):
        return None
    return said.get("content") or ""


_ENGINE_FAILED = frozenset({"server_error", "InternalServerError"})
"""Our engines' type, and vLLM's."""


def failure_in(event: bytes) -> FailureCause | None:
    """What failed where `event` says that the engine did, so that another may succeed; None for
    other events.
    """
    if not event.startswith(b'data: {"error"'):
        return None
    try:
        error = orjson.loads(event_data(event))["error"]
        if error.get("code") == TRANSFER_FAILED:
            return "transfer"
        return "status" if error.get("type") in _ENGINE_FAILED else None
    except (orjson.JSONDecodeError, AttributeError):
        return None


def error_event(body: bytes) -> bytes:
    """The last event of a stream that fails after it began; `body` is an OpenAI error object."""
    return b"data: " + body.replace(b"\n", b" ") + b"\n\n"


def scrub(data: bytes, secrets: Sequence[bytes], public: bytes) -> bytes:
    """`data` with every internal id replaced by the response's own: engines put theirs in `id`."""
    for secret in secrets:
        if data.find(secret) >= 0:  # for bytes, `in` makes an exception first, and drops it
            data = data.replace(secret, public)
    return data
