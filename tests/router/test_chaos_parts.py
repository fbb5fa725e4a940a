"""The chaos tests' own parts: the judge sees each defect, the script keeps its promises."""

from __future__ import annotations

import random
from collections.abc import Callable

import orjson
import pytest

from tests.router.chaos.asks import Ask, draw
from tests.router.chaos.script import KINDS, Exposure, Fitness, faults, victims
from tests.router.chaos.verdict import Answer, complaints
from tests.router.chaos.wire import DONE, Call, Stream, whole

UUID = "93923d63113b4b338973f24d19d4bf11"


def right_answer(ask: Ask) -> Answer:
    """What one engine alone says."""
    call = Call.of("A", ask.endpoint, UUID, orjson.dumps(ask.body))
    body = b"".join(Stream(call)) if ask.wanted.stream else whole(call)
    return Answer(200, {"x-request-id": call.head(chunk=False)["id"]}, body)


def asked(**fields: object) -> Ask:
    is_chat = "messages" in fields
    body = {"model": "m", "user": "t", "seed": 5, "max_tokens": 12, "ignore_eos": True, **fields}
    return Ask(0, "chat/completions" if is_chat else "completions", body)


CHAT = [{"role": "user", "content": "hello"}]
STREAMS = [
    asked(prompt="abc", stream=True),
    asked(messages=CHAT, stream=True, n=2, return_token_ids=True),
    asked(messages=CHAT, stream=True, logprobs=True, stream_options={"include_usage": True}),
]


def events_of(body: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in body.split(b"\n\n")[:-1]]


def content_of(events: list[bytes]) -> list[int]:
    """Where pieces with a text are."""
    return [i for i, event in enumerate(events) if b'":"' in event and b'"role"' not in event]


def repeat(events: list[bytes]) -> list[bytes]:
    at = content_of(events)[2]
    return [*events[:at], events[at], *events[at:]]


def drop(events: list[bytes]) -> list[bytes]:
    at = content_of(events)[2]
    return [*events[:at], *events[at + 1 :]]


def swap(events: list[bytes]) -> list[bytes]:
    """Two pieces of one choice change places."""
    at = [i for i in content_of(events) if b'"index":0' in events[i]][1:3]
    out = list(events)
    out[at[0]], out[at[1]] = out[at[1]], out[at[0]]
    return out


def edit(old: bytes, new: bytes) -> Callable[[list[bytes]], list[bytes]]:
    """`new` for `old` in the last event that has it."""

    def spoil(events: list[bytes]) -> list[bytes]:
        at = max(i for i, event in enumerate(events) if old in event)
        return [*events[:at], events[at].replace(old, new, 1), *events[at + 1 :]]

    return spoil


def once_more(events: list[bytes]) -> list[bytes]:
    """The end of a choice comes twice."""
    at = max(i for i, event in enumerate(events) if b'"finish_reason":"' in event)
    return [*events[: at + 1], *events[at:]]


SPOILT: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a token comes twice": repeat,
    "a token is missing": drop,
    "tokens out of order": swap,
    "two ends of a choice": once_more,
    "two [DONE]": lambda events: [*events, DONE],
    "no [DONE]": lambda events: events[:-1],
    "cut within an event": lambda events: [*events[:-2], events[-2][:20]],
    "an error event": lambda events: [*events[:-1], b'data: {"error":{"message":"x"}}\n\n'],
    "another id": edit(b'"id":"c', b'"id":"d'),
    "another finish": edit(b'"finish_reason":"length"', b'"finish_reason":"stop"'),
    "another model": edit(b'"model":"m"', b'"model":"n"'),
    "an address": edit(b'"model":"m"', b'"model":"m","at":"127.0.0.1:20001"'),
    "kv_transfer_params": edit(b'"model":"m"', b'"model":"m","kv_transfer_params":null'),
}


@pytest.mark.parametrize("ask", STREAMS, ids=["plain", "chat of two", "scored chat"])
@pytest.mark.parametrize("defect", SPOILT)
def test_a_defect_of_a_stream_is_seen(defect: str, ask: Ask) -> None:
    answer = right_answer(ask)
    assert complaints(ask, answer) == []
    spoilt = b"".join(SPOILT[defect](events_of(answer.body)))
    assert complaints(ask, answer._replace(body=spoilt))


def test_a_second_role_is_seen() -> None:
    ask = STREAMS[1]
    answer = right_answer(ask)
    events = events_of(answer.body)
    assert complaints(ask, answer._replace(body=b"".join([events[0], *events])))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"completion_tokens":12', b'"completion_tokens":13'),
        (b'"prompt_tokens":3', b'"prompt_tokens":4'),
        (b'"finish_reason":"length"', b'"finish_reason":"stop"'),
        (b'"text":"', b'"text":"x'),
        (b'"logprobs":null', b'"logprobs":null,"token_ids":[1]'),
    ],
)
def test_a_defect_of_a_whole_answer_is_seen(old: bytes, new: bytes) -> None:
    ask = asked(prompt="abc")
    answer = right_answer(ask)
    assert complaints(ask, answer) == []
    assert complaints(ask, answer._replace(body=answer.body.replace(old, new, 1)))


def test_an_error_and_another_request_id_are_seen() -> None:
    ask = asked(prompt="abc")
    answer = right_answer(ask)
    assert complaints(ask, answer._replace(status=502))
    assert complaints(ask, answer._replace(headers={"x-request-id": "cmpl-other"}))


def test_every_drawn_request_has_an_answer_that_is_right() -> None:
    for number in range(300):
        ask = draw(random.Random(number), number)
        assert complaints(ask, right_answer(ask)) == [], ask.body


def test_a_script_has_every_kind_on_both_sides_and_is_its_seeds() -> None:
    script = faults(3)
    lines = [next(script) for _ in range(24)]
    assert {(f.kind, f.role) for f in lines} == {(k, r) for k in KINDS for r in ("P", "D")}
    assert {f.kind for f in lines[:12]} == set(KINDS)
    again = faults(3)
    assert lines == [next(again) for _ in range(24)]
    other = faults(4)
    assert lines != [next(other) for _ in range(24)]


def test_no_request_lives_through_two_deadly_faults() -> None:
    exposure = Exposure()
    exposure.begin_request(1)
    exposure.begin_fault("deadly")
    assert not exposure.may_begin("deadly")
    assert exposure.may_begin("soft")
    exposure.begin_request(2)
    exposure.end_fault("deadly")
    exposure.begin_request(3)
    exposure.end_request(1)
    assert not exposure.may_begin("deadly")  # request 2 came while it lasted
    exposure.end_request(2)
    assert exposure.may_begin("deadly")


def test_one_of_each_role_is_left_that_has_served_since_it_came_back() -> None:
    def one(name: str, answered: int = 1, *, ready: bool = True, well: bool = True) -> Fitness:
        return Fitness(name, "P", well, 0, answered, ready)

    serving, other = one("p1"), one("p0")
    assert victims([serving, other], "P") == [other, serving]
    assert victims([serving, one("p2", 0)], "P") == []
    assert victims([serving, one("p2", ready=False)], "P") == []
    assert victims([serving, one("p2", well=False)], "P") == []
    assert victims([serving, other], "D") == []
