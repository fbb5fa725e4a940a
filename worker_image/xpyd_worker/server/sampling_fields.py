"""The sampling fields of a request body that change logits, checked. Pure.

Both endpoints take them. Ranges are OpenAI's and vLLM's; the bounds on lists and what the model has
to say (is an id in its vocabulary, how is a word tokenized) are ours, the latter behind this.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, cast

from xpyd_worker.server.fields import Fields, bad, is_token_id, shown

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
