"""Bodies of /v1/completions and /v1/chat/completions as checked, frozen values. Pure.

JSON members in, one CompletionCall or ChatCall out, or an ApiError (400) that names the field. What
needs the model (its name, the tokenizer, the context's length) is checked behind this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from xpyd_worker.server.fields import Fields, as_token_ids, bad, is_token_id, shown, too_long
from xpyd_worker.server.kv_params import KvParams, parse_kv_params
from xpyd_worker.server.not_built import refuse_not_built
from xpyd_worker.server.sampling_fields import LogitRules, parse_logit_rules

# vLLM has no bound on these; without one a small body could order unbounded work.
MAX_N = 128
MAX_PROMPTS = 256
MAX_CHOICES = 1024
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_MESSAGES = 4096
MAX_PARTS = 16_384
"""Of the contents of all messages together."""
# As OpenAI's bound for chat; vLLM has the same default for both.
MAX_LOGPROBS = 20
# Larger than any context; a number above the context gets its own message.
MAX_TOKENS = 2**62
_INT_64 = 2**63
_LABELS = ("user", "prompt_cache_key")
"""Whose a request is. Routers read them; only a wrong type matters here."""
_ROLES = ("system", "developer", "user", "assistant")

Prompt = str | tuple[int, ...]
Message = dict[str, str]


@dataclass(frozen=True)
class Options:
    """What both endpoints take. `max_tokens` None: none was given. `logprobs` None: none wanted.

    `include_usage`: a last chunk with usage; `running_usage`: usage in every chunk (vLLM's
    continuous_usage_stats). `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off. The lower
    its `priority`, the earlier a request runs.
    `include_stop`: stop strings and stop tokens are part of the text.
    """

    model: str | None
    stream: bool
    include_usage: bool
    running_usage: bool
    n: int
    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop: bool
    rules: LogitRules
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    ignore_eos: bool
    return_token_ids: bool
    cache_salt: bytes
    priority: int
    kv: KvParams


@dataclass(frozen=True)
class CompletionCall:
    """A checked /v1/completions body. `prompts` has one entry at least."""

    options: Options
    prompts: tuple[Prompt, ...]
    echo: bool


@dataclass(frozen=True)
class ChatCall:
    """A checked /v1/chat/completions body. Parts of type text are joined by line feeds."""

    options: Options
    messages: tuple[Message, ...]


def parse_completion(
    body: Mapping[str, Any], *, max_model_len: int | None = None
) -> CompletionCall:
    """The body of /v1/completions. Ids that are more than `max_model_len` are not looked at."""
    refuse_not_built(body, chat=False)
    fields = Fields(body)
    prompts = _prompts(body.get("prompt"), max_model_len)
    echo = fields.boolean("echo")
    least = 0 if echo or fields.get("prompt_logprobs") is not None else 1
    max_tokens = fields.integer("max_tokens", least, MAX_TOKENS)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
    options = _options(fields, max_tokens=max_tokens, logprobs=logprobs, prompts=len(prompts))
    return CompletionCall(options, prompts, echo)


def parse_chat(body: Mapping[str, Any]) -> ChatCall:
    """The body of /v1/chat/completions."""
    refuse_not_built(body, chat=True)
    fields = Fields(body)
    messages = parse_messages(fields)
    least = 0 if fields.get("prompt_logprobs") is not None else 1
    given = [
        fields.integer(name, least, MAX_TOKENS) for name in ("max_completion_tokens", "max_tokens")
    ]
    max_tokens = given[0] if given[0] is not None else given[1]
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    wanted = fields.boolean("logprobs")
    if top and not wanted:
        raise bad("top_logprobs", "needs logprobs to be true")
    logprobs = (top or 0) if wanted else None
    return ChatCall(_options(fields, max_tokens=max_tokens, logprobs=logprobs, prompts=1), messages)


def _options(
    fields: Fields, *, max_tokens: int | None, logprobs: int | None, prompts: int
) -> Options:
    for label in _LABELS:
        fields.text(label)
    stream = fields.boolean("stream")
    include_usage, running_usage = _stream_usage(fields, stream=stream)
    n = fields.integer("n", 1, MAX_N) or 1
    if n * prompts > MAX_CHOICES:
        raise bad("n", f"at most {MAX_CHOICES} choices (prompts x n), got {n * prompts}")
    min_tokens = fields.integer("min_tokens", 0, MAX_TOKENS) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise bad("min_tokens", f"must not be above max_tokens, which is {max_tokens}")
    temperature = fields.number("temperature", 0, 2)
    top_p = fields.number("top_p", 0, 1, above=True)
    top_k = fields.integer("top_k", -1, 2**31 - 1) or 0
    prompt_logprobs = fields.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if prompt_logprobs is not None and stream:
        raise bad("prompt_logprobs", "not available when stream is true")
    return Options(
        model=fields.text("model", 1024),
        stream=stream,
        include_usage=include_usage,
        running_usage=running_usage,
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(0, top_k),
        seed=fields.integer("seed", -_INT_64, _INT_64 - 1),
        stop=_stop(fields),
        stop_token_ids=fields.token_ids("stop_token_ids", MAX_STOP_TOKEN_IDS) or (),
        include_stop=fields.boolean("include_stop_str_in_output"),
        rules=parse_logit_rules(fields),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=fields.boolean("skip_special_tokens", default=True),
        spaces_between_special_tokens=fields.boolean("spaces_between_special_tokens", default=True),
        ignore_eos=fields.boolean("ignore_eos"),
        return_token_ids=fields.boolean("return_token_ids"),
        priority=fields.integer("priority", -_INT_64, _INT_64 - 1) or 0,
        cache_salt=(fields.text("cache_salt", 1024) or "").encode(),
        kv=parse_kv_params(fields, choices=n * prompts, prompts=prompts),
    )


def _stream_usage(fields: Fields, *, stream: bool) -> tuple[bool, bool]:
    """Whether usage is wanted at the end of the stream, and in every chunk of it."""
    options = fields.object("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise bad("stream_options", "needs stream to be true")
    include = options.boolean("include_usage")
    return include, options.boolean("continuous_usage_stats") and include


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else fields.items("stop", MAX_STOPS) or []
    for one in found:
        if not isinstance(one, str) or not 0 < len(one) <= MAX_STOP_CHARACTERS:
            raise bad(
                "stop",
                f"expected strings of 1 to {MAX_STOP_CHARACTERS} characters, got {shown(one)}",
            )
    return tuple(found)


def _prompts(value: object, max_model_len: int | None) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        found: list[Any] = [value]
    elif isinstance(value, list) and value:
        found = cast("list[Any]", value)
        if is_token_id(found[0]):
            return (_ids(found, max_model_len),)
    else:
        raise bad(
            "prompt", "expected a string, strings, token ids or lists of token ids, not empty"
        )
    if len(found) > MAX_PROMPTS:
        raise bad("prompt", f"at most {MAX_PROMPTS} prompts, got {len(found)}")
    return tuple(_prompt(one, index, max_model_len) for index, one in enumerate(found))


def _prompt(value: object, index: int, max_model_len: int | None) -> Prompt:
    if not isinstance(value, str | list):
        raise bad("prompt", f"item {index}: expected a string or token ids, got {shown(value)}")
    if not value:
        raise bad("prompt", f"item {index} is empty")
    if isinstance(value, str):
        return value
    return _ids(cast("list[Any]", value), max_model_len)


def _ids(values: list[Any], max_model_len: int | None) -> tuple[int, ...]:
    if max_model_len is not None and len(values) >= max_model_len:
        raise too_long(max_model_len, f"your prompt has {len(values)} tokens", "prompt")
    return as_token_ids(values, "prompt")


def parse_messages(fields: Fields) -> tuple[Message, ...]:
    """The member `messages`, also that of /tokenize."""
    found = fields.items("messages", MAX_MESSAGES)
    if not found:
        raise bad("messages", "expected a list of messages, not empty")
    parts = sum(map(_count_parts, found))
    if parts > MAX_PARTS:
        raise bad("messages", f"at most {MAX_PARTS} parts of content, got {parts}")
    return tuple(_message(one, f"messages[{index}]") for index, one in enumerate(found))


def _count_parts(message: object) -> int:
    content = cast("dict[str, Any]", message).get("content") if isinstance(message, dict) else None
    return len(cast("list[Any]", content)) if isinstance(content, list) else 0


def _message(value: object, name: str) -> Message:
    if not isinstance(value, dict):
        raise bad(name, f"expected an object, got {shown(value)}")
    fields = Fields(cast("dict[str, Any]", value), f"{name}.")
    role = fields.get("role")
    if role not in _ROLES:
        raise bad(f"{name}.role", f"expected one of {', '.join(_ROLES)}, got {shown(role)}")
    for key in ("tool_calls", "function_call", "audio"):
        if fields.get(key):
            raise bad(f"{name}.{key}", "this engine does not support it yet")
    message: Message = {"role": role, "content": _content(fields.get("content"), f"{name}.content")}
    speaker = fields.text("name", 256)
    return message if speaker is None else {**message, "name": speaker}


def _content(value: object, name: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad(name, f"expected a string or a list of parts, got {shown(value)}")
    texts: list[str] = []
    for index, part in enumerate(cast("list[Any]", value)):
        if not isinstance(part, dict):
            raise bad(f"{name}[{index}]", f"expected an object, got {shown(part)}")
        fields = Fields(cast("dict[str, Any]", part), f"{name}[{index}].")
        kind, text = fields.get("type"), fields.get("text")
        if kind != "text":
            raise bad(f"{name}[{index}].type", f"this engine takes text only, got {shown(kind)}")
        if not isinstance(text, str):
            raise bad(f"{name}[{index}].text", f"expected a string, got {shown(text)}")
        texts.append(text)
    return "\n".join(texts)
