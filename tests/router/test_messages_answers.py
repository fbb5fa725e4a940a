"""A chat's answer as Anthropic's message: golden transcripts, in any cut.

tests/testdata/messages has pairs: NAME.chat is what engines stream, NAME.events what the client
gets. They are written after Anthropic's documentation of streams.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from xpyd_core.errors import ProtocolError
from xpyd_router.translations.messages import Messages
from xpyd_router.translations.messages_answers import (
    MessageEvents,
    message_of,
    refusal_body,
    usage_of,
)
from xpyd_router.translations.seam import (
    ChatError,
    ChatReader,
    chat_answer,
    error_of,
    tokens_of,
)

FOLDER = Path(__file__).parents[1] / "testdata/messages"
NAMES = sorted(path.stem for path in FOLDER.glob("*.chat"))
HEX = "00112233445566778899aabbccddeeff"


def translated(*pieces: bytes, usage: dict[str, Any] | None = None) -> bytes:
    reader = ChatReader(MessageEvents(), lambda: usage or {})
    return b"".join([reader.feed(piece) for piece in pieces])


def whole_events(data: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_of_a_chat_is_this_stream_of_a_message(name: str) -> None:
    chat, wanted = ((FOLDER / f"{name}.{end}").read_bytes() for end in ("chat", "events"))
    assert translated(*whole_events(chat)) == wanted


@pytest.mark.parametrize("size", [1, 2, 7, 100, 1_000_000])
@pytest.mark.parametrize("name", NAMES)
def test_any_cut_is_the_same_to_the_client(name: str, size: int) -> None:
    chat, wanted = ((FOLDER / f"{name}.{end}").read_bytes() for end in ("chat", "events"))
    assert translated(*(chat[at : at + size] for at in range(0, len(chat), size))) == wanted


def test_what_the_prompt_has_is_said_at_the_beginning_where_it_is_known() -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    first = translated((FOLDER / "text.chat").read_bytes(), usage=usage).split(b"\n")[1]
    assert orjson.loads(first.removeprefix(b"data: "))["message"]["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "cache_creation": None,
        "output_tokens": 0,
        "output_tokens_details": None,
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }


def chunk(**delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    return b"data: " + orjson.dumps({"id": f"chatcmpl-{HEX}", "choices": [choice]}) + b"\n\n"


def deltas(data: bytes) -> list[tuple[int, str]]:
    """Index and text of each delta of a message's stream."""
    found: list[tuple[int, str]] = []
    for event in data.split(b"\n\n")[:-1]:
        payload = orjson.loads(event.partition(b"\ndata: ")[2])
        if payload["type"] == "content_block_delta":
            kind, said = payload["delta"].popitem()
            assert kind in ("text", "thinking", "partial_json", "signature")
            found.append((payload["index"], said))
    return found


@pytest.mark.parametrize(
    "text", ['"', "\\", '\\"', '"},"logprobs":null}', "\n", "\u2028é😀", '","a":"', "x" * 9000]
)
def test_a_text_is_cut_out_whole_whatever_it_holds(text: str) -> None:
    texts = ["a", text, "b", text, text]
    said = deltas(translated(*(chunk(content=one) for one in texts)))
    assert said == [(0, one) for one in texts]


def test_two_events_at_once_are_two_deltas() -> None:
    first, *rest = (chunk(content=one) for one in "abcd")
    assert deltas(translated(first, b"".join(rest))) == [(0, one) for one in "abcd"]


def test_a_member_behind_the_text_is_not_taken_for_text() -> None:
    other = chunk(content="b", refusal="c")
    assert deltas(translated(chunk(content="a"), other, other)) == [(0, "a"), (0, "b"), (0, "b")]


def test_tokens_of_thinking_are_said_where_the_engine_counts_them() -> None:
    usage = {"completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 3}}
    assert usage_of(usage)["output_tokens_details"] == {"thinking_tokens": 3}


def test_two_texts_of_one_chunk_are_both_shown_each_time() -> None:
    said = deltas(
        translated(*(chunk(reasoning_content=one, content="x") for one in ("a", "b", "c")))
    )
    assert [one for _, one in said if one != "xpyd"] == ["a", "x", "b", "x", "c", "x"]


def test_arguments_of_calls_that_take_turns_go_to_their_own_blocks() -> None:
    def part(index: int, **fields: Any) -> bytes:
        return chunk(tool_calls=[{"index": index, **fields}])

    said = deltas(
        translated(
            part(0, id="a", function={"name": "f", "arguments": ""}),
            part(1, id="b", function={"name": "g", "arguments": ""}),
            part(0, function={"arguments": "{"}),
            part(1, function={"arguments": "["}),
            part(0, function={"arguments": "}"}),
            part(1, function={"arguments": "]"}),
        )
    )
    assert said == [(0, "{"), (1, "["), (0, "}"), (1, "]")]


@pytest.mark.parametrize("event", [b": hello\n\n", b"data: {\n\n", b"data: []\n\n", b"\n\n"])
def test_what_is_no_chunk_is_skipped(event: bytes) -> None:
    assert deltas(translated(chunk(content="a"), event, chunk(content="b"))) == [(0, "a"), (0, "b")]


def whole(message: dict[str, Any], finish: str = "stop", **choice: Any) -> dict[str, Any]:
    body = {
        "id": f"chatcmpl-{HEX}",
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish, **choice}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
    }
    return orjson.loads(message_of(chat_answer(orjson.dumps(body))))


