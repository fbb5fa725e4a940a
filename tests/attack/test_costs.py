"""What a body may cost: memory above its own bytes, in the router and in the engine."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from xpyd_core.errors import ApiError
from xpyd_router.request.client_request import parse_request
from xpyd_worker.server.openai.params import parse_chat, parse_completion
from xpyd_worker.server.openai.prompts import parse_detokenize, parse_tokenize

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
    "different ids": filled(
        COMPLETION + '"prompt":[', ",".join(map(str, range(1_000_000, 1_060_000))), "]}"
    ),
    "different ids of several prompts": filled(
        COMPLETION + '"prompt":[',
        f"[{','.join(map(str, range(1_000_000, 1_060_000)))}]",
        "]}",
    ),
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
BLANKS = " " * 5000
TWICE = {
    f"{name}, and again": filled(
        COMPLETION + f'"prompt":"a","{name}":{opened}', item, f'{closed},"{name}":null' + "}"
    )
    for name, opened, item, closed in (
        ("stop", "[", '"a"', "]"),
        ("bad_words", "[", '"a"', "]"),
        ("allowed_token_ids", "[", "777", "]"),
        ("logit_bias", "{", '"7":1', "}"),
    )
}
TRANSFER = {
    f"{name} of kv_transfer_params": filled(
        COMPLETION + '"prompt":"a","kv_transfer_params":{"' + name + '":[',
        item,
        "]" + again + "}}",
    )
    for name, item, again in (
        ("continue_from", "[]", ""),
        ("continue_from", "[777]", ',"continue_from":null'),
        ("transfer", '"none"', ""),
        ("prompt_digest", '"a"', ',"prompt_digest":null'),
    )
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
    "prompts behind blanks": filled(COMPLETION + f'"prompt":[{BLANKS}', "[1]", "]}"),
    "texts behind blanks": filled(COMPLETION + f'"prompt":[{BLANKS}', '"a"', "]}"),
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
    *((parse_chat, name, body, 5.5) for name, body in CHATS.items()),
    *((by_engine, name, body, 1) for name, body in {**KNOWN, **TWICE, **TRANSFER}.items()),
    (parse_tokenize, "/tokenize", UNKNOWN["empty objects"], 1),
    (parse_detokenize, "/detokenize", filled('{"tokens":[', "7", "]}"), 8),
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
        for name, body in {**UNKNOWN, **IDS, **TEXT, **KNOWN, **TWICE, **TRANSFER, **WRONG}.items()
    ),
    *(("chat/completions", name, body) for name, body in CHATS.items()),
]


@pytest.mark.parametrize(
    ("endpoint", "body"), [pytest.param(endpoint, body, id=name) for endpoint, name, body in ROUTER]
)
def test_a_router_takes_at_most_one_length_of_a_body(endpoint: str, body: bytes) -> None:
    assert cost_of(lambda raw: parse_request(endpoint, raw), body) <= 1.1


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ('"stream":true,"stream_options":{"include_usage":5},"stream_options":3', "stream_options"),
        (
            '"stream":true,"stream_options":{"include_usage":5},"stream_options":{}',
            "stream_options",
        ),
        ('"n":"x","n":1', "n"),
    ],
)
def test_the_first_of_two_members_is_refused_by_its_name(members: str, param: str) -> None:
    body = ('{"model":"m","prompt":"a",' + members + "}").encode()
    for parse in (by_engine, lambda raw: parse_request("completions", raw)):
        with pytest.raises(ApiError) as error:
            parse(body)
        assert (error.value.status, (error.value.param or "").split(".")[0]) == (400, param)


@pytest.mark.parametrize(
    "members",
    ['"stop":["a",5],"stop":3', '"stop":["a",5],"stop":[]', '"logit_bias":{"1":"x","1":2}'],
)
def test_so_it_is_in_lists_and_objects(members: str) -> None:
    with pytest.raises(ApiError) as error:
        by_engine(('{"prompt":"a",' + members + "}").encode())
    assert error.value.status == 400


@pytest.mark.parametrize("blanks", [1, 5000])
def test_blanks_change_nothing(blanks: int) -> None:
    space = " " * blanks
    several = ",".join(['"a, b"'] * 300)
    texts = f'{{"model":"m","prompt":[{space}{several}]}}'.encode()
    assert parse_request("completions", texts).choices == 300
    with pytest.raises(ApiError, match="at most 256 prompts"):
        by_engine(texts)
    one = f'{{"model":"m","prompt":[{space}"a, b, c"]}}'.encode()
    assert parse_completion(one, max_model_len=3).prompts == ("a, b, c",)
