"""What a request's tries say to P: contexts of both, and where P may not add a token."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.router.beats import beat
from tests.router.choosing import make_policy
from xpyd_core.errors import ProtocolError
from xpyd_router.access_log import Trace
from xpyd_router.fleet.poison import Break
from xpyd_router.fleet.registry import Registry
from xpyd_router.policy.base import Want
from xpyd_router.policy.pairs import Pair
from xpyd_router.request.answers import DONE, EventSplitter, Head, event_data
from xpyd_router.request.client_request import parse_request
from xpyd_router.request.state import (
    RequestState,
    Sent,
    alone_params,
    decode_params,
    first_events,
    gave_up,
    last_events,
    prefill_params,
    take_prefill,
)


def pair(p_context: int, d_context: int) -> Pair:
    registry = Registry(period_s=3.0, missed_beats=3)
    ours: dict[str, Any] = {"continuation": 1, "compatibility": "k"}
    registry.apply(beat("P", host=1, max_model_len=p_context, **ours), now=0.0)
    registry.apply(beat("D", host=2, max_model_len=d_context, **ours), now=0.0)
    chosen = make_policy().pick(registry.snapshot, Want("m"))
    assert isinstance(chosen, Pair)
    return chosen


def request_state(sent: Sent | None = None, **fields: object) -> RequestState:
    raw = orjson.dumps({"model": "m", "prompt": "x", **fields})
    return RequestState(
        request=parse_request("completions", raw),
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
    params = prefill_params(request_state(max_tokens=9), pair(p_context, d_context))
    assert params == {"seed": 3, "client_max_tokens": 9, "max_model_len": said}


def test_nothing_is_said_of_contexts_that_nobody_told() -> None:
    assert "max_model_len" not in prefill_params(request_state(), pair(0, 0))


@pytest.mark.parametrize(
    ("prompt_tokens", "ids", "extends"),
    [(100, 1, True), (126, 1, False), (125, 1, True), (124, 2, True), (125, 2, False)],
)
def test_at_the_contexts_last_token_p_adds_none(
    prompt_tokens: int, ids: int, extends: bool
) -> None:
    sent = Sent([[7] * ids], "k", {"prompt_tokens": prompt_tokens}, "m")
    tried = request_state(sent, max_tokens=99)
    params = prefill_params(tried, pair(128, 128))
    assert tried.extends == extends
    assert ("continue_from" in params) == extends
    assert ("client_max_tokens" in params) == extends


@pytest.mark.parametrize(("max_tokens", "extends"), [(2, False), (3, True), (None, False)])
def test_at_the_clients_last_token_p_adds_none(max_tokens: int | None, extends: bool) -> None:
    tried = request_state(Sent([[7]], "k", {}, "m"), max_tokens=max_tokens)
    prefill_params(tried, pair(0, 0))
    assert tried.extends == extends


def of_p(*choices: list[int]) -> bytes:
    """P's answer with these tokens."""
    return orjson.dumps(
        {
            "model": "m",
            "choices": [
                {"index": i, "text": f"t{ids} ", "token_ids": ids, "logprobs": {"of": i}}
                for i, ids in enumerate(choices)
            ],
            "usage": {"prompt_tokens": 5},
            "kv_transfer_params": {"transfer": ["granted"], "other": 1},
        }
    )


def test_ps_token_is_sent_once_and_d_goes_on_behind_it() -> None:
    both, tried = pair(0, 0), request_state(stream=True, n=2)
    assert "continue_from" not in prefill_params(tried, both)
    prefilled = take_prefill(tried, of_p([7], [8]))
    assert first_events(tried, prefilled, both).count(b"t[") == 2
    assert tried.sent == Sent([[7], [8]], "k", {"prompt_tokens": 5}, "m")
    params = decode_params(tried, prefilled, is_stream=True)
    assert params == {
        "seed": 3,
        "continue_from": ((7,), (8,)),
        "emit_from": [1, 1],
        "response_id": "cmpl-1",
        "created": 5,
        "transfer": ["granted"],
    }
    whole = decode_params(tried, prefilled, is_stream=False)
    assert whole["emit_from"] == [0, 0]
    assert whole["first_logprobs"] == [{"of": 0}, {"of": 1}]


