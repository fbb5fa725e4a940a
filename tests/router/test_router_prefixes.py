"""Marks and sessions of bodies: equal where prompts begin alike, and nowhere else."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from xpyd_router.policy.base import PrefixMark
from xpyd_router.request import client_request
from xpyd_router.request.client_request import InferenceRequest, parse_request

TEXT = "The quick brown fox jumps over the lazy dog. " * 400


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant")
    messages = [
        {"role": roles[place and 1 + (place + 1) % 2], "content": content}
        for place, content in enumerate(contents)
    ]
    return {"model": "m", "messages": messages, **fields}


def parsed(body: dict[str, Any]) -> InferenceRequest:
    endpoint = "chat/completions" if "messages" in body else "completions"
    return parse_request(endpoint, orjson.dumps({"model": "m", **body}))


def text_marks(body: dict[str, Any]) -> tuple[PrefixMark, ...]:
    return client_request.text_marks(parsed(body).members)


def session_in(body: dict[str, Any]) -> str:
    return client_request.session_in(parsed(body).members)


def shared(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Tokens that both begin with."""
    a, b = text_marks(one), text_marks(other)
    return max([length for length, _ in set(a) & set(b)], default=0)


def test_the_next_turn_begins_with_the_last_one() -> None:
    first = chat("You are kind.", TEXT[:4000])
    second = chat("You are kind.", TEXT[:4000], TEXT[:800], "And then?")
    assert 900 < shared(first, second) <= 1030
    assert shared(first, chat("You are rude.", TEXT[:4000])) == 0


@pytest.mark.parametrize("characters", [400, 1000, 5000, 12_000])
def test_what_two_prompts_have_in_common_is_known_to_an_eighth(characters: int) -> None:
    one = {"model": "m", "prompt": TEXT[:characters] + "one" * 500}
    other = {"model": "m", "prompt": TEXT[:characters] + "two" * 500}
    tokens = characters / 4
    assert 0.85 * tokens - 16 <= shared(one, other) <= tokens + 1


def test_ids_are_compared_as_text_is() -> None:
    ids = list(range(1000, 2000))
    assert shared({"model": "m", "prompt": ids}, {"model": "m", "prompt": [*ids, 7]}) > 1000
    assert shared({"model": "m", "prompt": ids}, {"model": "m", "prompt": ids[1:]}) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"cache_salt": "mine"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
)
def test_what_changes_the_whole_prompt_leaves_nothing_in_common(changes: dict[str, Any]) -> None:
    one = chat("You are kind.", TEXT)
    assert shared(one, {**one, **changes}) == 0
    assert shared({**one, **changes}, {**one, **changes, "seed": 3}) > 3000


def test_a_prompt_of_any_length_has_few_marks() -> None:
    made = text_marks({"model": "m", "prompt": TEXT * 100})
    assert len(made) == 58
    assert made[-1][0] > 28_000
    assert [length for length, _ in made[:9]] == [16 * blocks for blocks in range(1, 10)]
    assert text_marks({"model": "m", "prompt": "short"}) == ()
    assert text_marks({"model": "m"}) == ()


def test_sessions() -> None:
    assert session_in({"user": "ann"}) == "ann"
    assert session_in({"user": "ann", "prompt_cache_key": "talk 7"}) == "talk 7"
    assert session_in({"user": "", "prompt_cache_key": None}) == ""
    assert session_in({"user": 7, "prompt_cache_key": ["x"]}) == ""
    assert len(session_in({"user": "x" * 100_000})) == 512
