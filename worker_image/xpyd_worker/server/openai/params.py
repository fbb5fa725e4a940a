"""The bodies of completions and chats as checked values: options, sampling, KV transfer. Pure.

xpyd_core.openai describes the fields and their bounds; this module checks what two fields forbid
together, fills in defaults, and makes the frozen values that the engine's server works with.
ApiError 400 names the field at fault. It must not know the model, the engine or HTTP.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import msgspec

from xpyd_core.bodies import (
    NO_VALUE,
    check_text,
    is_absent,
    most_ids_in,
    prompt_items,
    read,
    refuse,
)
from xpyd_core.complaints import shown
from xpyd_core.errors import ApiError
from xpyd_core.openai import (
    MAX_PROMPTS,
    ChatRequest,
    CompletionOptions,
    KvTransferParams,
    Prompts,
    RoutedChat,
    RoutedCompletion,
    TokenId,
)
from xpyd_worker.grammar.fields import grammar_of
from xpyd_worker.grammar.spec import Grammar
from xpyd_worker.model.generation import OPENAI_DEFAULTS, SamplingDefaults
from xpyd_worker.parsers.registry import ChatOptions
from xpyd_worker.server.openai.chats import Conversation, chat_options, conversation_of
from xpyd_worker.server.openai.not_built import refuse_not_built

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions without the field."""
MAX_N = 128
MAX_CHOICES = 1024
"""The most choices of all prompts. vLLM has no bound; without one a small body could order
unbounded work."""
MAX_CONTINUE_TOKENS = 2**20
# OpenAI's range. A value outside of it is taken for its end, as vLLM does.
_MOST_BIAS = 100.0
_MOST_ID_DIGITS = 10
_MOST_ID = 2**31 - 1
_SEED = 2**64
_Item = TypeVar("_Item")


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


Prompt = str | Sequence[int]
"""A text, or ids: a tuple, or an array where there are many."""
_Common = RoutedCompletion | RoutedChat
_Own = CompletionOptions | ChatRequest


@dataclass(frozen=True)
class Options:
    """What both endpoints take. `max_tokens` None: none was given. `logprobs` None: none wanted.

    `include_usage`: a last chunk with usage; `running_usage`: usage in every chunk (vLLM's
    continuous_usage_stats). `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off,
    as are `min_p` 0, `repetition_penalty` 1, and the other two penalties 0. The lower
    its `priority`, the earlier a request runs.
    `include_stop`: stop strings and stop tokens are part of the text.
    `truncate`: so many tokens of each prompt's end are kept, of -1 as many as there is room for;
    None: all. `grammar`: what each choice must look like as a whole; None: anything. `chat`: what
    an answer may hold besides content; None of a completion.
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
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    allowed_token_ids: tuple[int, ...]
    bad_words: tuple[str, ...]
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    ignore_eos: bool
    return_token_ids: bool
    cache_salt: bytes
    priority: int
    kv: KvParams
    truncate: int | None = None
    grammar: Grammar | None = None
    chat: ChatOptions | None = None


@dataclass(frozen=True)
class CompletionCall:
    """A checked /v1/completions body. `prompts` has one entry at least."""

    options: Options
    prompts: tuple[Prompt, ...]
    echo: bool


@dataclass(frozen=True)
class ChatCall:
    """A checked /v1/chat/completions body."""

    options: Options
    conversation: Conversation


class _LongMembers(msgspec.Struct, frozen=True, gc=False):
    """Members that are read apart from the others."""

    prompt: msgspec.Raw = NO_VALUE
    kv_transfer_params: msgspec.Raw = NO_VALUE


class _ContinuedIds(msgspec.Struct, frozen=True, gc=False):
    """What of kv_transfer_params may be long."""

    continue_from: msgspec.Raw = NO_VALUE


def parse_completion(
    body: bytes,
    *,
    max_model_len: int | None = None,
    defaults: SamplingDefaults = OPENAI_DEFAULTS,
) -> CompletionCall:
    """The body of /v1/completions. Ids that are more than `max_model_len` are not looked at."""
    check_text(body)
    common, own = read(RoutedCompletion, body), read(CompletionOptions, body)
    refuse_not_built(body, chat=False)
    members = read(_LongMembers, body)
    most = None if own.truncate_prompt_tokens else max_model_len
    prompts = read_prompts(members.prompt, most)
    options = _options(
        members.kv_transfer_params,
        common,
        own,
        max_tokens=_max_tokens("max_tokens", common.max_tokens, own, echo=bool(common.echo)),
        logprobs=own.logprobs,
        prompts=len(prompts),
        defaults=defaults,
        own_max_tokens=COMPLETION_MAX_TOKENS,
    )
    return CompletionCall(options, prompts, bool(common.echo))


def parse_chat(body: bytes, *, defaults: SamplingDefaults = OPENAI_DEFAULTS) -> ChatCall:
    """The body of /v1/chat/completions."""
    check_text(body)
    common = read(RoutedChat, body)
    refuse_not_built(body, chat=True)
    own, members = read(ChatRequest, body), read(_LongMembers, body)
    conversation = conversation_of(body, own.messages, own)
    chat = chat_options(own)
    newer = _max_tokens("max_completion_tokens", common.max_completion_tokens, own)
    older = _max_tokens("max_tokens", common.max_tokens, own)
    if own.top_logprobs and not own.logprobs:
        raise refuse("top_logprobs", "needs logprobs to be true")
    options = _options(
        members.kv_transfer_params,
        common,
        own,
        max_tokens=older if newer is None else newer,
        logprobs=(own.top_logprobs or 0) if own.logprobs else None,
        prompts=1,
        defaults=defaults,
        own_max_tokens=None,
    )
    return ChatCall(replace(options, chat=chat), conversation)


def too_long(max_model_len: int, detail: str, param: str) -> ApiError:
    """A 400 in OpenAI's words for what is longer than the context; `detail` says how long it is."""
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, {detail}. "
        "Please reduce the length of the prompt or of the completion."
    )
    return ApiError(400, message, param=param, code="context_length_exceeded")


