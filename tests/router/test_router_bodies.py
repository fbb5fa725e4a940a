"""Bodies: what the router refuses, what P gets, what D gets."""

from __future__ import annotations

import asyncio
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.router.fakes import pair
from xpyd_core.bodies import BodyBuffer, LongBody, prompt_shape
from xpyd_core.errors import ApiError
from xpyd_core.openai import RoutedChat, RoutedCompletion
from xpyd_router.http.inference import read_on
from xpyd_router.request.client_request import ChatMembers, CompletionMembers, parse_request
from xpyd_router.request.state import prefill_body, splice


def ask(endpoint: Any = "completions", **fields: Any) -> Any:
    return parse_request(endpoint, orjson.dumps({"model": "m", "prompt": "x", **fields}))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"model": ""}, "model"),
        ({"model": "m" * 600}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"max_tokens": None, "min_tokens": 17}, "min_tokens"),
        ({"seed": "x"}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": 1}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"echo": 1}, "echo"),
        ({"kv_transfer_params": {}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"seed": 1}}, "kv_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
        ({"vllm_xargs": {"a": 1, "ec_transfer_params": [1]}}, "vllm_xargs.ec_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": False}}, "vllm_xargs.kv_transfer_params"),
        ({"vllm_xargs": "x"}, "vllm_xargs"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("before", [0, 100_000])
@pytest.mark.parametrize(
    "members",
    [
        r'"vllm_xargs": {"kv\u005ftransfer_params": "x"}',
        r'"vllm\u005fxargs": {"kv_transfer_params": "x"}',
        '"vllm_xargs": {}, "vllm_xargs": {"kv_transfer_params": "x"}',
        '"vllm_xargs": {"kv_transfer_params": null, "kv_transfer_params": "x"}',
    ],
)
def test_kv_params_in_vllms_extra_arguments_are_refused_however_they_are_written(
    members: str, before: int
) -> None:
    text = '{"model": "m", "prompt": "a", "n": 2, "user": "' + "u" * before + '", ' + members + "}"
    with pytest.raises(ApiError, match="set by the router") as caught:
        parse_request("completions", text.encode())
    assert caught.value.param == "vllm_xargs.kv_transfer_params"


def test_other_extra_arguments_of_vllm_are_passed_on() -> None:
    for extra in ({"session_id": "s"}, {"a": {"kv_transfer_params": 1}}, {}, None):
        assert ask(vllm_xargs=extra)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b'"x"', b"\xff", b'{"model": NaN}', b"[" * 5000, b"null"]
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request("completions", raw)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("endpoint", "fields", "alone"),
    [
        ("completions", {}, None),
        ("completions", {"max_tokens": 2}, None),
        ("completions", {"max_tokens": None}, None),
        ("completions", {"max_tokens": 1}, "P"),
        ("completions", {"max_tokens": 0, "echo": True}, "P"),
        ("completions", {"max_tokens": 0, "prompt_logprobs": 1}, "P"),
        ("completions", {"max_tokens": 1, "echo": True}, "P"),
        ("completions", {"max_tokens": 9, "echo": True}, "D"),
        ("completions", {"echo": True}, "D"),
        ("completions", {"echo": False, "prompt_logprobs": None}, None),
        ("chat/completions", {"prompt_logprobs": 0}, "D"),
        ("chat/completions", {"max_tokens": 1}, "P"),
        ("chat/completions", {"max_completion_tokens": 1, "max_tokens": 9}, "P"),
        ("chat/completions", {"max_completion_tokens": 9, "max_tokens": 1}, None),
        ("completions", {"max_completion_tokens": 1}, None),
    ],
)
def test_where_a_request_runs_alone(endpoint: Any, fields: dict[str, Any], alone: Any) -> None:
    assert ask(endpoint, **fields).alone == alone


