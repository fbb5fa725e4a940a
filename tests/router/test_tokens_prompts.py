"""Estimates of tokens: cheap, whatever a client sends."""

from __future__ import annotations

from typing import Any

import pytest

from xpyd_router.tokens.prompts import estimate_tokens


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("x" * 400, 100),
        ("x", 1),
        ("", 1),
        ("é" * 400, 200),
        ("\ud800", 1),
        ([1, 2, 3], 3),
        ([[1, 2, 3], [4]], 4),
        (["x" * 40, [1, 2]], 12),
        (["x" * 40, 7, None], 10),
        ([], 1),
        (None, 1),
        ({"text": "x"}, 1),
    ],
)
def test_a_prompt_is_estimated_by_its_bytes_or_ids(prompt: Any, tokens: int) -> None:
    assert estimate_tokens({"prompt": prompt, "messages": 3}, is_chat=False) == tokens


@pytest.mark.parametrize(
    ("messages", "tokens"),
    [
        ([{"role": "user", "content": "x" * 400}], 104),
        ([{"content": "x" * 40}, {"content": "y" * 40}], 28),
        ([{"content": [{"type": "text", "text": "x" * 40}, {"type": "image_url"}, "x"]}], 14),
        ([{"content": None}, "x", 3], 4),
        ([{"content": {"text": "x"}}], 4),
        ([], 1),
        ("x", 1),
        (None, 1),
    ],
)
def test_a_conversation_is_estimated_by_its_contents(messages: Any, tokens: int) -> None:
    assert estimate_tokens({"messages": messages, "prompt": "x" * 99}, is_chat=True) == tokens
