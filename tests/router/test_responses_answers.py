"""OpenAI's Responses: a chat's answer as a response and its events, and what is kept of it.

tests/testdata/responses has transcripts: NAME.events is what the client gets of the chat NAME.chat
in tests/testdata/messages.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.responses_kit import (
    DONE,
    ENDING,
    FUNCTION,
    HEX,
    MIXED,
    NOW_S,
    OTHER,
    OUTPUT,
    ROLE,
    Json,
    api,
    call_chunk,
    chunk,
    messages_of,
    parsed,
    read,
    streamed,
    text_part,
    whole_chat,
)
from xpyd_core.errors import ApiError
from xpyd_router.translations.responses_store import Kept, ResponseStore
from xpyd_router.translations.seam import ChatError, ChatReader

DATA = Path(__file__).parents[1] / "testdata"


@pytest.mark.parametrize("size", [1, 7, 100, 1_000_000])
@pytest.mark.parametrize(
    "name", ["text", "thinking_and_tools", "vllm", "silent", "failure", "stop_sequence"]
)
def test_a_stream_of_a_chat_is_this_stream_of_a_response(name: str, size: int) -> None:
    chat = (DATA / "messages" / f"{name}.chat").read_bytes()
    reader = ChatReader(read(stream=True).events(), dict)
    came = [reader.feed(chat[at : at + size]) for at in range(0, len(chat), size)]
    assert b"".join(came) == (DATA / "responses" / f"{name}.events").read_bytes()


def test_the_events_of_a_text_are_those_of_the_api() -> None:
    data = b"".join([ROLE, chunk({"content": "Hel"}), chunk({"content": "lo"}), chunk({}, "stop")])
    events = streamed(data + ENDING + DONE)
    response = events[0].pop("response")
    assert events[1].pop("response") == response
    assert response["status"] == "in_progress"
    assert response["output"] == []
    final = events[-1].pop("response")
    item = {"id": f"msg_{HEX}_0", "type": "message", "role": "assistant"}
    begun = {**item, "status": "in_progress", "content": []}
    done = {**item, "status": "completed", "content": [text_part("Hello")]}
    at = {"item_id": f"msg_{HEX}_0", "output_index": 0, "content_index": 0}
    assert events == [
        {"type": "response.created", "sequence_number": 0},
        {"type": "response.in_progress", "sequence_number": 1},
        {
            "type": "response.output_item.added",
            "sequence_number": 2,
            "output_index": 0,
            "item": begun,
        },
        {
            "type": "response.content_part.added",
            "sequence_number": 3,
            **at,
            "part": text_part(""),
        },
        {
            "type": "response.output_text.delta",
            "sequence_number": 4,
            **at,
            "delta": "Hel",
            "logprobs": [],
        },
        {
            "type": "response.output_text.delta",
            "sequence_number": 5,
            **at,
            "delta": "lo",
            "logprobs": [],
        },
        {
            "type": "response.output_text.done",
            "sequence_number": 6,
            **at,
            "text": "Hello",
            "logprobs": [],
        },
        {
            "type": "response.content_part.done",
            "sequence_number": 7,
            **at,
            "part": text_part("Hello"),
        },
        {
            "type": "response.output_item.done",
            "sequence_number": 8,
            "output_index": 0,
            "item": done,
        },
        {"type": "response.completed", "sequence_number": 9},
    ]
    assert final == {
        **response,
        "status": "completed",
        "completed_at": NOW_S,
        "output": [done],
        "usage": {
            "input_tokens": 5,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 3},
            "total_tokens": 12,
        },
    }
    assert (final["id"], final["created_at"], final["model"]) == (f"resp_{HEX}", 7, "m")


def kinds(events: list[Json]) -> list[str]:
    """Types of the events, without those that come again and again."""
    found = [event["type"].removeprefix("response.") for event in events]
    return [kind for kind, before in zip(found, ["", *found], strict=False) if kind != before]


@given(st.lists(st.integers(0, len(b"".join(MIXED))), max_size=12))
def test_reasoning_text_and_calls_are_items_however_the_stream_is_cut(cuts: list[int]) -> None:
    events = streamed(b"".join(MIXED), cuts)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["output"] == OUTPUT
    assert [one["item"] for one in events if one["type"].endswith("item.done")] == OUTPUT
    part = ["content_part.added", "", "", "content_part.done"]
    item = ["output_item.added", *part, "output_item.done"]

    def of(name: str, expected: list[str]) -> list[str]:
        texts = iter((f"{name}.delta", f"{name}.done"))
        return [one or next(texts) for one in expected]

    call = ["output_item.added", "", "", "output_item.done"]
    assert kinds(events) == [
        "created",
        "in_progress",
        *of("reasoning_text", item),
        *of("output_text", item),
        *(2 * of("function_call_arguments", call)),
        "completed",
    ]


def test_deltas_of_an_item_join_to_its_text() -> None:
    events = streamed(b"".join(MIXED))
    joined: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            joined[event["item_id"]] = joined.get(event["item_id"], "") + event["delta"]
    texts = {
        one["item_id"]: one.get("text", one.get("arguments"))
        for one in events
        if one["type"].endswith(("text.done", "arguments.done"))
    }
    assert joined == texts
    assert len(texts) == 4


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_whole_answer_is_the_response_at_the_end_of_its_stream(name: str) -> None:
    calls = [{"id": one["call_id"], "type": "function", "function": one} for one in OUTPUT[2:]]
    message = {name: 'Let me th"ink', "content": "Hel\\lo wörld\n", "tool_calls": calls}
    made = orjson.loads(read().whole(whole_chat(**message)))
    assert made == streamed(b"".join(MIXED))[-1]["response"]


def test_a_summary_that_is_asked_for_is_the_reasoning_itself() -> None:
    asked = {"summary": "auto"}
    events = streamed(b"".join(MIXED), reasoning=asked)
    assert kinds(events)[2:8] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    assert events[3]["summary_index"] == 0
    said = [{"type": "summary_text", "text": 'Let me th"ink'}]
    item = events[-1]["response"]["output"][0]
    assert (item["summary"], item["content"]) == (said, [])
    whole = orjson.loads(
        read(reasoning=asked).whole(whole_chat(reasoning_content='Let me th"ink', content="x"))
    )
    assert whole["output"][0] == item
    assert whole["reasoning"] == {"effort": None, "summary": "auto"}


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
)
def test_an_answer_that_was_cut_off_is_incomplete(finish: str, reason: str) -> None:
    events = streamed(b"".join([*MIXED[:5], chunk({}, finish), ENDING, DONE]))
    final = events[-1]
    assert final["type"] == "response.incomplete"
    response = final["response"]
    assert response["status"] == "incomplete"
    assert response["completed_at"] is None
    assert response["incomplete_details"] == {"reason": reason}
    assert [one["status"] for one in response["output"]] == ["completed", "incomplete"]
    assert events[-2]["item"]["status"] == "incomplete"
    whole = orjson.loads(
        read().whole(whole_chat(finish, reasoning='Let me th"ink', content="Hel\\lo "))
    )
    assert whole == response


def test_a_call_that_a_stop_string_cut_is_incomplete() -> None:
    """With another status an agent would run it."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
    chat = whole_chat("stop", content="t", tool_calls=[call])
    for stop, status in (("END", "incomplete"), (None, "completed"), (17, "completed")):
        chat["choices"][0]["stop_reason"] = stop
        whole = orjson.loads(read().whole(chat))
        assert [one["status"] for one in whole["output"]] == ["completed", status]
        chunks = (ROLE, chunk({"content": "t"}), call_chunk(0, '{"a', id="c", name="f"))
        data = b"".join((*chunks, chunk({}, "stop", stop_reason=stop)))
        events = streamed(data + ENDING + DONE)
        assert events[-2]["item"]["status"] == status
        assert [one["status"] for one in events[-1]["response"]["output"]] == ["completed", status]


