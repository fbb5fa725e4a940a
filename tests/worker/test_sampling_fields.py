"""Sampling fields of a body: what is taken, what gets 400 and which field the error names."""

from __future__ import annotations

import json
import math
import re
from dataclasses import MISSING, fields
from typing import Any

import pytest

from xpyd_core.errors import ApiError
from xpyd_core.openai import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    Generation,
    body_schema,
)
from xpyd_worker import SamplingParams as UserParams
from xpyd_worker.engine.request import SamplingParams as EngineParams
from xpyd_worker.server.openai.params import Options, parse_chat, parse_completion


def as_json(body: dict[str, Any]) -> bytes:
    """The body; infinity as a number that is too large."""
    return json.dumps(body).replace("Infinity", "1e999").encode()


def parse(endpoint: str, **fields: Any) -> Any:
    """The Options of a body of that endpoint."""
    if endpoint == "completions":
        return parse_completion(as_json({"prompt": "hi", **fields})).options
    messages = [{"role": "user", "content": "hi"}]
    return parse_chat(as_json({"messages": messages, **fields})).options


BOTH = pytest.mark.parametrize("endpoint", ["completions", "chat"])


def rules_of(options: Options) -> tuple[Any, ...]:
    """What changes the logits of a request's tokens."""
    penalties = (
        options.repetition_penalty,
        options.presence_penalty,
        options.frequency_penalty,
    )
    return (
        options.min_p,
        *penalties,
        options.logit_bias,
        options.allowed_token_ids,
        options.bad_words,
    )


@BOTH
def test_all_descriptions_of_a_field_have_one_default(endpoint: str) -> None:
    """The API's is compared with the engine's, the users' and what the OpenAPI document says."""
    options = vars(parse(endpoint))
    engine = {one.name: one.default for one in fields(EngineParams) if one.default is not MISSING}
    assert engine == {name: options[name] for name in engine}
    user = {one.name: one.default for one in fields(UserParams) if one.default is not None}
    del user["max_tokens"], user["include_stop_str_in_output"]  # the API's are other ones
    assert user == {name: options[name] for name in user}
    schemas = body_schema(Generation)["properties"]
    texts = {name: one.get("description", "") for name, one in schemas.items()}
    said = {name: re.search(r"Default: (\w+)", text) for name, text in texts.items()}
    shown = {name: json.loads(found[1]) for name, found in said.items() if found}
    assert "temperature" in shown
    assert shown == {name: options[name] for name in shown}


@BOTH
def test_without_the_fields_nothing_is_changed(endpoint: str) -> None:
    options = parse(endpoint)
    assert rules_of(options) == (0.0, 1.0, 0.0, 0.0, (), (), ())
    assert (options.prompt_logprobs, options.include_stop) == (None, False)
    assert (options.skip_special_tokens, options.spaces_between_special_tokens) == (True, True)


@BOTH
def test_every_field_is_taken(endpoint: str) -> None:
    options = parse(
        endpoint,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-2,
        frequency_penalty=0.5,
        logit_bias={"5": 1, "07": -3.5},
        allowed_token_ids=[3, 1, 3],
        bad_words=["no", "never"],
        prompt_logprobs=0,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
    )
    biases, bad_words = ((5, 1.0), (7, -3.5)), ("no", "never")
    assert rules_of(options) == (0.25, 1.5, -2.0, 0.5, biases, (3, 1), bad_words)
    assert (options.prompt_logprobs, options.include_stop) == (0, True)
    assert (options.skip_special_tokens, options.spaces_between_special_tokens) == (False, False)


def test_a_bias_beyond_openais_range_counts_as_its_end() -> None:
    bias = parse("chat", logit_bias={"1": 1e9, "2": -(10**30)}).logit_bias
    assert bias == ((1, 100.0), (2, -100.0))


@BOTH
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", True),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", 1e300),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("presence_penalty", "1"),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", -math.inf),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"9999999999": 1}),
        ("logit_bias", {"1" * 5000: 1}),
        ("logit_bias", {"\u0661": 1}),
        ("logit_bias", {"1": "2"}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {"1": None}),
        ("logit_bias", {"1": math.inf}),
        ("logit_bias", {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.5]),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", [1] * (MAX_ALLOWED_TOKEN_IDS + 1)),
        ("bad_words", "no"),
        ("bad_words", [""]),
        ("bad_words", [1]),
        ("bad_words", ["x" * (MAX_BAD_WORD_CHARACTERS + 1)]),
        ("bad_words", ["x"] * (MAX_BAD_WORDS + 1)),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", False),
        ("include_stop_str_in_output", 1),
        ("skip_special_tokens", "no"),
        ("spaces_between_special_tokens", 0),
    ],
)
def test_a_wrong_value_is_refused_by_name(endpoint: str, field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parse(endpoint, **{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert len(caught.value.message) < 300


@BOTH
def test_prompt_logprobs_cannot_be_streamed(endpoint: str) -> None:
    with pytest.raises(ApiError, match="prompt_logprobs: not available when stream"):
        parse(endpoint, prompt_logprobs=1, stream=True)


@BOTH
def test_max_tokens_0_shows_the_prompts_log_probabilities_alone(endpoint: str) -> None:
    assert parse(endpoint, prompt_logprobs=1, max_tokens=0).max_tokens == 0
    with pytest.raises(ApiError, match="max_tokens"):
        parse(endpoint, max_tokens=0)
