"""What a body may cost: memory above its own bytes, in the router and in the engine."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from xpyd_core.errors import ApiError
from xpyd_router.request.client_request import parse_request
from xpyd_worker.server.openai.params import parse_chat, parse_completion

_SIZE = 2_000_000
_CONTEXT = 10**9
"""Longer than any list here: what is refused for its length costs nothing."""


def filled(head: str, item: str, tail: str) -> bytes:
    """A body of about `_SIZE` bytes: `item` again and again between `head` and `tail`."""
    return (head + ",".join([item] * (_SIZE // (len(item) + 1))) + tail).encode()


COMPLETION = '{"model":"m","max_tokens":1,'
CHAT = '{"model":"m","messages":['
# By name: the body, and the bound on memory above it, in its lengths.
UNKNOWN = {
    "empty objects": filled(COMPLETION + '"prompt":"a","x":[', "{}", "]}"),
    "numbers": filled(COMPLETION + '"prompt":"a","x":[', "12345", "]}"),
    "members": filled(COMPLETION + '"prompt":"a","x":{', '"a":[]', "}}"),
    "top-level members": filled(COMPLETION + '"prompt":"a",', '"a":1', "}"),
    "tools": filled(COMPLETION + '"prompt":"a","tools":[', "{}", "]}"),
}
IDS = {
    "ids of one digit": filled(COMPLETION + '"prompt":[', "7", "]}"),
    "ids of three digits": filled(COMPLETION + '"prompt":[', "777", "]}"),
    "several prompts": filled(COMPLETION + '"prompt":[', f"[{','.join(['777'] * 5000)}]", "]}"),
}
TEXT = {
    "letters": filled(COMPLETION + '"prompt":"', "a" * 100, '"}'),
    "escapes in a list": filled(COMPLETION + '"prompt":["', "\\n" * 100, '"]}'),
    "a wide letter among narrow ones": filled(COMPLETION + '"prompt":"😀', "a" * 100, '"}'),
}
CHATS = {
    "short messages": filled(CHAT, '{"role":"user","content":"a"}', "]}"),
    "short parts": filled(
        CHAT + '{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}"
    ),
    "members of messages": filled(CHAT + '{"role":"user","content":"a","x":[', "{}", "]}]}"),
}
KNOWN = {
    name: filled(COMPLETION + f'"prompt":"a","{name}":{opened}', item, closed + "}")
    for name, opened, item, closed in (
        ("stop", "[", '"a"', "]"),
        ("stop_token_ids", "[", "777", "]"),
        ("allowed_token_ids", "[", "777", "]"),
        ("logit_bias", "{", '"7":1', "}"),
        ("bad_words", "[", '"a"', "]"),
        ("n", "[", "[]", "]"),
        ("user", "[", "{}", "]"),
        ("stream_options", "{", '"a":{}', "}"),
        ("response_format", "{", '"a":{}', "}"),
        ("prompt_logprobs", "[", "{}", "]"),
    )
}
WRONG = {
    "objects as prompts": filled(COMPLETION + '"prompt":[', "{}", "]}"),
    "empty lists as prompts": filled(COMPLETION + '"prompt":[', "[]", "]}"),
    "empty texts as prompts": filled(COMPLETION + '"prompt":[', '""', "]}"),
    "texts, then ids": filled(COMPLETION + '"prompt":["a",', "777", "]}"),
    "an id, then texts": filled(COMPLETION + '"prompt":[7,', '"a"', "]}"),
}


def cost_of(parse: Callable[[bytes], object], body: bytes) -> float:
    """The peak of memory that `parse` takes, in lengths of `body`, whether it refuses it or not."""
    found: object = None
    tracemalloc.start()
    try:
        found = parse(body)
    except ApiError:
        found = None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    del found
    return peak / len(body)


def by_engine(body: bytes) -> object:
    return parse_completion(body, max_model_len=_CONTEXT)


ENGINE = [
    *((by_engine, name, body, 1) for name, body in UNKNOWN.items()),
    *((by_engine, name, body, 8) for name, body in IDS.items()),
    *((by_engine, name, body, 5) for name, body in TEXT.items()),
    *((parse_chat, name, body, 5) for name, body in CHATS.items()),
    *((by_engine, name, body, 1) for name, body in KNOWN.items()),
    *((by_engine, name, body, 8) for name, body in WRONG.items()),
]


@pytest.mark.parametrize(
    ("parse", "body", "most"),
    [pytest.param(parse, body, most, id=name) for parse, name, body, most in ENGINE],
)
def test_an_engine_takes_a_few_lengths_of_a_body(
    parse: Callable[[bytes], object], body: bytes, most: float
) -> None:
    assert cost_of(parse, body) <= most + 0.1


ROUTER = [
    *(
        ("completions", name, body)
        for name, body in {**UNKNOWN, **IDS, **TEXT, **KNOWN, **WRONG}.items()
    ),
    *(("chat/completions", name, body) for name, body in CHATS.items()),
]


@pytest.mark.parametrize(
    ("endpoint", "body"), [pytest.param(endpoint, body, id=name) for endpoint, name, body in ROUTER]
)
def test_a_router_takes_at_most_one_length_of_a_body(endpoint: str, body: bytes) -> None:
    assert cost_of(lambda raw: parse_request(endpoint, raw), body) <= 1.1