def test_an_answer_without_text_is_an_empty_message() -> None:
    events = streamed(b"".join([ROLE, chunk({}, "stop"), ENDING, DONE]))
    response = events[-1]["response"]
    assert [one["content"] for one in response["output"]] == [[text_part("")]]
    assert orjson.loads(read().whole(whole_chat("stop", content=None))) == response
    thought = orjson.loads(read().whole(whole_chat("length", reasoning="x", content=None)))
    assert [one["type"] for one in thought["output"]] == ["reasoning"]


def test_a_stream_that_fails_ends_with_the_failed_response() -> None:
    error = {"error": {"message": "all died", "type": "server_error", "param": None, "code": "x"}}
    said = b"data: " + orjson.dumps(error) + b"\n\n"
    events = streamed(b"".join([*MIXED[:5], said]))
    final = events[-1]
    assert final["type"] == "response.failed"
    response = final["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "all died"}
    assert [one["status"] for one in response["output"]] == ["incomplete", "incomplete"]


def test_a_response_repeats_what_was_asked_for() -> None:
    schema = {"type": "object"}
    fields: Json = {
        "instructions": "Be brief.",
        "temperature": 0.5,
        "top_p": 0.25,
        "max_output_tokens": 99,
        "max_tool_calls": 2,
        "parallel_tool_calls": False,
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "high", "summary": "detailed"},
    }
    format_ = {"type": "json_schema", "name": "x", "schema": schema}
    made = orjson.loads(
        read(**fields, tools=[FUNCTION, OTHER], text={"format": format_}).whole(
            whole_chat(content="x")
        )
    )
    assert {name: made[name] for name in fields} == fields
    assert made["text"] == {
        "format": {**format_, "strict": False, "description": None},
        "verbosity": "medium",
    }
    assert made["tools"] == [
        {**FUNCTION, "description": None},
        {**OTHER, "parameters": None, "strict": None},
    ]
    assert (made["store"], made["background"], made["truncation"]) == (False, False, "disabled")


