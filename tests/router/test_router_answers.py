"""Chunks that the router writes itself, and the filter on D's."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.fakes import parse_events
from xpyd_core.errors import ProtocolError
from xpyd_router.request.answers import (
    ChunkWriter,
    EventSplitter,
    Head,
    chunk_of,
    failure_in,
    parse_prefill_answer,
    scrub,
    whole_answer,
    without_token_ids,
)
from xpyd_router.request.client_request import parse_request

HEAD = Head("cmpl-abc", 7)


def ask(endpoint: Any = "completions", **fields: Any) -> Any:
    return parse_request(endpoint, orjson.dumps({"model": "m", **fields}))


def writer(what: Any, answer: Any) -> ChunkWriter:
    return ChunkWriter(what, HEAD, answer, answer.usage)


def document(*choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
    base: list[dict[str, Any]] = []
    for index, choice in enumerate(choices or ({},)):
        made = {"index": index, "text": "Hi", "token_ids": [5], "finish_reason": "length"}
        base.append({**made, **choice})
    answer = {"id": "x", "model": "m", "choices": base, "usage": {"prompt_tokens": 3}}
    answer["kv_transfer_params"] = {"transfer": ["granted"], "decode_incarnation": "i", "z": 1}
    return {**answer, **fields}


def parsed(what: Any, *choices: dict[str, Any], **fields: Any) -> Any:
    return parse_prefill_answer(what, orjson.dumps(document(*choices, **fields)))


@pytest.mark.parametrize(
    "answer",
    [
        b"{",
        b"[]",
        orjson.dumps(document(choices=[])),
        orjson.dumps(document(choices=[1])),
        orjson.dumps(document(kv_transfer_params=None)),
        orjson.dumps(document({"token_ids": None})),
        orjson.dumps(document({"token_ids": []})),
        orjson.dumps(document({"token_ids": [1.5]})),
        orjson.dumps(document({"token_ids": [True]})),
        orjson.dumps(document({"index": 1})),
        orjson.dumps(document({"text": None})),
        orjson.dumps(document({"finish_reason": 3})),
    ],
)
def test_an_answer_of_p_that_cannot_be_used_is_refused(answer: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_prefill_answer(ask(), answer)


def test_what_d_needs_of_ps_answer_is_kept_as_it_is() -> None:
    answer = parsed(ask())
    assert answer.transfer == {"transfer": ["granted"], "decode_incarnation": "i"}
    assert not answer.is_over


def test_a_chat_begins_with_a_role_then_the_text() -> None:
    what = ask("chat/completions")
    answer = parsed(what, {"message": {"role": "assistant", "content": "Hi"}})
    chunks = writer(what, answer)
    events = parse_events(b"".join([*chunks.role(), *chunks.content(1)]))
    assert [e["choices"][0]["delta"] for e in events] == [
        {"role": "assistant", "content": ""},
        {"content": "Hi"},
    ]
    assert all(e["id"] == "cmpl-abc" and e["created"] == 7 for e in events)
    assert all(e["object"] == "chat.completion.chunk" for e in events)


def test_a_held_back_text_makes_no_chunk_unless_something_else_is_asked_for() -> None:
    assert writer(ask(), parsed(ask(), {"text": ""})).content(1) == []
    with_logprobs = parsed(ask(), {"text": "", "logprobs": {"tokens": ["h"]}})
    [event] = parse_events(b"".join(writer(ask(), with_logprobs).content(1)))
    assert event["choices"][0]["logprobs"] == {"tokens": ["h"]}
    what = ask(return_token_ids=True)
    [event] = parse_events(b"".join(writer(what, parsed(what, {"text": ""})).content(1)))
    assert event["choices"][0]["token_ids"] == [5]


def test_token_ids_are_not_shown_unless_asked_for() -> None:
    assert b"token_ids" not in b"".join(writer(ask(), parsed(ask())).content(1))


def test_the_end_by_the_router_has_reasons_usage_and_done() -> None:
    what = ask(stream=True, stream_options={"include_usage": True}, n=2)
    answer = parsed(what, {"finish_reason": "stop", "stop_reason": "x"}, {"finish_reason": "stop"})
    assert answer.is_over
    events = parse_events(b"".join(writer(what, answer).finish(2)))
    assert [e["choices"][0]["finish_reason"] for e in events[:2]] == ["stop", "stop"]
    assert events[0]["choices"][0]["stop_reason"] == "x"
    assert events[2]["choices"] == []
    assert events[2]["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert events[3] == "[DONE]"


@pytest.mark.parametrize(
    ("options", "usage"),
    [
        ({}, "absent"),
        ({"include_usage": True}, None),
        ({"continuous_usage_stats": True}, "absent"),
        (
            {"include_usage": True, "continuous_usage_stats": True},
            {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
        ),
    ],
)
def test_usage_stands_in_every_chunk_as_engines_write_it(options: Any, usage: Any) -> None:
    what = ask(stream=True, stream_options=options)
    [event] = parse_events(b"".join(writer(what, parsed(what)).content(1)))
    assert event.get("usage", "absent") == usage


def test_a_whole_answer_of_p_loses_what_only_the_router_asked_for() -> None:
    answer = parsed(ask(), {"finish_reason": "stop", "prompt_token_ids": [1]})
    body = orjson.loads(whole_answer(ask(), HEAD, answer))
    assert (body["id"], body["created"]) == ("cmpl-abc", 7)
    assert "kv_transfer_params" not in body
    assert not {"token_ids", "prompt_token_ids"} & body["choices"][0].keys()
    what = ask(return_token_ids=True)
    kept = orjson.loads(whole_answer(what, HEAD, parsed(what, {"finish_reason": "stop"})))
    assert kept["choices"][0]["token_ids"] == [5]


def event(**chunk: Any) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


@pytest.mark.parametrize(
    ("chunk", "is_kept"),
    [
        ({"choices": [{"index": 0, "text": "a", "token_ids": [1]}]}, True),
        ({"choices": [{"index": 0, "text": "", "token_ids": [1]}]}, False),
        ({"choices": [{"index": 0, "delta": {}, "token_ids": [1]}]}, False),
        ({"choices": [{"index": 0, "delta": {"content": ""}, "token_ids": [1]}]}, False),
        ({"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [1]}]}, True),
        ({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "stop"}]}, True),
        ({"choices": [{"index": 0, "text": "", "token_ids": [1], "logprobs": {"a": 1}}]}, True),
        ({"choices": [{"index": 0, "text": "", "token_ids": [1]}], "usage": {"a": 1}}, True),
        ({"choices": [{"index": 0, "text": "", "token_ids": [1]}], "usage": None}, False),
        ({"choices": [{"text": "", "token_ids": [1]}, {"text": "b", "token_ids": [2]}]}, True),
    ],
)
def test_ids_are_taken_out_and_what_then_says_nothing_is_dropped(
    chunk: dict[str, Any], is_kept: bool
) -> None:
    out = without_token_ids(chunk_of(event(**chunk)) or {})
    assert (out is not None) == is_kept
    if out is not None:
        assert b"token_ids" not in out


@pytest.mark.parametrize(
    "other", [b"data: [DONE]\n\n", b": ping\n\n", event(error={"a": 1}), b'data: {"choi\n\n']
)
def test_what_is_no_chunk_of_choices_is_told_apart(other: bytes) -> None:
    assert chunk_of(other) is None


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ({"type": "server_error"}, "status"),
        ({"type": "InternalServerError"}, "status"),
        ({"type": "server_error", "code": "kv_transfer_failed"}, "transfer"),
        ({"type": "invalid_request_error"}, None),
        ("x", None),
    ],
)
def test_only_an_engines_own_failure_counts_as_one(error: Any, cause: str | None) -> None:
    assert failure_in(event(error=error)) == cause
    assert failure_in(event(choices=[], error=error)) is None


def test_internal_ids_are_replaced_wherever_they_stand() -> None:
    inner = b"___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:2_" + b"a" * 32
    data = b'{"id":"cmpl-' + inner + b'-0","x":"' + b"a" * 32 + b'"}'
    assert scrub(data, (inner, b"a" * 32), b"f00") == b'{"id":"cmpl-f00-0","x":"f00"}'


@given(
    st.lists(st.binary(min_size=1, max_size=9).filter(lambda b: not set(b) & set(b"\r\n"))),
    st.lists(st.integers(1, 7), min_size=1, max_size=50),
    st.sampled_from([b"\n\n", b"\r\n\r\n"]),
)
def test_events_are_the_same_in_any_cut(payloads: list[bytes], cuts: list[int], end: bytes) -> None:
    payloads = [b"data: " + p for p in payloads]
    stream = b"".join(p + end for p in payloads)
    splitter, got, at = EventSplitter(), [], 0
    while at < len(stream):
        step = cuts[at % len(cuts)]
        if step == 7:  # a cut where the event ends, as networks make them
            step = stream.index(end, at) + len(end) - at if end in stream[at:] else step
        piece = stream[at : at + step]
        got += splitter.push(piece)
        at += step
    assert got == [p + b"\n\n" for p in payloads]


def test_an_endless_event_is_refused() -> None:
    splitter = EventSplitter(max_event_bytes=100)
    splitter.push(b"data: " + b"x" * 90)
    with pytest.raises(ProtocolError):
        splitter.push(b"x" * 10)
