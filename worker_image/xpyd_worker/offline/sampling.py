"""The user's SamplingParams, under vLLM's names; checked by the rules of the HTTP API. Pure.

The engine has a SamplingParams of its own (engine.request), which holds what is left of these when
the server's part (stop strings, defaults, the seed) is done.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, cast

import msgspec

from xpyd_core.errors import UserError
from xpyd_worker.model.generation import SamplingDefaults
from xpyd_worker.server.openai.params import Options, parse_completion


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What an answer must look like: one of the first six, under vLLM's names.

    Their meanings are those of the HTTP API's `structured_outputs` (docs/agents.md).
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema, or its text."""
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    """Rules in Lark's or GBNF's notation."""
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def as_json(self) -> dict[str, object]:
        """The member `structured_outputs` of a body."""
        root = "structured_outputs"
        return {
            one.name: as_json(value, f"{root}.{one.name}")
            for one in fields(self)
            if (value := getattr(self, one.name)) != one.default
        }


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are drawn, and when it ends.

    Names, meanings and defaults are those of vLLM's class; the bounds are those of the HTTP API
    (docs/engine.md, API). Raises UserError that names the field when a value is out of them, or
    asks for what this engine does not have.
    """

    n: int = 1
    """Choices per prompt."""
    temperature: float = 1.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids."""
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    """The same seed gives the same tokens, whatever else runs. None: drawn from the LLM's seed."""
    stop: str | Sequence[str] | None = None
    """Texts that end a choice; not in its output."""
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """The most tokens of a choice; None: as many as the context has room for."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Alternatives per output token; 0: the token's own only."""
    prompt_logprobs: int | None = None
    """Alternatives per prompt token; 0: the token's own only."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    """Matters only without skip_special_tokens, to tokenizers that put spaces between tokens."""
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> Options:
        """The options that the server's parser makes of these for one prompt."""
        body: dict[str, Any] = {"prompt": [0]}
        for field in fields(self):
            value = getattr(self, field.name)
            # The API's default of max_tokens depends on the endpoint: this one's is always said.
            if value != field.default or field.name == "max_tokens":
                body[field.name] = as_json(value, field.name)
        return parse_completion(msgspec.json.encode(body)).options


def default_params(defaults: SamplingDefaults) -> SamplingParams:
    """The parameters of a call that names none."""
    return SamplingParams(
        temperature=defaults.temperature,
        top_p=defaults.top_p,
        top_k=defaults.top_k,
        min_p=defaults.min_p,
        repetition_penalty=defaults.repetition_penalty,
        max_tokens=min(SamplingParams.max_tokens or 0, defaults.max_tokens or 2**62),
    )


def as_json(value: object, name: str) -> object:
    """A value as it would come out of a JSON body. UserError for what cannot."""
    if isinstance(value, StructuredOutputsParams):
        return value.as_json()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        check_text(value, name)
        return value
    if isinstance(value, Integral):  # numpy's, too
        if not -(2**63) <= int(value) < 2**64:
            raise UserError(f"{name}: a number of more than 64 bits")
        return int(value)
    if isinstance(value, Real):
        if not math.isfinite(value):
            raise UserError(f"{name}: expected a finite number, got {value}")
        return float(value)
    if isinstance(value, Mapping):
        members = cast("Mapping[object, object]", value).items()
        return {str(key): as_json(one, name) for key, one in members}
    if isinstance(value, Sequence):
        return [as_json(one, name) for one in cast("Sequence[object]", value)]
    raise UserError(f"{name}: {type(value).__name__} is no value of JSON")


def check_text(text: str, name: str) -> None:
    """UserError where `text` has half a surrogate pair, which a Python text may hold and a JSON
    body may not: no tokenizer has bytes for it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name}: character {error.start} is {text[error.start]!r}, half a surrogate pair; "
            'decode the text anew, e.g. with errors="replace"'
        ) from None