def scored(text: str) -> Json:
    return {"token": text, "logprob": -0.5, "bytes": list(text.encode())}


def test_log_probabilities_that_are_asked_for_come_with_their_text() -> None:
    asked: Json = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    entries = [{**scored(text), "top_logprobs": [scored(text)]} for text in ("a", "", "b", "b")]
    data = [ROLE, *(chunk({"content": e["token"]}, logprobs={"content": [e]}) for e in entries)]
    data += [chunk({}, "stop"), ENDING, DONE]
    ends = list(accumulate(map(len, data)))  # each event by itself, as engines send them
    events = streamed(b"".join(data), ends, **asked)
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    assert [one["delta"] for one in deltas] == ["a", "b", "b"]
    assert [one["logprobs"] for one in deltas] == [entries[:1], entries[1:3], entries[3:]]
    response = events[-1]["response"]
    assert response["output"][0]["content"][0]["logprobs"] == entries
    answer = whole_chat("stop", content="abb")
    answer["choices"][0]["logprobs"] = {"content": entries}
    assert orjson.loads(read(**asked).whole(answer)) == response


@pytest.mark.parametrize(
    ("place", "own"),
    [
        ("response_format", "text.format"),
        ("response_format.json_schema.schema.items", "text.format.schema.items"),
        ("max_completion_tokens", "max_output_tokens"),
        ("reasoning_effort", "reasoning.effort"),
        ("messages[3].content[0].type", "input"),
        ("tools[1].function.parameters.type", "tools[1].parameters.type"),
        ("tools[1]", "tools[1]"),
        ("temperature", "temperature"),
    ],
)
def test_an_engines_error_names_the_field_that_the_client_wrote(place: str, own: str) -> None:
    inside = place.partition(".")[0]  # some engines name the field, and in words the place in it
    for param in (place, inside):
        error = ChatError(400, f"{place}: expected: x", param=param, code="c")
        said = orjson.loads(api().refusal(error, ""))["error"]
        assert said["message"] == f"{own}: expected: x"
        assert (said["type"], said["code"]) == ("invalid_request_error", "c")
        assert param != place or said["param"] == own