USE: dict[str, Any] = {
    "type": "tool_use",
    "id": "c1",
    "name": "f",
    "input": {},
    "caller": {"type": "direct"},
}


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


ENDINGS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "end": ({}, ["end_turn", None]),
    "token": ({"stop_reason": 17}, ["end_turn", None]),
    "stop sequence": ({"stop_reason": "END"}, ["stop_sequence", "END"]),
    "stop sequence in a call": (
        {"message": {"tool_calls": [call('{"a')]}, "stop_reason": "END"},
        ["stop_sequence", "END"],
    ),
    "limit": ({"finish": "length"}, ["max_tokens", None]),
    "filter": ({"finish": "content_filter"}, ["refusal", None]),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_each_end_has_its_stop_reason(case: str) -> None:
    given, wanted = ENDINGS[case]
    found = whole(**{"message": {"content": "x"}, **given})
    assert [found["stop_reason"], found["stop_sequence"]] == wanted


@pytest.mark.parametrize(
    ("finish", "stop"),
    [("tool_calls", "tool_use"), ("stop", "tool_use"), ("length", "max_tokens")],
)
def test_blocks_of_a_whole_answer_are_in_order(finish: str, stop: str) -> None:
    said = {"content": "t", "reasoning_content": "r", "tool_calls": [call('{"a":[1]}')]}
    found = whole(said, finish)
    assert found["content"] == [
        {"type": "thinking", "thinking": "r", "signature": "xpyd"},
        {"type": "text", "text": "t", "citations": None},
        {**USE, "input": {"a": [1]}},
    ]
    assert (found["stop_reason"], found["id"]) == (stop, f"msg_{HEX}")


@pytest.mark.parametrize("arguments", ["", '{"a', "[1]", "{}"])
def test_arguments_that_are_no_object_are_an_empty_input(arguments: str) -> None:
    found = whole({"content": None, "tool_calls": [call(arguments)]})
    assert found["content"] == [USE]


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[{}]}'])
def test_what_is_no_chat_is_the_engines_fault(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        chat_answer(body)
    with pytest.raises(ProtocolError):
        tokens_of(body)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (408, "invalid_request_error"),
        (413, "request_too_large"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_each_status_has_anthropics_type_of_error(status: int, kind: str) -> None:
    body = orjson.loads(refusal_body(ChatError(status, "no"), "req"))
    error = {"type": kind, "message": "no"}
    assert body == {"type": "error", "error": error, "request_id": "req"}


@pytest.mark.parametrize(
    ("param", "said", "wanted"),
    [
        ("stop", "stop: too many", "stop_sequences: too many"),
        ("stop", "too many of them", "too many of them"),
        (
            "response_format",
            "response_format.json_schema.schema.properties.a.not: no",
            "output_config.format.schema.properties.a.not: no",
        ),
        (
            "tools[0].function.parameters.type",
            "tools[0].function.parameters.type: no",
            "tools[0].input_schema.type: no",
        ),
        ("tools[2].function.name", "tools[2].function.name: no", "tools[2].name: no"),
        (
            "messages[1].content[0].type",
            "messages[1].content[0].type: expected one of text, got 'image_url'",
            "messages: expected one of text, got 'image'",
        ),
        (
            "messages[1].tool_calls[0].function.name",
            "messages[1].tool_calls[0].function.name: no",
            "messages: name of a tool_use: no",
        ),
        ("continue_final_message", "continue_final_message: no", "messages: no"),
        ("stop_token_ids", "stop_token_ids: no", "stop_token_ids: no"),
        ("max_tokens", "max_tokens: too many", "max_tokens: too many"),
        (
            "response_format.json_schema.schema.not",
            "response_format.json_schema.schema.not: no",
            "output_config.format.schema.not: no",
        ),
        (
            "tools[1].function.parameters.a.not",
            "tools[1].function.parameters.a.not: no",
            "tools[1].input_schema.a.not: no",
        ),
        ("tools[0].function.name", "tools[0].function.name: empty", "tools[0].name: empty"),
        (None, "no", "no"),
    ],
)
def test_an_error_names_the_field_that_the_client_wrote(
    param: str | None, said: str, wanted: str
) -> None:
    body = orjson.loads(refusal_body(ChatError(400, said, param=param), ""))
    error = {"type": "invalid_request_error", "message": wanted}
    assert body == {"type": "error", "error": error, "request_id": None}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"m","type":"t","param":null,"code":400}}', "m"),
        (b'{"error":{}}', "the request failed"),
        (b'{"detail":"x"}', '{"detail":"x"}'),
        (b"plain \xff", "plain \ufffd"),
        (b"", ""),
    ],
)
def test_whatever_an_engine_refuses_with_has_a_message(body: bytes, message: str) -> None:
    assert error_of(400, body).message == message
    assert orjson.loads(Messages().refusal(error_of(400, body), ""))["type"] == "error"
