"""The bodies of completions and chats as checked values: options, sampling, KV transfer. Pure.

JSON members in (fields.py), frozen values out; ApiError 400 names the member at fault. It must not
know the model, the engine or HTTP.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from xpyd_worker.server.openai.fields import (
    Fields,
    as_token_ids,
    bad,
    is_token_id,
    refuse_not_built,
    shown,
    too_long,
)

# Each is work per token put out, and OpenAI and vLLM state no bound.
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 65_536
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 128
# OpenAI's range. What lies outside is taken for its end, as vLLM does.
_MOST_BIAS = 100.0
# vLLM takes any finite number above 0; no wider range than this one means anything.
_MOST_REPETITION_PENALTY = 1e6
_MOST_ID_DIGITS = 10


@dataclass(frozen=True)
class LogitRules:
    """What changes the logits of a request's tokens; the defaults change nothing."""

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()


def parse_logit_rules(fields: Fields) -> LogitRules:
    """The rules in a body; ApiError 400 that names the field."""
    repetition = fields.number("repetition_penalty", 0, _MOST_REPETITION_PENALTY, above=True)
    return LogitRules(
        min_p=fields.number("min_p", 0, 1) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        presence_penalty=fields.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=fields.number("frequency_penalty", -2, 2) or 0.0,
        logit_bias=_logit_bias(fields),
        allowed_token_ids=_allowed(fields),
        bad_words=_bad_words(fields),
    )


def _logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    name, value = "logit_bias", fields.get("logit_bias")
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise bad(name, f"expected an object of token ids and numbers, got {shown(value)}")
    members = cast("dict[str, Any]", value)
    if len(members) > MAX_LOGIT_BIAS:
        raise bad(name, f"at most {MAX_LOGIT_BIAS} entries, got {len(members)}")
    found: dict[int, float] = {}
    values = Fields(members)
    for key in members:
        is_number = key.isascii() and key.isdecimal() and len(key) <= _MOST_ID_DIGITS
        token_id = int(key) if is_number else -1
        if not is_token_id(token_id):
            raise bad(name, f"expected token ids as keys, got {shown(key)}")
        bias = values.get(key)
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not _is_finite(bias):
            raise bad(name, f"{key}: expected a finite number, got {shown(bias)}")
        found[token_id] = float(max(-_MOST_BIAS, min(_MOST_BIAS, bias)))
    return tuple(found.items())


def _is_finite(number: float) -> bool:
    """Also of an integer beyond the floats, for which math's raises."""
    return abs(number) <= sys.float_info.max


def _allowed(fields: Fields) -> tuple[int, ...]:
    found = fields.token_ids("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)
    if found is not None and not found:
        raise bad("allowed_token_ids", "must not be empty; leave it out to allow all tokens")
    return tuple(dict.fromkeys(found or ()))


def _bad_words(fields: Fields) -> tuple[str, ...]:
    found = fields.items("bad_words", MAX_BAD_WORDS) or []
    for word in found:
        if not isinstance(word, str) or not 0 < len(word) <= MAX_BAD_WORD_CHARACTERS:
            raise bad(
                "bad_words",
                f"expected strings of 1 to {MAX_BAD_WORD_CHARACTERS} characters, got {shown(word)}",
            )
    return tuple(dict.fromkeys(found))


MAX_CONTINUE_TOKENS = 2**20
_STATES = ("none", "pending", "granted")
_SEED = 2**64


@dataclass(frozen=True)
class KvParams:
    """Checked kv_transfer_params.

    `from_router`: the key client_max_tokens was there (its value may be null): our router asks P.
    `continue_from`: ids that each choice already put out; empty for none. `emit_from`: of how many
    of them the client has the text. `first_logprobs`: P's `logprobs` objects, per choice.
    `max_model_len` is the smaller context of the pair: P refuses what D could not hold.
    `transfer`, `decode_incarnation` and `prompt_digest` are P's answer; empty where not given.
    """

    seed: int | None = None
    from_router: bool = False
    client_max_tokens: int | None = None
    max_model_len: int | None = None
    continue_from: tuple[tuple[int, ...], ...] = ()
    emit_from: tuple[int, ...] = ()
    first_logprobs: tuple[dict[str, Any] | None, ...] = ()
    response_id: str | None = None
    created: int | None = None
    transfer: tuple[str, ...] = ()
    decode_incarnation: str = ""
    prompt_digest: tuple[str, ...] = ()


def parse_kv_params(body: Fields, *, choices: int, prompts: int) -> KvParams:
    """The body's kv_transfer_params for `prompts` prompts with `choices` choices in all."""
    fields = body.object("kv_transfer_params")
    if fields is None:
        return KvParams()
    continue_from = _continue_from(fields, choices)
    return KvParams(
        seed=fields.integer("seed", -_SEED, _SEED),
        from_router=fields.has("client_max_tokens"),
        client_max_tokens=fields.integer("client_max_tokens", 0, 2**62),
        max_model_len=fields.integer("max_model_len", 1, 2**53),
        continue_from=continue_from,
        emit_from=_emit_from(fields, continue_from),
        first_logprobs=_first_logprobs(fields, choices),
        response_id=fields.text("response_id", 256),
        created=fields.integer("created", 0, 2**53),
        transfer=_words(fields, "transfer", prompts, _STATES),
        decode_incarnation=fields.text("decode_incarnation", 64) or "",
        prompt_digest=_words(fields, "prompt_digest", prompts, None),
    )


def _list_of(fields: Fields, name: str, length: int) -> list[Any]:
    """A list with `length` entries; empty where absent."""
    found = fields.items(name, length)
    if found is None:
        return []
    if len(found) != length:
        raise bad(fields.name(name), f"expected {length} entries, got {len(found)}")
    return found


def _continue_from(fields: Fields, choices: int) -> tuple[tuple[int, ...], ...]:
    name = fields.name("continue_from")
    result: list[tuple[int, ...]] = []
    for ids in _list_of(fields, "continue_from", choices):
        if not isinstance(ids, list):
            raise bad(name, f"expected lists of token ids, got {shown(ids)}")
        result.append(as_token_ids(cast("list[Any]", ids), name))
    if sum(map(len, result)) > MAX_CONTINUE_TOKENS:
        raise bad(name, f"at most {MAX_CONTINUE_TOKENS} token ids")
    return tuple(result)


def _emit_from(fields: Fields, continue_from: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    found = _list_of(fields, "emit_from", len(continue_from))
    for ids, k in zip(continue_from, found, strict=False):
        if not isinstance(k, int) or isinstance(k, bool) or not 0 <= k <= len(ids):
            raise bad(fields.name("emit_from"), f"must be 0 to {len(ids)}, got {shown(k)}")
    return tuple(found) or (0,) * len(continue_from)


def _first_logprobs(fields: Fields, choices: int) -> tuple[dict[str, Any] | None, ...]:
    found = _list_of(fields, "first_logprobs", choices)
    for one in found:
        if one is not None and not isinstance(one, dict):
            raise bad(fields.name("first_logprobs"), f"expected objects, got {shown(one)}")
    return tuple(found)


def _words(
    fields: Fields, name: str, prompts: int, allowed: tuple[str, ...] | None
) -> tuple[str, ...]:
    found = _list_of(fields, name, prompts)
    for one in found:
        if not isinstance(one, str) or len(one) > 64 or (allowed and one not in allowed):
            raise bad(fields.name(name), f"unexpected entry {shown(one)}")
    return tuple(found)


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