def test_p_of_an_old_engine_gets_one_token_and_nothing_else() -> None:
    client = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 10, "n": 2}
    body = orjson.loads(prefill_body(ask(**client, min_tokens=3, other=[1.5]), pair_mac="mac"))
    assert body == {
        "model": "m",
        "prompt": "x",
        "n": 2,
        "other": [1.5],
        "stream": False,
        "stream_options": None,
        "max_tokens": 1,
        "min_tokens": 1,
        "kv_transfer_params": {"pair_mac": "mac"},
    }


@pytest.mark.parametrize(
    ("client", "continue_from", "want"),
    [
        ({}, None, {"max_tokens": 1}),
        ({"min_tokens": 0, "max_tokens": 5}, None, {"max_tokens": 1, "min_tokens": 0}),
        ({"min_tokens": None}, None, {"max_tokens": 1, "min_tokens": None}),
        ({"min_tokens": 5}, [[7, 8]], {"max_tokens": 3, "min_tokens": 3}),
        (
            {"max_completion_tokens": 9},
            None,
            {"max_tokens": 1, "max_completion_tokens": 1},
        ),
    ],
)
def test_ps_limits_count_what_it_continues(
    client: dict[str, Any], continue_from: Any, want: dict[str, Any]
) -> None:
    params = {"seed": 1, "client_max_tokens": None}
    if continue_from:
        params["continue_from"] = continue_from
    body = orjson.loads(prefill_body(ask("chat/completions", **client), params, pair_mac="mac"))
    assert body["kv_transfer_params"] == {**params, "pair_mac": "mac"}
    assert body["return_token_ids"] is True
    assert {name: body.get(name) for name in want} == want
    assert ("max_completion_tokens" in body) == ("max_completion_tokens" in client)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"m"}',
        b'{ "model" : "m" , "a": {"b": "}"} }\n\n  ',
        b'{"model":"m","kv_transfer_params":null}',
        b'{"kv_transfer_params":null,"model":"m"}',
        '{"model":"mü","x":1e400,"y":"\\u0041","z":1.0}'.replace("1e400", "1e40").encode(),
    ],
)
def test_a_splice_keeps_every_byte_and_is_what_a_parser_sees(raw: bytes) -> None:
    params = {"seed": 3, "continue_from": [[1]]}
    out = splice(raw, {"kv_transfer_params": params})
    end = raw.rindex(b"}")
    assert out.startswith(raw[:end])
    assert out.endswith(raw[end:])
    assert orjson.loads(out) == {**orjson.loads(raw), "kv_transfer_params": params}


def test_a_splice_into_a_long_body_copies_nothing_of_it() -> None:
    raw = b'{"model":"m","x":"' + b"x" * 100_000 + b'"} '
    out = splice(raw, {"seed": 1})
    assert isinstance(out, LongBody)
    front, behind = out.pieces
    assert isinstance(front, memoryview)
    assert front.obj is raw
    assert bytes(front) + behind == raw[:-2] + b',"seed":1} '
    assert len(out) == len(raw) + len(b',"seed":1')


def test_what_has_come_of_a_body_is_given_once_and_not_copied_where_it_came_at_once() -> None:
    buffer, part = BodyBuffer(), b"x" * 1000
    buffer.add(part)
    assert len(buffer) == 1000
    assert buffer.take() is part
    assert (len(buffer), buffer.take()) == (0, b"")
    for piece in (b"", b"ab", b"", b"c", b"d"):
        buffer.add(piece)
    assert len(buffer) == 4
    assert (buffer.take(), buffer.take()) == (b"abcd", b"")


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=6), _json, min_size=1, max_size=5))
def test_a_splice_into_any_object_adds_or_replaces_just_the_members(fields: dict[str, Any]) -> None:
    out = orjson.loads(splice(orjson.dumps(fields), {"seed": 1, "n": None}))
    assert out == {**fields, "seed": 1, "n": None}


def test_the_router_reads_each_field_of_its_own_as_it_is_described() -> None:
    for members, described in ((CompletionMembers, RoutedCompletion), (ChatMembers, RoutedChat)):
        read = {one.name: one for one in structs.fields(members)}
        for field in structs.fields(described):
            assert read[field.name] == field
        others = {name for name in read if name not in described.__struct_fields__}
        assert {read[name].type for name in others} == {msgspec.Raw}


