"""The router in front of fake engines: who gets which body, and what the client gets."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import orjson
import pytest
from aiohttp import web

from tests.router.fakes import (
    Call,
    Generated,
    HttpEngine,
    fleet,
    pair,
    sse,
    start_stream,
    text_of,
    until,
)

PAIR_ID = r"___prefill_addr_127\.0\.0\.1:\d+___decode_addr_127\.0\.0\.1:\d+_[0-9a-f]{32}"


async def test_p_gets_one_token_and_d_the_clients_bytes_with_the_splice() -> None:
    async with pair() as (fleet_, p, d):
        answer = await fleet_.json(max_tokens=4, temperature=0, min_tokens=2, unknown={"a": 1})
        assert answer["choices"][0]["text"] == "t0.0 t0.1 t0.2 t0.3 "
        first, second = p.calls[0], d.calls[0]
        assert first.request_id == second.request_id
        assert re.fullmatch(PAIR_ID, first.request_id)
        assert first.body["max_tokens"] == 1
        assert first.body["min_tokens"] == 1
        assert first.body["stream"] is False
        assert first.body["return_token_ids"] is True
        assert first.body["kv_transfer_params"]["client_max_tokens"] == 4
        params = second.body["kv_transfer_params"]
        assert params["continue_from"] == [[0]]
        assert params["emit_from"] == [0]
        assert params["first_logprobs"] == [None]
        assert params["transfer"] == ["granted"]
        assert params["decode_incarnation"] == "d-inc"
        assert params["seed"] == first.body["kv_transfer_params"]["seed"]
        assert params["response_id"] == answer["id"]
        client = second.raw[: second.raw.index(b',"kv_transfer_params"')] + b"}"
        assert orjson.loads(client)["unknown"] == {"a": 1}
        assert client.startswith(b'{"model": "m", ')  # aiohttp's spaces are still there


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_stream_begins_with_ps_token_and_goes_on_with_ds(path: str) -> None:
    async with pair() as (fleet_, p, d):
        events = await fleet_.events(path, stream_options={"include_usage": True})
        assert p.calls[0].body["stream_options"] is None
        assert d.calls[0].body["kv_transfer_params"]["emit_from"] == [1]
        assert text_of(events) == "t0.0 t0.1 t0.2 t0.3 "
        assert events[-1] == "[DONE]"
        assert events[-2]["usage"]["completion_tokens"] == 4
        assert len({e["id"] for e in events[:-1]}) == 1
        assert len({e["created"] for e in events[:-1]}) == 1
        assert b"token_ids" not in orjson.dumps(events)
        if path != "completions":
            assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


async def test_1p3d_and_3p1d_take_turns() -> None:
    for ps, ds in ((1, 3), (3, 1)):
        async with fleet() as fleet_:
            engines = [await fleet_.engine("P") for _ in range(ps)]
            engines += [await fleet_.engine("D") for _ in range(ds)]
            for _ in range(6):
                await fleet_.json()
            assert [e.served for e in engines if e.beat.type == "P"] == [6 // ps] * ps
            assert [e.served for e in engines if e.beat.type == "D"] == [6 // ds] * ds


async def test_an_engine_that_does_not_end_its_body_behind_done_is_left() -> None:
    async with fleet() as fleet_:
        engine = await fleet_.engine("A")

        async def script(one: HttpEngine, call: Call, request: web.Request) -> Any:
            response = await start_stream(request)
            for chunk in Generated(one, call).chunks():
                await response.write(sse(chunk))
            await response.write(b"data: [DONE]\n\n")
            while True:  # what comes still is no reason to stay
                await response.write(b": and more\n\n")
                await asyncio.sleep(0.05)

        engine.script = script
        events = await fleet_.events()
        assert events[-1] == "[DONE]"
        assert engine.runner is not None
        server = engine.runner.server
        await until(lambda: server is not None and not server.connections)
        assert fleet_.router.state.fleet.instances, "its beats were missed first"
