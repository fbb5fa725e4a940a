"""Request bodies: what the client sent -> what P and D get. Pure.

The router checks only what it acts on itself; the rest is the engine's to validate, and P sees
every field before anything is streamed. D's body is the client's bytes with kv_transfer_params
spliced in; nothing else of it is encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import msgspec
import orjson

from xpyd_core.errors import ApiError

Endpoint = Literal["completions", "chat/completions"]
ENDPOINTS: tuple[Endpoint, ...] = ("completions", "chat/completions")
MAX_NAME_CHARACTERS = 512
MAX_CHOICES = 16_384
"""Of all prompts: the router keeps something for each. Engines allow fewer."""
MAX_DEPTH = 254
"""Of lists and objects in the body: orjson reads more of them than it writes."""
_BYTES_PER_TOKEN = 4
"""Of English text; without the model's tokenizer a body's length is what is known."""
_EXPECTED_TOKENS = 256
_MOST_EXPECTED_TOKENS = 1024
"""Clients give limits far above what their answers need."""
_COMPLETIONS_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions without the field."""


class Ask(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A client's request: its bytes and what the router reads in them. Made for every request: a
    Struct takes a twelfth of a frozen dataclass's time.
    """

    endpoint: Endpoint
    raw: bytes
    fields: Mapping[str, Any]
    model: str
    stream: bool
    include_usage: bool
    wants_running_usage: bool
    wants_token_ids: bool
    max_tokens: int | None
    """The client's limit; None where it gave none."""
    seed: int | None
    choices: int
    """Of all prompts together."""
    prompt_tokens: int
    """An estimate by the body's length, for policies and limits that have no count."""
    output_tokens: int
    """An estimate of what is generated: the limit, where it is no figure of fear."""
    shows_prompt: bool
    """The answer holds the prompt's text or logprobs."""
    alone: Literal["P", "D"] | None
    """Where it runs alone: what ends with P's token on P, what shows the prompt's side on D."""

    @property
    def is_chat(self) -> bool:
        """Whether answers are chat completions."""
        return self.endpoint == "chat/completions"


def _bad(field: str, message: str) -> ApiError:
    return ApiError(400, f"{field}: {message}", param=field)


def _boolean(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is None or value is False:
        return False
    if value is not True:
        raise _bad(name, "expected true or false")
    return True


def _integer(fields: Mapping[str, Any], name: str, least: int | None = None) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int:  # True is an int, too
        raise _bad(name, "expected an integer")
    if least is not None and value < least:
        raise _bad(name, f"expected at least {least}")
    return value


def _stream_options(fields: Mapping[str, Any], stream: bool) -> tuple[bool, bool]:
    """Whether the client wants usage at the stream's end, and in every chunk."""
    options = fields.get("stream_options")
    if options is None:
        return False, False
    if not isinstance(options, dict):
        raise _bad("stream_options", "expected an object")
    if not stream:
        raise _bad("stream_options", "only allowed when stream is true")
    options = cast("dict[str, Any]", options)
    at_end = _boolean(options, "include_usage")
    return at_end, _boolean(options, "continuous_usage_stats") and at_end  # as in vLLM


def _load(raw: bytes) -> dict[str, Any]:
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    return cast("dict[str, Any]", fields)


def _shows_prompt(fields: Mapping[str, Any], endpoint: Endpoint) -> bool:
    """Whether the answer holds the prompt's text or logprobs, which only a prefill makes."""
    echo = endpoint == "completions" and _boolean(fields, "echo")
    wanted = fields.get("prompt_logprobs")  # 0 is a wish too, and equals False
    return echo or (wanted is not None and wanted is not False)


def _limit(fields: Mapping[str, Any], endpoint: Endpoint) -> int | None:
    limit = _integer(fields, "max_tokens", 0)
    if endpoint == "chat/completions":
        newer = _integer(fields, "max_completion_tokens", 0)
        limit = newer if newer is not None else limit
    return limit


def _prompts(fields: Mapping[str, Any], endpoint: Endpoint) -> int:
    """How many prompts the body has; what is no valid prompt is the engine's to refuse."""
    prompt = fields.get("prompt")
    if endpoint != "completions" or not isinstance(prompt, list) or not prompt:
        return 1
    first = cast("list[Any]", prompt)[0]
    return len(cast("list[Any]", prompt)) if isinstance(first, str | list) else 1


def _choices(fields: Mapping[str, Any], endpoint: Endpoint) -> int:
    each, prompts = _integer(fields, "n", 1) or 1, _prompts(fields, endpoint)
    if each * prompts > MAX_CHOICES:
        field = "n" if each > 1 else "prompt"
        raise _bad(field, f"expected at most {MAX_CHOICES} choices (prompts x n)")
    return each * prompts


def parse_ask(endpoint: Endpoint, raw: bytes) -> Ask:
    """The request in `raw`; ApiError 400 that names the field and what is allowed."""
    fields = _load(raw)
    model = fields.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= MAX_NAME_CHARACTERS:
        raise _bad("model", "you must provide the model's name as a string")
    if fields.get("kv_transfer_params") is not None:
        raise _bad("kv_transfer_params", "set by the router, not by clients")
    stream = _boolean(fields, "stream")
    include_usage, running_usage = _stream_options(fields, stream)
    choices = _choices(fields, endpoint)
    shows_prompt = _shows_prompt(fields, endpoint)
    limit = _limit(fields, endpoint)
    if limit == 0 and not shows_prompt:
        raise _bad("max_tokens", "expected at least 1 (0 only with echo or prompt_logprobs)")
    least = _integer(fields, "min_tokens", 0) or 0
    most = limit
    if endpoint == "completions" and limit is None:
        most = _COMPLETIONS_MAX_TOKENS
    if most is not None and least > most:
        raise _bad("min_tokens", f"must not be more than max_tokens, {most}")
    alone: Literal["P", "D"] | None = None
    if limit is not None and limit <= 1:
        alone = "P"
    elif shows_prompt:
        alone = "D"
    return Ask(
        endpoint=endpoint,
        raw=raw,
        fields=fields,
        model=model,
        stream=stream,
        include_usage=include_usage,
        wants_running_usage=running_usage,
        wants_token_ids=_boolean(fields, "return_token_ids"),
        max_tokens=limit,
        seed=_integer(fields, "seed"),
        choices=choices,
        prompt_tokens=len(raw) // _BYTES_PER_TOKEN + 1,
        output_tokens=choices * min(most or _EXPECTED_TOKENS, _MOST_EXPECTED_TOKENS),
        shows_prompt=shows_prompt,
        alone=alone,
    )


def _too_deep(fields: Mapping[str, Any]) -> ApiError:
    for name, value in fields.items():
        try:
            orjson.dumps({name: value})
        except TypeError:
            return _bad(name[:MAX_NAME_CHARACTERS], f"nested more than {MAX_DEPTH} levels deep")
    return ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep")


def prefill_body(ask: Ask, params: Mapping[str, Any] | None = None) -> bytes:
    """P's body: one token behind what it continues, not streamed.

    `params` is None for an engine without continuation; else {seed, client_max_tokens,
    continue_from?}, with one list of ids per choice in continue_from. ApiError 400 for a field that
    is nested too deeply.
    """
    fields = dict(ask.fields)
    limit = 1
    if params is not None:
        ids: Sequence[Sequence[int]] = params.get("continue_from") or ((),)
        limit += len(ids[0])
        fields["return_token_ids"] = True
        fields["kv_transfer_params"] = params
    fields["stream"] = False
    fields.pop("stream_options", None)
    fields["max_tokens"] = limit
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = limit
    if fields.get("min_tokens") is not None:
        fields["min_tokens"] = min(fields["min_tokens"], limit)
    try:
        return orjson.dumps(fields)
    except TypeError as error:  # all else that was read can be written
        raise _too_deep(ask.fields) from error


def splice(raw: bytes, params: Mapping[str, Any]) -> bytes:
    """The JSON object `raw`, byte for byte, with kv_transfer_params as its last member.

    A client's own `"kv_transfer_params": null` stays before it: of two members of one name the last
    counts, as in every parser that engines use. `raw` is an object with at least one member.
    """
    end = raw.rindex(b"}")
    return raw[:end] + b',"kv_transfer_params":' + orjson.dumps(params) + raw[end:]
