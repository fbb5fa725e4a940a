"""vLLM's engines behind this router: equal tokens over P and D, wherever a body or a death cuts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import orjson
import pytest
from aiohttp import web

from tests.router.fakes import (
    Fleet,
    HttpEngine,
    answer,
    begin_and_hang,
    fleet,
    hang,
    text_of,
    until,
)
from tests.router.vllm_engines import (
    ASKED_OF_P,
    Vllm,
    generated_id,
    text_of_ids,
    vllm_engine,
)

PROMPTS = ["a", "San Francisco is a", "x" * 15, "x" * 16, "x" * 17, "y" * 300]


def expected(prompt: str, tokens: int) -> str:
    """What one vLLM alone answers."""
    ids = list(prompt.encode())
    for _ in range(tokens):
        ids.append(generated_id(ids))
    return text_of_ids(ids[len(prompt.encode()) :])


class Pinned(dict[str, list[int]]):
    """The KV that Ps hold."""


async def nixl_pair(
    fleet_: Fleet, **beat: Any
) -> tuple[tuple[HttpEngine, Vllm], tuple[HttpEngine, Vllm], Pinned]:
    pinned = Pinned()
    p = await vllm_engine(fleet_, "P", pinned, **beat)
    d = await vllm_engine(fleet_, "D", pinned, **beat)
    return p, d, pinned


kinds = pytest.mark.parametrize(
    "beat",
    [{}, {"prompt_ids": 0}, {"dialect": "nixl-push"}],
    ids=["by ids", "without ids", "push"],
)


@kinds
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_pairs_answer_as_one_vllm_alone(beat: dict[str, Any], prompt: str) -> None:
    async with fleet() as fleet_:
        (p, _), (d, decode), pinned = await nixl_pair(fleet_, **beat)
        whole = await fleet_.json(prompt=prompt, max_tokens=5)
        assert whole["choices"][0]["text"] == expected(prompt, 5)
        assert whole["usage"]["completion_tokens"] == 5
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = await fleet_.events(prompt=prompt, max_tokens=5, stream_options=options)
        assert text_of(events) == expected(prompt, 5)
        assert events[-1] == "[DONE]"
        assert len({event["id"] for event in events[:-1]}) == 1
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": 5,
            "total_tokens": len(prompt) + 5,
        }
        assert [e["usage"] for e in events[:-1] if not e["choices"]] == [usage]
        running = [e["usage"]["completion_tokens"] for e in events[:-1] if e["choices"]]
        assert running == sorted(running)
        assert running[-1] == 5
        assert len(p.calls) == len(d.calls) == 2
        assert 0 not in decode.external_tokens, "all of the prompt came from P"
        assert pinned == {}
        assert "token_ids" not in orjson.dumps(events).decode()


@kinds
async def test_chats_are_the_same_and_begin_with_one_role(beat: dict[str, Any]) -> None:
    async with fleet() as fleet_:
        await nixl_pair(fleet_, **beat)
        rendered = "user: hello\n"
        whole = await fleet_.json("chat/completions", max_tokens=5)
        assert whole["choices"][0]["message"]["content"] == expected(rendered, 5)
        events = await fleet_.events("chat/completions", max_completion_tokens=5, max_tokens=None)
        assert text_of(events) == expected(rendered, 5)
        deltas = [event["choices"][0]["delta"] for event in events[:-1]]
        assert [delta.get("role") for delta in deltas].count("assistant") == 1
        assert deltas[0]["role"] == "assistant"


async def test_p_is_asked_as_nixls_protocol_says_and_d_gets_what_p_answered() -> None:
    async with fleet() as fleet_:
        (p, _), (d, _), _ = await nixl_pair(fleet_, prompt_ids=0)
        given: list[dict[str, Any]] = []
        before = p.script

        async def noted(*call: Any) -> Any:
            response = await before(*call)
            given.append(orjson.loads(response.body)["kv_transfer_params"])
            return response

        p.script = noted
        await fleet_.events(max_tokens=3, min_tokens=2, stream_options={"include_usage": True})
        (to_p,), (to_d,) = p.calls, d.calls
        assert to_p.body == {
            "model": "m",
            "prompt": "San Francisco is a",
            "max_tokens": 1,
            "min_tokens": 1,
            "stream": False,
            "stream_options": None,
            "kv_transfer_params": ASKED_OF_P,
        }
        assert to_d.body == {
            "model": "m",
            "prompt": "San Francisco is a",
            "max_tokens": 3,
            "min_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "kv_transfer_params": given[0],
        }


async def test_a_push_p_is_not_asked_for_blocks() -> None:
    async with fleet() as fleet_:
        (p, _), _, _ = await nixl_pair(fleet_, dialect="nixl-push")
        await fleet_.json()
        asked = {k: v for k, v in ASKED_OF_P.items() if k != "remote_block_ids"}
        assert p.calls[0].body["kv_transfer_params"] == asked


@kinds
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "prompt", [["a list of one"], [list(b"a list of one")]], ids=["text", "ids"]
)
async def test_a_list_of_one_prompt_is_one_prompt(
    beat: dict[str, Any], stream: bool, prompt: Any
) -> None:
    async with fleet() as fleet_:
        (p, _), (_, decode), pinned = await nixl_pair(fleet_, **beat)
        if stream:
            text = text_of(await fleet_.events(prompt=prompt, max_tokens=3))
        else:
            text = (await fleet_.json(prompt=prompt, max_tokens=3))["choices"][0]["text"]
        assert text == expected("a list of one", 3)
        assert (len(p.calls), pinned, decode.external_tokens) == (1, {}, [13])


@pytest.mark.parametrize(
    ("body", "is_handed"),
    [
        ({}, True),
        ({"temperature": 0.7}, True),
        ({"temperature": 0, "seed": 3}, True),
        ({"temperature": 0.7, "seed": 3}, False),
        ({"presence_penalty": 0.5}, False),
        ({"frequency_penalty": 0.5}, False),
        ({"stop": ["w"]}, False),
        ({"logprobs": 0}, False),
        ({"logprobs": None, "echo": False, "stop": []}, True),
        ({"min_tokens": 1}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"return_token_ids": True}, False),
        ({"max_tokens": None}, False),
        ({"a_field_of_tomorrow": 1}, False),
        ({"prompt": "x" * 16}, False),
        ({"prompt": "x" * 31}, True),
        ({"prompt": "x" * 32}, False),
        ({"max_tokens": 500}, False),
    ],
    ids=str,
)
async def test_ps_token_is_handed_over_where_sampling_allows_it(
    body: dict[str, Any], is_handed: bool
) -> None:
    async with fleet() as fleet_:
        _, (d, _), _ = await nixl_pair(fleet_)
        wanted: dict[str, Any] = {"max_tokens": 5, "stream": True, **body}
        async with await fleet_.post("completions", **wanted) as response:
            await response.read()
        prompt = body.get("prompt", "San Francisco is a")
        (to_d,) = d.calls
        ids: object = to_d.body["prompt"]
        had = len(cast("list[int]", ids)) if isinstance(ids, list) else 0
        assert (had == len(prompt) + 1) == is_handed
        if is_handed:
            assert to_d.body["max_tokens"] == 4


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("chunks", [0, 1, 4])
@pytest.mark.parametrize("half_at", [None, 1, 2])
@pytest.mark.parametrize("how", ["dies_after", "aborts_after"])
async def test_a_stream_goes_on_elsewhere_behind_the_ids_when_d_dies_or_is_ended(
    path: str, chunks: int, half_at: int | None, how: str
) -> None:
    async with fleet() as fleet_:
        _, (_, decode), pinned = await nixl_pair(fleet_)
        setattr(decode, how, chunks)
        decode.half_character_at = half_at
        await vllm_engine(fleet_, "D", pinned)
        for _ in range(2):
            options = {"include_usage": True}
            events = await fleet_.events(path, max_tokens=9, stream_options=options)
            prompt = "San Francisco is a" if path == "completions" else "user: hello\n"
            assert text_of(events) == expected(prompt, 9)
            assert events[-2]["usage"] == {
                "prompt_tokens": len(prompt),
                "completion_tokens": 9,
                "total_tokens": len(prompt) + 9,
            }
            assert len({event["id"] for event in events[:-1]}) == 1
            roles = [e["choices"][0].get("delta", {}).get("role") for e in events[:-2]]
            assert roles.count("assistant") == (path != "completions")


@pytest.mark.parametrize("how", ["dies_after", "aborts_after"])
async def test_a_stream_that_cannot_be_repeated_ends_in_an_error(how: str) -> None:
    async with fleet() as fleet_:
        _, (_, decode), pinned = await nixl_pair(fleet_, prompt_ids=0)
        setattr(decode, how, 2)
        await vllm_engine(fleet_, "D", pinned, prompt_ids=0)
        endings = [(await fleet_.events(max_tokens=9))[-1] for _ in range(2)]
        assert endings.count("[DONE]") == 1
        (error,) = (one["error"] for one in endings if one != "[DONE]")
        assert error["code"] == "decode_failed"


async def test_engines_of_two_dialects_are_no_pair() -> None:
    async with fleet() as fleet_:
        pinned = Pinned()
        p, _ = await vllm_engine(fleet_, "P", pinned)
        await vllm_engine(fleet_, "D", pinned, dialect="nixl-push")
        await fleet_.engine("D", compatibility="")
        async with await fleet_.post() as response:
            assert response.status == 503
        assert p.calls == []


async def test_what_p_keeps_for_a_d_that_is_never_asked_is_counted() -> None:
    async with fleet(max_tries=1) as fleet_:
        (p, _), (d, _), pinned = await nixl_pair(fleet_)
        d.script = answer(500, {"error": {"message": "no"}})
        async with await fleet_.post() as response:
            assert response.status == 502
        assert len(pinned) == 1
        assert fleet_.metric("xpyd_router_releases_total", result="leased") == 1
        assert d.releases == []
        p.script = answer(500, {"error": {"message": "no"}})
        async with await fleet_.post() as response:
            assert response.status == 502
        assert fleet_.metric("xpyd_router_releases_total", result="leased") == 1


async def test_a_p_that_keeps_nothing_leaves_all_to_d() -> None:
    async with fleet() as fleet_:
        (p, _), (d, _), _ = await nixl_pair(fleet_)
        body: dict[str, Any] = {"choices": [], "usage": None, "kv_transfer_params": None}
        p.script = answer(200, body)
        whole = await fleet_.json(prompt="one", max_tokens=3)
        assert whole["choices"][0]["text"] == expected("one", 3)
        assert "kv_transfer_params" not in d.calls[0].body
        p.script = answer(200, [])
        async with await fleet_.post() as response:
            assert response.status == 502


async def test_an_engine_may_say_that_the_pair_id_is_all_it_needs() -> None:
    async with fleet(kv_insecure=True) as fleet_:
        said: dict[str, Any] = {"dialect": "pair-id", "continuation": 0}
        p, d = await fleet_.engine("P", **said), await fleet_.engine("D", **said)
        given = {"transfer": ["none"], "reason": ["busy"], "decode_incarnation": "x", "other": 1}
        p.script = answer(200, {"choices": [], "kv_transfer_params": given})
        await fleet_.json(max_tokens=3)
        assert set(p.calls[0].body["kv_transfer_params"]) == {"pair_mac"}
        params = d.calls[0].body["kv_transfer_params"]
        assert params == {
            "transfer": ["none"],
            "decode_incarnation": "x",
            "pair_mac": p.calls[0].headers["x-xpyd-pair-mac"],
        }
        await fleet_.json(max_tokens=3, n=2)
        assert (len(p.calls), len(d.calls)) == (1, 2)
        await fleet_.json(max_tokens=3, prompt=["one", "two"])
        params = d.calls[2].body["kv_transfer_params"]
        assert set(params) == {"decode_incarnation", "pair_mac", "transfer"}
        assert params["transfer"] == ["none", "none"], "D waits for neither"
        given["transfer"] = ["granted"]
        await fleet_.json(max_tokens=3, prompt=["one", "two"])
        params = d.calls[3].body["kv_transfer_params"]
        assert set(params) == {"decode_incarnation", "pair_mac"}, "P speaks of the first one"


def nothing_is_open(fleet_: Fleet) -> bool:
    view = fleet_.router.state.fleet
    return all(view.load(one.key).own.requests == 0 for one in view.instances)


def params_of(text: str) -> Any:
    """A P that answers with these kv_transfer_params."""

    async def script(*_: Any) -> web.Response:
        body = '{"choices": [], "kv_transfer_params": ' + text + "}"
        return web.Response(text=body, content_type="application/json")

    return script


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        *("[1]", '"text"', "7", "NaN"),
        '{"remote_block_ids": ' + "[" * 400 + "]" * 400 + "}",
        '{"remote_block_ids": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"remote_engine_id": "' + "x" * (1 << 20) + '"}',
    ],
    ids=["list", "string", "number", "no JSON", "nested", "nested deeper", "long"],
)
@pytest.mark.parametrize("dialect", ["nixl", "pair-id"])
async def test_what_p_says_and_d_could_not_read_is_ps_fault_and_another_p_serves(
    dialect: str, text: str, stream: bool
) -> None:
    async with fleet() as fleet_:
        (bad, _), (d, _), pinned = await nixl_pair(fleet_, dialect=dialect)
        is_named = dialect == "pair-id" and text.startswith("{")
        bad.script = params_of('{"transfer": ' + text + "}" if is_named else text)
        await vllm_engine(fleet_, "P", pinned, dialect=dialect)
        for _ in range(2):
            if stream:
                said = text_of(await fleet_.events(prompt="one", max_tokens=3))
            else:
                said = (await fleet_.json(prompt="one", max_tokens=3))["choices"][0]["text"]
            assert said == expected("one", 3)
        assert (len(bad.calls), len(d.calls)) == (1, 2)
        assert nothing_is_open(fleet_)
        assert pinned == {}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [500, 503, 429])
async def test_a_d_that_fails_behind_p_leaves_p_its_lease_and_another_d_serves(
    status: int, stream: bool
) -> None:
    async with fleet() as fleet_:
        _, (bad, _), pinned = await nixl_pair(fleet_)
        bad.script = answer(status, {"error": {"message": "no"}})
        await vllm_engine(fleet_, "D", pinned)
        statuses: list[int] = []
        for _ in range(2):
            async with await fleet_.post(prompt="one", max_tokens=3, stream=stream) as response:
                statuses.append(response.status)
                await response.read()
        assert statuses == [200, 200]
        assert len(pinned) == len(bad.calls) == 1
        assert fleet_.metric("xpyd_router_releases_total", result="leased") == 1
        assert nothing_is_open(fleet_)


@kinds
@pytest.mark.parametrize("state", ["prefill", "decode", "stream"])
async def test_a_client_that_leaves_ends_both_calls_and_no_work_stays(
    beat: dict[str, Any], state: str
) -> None:
    async with fleet() as fleet_:
        (p, _), (d, _), pinned = await nixl_pair(fleet_, **beat)
        waits = p if state == "prefill" else d
        waits.script = begin_and_hang if state == "stream" else hang
        request = asyncio.create_task(fleet_.events(prompt="one", max_tokens=3))
        await until(lambda: bool(waits.calls))
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
        await until(lambda: waits.calls[0].is_closed and nothing_is_open(fleet_))
        assert len(pinned) == (state != "prefill")
        # A D that has begun to answer has read P's KV; this fake has not.
        leased = fleet_.metric("xpyd_router_releases_total", result="leased")
        assert leased == (state == "decode")