def test_an_error_that_names_no_place_is_as_it_came() -> None:
    error = ChatError(404, "no such model", "not_found_error", "model", "model_not_found")
    assert orjson.loads(api().refusal(error, "")) == {
        "error": {
            "message": "no such model",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


def test_a_response_goes_on_from_one_that_is_kept() -> None:
    served = api(100_000)
    first = read(
        served,
        instructions="Be brief.",
        input=[{"role": "developer", "content": "Told."}, {"role": "user", "content": "Hi"}],
        tools=[FUNCTION, OTHER],
    )
    calls = [{"id": one["call_id"], "function": one} for one in OUTPUT[2:]]
    made = orjson.loads(first.whole(whole_chat(reasoning="Hm", content="Yes", tool_calls=calls)))
    assert made["store"] is True
    results = [
        {"type": "function_call_output", "call_id": f"call_{i}", "output": "ok"} for i in (1, 2)
    ]
    goes_on = {"previous_response_id": made["id"], "instructions": "Be long."}
    second = orjson.loads(read(served, input=results, **goes_on).chat.raw)["messages"]
    items = [
        {"role": "developer", "content": "Told."},
        {"role": "user", "content": "Hi"},
        *made["output"],
        *results,
    ]
    assert second == messages_of(*items, instructions="Be long.")
    assert second[0]["content"] == "Be long.\n\nTold."
    assert second[2]["reasoning_content"] == "Hm"


def test_text_behind_a_call_is_another_message_of_the_chat() -> None:
    served = api(100_000)
    assert served.store is not None
    reader = ChatReader(read(served, stream=True).events(), dict)
    call = call_chunk(0, "{}", id="c", type="function", name="f")
    said = [chunk({"content": text}) for text in ("a", "b")]
    for event in (ROLE, said[0], call, said[1], chunk({}, "stop"), DONE):
        reader.feed(event)
    kept = served.store.get(f"resp_{HEX}")
    assert kept is not None
    turns = [orjson.loads(one) for one in kept.turns]
    assert [(one["role"], one["content"], len(one.get("tool_calls", ()))) for one in turns] == [
        ("user", "Hi", 0),
        ("assistant", "a", 1),
        ("assistant", "b", 0),
    ]


def test_a_stream_is_kept_at_its_end_and_not_where_it_fails_or_must_not_be() -> None:
    served = api(100_000)
    assert served.store is not None
    reader = ChatReader(read(served, stream=True).events(), dict)
    for event in MIXED[:-1]:
        reader.feed(event)
    assert len(served.store) == 0
    final = parsed(reader.feed(DONE))[-1]["response"]
    kept = served.store.get(f"resp_{HEX}")
    assert kept is not None
    assert orjson.loads(kept.body) == final
    served.store.remove(f"resp_{HEX}")
    read(served, store=False).whole(whole_chat(content="x"))
    assert len(served.store) == 0


def test_a_response_that_is_not_kept_is_an_error_of_its_own() -> None:
    with pytest.raises(ApiError) as caught:
        read(api(100_000), previous_response_id="resp_x")
    assert caught.value.status == 400
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(ApiError, match="--responses-store-mib"):
        read(previous_response_id="resp_x")


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 6000)), max_size=30))
def test_the_store_never_takes_more_than_its_limit(puts: list[tuple[str, int]]) -> None:
    store = ResponseStore(10_000)
    for name, size in puts:
        store.put(name, Kept(bytes(size), (b"y",), (), (b"x",) * (size % 5), ()))
        assert store.used_bytes <= 10_000
    for name in "abcdef":
        store.remove(name)
    assert store.used_bytes == 0


def test_the_response_that_was_used_longest_ago_goes_first() -> None:
    store, kept = ResponseStore(10_000), Kept(bytes(2000), (), (), (), ())
    for name in "abc":
        assert store.put(name, kept)
    assert store.get("a") is kept
    assert store.put("d", kept)
    assert [name for name in "abcd" if store.get(name)] == ["a", "c", "d"]
    assert not store.put("e", Kept(bytes(20_000), (), (), (), ()))
    assert not store.put("e", Kept(b"", (bytes(20_000),), (), (), ()))
    assert store.get("e") is None


def test_a_flood_of_one_owners_responses_takes_none_of_another_owners() -> None:
    store = ResponseStore(10_000)
    mine, others = (Kept(bytes(500), (), (), (), (), owner=name) for name in ("a", "b"))
    assert store.put("x", mine)
    for number in range(100):
        assert store.put(f"y{number}", others)
        assert store.get(f"y{number}", "b") is others
    assert store.get("x", "a") is mine
    assert store.put("z", Kept(bytes(7000), (), (), (), (), owner="a"))
    assert store.get("z", "a") is not None, "the newest is always kept"
    assert store.used_bytes <= 10_000
