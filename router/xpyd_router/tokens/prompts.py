"""What of a request's JSON becomes tokens, by the engine's rules. Pure.

`estimate_tokens` counts it in the router's own process and takes whatever clients send; the rest
runs in the child and raises Refused for what engines (xpyd_worker.server) do not take, or would
read in another way than is known here: there is no exact count then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from xpyd_core.bodies import PromptShape

BYTES_PER_TOKEN = 4
"""Bytes of a token of English text in vocabularies of 32 k to 256 k tokens: 3.5 to 4.5."""
_MESSAGE_BYTES = 15
"""Of the 31 bytes of JSON around a message's text, those above the four tokens that a template puts
around it."""
_MAX_PROMPTS = 256
_MAX_MESSAGES = 4096
_MAX_PARTS = 16_384
_ROLES = ("system", "developer", "user", "assistant", "tool")

Prompt = str | Sequence[int]


class Refused(Exception):
    """The request has no exact count; the message says why."""


@dataclass(frozen=True)
class Conversation:
    """What a chat template is rendered with."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    documents: list[Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Any]
    """The client's `chat_template_kwargs`."""


def estimate_tokens(prompt: msgspec.Raw, shape: PromptShape | None) -> int:
    """Tokens of the prompts, about: a quarter of their bytes; of ids their number. At least 1.

    `prompt` is the JSON of `prompt`, which has this `shape`, or of `messages`, which have none. It
    is counted, not read: a body may be long.
    """
    text = bytes(prompt)
    if shape is None:
        ids, size_bytes = 0, len(text) - _MESSAGE_BYTES * text.count(b'"role"')
    else:
        ids, size_bytes = shape.most_ids, max(0, shape.text_bytes - 2)
    # A letter that is written as \uXXXX has two or three bytes as UTF-8, half as many as here.
    size_bytes = max(size_bytes - 3 * text.count(b"\\u"), size_bytes // 2)
    return max(1, ids + -(-size_bytes // BYTES_PER_TOKEN))


def completion_prompts(fields: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of a /v1/completions body, each a text or ids, none empty."""
    value = fields.get("prompt")
    if isinstance(value, str):
        found: list[Any] = [value]
    elif isinstance(value, list) and value:
        found = cast("list[Any]", value)
        if _is_id(found[0]):
            found = [found]
    else:
        raise Refused("prompt: no text, ids or list of them")
    if len(found) > _MAX_PROMPTS:
        raise Refused(f"prompt: more than {_MAX_PROMPTS}")
    for one in found:
        if not isinstance(one, str | list) or not one:
            raise Refused("prompt: an item is empty or neither text nor ids")
        if isinstance(one, list) and not all(map(_is_id, cast("list[object]", one))):
            raise Refused("prompt: an item is no token id")
    return cast("list[Prompt]", found)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def conversation(fields: Mapping[str, Any], *, knows_developer: bool) -> Conversation:
    """The conversation of a /v1/chat/completions body as templates see it."""
    if fields.get("chat_template"):
        raise Refused("chat_template: the client's own")
    value = fields.get("messages")
    if not isinstance(value, list) or not 0 < len(cast("list[Any]", value)) <= _MAX_MESSAGES:
        raise Refused("messages: no list, empty or too many")
    messages = [_message(one) for one in cast("list[object]", value)]
    if not knows_developer:
        # OpenAI's newer name for the same thing; templates of older models know one of them.
        messages = [
            {**message, "role": "system"} if message["role"] == "developer" else message
            for message in messages
        ]
    continues = flag(fields, "continue_final_message", default=False)
    generates = flag(fields, "add_generation_prompt", default=not continues)
    if continues and generates:
        raise Refused("continue_final_message: not with add_generation_prompt")
    if continues and (messages[-1]["role"] != "assistant" or not messages[-1]["content"]):
        raise Refused("continue_final_message: needs an assistant's last message with content")
    return Conversation(
        messages=messages,
        # The model does not see tools that it may not call.
        tools=None if fields.get("tool_choice") == "none" else _objects(fields, "tools"),
        documents=_objects(fields, "documents"),
        add_generation_prompt=generates,
        continue_final_message=continues,
        variables=_variables(fields),
    )


def _variables(fields: Mapping[str, Any]) -> dict[str, Any]:
    given: object = fields.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise Refused("chat_template_kwargs: no object")
    variables = cast("dict[str, Any]", given)
    effort = fields.get("reasoning_effort")
    if effort is None:
        return variables
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", **variables}


def _message(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Refused("messages: an item is no object")
    fields = cast("dict[str, Any]", value)
    role, name, content = fields.get("role"), fields.get("name"), fields.get("content")
    if role not in _ROLES or fields.get("function_call"):
        raise Refused("messages: a role or a member that engines do not take")
    is_assistant = role == "assistant"
    if content is None and is_assistant:
        content = ""
    text = _content(content, is_assistant=is_assistant)
    if is_assistant and not text and (refusal := fields.get("refusal")):
        text = _member(refusal, "a refusal")
    message: dict[str, Any] = {"role": cast(str, role), "content": text}
    if name is not None:
        message["name"] = _member(name, "a name")
    if role == "tool" and (call_id := fields.get("tool_call_id")) is not None:
        message["tool_call_id"] = _member(call_id, "a tool_call_id")
    reasoning = fields.get("reasoning_content") or fields.get("reasoning")
    if is_assistant and reasoning:
        text = _member(reasoning, "reasoning")
        message = {"thinking": text, **message, "reasoning_content": text}
    if calls := fields.get("tool_calls"):
        if not is_assistant or not isinstance(calls, list):
            raise Refused("messages: calls that are no list of an assistant's")
        message["tool_calls"] = [_call(call) for call in cast("list[object]", calls)]
    return message


def _member(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise Refused(f"messages: {what} is no text")
    return value


def _call(value: object) -> dict[str, Any]:
    """An earlier call; its arguments as the object that their JSON says, where it says one."""
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    function: object = fields.get("function")
    if not isinstance(function, dict) or fields.get("type", "function") != "function":
        raise Refused("messages: a call of no function")
    called = cast("dict[str, Any]", function)
    arguments: Any = _member(called.get("arguments", ""), "a call's arguments")
    try:
        parsed: object = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    return {
        "type": "function",
        **({} if fields.get("id") is None else {"id": _member(fields["id"], "a call's id")}),
        "function": {
            "name": _member(called.get("name"), "a call's name"),
            "arguments": cast("Any", parsed) if isinstance(parsed, dict) else arguments,
        },
    }


def _content(value: object, *, is_assistant: bool) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or len(cast("list[Any]", value)) > _MAX_PARTS:
        raise Refused("messages: content that is neither text nor parts")
    texts: list[str] = []
    for part in cast("list[object]", value):
        fields = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
        kind = fields.get("type")
        text = fields.get("refusal" if kind == "refusal" and is_assistant else "text")
        if kind not in ("text", "refusal") or not isinstance(text, str):
            raise Refused("messages: a part that is no text")
        texts.append(text)
    return "\n".join(texts)


def _objects(fields: Mapping[str, Any], name: str) -> list[Any] | None:
    """A list of objects; None where absent or empty, which are the same to engines."""
    value = fields.get(name)
    if not value:
        return None
    items = cast("list[object]", value) if isinstance(value, list) else []
    if not items or not all(isinstance(item, dict) for item in items):
        raise Refused(f"{name}: no list of objects")
    return list(items)


def flag(fields: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """true or false; `default` where absent."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Refused(f"{name}: neither true nor false")
    return value


def kept_tokens(fields: Mapping[str, Any], max_model_len: int) -> int | None:
    """`truncate_prompt_tokens`, vLLM's: so many ids of a prompt's end are kept; -1 means the
    context's length less one. None: all of them."""
    value = fields.get("truncate_prompt_tokens")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < -1 or value == 0:
        raise Refused("truncate_prompt_tokens: neither -1 nor above 0")
    return max_model_len - 1 if value == -1 else value


def salt(fields: Mapping[str, Any]) -> bytes:
    """`cache_salt` as it enters the block hashes."""
    value = fields.get("cache_salt")
    if value is None:
        return b""
    if not isinstance(value, str):
        raise Refused("cache_salt: no text")
    return value.encode(errors="replace")
