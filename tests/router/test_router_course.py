"""What a request's tries say to P: contexts of both, and where P may not add a token."""

from __future__ import annotations

import orjson
import pytest

from tests.router.beats import beat
from tests.router.choosing import make_policy
from xpyd_router.fleet.poison import Break
from xpyd_router.fleet.registry import Registry
from xpyd_router.policy.base import Pair, Want
from xpyd_router.requests.answers import Head
from xpyd_router.requests.bodies import parse_ask
from xpyd_router.requests.course import Course, Sent, prefill_params
from xpyd_router.requests.trace import Trace


def pair(p_context: int, d_context: int) -> Pair:
    registry = Registry(period_s=3.0, missed_beats=3)
    registry.apply(beat("P", host=1, continuation=1, max_model_len=p_context), now=0.0)
    registry.apply(beat("D", host=2, continuation=1, max_model_len=d_context), now=0.0)
    chosen = make_policy().pick(registry.snapshot, Want("m"))
    assert isinstance(chosen, Pair)
    return chosen


def course(sent: Sent | None = None, **fields: object) -> Course:
    raw = orjson.dumps({"model": "m", "prompt": "x", **fields})
    return Course(
        ask=parse_ask("completions", raw),
        trace=Trace("completions", 0.0),
        head=Head("cmpl-1", 5),
        public="1",
        seed=3,
        deadline_s=60.0,
        prompt_tokens=1,
        sent=sent,
    )


@pytest.mark.parametrize(
    ("p_context", "d_context", "said"), [(2048, 128, 128), (128, 2048, 128), (2048, 0, 2048)]
)
def test_p_hears_the_smaller_context_so_that_it_refuses_for_d_too(
    p_context: int, d_context: int, said: int
) -> None:
    params = prefill_params(course(max_tokens=9), pair(p_context, d_context))
    assert params == {"seed": 3, "client_max_tokens": 9, "max_model_len": said}


def test_nothing_is_said_of_contexts_that_nobody_told() -> None:
    assert "max_model_len" not in prefill_params(course(), pair(0, 0))


@pytest.mark.parametrize(
    ("prompt_tokens", "ids", "extends"),
    [(100, 1, True), (126, 1, False), (125, 1, True), (124, 2, True), (125, 2, False)],
)
def test_at_the_contexts_last_token_p_adds_none(
    prompt_tokens: int, ids: int, extends: bool
) -> None:
    sent = Sent([[7] * ids], "k", {"prompt_tokens": prompt_tokens}, "m")
    tried = course(sent)
    params = prefill_params(tried, pair(128, 128))
    assert tried.extends == extends
    assert ("continue_from" in params) == extends
    assert ("client_max_tokens" in params) == extends


def broke_at(tokens: list[int]) -> int:
    """How many deaths a stream has met that broke when the client had so many tokens."""
    tried = course(Sent([[]], "k", {}, "m"))
    for had in tokens:
        assert tried.sent is not None
        tried.sent.token_ids[0] = [7] * had
        tried.met(Break(0.0))
    return len(tried.breaks)


@pytest.mark.parametrize(
    ("tokens", "deaths"),
    [([0, 1], 2), ([500, 503], 2), ([5, 36], 2), ([5, 37], 1), ([0, 40, 41, 90], 1)],
)
def test_who_streamed_much_did_not_die_of_the_same(tokens: list[int], deaths: int) -> None:
    assert broke_at(tokens) == deaths


def test_one_death_is_met_once() -> None:
    tried, broken = course(), Break(0.0)
    for _ in range(2):
        tried.met(broken)
    assert tried.breaks == [broken]