class Body(bytearray):
    """A body that a weak reference can follow; `bytes` know none."""


class Blocked:
    """A thread that is busy until `free`, and what it was given meanwhile."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.read: list[bytes] = []
        self.reader = ThreadPoolExecutor(1)
        self.reader.submit(self.free.wait, 20)

    def take(self, body: bytes) -> bytes:
        self.read.append(body)
        return body

    async def asked(self, waiting: list[bytes]) -> asyncio.Task[bytes]:
        """`read_on`, which waits for the thread."""
        task = asyncio.create_task(read_on(self.reader, self.take, waiting))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        return task

    def end(self) -> None:
        self.free.set()
        self.reader.shutdown()


async def test_a_body_that_waits_for_the_thread_is_held_by_its_request_alone() -> None:
    blocked = Blocked()
    try:
        kept = [b"kept"]
        left = [cast("bytes", Body(b"left"))]
        held = weakref.ref(left[0])
        reading, leaving = await blocked.asked(kept), await blocked.asked(left)
        assert (kept, left) == ([b"kept"], [b"left"])
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert held() is None
        assert left == []
        blocked.free.set()
        assert await asyncio.wait_for(reading, 20) == b"kept"
        assert kept == []
    finally:
        blocked.end()
    assert blocked.read == [b"kept"]


async def test_what_is_wrong_with_a_body_that_is_read_on_a_thread_is_said_and_nothing_is_kept() -> (
    None
):
    def refuse_it(body: bytes) -> None:
        raise ApiError(400, body.decode())

    waiting = [b"wrong"]
    with ThreadPoolExecutor(1) as reader:
        with pytest.raises(ApiError, match="wrong"):
            await read_on(reader, refuse_it, waiting)
        assert waiting == []
        reader.shutdown()
        waiting = [b"late"]
        with pytest.raises(RuntimeError):
            await read_on(reader, refuse_it, waiting)
        assert waiting == []


_TEXTS = {
    "plain": "a" * 5000,
    "escapes": '\\"' * 2000,
    "quotes": '"' * 2000,
    "brackets": '],[",1,' * 500,
    "wide": "漢\n" * 1000,
}


@pytest.mark.parametrize("text", _TEXTS.values(), ids=_TEXTS)
@pytest.mark.parametrize("count", [1, 30, 256, 257])
def test_prompts_are_counted_whatever_is_in_them(text: str, count: int) -> None:
    raw = msgspec.Raw(b"[ " + orjson.dumps([text, [1, 2]] * count)[1:])
    shape = prompt_shape(raw, 2 * count)
    assert (shape.prompts, shape.most_ids) == (2 * count, 2 * count)
    assert shape.text_bytes == count * len(orjson.dumps(text))
    for wrong in (b"[1,2]", b"5", b"{}"):
        longer = msgspec.Raw(bytes(raw)[:-1] + b"," + wrong + b"]")
        with pytest.raises(ApiError, match=f"at most {2 * count} prompts") as caught:
            prompt_shape(longer, 2 * count)
        assert (caught.value.status, caught.value.param) == (400, "prompt")
    with pytest.raises(ApiError, match=f"item {2 * count}: expected a string or token ids"):
        prompt_shape(msgspec.Raw(bytes(raw)[:-1] + b", null]"), 2 * count + 1)


async def test_a_long_body_is_read_on_a_thread_and_refused_as_a_short_one_is() -> None:
    def readers() -> int:
        return sum(thread.name.startswith("bodies") for thread in threading.enumerate())

    before = readers()
    async with pair() as (made, p, _):
        await made.json(max_tokens=3)
        assert readers() == before
        prompt = "x" * 500_000
        await made.json(prompt=prompt, max_tokens=3)
        assert readers() == before + 1
        assert p.calls[-1].body["prompt"] == prompt
        async with await made.post(prompt=prompt, n="x") as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "n")
        async with made.http.post(f"{made.base}/tokenize", data=b'{"x":"' + b"x" * 500_000) as bad:
            assert bad.status == 400
