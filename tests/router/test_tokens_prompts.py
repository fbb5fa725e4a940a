"""Estimates of tokens: cheap, whatever a client sends."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from xpyd_router.tokens.prompts import estimate_tokens


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
    assert estimate_tokens(orjson.dumps(prompt), is_chat=False) == tokens


def test_no_prompt_of_many_bytes_counts_as_few_tokens() -> None:
    assert estimate_tokens(orjson.dumps(["x" * 40_000, [1]]), is_chat=False) >= 10_000
    assert estimate_tokens(b'"' + rb"\\u" * 10_000 + b'"', is_chat=False) >= 3_000


def test_letters_that_are_escaped_count_as_they_are_written_without() -> None:
    short, long = (json.dumps("漢" * 400, ensure_ascii=a).encode() for a in (False, True))
    assert estimate_tokens(long, is_chat=False) == estimate_tokens(short, is_chat=False) == 300


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
    assert estimate_tokens(orjson.dumps(messages), is_chat=True) == tokens