def test_a_later_p_goes_on_behind_what_was_sent() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    sent = Sent([[1, 2]], "k", {"prompt_tokens": 4}, "m")
    tried = request_state(sent, stream=True, stream_options=options, max_tokens=9)
    both = pair(0, 0)
    assert prefill_params(tried, both)["continue_from"] == [[1, 2]]
    prefilled = take_prefill(tried, of_p([3]))
    assert decode_params(tried, prefilled, is_stream=True)["emit_from"] == [3]
    (event,) = EventSplitter().push(first_events(tried, prefilled, both))
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert orjson.loads(event_data(event))["usage"] == usage
    assert tried.sent == Sent([[1, 2, 3]], "k", {"prompt_tokens": 4}, "m")


def test_a_later_p_that_only_makes_the_kv_adds_nothing() -> None:
    both, tried = pair(0, 0), request_state(Sent([[1], [2, 3]], "k", {}, "m"), stream=True, n=2)
    assert "continue_from" not in prefill_params(tried, both)
    prefilled = take_prefill(tried, of_p([8], [9]))
    assert first_events(tried, prefilled, both) == b""
    params = decode_params(tried, prefilled, is_stream=True)
    assert (params["continue_from"], params["emit_from"]) == (((1,), (2, 3)), [1, 2])
    with pytest.raises(ProtocolError, match="another number of choices"):
        take_prefill(tried, of_p([8]))


def test_who_goes_on_alone_begins_behind_what_was_sent() -> None:
    params = alone_params(request_state(Sent([[1], [2, 3]], "k", {}, "m"), n=2))
    assert (params["continue_from"], params["emit_from"]) == (((1,), (2, 3)), [1, 2])
    assert params["seed"] == 3
    begins = alone_params(request_state(n=2))
    assert (begins["continue_from"], begins["emit_from"]) == (((), ()), [0, 0])


@pytest.mark.parametrize(
    ("cause", "status", "code", "retry_after_s"),
    [
        ("timeout", 504, "timeout", None),
        ("refused", 503, None, 1),
        ("status", 502, "upstream_failed", None),
    ],
)
def test_the_last_word_tells_what_a_client_may_do(
    cause: str, status: int, code: str | None, retry_after_s: int | None
) -> None:
    tried = request_state()
    tried.last_cause, tried.trace.tries = cause, 3
    error = gave_up(tried)
    assert (error.status, error.code, error.retry_after_s) == (status, code, retry_after_s)
    assert "after 3 tries" in str(error)


def test_behind_the_end_of_a_choice_p_adds_no_token() -> None:
    tried = request_state(Sent([[7]], "k", {}, "m", ended={0}))
    assert "continue_from" not in prefill_params(tried, pair(0, 0))
    assert not tried.extends


@pytest.mark.parametrize(
    ("sent", "include_usage", "left"),
    [
        (None, False, None),
        (Sent([[7], [8]], "k", {}, "m", ended={0}), False, None),
        (Sent([[7], [8, 9]], "k", {}, "m", ended={0, 1}), False, []),
        (Sent([[7], [8, 9]], "k", {"prompt_tokens": 4}, "m", ended={0, 1}), True, [(4, 3, 7)]),
        (Sent([[7]], "k", {}, "m", ended={0}), True, None),  # nobody told of the prompt
        (Sent([[7]], "k", {}, "m", ended={0}, has_usage=True), True, []),
        # Reasoning is told where it is known of every choice.
        (
            Sent([[7], [8]], "k", {"prompt_tokens": 4}, "m", ended={0, 1}, reasoning={0: 1, 1: 0}),
            True,
            [(4, {"reasoning_tokens": 1}, 2, 6)],
        ),
        (
            Sent([[7], [8]], "k", {"prompt_tokens": 4}, "m", ended={0, 1}, reasoning={0: 1}),
            True,
            [(4, 2, 6)],
        ),
    ],
)
def test_what_is_left_of_a_stream_whose_choices_have_ended_needs_no_engine(
    sent: Sent | None, include_usage: bool, left: list[tuple[Any, ...]] | None
) -> None:
    options = {"stream_options": {"include_usage": True}} if include_usage else {}
    events = last_events(request_state(sent, stream=True, **options))
    if left is None:
        assert events is None
        return
    assert events is not None
    *counted, done = EventSplitter().push(events)
    assert done == DONE
    usage = [orjson.loads(event_data(event))["usage"] for event in counted]
    assert [tuple(one.values()) for one in usage] == left


def broke_at(tokens: list[int]) -> int:
    """How many deaths a stream has met that broke when the client had so many tokens."""
    tried = request_state(Sent([[]], "k", {}, "m"))
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
    tried, broken = request_state(), Break(0.0)
    for _ in range(2):
        tried.met(broken)
    assert tried.breaks == [broken]
