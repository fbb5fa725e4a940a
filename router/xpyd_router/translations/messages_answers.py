"""Anthropic's Messages: a chat's answer as a message, as its events, and errors. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

import orjson

from xpyd_router.translations.seam import ChatError, Json, hex_of

_SIGNATURE = "xpyd"
"""Clients want one, and send it back. Thinking is not secret here: nothing is checked by it."""
_STOPS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NAMES: Sequence[tuple[str, str]] = (
    (r"response_format\.json_schema\.schema", "output_config.format.schema"),
    (r"response_format(\.json_schema)?", "output_config.format"),
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"messages\[\d+\]\.tool_calls\[\d+\]\.function\.name", "messages: name of a tool_use"),
    # A chat has other messages: one for each tool result, and one for `system`.
    (r"messages\[\d+\]\S*", "messages"),
    (r"continue_final_message", "messages"),
    (r"reasoning_effort", "output_config.effort"),
    (r"chat_template_kwargs", "thinking"),
    (r"stop", "stop_sequences"),
    (r"user", "metadata.user_id"),
)
"""Fields of a chat, and what the client called them."""
_NO_THREADS = "thread_unsupported_request"
"""The code by which Anthropic's clients learn to send the whole history."""
_OVERLOADED = frozenset({"no_instances", "queue_timeout", "queue_full", "displaced"})


def refusal_body(error: ChatError, request_id: str) -> bytes:
    """The body of an answer that says `error`."""
    said: Json = {"type": _kind(error), "message": _said(error)}
    if error.code == _NO_THREADS:
        said["details"] = {"error_code": error.code, "unsupported": ["thread"]}
    return orjson.dumps({"type": "error", "error": said, "request_id": request_id or None})


def _said(error: ChatError) -> str:
    """The message, which begins with the client's own name of the field."""
    place, colon, rest = error.message.partition(": ")
    if not error.param or not colon or not place.startswith(error.param):
        return error.message
    for pattern, name in _NAMES:
        place, count = re.subn(rf"^{pattern}(?=$|[.\[])", name, place)
        if count:
            break
    return f"{place}: {rest}".replace("'image_url'", "'image'")


def _kind(error: ChatError) -> str:
    """Anthropic's type of the error."""
    if error.status in _KINDS:
        return _KINDS[error.status]
    if 400 <= error.status < 500:
        return "invalid_request_error"
    if error.status == 0:
        if error.code == "timeout":
            return "timeout_error"
        if error.code in _OVERLOADED:
            return "overloaded_error"
    return "api_error"


