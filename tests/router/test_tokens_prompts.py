"""Estimates of tokens: cheap, whatever a client sends."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import orjson
import pytest

from xpyd_core.bodies import prompt_shape
from xpyd_core.openai import MAX_CHOICES
from xpyd_router.tokens.prompts import estimate_tokens


def estimate(raw: bytes, *, is_chat: bool = False) -> int:
    prompt = msgspec.Raw(raw)
    return estimate_tokens(prompt, None if is_chat else prompt_shape(prompt, MAX_CHOICES))


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("x" * 400, 100),
        ("x", 1),
        ("", 1),
        ("é" * 400, 200),
        ([1, 2, 3], 3),
        ([[1, 2, 3], [4]], 4),
        (["x" * 40, "y" * 40], 21),
        ([], 1),
        (None, 1),
        ({"text": "x"}, 3),
    ],
)
def test_a_prompt_is_estimated_by_its_bytes_or_ids(prompt: Any, tokens: int) -> None:
    assert estimate(orjson.dumps(prompt)) == tokens


def test_no_prompt_of_many_bytes_counts_as_few_tokens() -> None:
    assert estimate(orjson.dumps(["x" * 40_000, [1]])) >= 10_000
    assert estimate(b'"' + rb"\\u" * 10_000 + b'"') >= 3_000


def test_letters_that_are_escaped_count_as_they_are_written_without() -> None:
    short, long = (json.dumps("漢" * 400, ensure_ascii=a).encode() for a in (False, True))
    assert estimate(long) == estimate(short) == 300


@pytest.mark.parametrize(
    ("messages", "tokens"),
    [
        ([{"role": "user", "content": "x" * 400}], 104),
        ([{"role": "user", "content": "x" * 40}, {"role": "user", "content": "y" * 40}], 28),
        ([], 1),
        ("x", 1),
        (None, 1),
    ],
)
def test_a_conversation_is_estimated_by_its_contents(messages: Any, tokens: int) -> None:
    assert estimate(orjson.dumps(messages), is_chat=True) == tokens