def _max_tokens(name: str, value: int | None, own: _Own, *, echo: bool = False) -> int | None:
    if value == 0 and not echo and own.prompt_logprobs is None:
        raise refuse(name, "must be at least 1; 0 only with echo or prompt_logprobs")
    return value


def _options(
    kv_transfer_params: msgspec.Raw,
    common: _Common,
    own: _Own,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompts: int,
    defaults: SamplingDefaults,
    own_max_tokens: int | None,
) -> Options:
    """`own_max_tokens`: the endpoint's default."""
    include_usage, running_usage = _stream_usage(common)
    n = 1 if common.n is None else common.n
    if n > MAX_N:
        raise refuse("n", f"must be 1 to {MAX_N}, got {n}")
    if n * prompts > MAX_CHOICES:
        raise refuse("n", f"at most {MAX_CHOICES} choices (prompts x n), got {n * prompts}")
    min_tokens = common.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise refuse("min_tokens", f"must not be above max_tokens, which is {max_tokens}")
    most = defaults.max_tokens
    if most is not None:
        asked = own_max_tokens if max_tokens is None else max_tokens
        max_tokens = most if asked is None else min(asked, most)
    if own.prompt_logprobs is not None and common.stream:
        raise refuse("prompt_logprobs", "not available when stream is true")
    return Options(
        model=common.model,
        stream=bool(common.stream),
        include_usage=include_usage,
        running_usage=running_usage,
        n=n,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(own.temperature, defaults.temperature),
        top_p=_or(own.top_p, defaults.top_p),
        top_k=max(0, _or(own.top_k, defaults.top_k)),
        seed=common.seed,
        stop=(own.stop,) if isinstance(own.stop, str) else tuple(own.stop or ()),
        stop_token_ids=tuple(own.stop_token_ids or ()),
        include_stop=bool(own.include_stop_str_in_output),
        min_p=_or(own.min_p, defaults.min_p),
        repetition_penalty=_or(own.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=own.presence_penalty or 0.0,
        frequency_penalty=own.frequency_penalty or 0.0,
        logit_bias=_logit_bias(own.logit_bias or {}),
        allowed_token_ids=tuple(dict.fromkeys(own.allowed_token_ids or ())),
        bad_words=tuple(dict.fromkeys(own.bad_words or ())),
        logprobs=logprobs,
        prompt_logprobs=own.prompt_logprobs,
        skip_special_tokens=own.skip_special_tokens is not False,
        spaces_between_special_tokens=own.spaces_between_special_tokens is not False,
        ignore_eos=bool(own.ignore_eos),
        return_token_ids=bool(common.return_token_ids),
        priority=own.priority or 0,
        cache_salt=(own.cache_salt or "").encode(),
        kv=_kv_params(kv_transfer_params, choices=n * prompts, prompts=prompts),
        truncate=_truncated(own.truncate_prompt_tokens),
        grammar=grammar_of(own),
    )


def _truncated(tokens: int | None) -> int | None:
    if tokens == 0:
        raise refuse("truncate_prompt_tokens", "expected -1 or at least 1: no token would be left")
    return tokens


def _or(value: _Item | None, default: _Item) -> _Item:
    return default if value is None else value


def _stream_usage(common: _Common) -> tuple[bool, bool]:
    """Whether usage is wanted at the end of the stream, and in every chunk of it."""
    options = common.stream_options
    if options is None:
        return False, False
    if not common.stream:
        raise refuse("stream_options", "needs stream to be true")
    include = bool(options.include_usage)
    return include, bool(options.continuous_usage_stats) and include


def _logit_bias(members: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    for key, bias in members.items():
        is_number = key.isascii() and key.isdecimal() and len(key) <= _MOST_ID_DIGITS
        if not is_number or int(key) > _MOST_ID:
            raise refuse("logit_bias", f"expected token ids as keys, got {shown(key)}")
        if not math.isfinite(bias):
            raise refuse("logit_bias", f"{key}: expected a finite number, got {shown(bias)}")
        found[int(key)] = max(-_MOST_BIAS, min(_MOST_BIAS, bias))
    return tuple(found.items())


_SHORT_BYTES = 64 * 1024
"""A prompt of less JSON is read at once: its ids take twelve times as much in Python."""


def read_prompts(raw: msgspec.Raw, max_model_len: int | None) -> tuple[Prompt, ...]:
    """The prompts whose JSON is `raw`. What is too long is refused before it is read."""
    if is_absent(raw):
        raise refuse("prompt", "this field is missing")
    items = prompt_items(raw, MAX_PROMPTS)
    most_ids = max(map(most_ids_in, items), default=0)
    if max_model_len is not None and most_ids >= max_model_len:
        raise too_long(max_model_len, f"your prompt has {most_ids} tokens", "prompt")
    if not most_ids or len(raw) <= _SHORT_BYTES:
        return _prompts(read(cast("type[_Prompts]", Prompts), raw, "prompt"))
    return tuple(_long_prompt(item, index) for index, item in enumerate(items))


def _long_prompt(item: msgspec.Raw, index: int) -> Prompt:
    if most_ids_in(item):
        return _token_ids(bytes(item), index)
    return read(str, item, f"prompt[{index}]")


def _token_ids(text: bytes, index: int) -> Sequence[int]:
    """The ids of a long list, read in pieces: an int of Python's is eight times as long."""
    found = array("i")
    start, end = 1, len(text) - 1
    while start < end:
        cut = text.find(b",", start + _SHORT_BYTES, end)
        cut = end if cut < 0 else cut
        piece = b"[" + text[start:cut] + b"]"
        try:
            found.extend(read(list[TokenId], piece, "prompt"))
        except ApiError as error:
            place = f"prompt {index}, behind item {len(found)}"
            raise refuse("prompt", f"{place}: {error}") from None
        start = cut + 1
    return found


_Prompts = str | list[int | str | list[int]]


def _prompts(value: _Prompts) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value[0], int):
        for index, one in enumerate(value):
            if not isinstance(one, int):
                raise refuse("prompt", f"item {index}: expected a token id, got {shown(one)}")
        return (tuple(cast("list[int]", value)),)
    found: list[Prompt] = []
    for index, one in enumerate(value):
        if isinstance(one, int):
            raise refuse("prompt", f"item {index}: expected a string or token ids, got {one}")
        found.append(one if isinstance(one, str) else tuple(one))
    return tuple(found)


def _kv_params(raw: msgspec.Raw, *, choices: int, prompts: int) -> KvParams:
    """kv_transfer_params for `prompts` prompts with `choices` choices in all."""
    name = "kv_transfer_params"
    if is_absent(raw):
        return KvParams()
    ids = bytes(read(_ContinuedIds, raw, name).continue_from)
    if ids.count(b"[") > choices + 1:
        raise refuse(f"{name}.continue_from", f"expected {choices} entries")
    if ids.count(b",") >= MAX_CONTINUE_TOKENS + choices:
        raise refuse(f"{name}.continue_from", f"at most {MAX_CONTINUE_TOKENS} token ids")
    found = read(KvTransferParams, raw, name)
    seed, client_max_tokens = found.seed, found.client_max_tokens
    if seed is not None and not -_SEED <= seed <= _SEED:
        raise refuse(f"{name}.seed", f"must be {-_SEED} to {_SEED}, got {shown(seed)}")
    continue_from = _listed(found.continue_from, f"{name}.continue_from", choices)
    if sum(map(len, continue_from)) > MAX_CONTINUE_TOKENS:
        raise refuse(f"{name}.continue_from", f"at most {MAX_CONTINUE_TOKENS} token ids")
    is_unset = isinstance(client_max_tokens, msgspec.UnsetType)
    return KvParams(
        seed=seed,
        from_router=not is_unset,
        client_max_tokens=None if is_unset else client_max_tokens,
        max_model_len=found.max_model_len,
        continue_from=tuple(map(tuple, continue_from)),
        emit_from=_emit_from(found.emit_from, f"{name}.emit_from", continue_from),
        first_logprobs=_listed(found.first_logprobs, f"{name}.first_logprobs", choices),
        response_id=found.response_id,
        created=found.created,
        transfer=_listed(found.transfer, f"{name}.transfer", prompts),
        decode_incarnation=found.decode_incarnation or "",
        prompt_digest=_listed(found.prompt_digest, f"{name}.prompt_digest", prompts),
    )


def _listed(found: Sequence[_Item] | None, name: str, length: int) -> tuple[_Item, ...]:
    """The entries of a list, as many as `length`; none where the field is absent."""
    if found is not None and len(found) != length:
        raise refuse(name, f"expected {length} entries, got {len(found)}")
    return tuple(found or ())


def _emit_from(
    found: Sequence[int] | None, name: str, continue_from: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    emitted = _listed(found, name, len(continue_from))
    for ids, k in zip(continue_from, emitted, strict=False):
        if not 0 <= k <= len(ids):
            raise refuse(name, f"must be 0 to {len(ids)}, got {shown(k)}")
    return emitted or (0,) * len(continue_from)