def usage_of(usage: Json) -> Json:
    """Anthropic counts tokens that were read from the cache apart."""
    prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
    details = usage.get("prompt_tokens_details")
    cached = cast(Json, details).get("cached_tokens") if isinstance(details, dict) else 0
    cached = cached if isinstance(cached, int) else 0
    details = usage.get("completion_tokens_details")
    thought = cast(Json, details).get("reasoning_tokens") if isinstance(details, dict) else None
    return {
        "input_tokens": max(0, (prompt or 0) - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output or 0,
        "output_tokens_details": None if thought is None else {"thinking_tokens": thought},
        "server_tool_use": None,
    }


_WHOLE_USAGE: Json = {"cache_creation": None, "service_tier": "standard", "inference_geo": None}
"""What a message's usage has besides."""
_UNUSED: Json = {"stop_details": None, "container": None}
"""What Anthropic's clients may look for, and a chat has nothing of."""


def stop_of(reason: object, stop_reason: object, *, has_tools: bool) -> Json:
    """stop_reason and stop_sequence. `stop_reason`: the text, or the token, that ended it. A text
    that ends a tool_use leaves half of it, which nobody may run."""
    if reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    ending = _STOPS.get(str(reason), "end_turn")
    if has_tools and ending == "end_turn":  # where the tool was forced, some engines say stop
        ending = "tool_use"
    return {"stop_reason": ending, "stop_sequence": None}


def message_of(answer: Json) -> bytes:
    """The message of a whole chat."""
    choice = cast(Json, answer["choices"][0])
    said = cast(Json, choice["message"])
    content: list[Json] = []
    thoughts = said.get("reasoning_content") or said.get("reasoning")
    if isinstance(thoughts, str):
        content.append({"type": "thinking", "thinking": thoughts, "signature": _SIGNATURE})
    if isinstance(text := said.get("content"), str) and text:
        content.append({"type": "text", "text": text, "citations": None})
    calls = [_tool_use(cast(Json, call)) for call in said.get("tool_calls") or ()]
    ending = stop_of(choice.get("finish_reason"), choice.get("stop_reason"), has_tools=bool(calls))
    message = _message(answer, [*content, *calls], usage_of(answer.get("usage") or {}))
    return orjson.dumps(message | ending)


def _message(chat: Json, content: list[Json], usage: Json) -> Json:
    return {
        "id": "msg_" + hex_of(str(chat.get("id") or "")),
        "type": "message",
        "role": "assistant",
        "model": chat.get("model"),
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage | _WHOLE_USAGE,
        **_UNUSED,
    }


def _tool_use(call: Json) -> Json:
    function = cast(Json, call.get("function") or {})
    try:
        found = orjson.loads(function.get("arguments") or "{}")
    except (orjson.JSONDecodeError, TypeError):  # cut off by max_tokens
        found = {}
    arguments = cast(Json, found) if isinstance(found, dict) else {}
    return _block(str(call.get("id") or ""), str(function.get("name") or ""), arguments)


def _block(call_id: str, name: str, arguments: Json) -> Json:
    block: Json = {"type": "tool_use", "id": call_id, "name": name, "input": arguments}
    return {**block, "caller": {"type": "direct"}}


def _event(name: str, payload: Json) -> bytes:
    head = f"event: {name}\ndata: ".encode()
    return head + orjson.dumps({"type": name, **payload}) + b"\n\n"


_PING = _event("ping", {})
_END = b'"}}\n\n'


def _delta_head(index: int, kind: str, member: str) -> bytes:
    """A delta up to its text; `_END` follows the text."""
    return (
        "event: content_block_delta\n"
        f'data: {{"type":"content_block_delta","index":{index},'
        f'"delta":{{"type":"{kind}","{member}":"'
    ).encode()


class MessageEvents:
    """seam.Events of Messages. One content block is open at a time."""

    def __init__(self) -> None:
        self._blocks = 0
        """Blocks that have begun."""
        self._open = ""
        """The kind of the open one."""
        self._head = b""
        """Its deltas up to their text."""
        self._calls: dict[int, bytes] = {}
        """By the call's number: the head of its deltas."""
        self._ending: Json = {"stop_reason": "end_turn", "stop_sequence": None}
        self._usage: Json = usage_of({})

    def begin(self, chunk: Json, usage: Json) -> bytes:
        """See seam.Events."""
        self._usage = usage_of({**usage, "completion_tokens": 0})
        message = _message(chunk, [], self._usage)
        return _event("message_start", {"message": message}) + _PING

    def content(self, text: bytes) -> bytes:
        """See seam.Events."""
        if self._open == "text":
            return b"".join((self._head, text, _END))
        block = {"type": "text", "text": "", "citations": None}
        begun = self._begin("text", block, "text_delta", "text")
        return b"".join((begun, self._head, text, _END))

    def reasoning(self, text: bytes) -> bytes:
        """See seam.Events."""
        if self._open == "thinking":
            return b"".join((self._head, text, _END))
        block = {"type": "thinking", "thinking": "", "signature": ""}
        begun = self._begin("thinking", block, "thinking_delta", "thinking")
        return b"".join((begun, self._head, text, _END))

    def tool_call(self, index: int, call_id: str, name: str) -> bytes:
        """See seam.Events."""
        begun = self._begin(
            "tool_use", _block(call_id, name, {}), "input_json_delta", "partial_json"
        )
        self._calls[index] = self._head
        return begun

    def arguments(self, index: int, text: bytes) -> bytes:
        """See seam.Events."""
        return b"".join((self._calls[index], text, _END))

    def finish(self, reason: str, stop_reason: object) -> bytes:
        """See seam.Events."""
        self._ending = stop_of(reason, stop_reason, has_tools=bool(self._calls))
        return self._stop()

    def logprobs(self, choice: Json) -> None:
        """See seam.Events. Messages has none."""

    def usage(self, usage: Json) -> bytes:
        """See seam.Events."""
        self._usage = usage_of(usage)
        return b""

    def end(self) -> bytes:
        """See seam.Events."""
        ending = self._ending | _UNUSED
        delta = _event("message_delta", {"delta": ending, "usage": self._usage})
        return self._stop() + delta + _event("message_stop", {})

    def fail(self, error: ChatError) -> bytes:
        """See seam.Events."""
        said = {"type": _kind(error), "message": error.message}
        return _event("error", {"error": said})

    def ping(self) -> bytes:
        """See seam.Events."""
        return _PING

    def _begin(self, kind: str, block: Json, delta: str, member: str) -> bytes:
        stopped = self._stop()
        index, self._blocks, self._open = self._blocks, self._blocks + 1, kind
        self._head = _delta_head(index, delta, member)
        begun = _event("content_block_start", {"index": index, "content_block": block})
        return stopped + begun

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        index, kind, self._open = self._blocks - 1, self._open, ""
        stopped = _event("content_block_stop", {"index": index})
        if kind == "thinking":
            return _delta_head(index, "signature_delta", "signature") + (
                _SIGNATURE.encode() + _END + stopped
            )
        return stopped
