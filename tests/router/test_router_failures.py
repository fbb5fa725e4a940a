"""Engines that fail: what is tried again, what D is told, what the client sees."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.router.fakes import (
    Call,
    HttpEngine,
    Script,
    answer,
    begin_and_die,
    begin_and_hang,
    die,
    fleet,
    hang,
    pair,
    serve_model,
    text_of,
    until,
)
from xpyd_core.errors import UserError
from xpyd_core.keys import call_mac
from xpyd_router.command import command, read_config
from xpyd_router.fleet.loads import Work

pytestmark = pytest.mark.usefixtures("both_ways")

KEY = b"a-key-of-enough-bytes"
ERROR = {"error": {"message": "boom at 127.0.0.1", "type": "server_error"}}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    return path


def once(first: Script) -> Script:
    """`first` for the first call of all the engines that get it, then the contract."""
    turns = iter([first])

    async def script(engine: HttpEngine, call: Call, request: Any) -> Any:
        return await next(turns, serve_model)(engine, call, request)

    return script


def addresses(engines: list[HttpEngine]) -> list[str]:
    return [a for e in engines for a in (e.beat.http_address, e.beat.zmq_address)]


@pytest.mark.parametrize("broken", [die, answer(500, ERROR), answer(200, {"choices": []})])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_p_is_replaced_under_a_new_uuid_and_d_is_told(
    broken: Script, stream: bool, key_file: Path
) -> None:
    async with fleet(kv_key_file=key_file) as fleet_:
        bad, good = await fleet_.engine("P"), await fleet_.engine("P")
        d = await fleet_.engine("D")
        bad.script = broken
        for _ in range(2):  # turns: one of the two meets the bad one
            if stream:
                assert text_of(await fleet_.events()) == "t0.0 t0.1 t0.2 t0.3 "
            else:
                await fleet_.json()
        assert bad.served == 1
        assert good.served == 2
        uuids = [call.uuid for call in (*bad.calls, *good.calls)]
        assert len(set(uuids)) == 3
        assert [call.uuid for call in d.calls] == [call.uuid for call in good.calls]
        await until(lambda: bool(d.releases))
        lost = bad.calls[0].uuid
        assert d.releases == [(lost, call_mac(KEY, "kv-release", lost))]
        assert fleet_.metric("xpyd_router_retries_total") == 1


@pytest.mark.parametrize("broken", [die, *(answer(s, ERROR) for s in (429, 500, 503))])
async def test_a_whole_request_is_done_again_when_d_fails(broken: Script, key_file: Path) -> None:
    async with fleet(kv_key_file=key_file) as fleet_:
        p, bad = await fleet_.engine("P"), await fleet_.engine("D")
        good = await fleet_.engine("D")
        bad.script = broken
        for _ in range(2):
            body = await fleet_.json()
            assert body["choices"][0]["text"] == "t0.0 t0.1 t0.2 t0.3 "
        assert (bad.served, good.served, p.served) == (1, 2, 3)
        assert len({call.uuid for call in p.calls}) == 3
        await until(lambda: bool(bad.releases))
        assert bad.releases[0][0] == bad.calls[0].uuid


@pytest.mark.parametrize("broken", [die, *(answer(s, ERROR) for s in (429, 500, 503))])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_with_ps_token_sent_the_next_p_goes_on_behind_it(broken: Script, path: str) -> None:
    async with fleet() as fleet_:
        p = await fleet_.engine("P")
        ds = [await fleet_.engine("D") for _ in range(2)]
        ds[0].script = ds[1].script = once(broken)
        events = await fleet_.events(path, max_tokens=6, logprobs=True)
        assert text_of(events) == "t0.0 t0.1 t0.2 t0.3 t0.4 t0.5 "
        assert events[-1] == "[DONE]"
        again = p.calls[1].body
        assert again["max_tokens"] == 2
        assert again["kv_transfer_params"]["continue_from"] == [[0]]
        assert again["kv_transfer_params"]["client_max_tokens"] == 6
        calls = [*p.calls, *ds[0].calls, *ds[1].calls]
        assert len(calls) == 4
        assert len({call.body["kv_transfer_params"]["seed"] for call in calls}) == 1
        assert len({e["id"] for e in events[:-1]}) == 1
        roles = [e for e in events[:-1] if "role" in (e["choices"][0].get("delta") or {})]
        assert len(roles) == (1 if path != "completions" else 0)


@pytest.mark.parametrize(
    "body", [{"n": 2}, {"prompt": ["a", "b"]}, {"prompt": ["a", "b"], "n": 2}, {"max_tokens": 2}]
)
async def test_several_choices_are_prefilled_again_without_a_limit(body: dict[str, Any]) -> None:
    async with fleet() as fleet_:
        p = await fleet_.engine("P")
        ds = [await fleet_.engine("D") for _ in range(2)]
        ds[0].script = ds[1].script = once(die)
        events = await fleet_.events(**body)
        again = p.calls[1].body
        assert set(again["kv_transfer_params"]) == {"seed", "pair_mac"}
        assert again["max_tokens"] == 1
        params = [c.body["kv_transfer_params"] for d in ds for c in d.calls]
        choices = len(params[0]["continue_from"])
        assert all(p["continue_from"] == [[100 * c] for c in range(choices)] for p in params)
        assert all(p["emit_from"] == [1] * choices for p in params)
        limit = body.get("max_tokens", 4)
        for c in range(choices):
            assert text_of(events, c) == "".join(f"t{c}.{i} " for i in range(limit))
        assert events[-1] == "[DONE]"


async def test_an_old_d_dying_in_its_stream_is_an_error_event_and_no_done() -> None:
    async with fleet() as fleet_:
        await fleet_.engine("P", is_ours=False)
        ds = [await fleet_.engine("D", is_ours=False) for _ in range(2)]
        ds[0].script = ds[1].script = once(begin_and_die)
        events = await fleet_.events()
        assert text_of(events[:-1]) == "t0.0 "
        assert events[-1]["error"]["code"] == "decode_failed"
        assert sum(d.served for d in ds) == 1


@pytest.mark.parametrize("status", [400, 404, 422])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engines_4xx_is_the_clients_and_is_not_tried_again(
    status: int, stream: bool
) -> None:
    async with pair() as (fleet_, p, d):
        error = {"error": {"message": "too long", "type": "x", "param": "prompt", "code": "c"}}
        p.script = answer(status, error, **{"Retry-After": "9"})
        async with await fleet_.post(stream=stream) as response:
            assert response.status == status
            assert await response.json() == error
            assert response.headers["Retry-After"] == "9"
        assert (p.served, d.served) == (1, 0)
        assert fleet_.metric("xpyd_router_retries_total") == 0


async def test_an_error_of_d_behind_the_first_chunk_is_an_event() -> None:
    async with pair() as (fleet_, _, d):
        d.script = answer(400, {"error": {"message": "no", "type": "invalid_request_error"}})
        events = await fleet_.events()
        assert events[-1]["error"]["message"] == "no"
        assert "[DONE]" not in events


async def test_a_failed_transfer_is_done_again_and_its_d_not_ejected() -> None:
    async with fleet() as fleet_:
        await fleet_.engine("P")
        d, _ = await fleet_.engine("D"), await fleet_.engine("D")
        d.script = answer(503, {"error": {"message": "x", "code": "kv_transfer_failed"}})
        await fleet_.json()
        await fleet_.json()
        assert all(i.standing == "Good" for i in fleet_.router.state.fleet.instances)


async def test_when_all_fail_the_answer_names_no_instance() -> None:
    async with fleet() as fleet_:
        for kind in "PPPPD":
            await fleet_.engine(kind)
        for engine in fleet_.engines[:4]:
            engine.script = answer(500, ERROR)
        async with await fleet_.post() as response:
            assert response.status == 502
            text = await response.text()
        assert not any(a in text for a in addresses(fleet_.engines))
        assert sum(e.served for e in fleet_.engines) == 3


async def test_a_failure_with_nobody_else_to_ask_is_the_answer() -> None:
    async with pair() as (fleet_, p, _):
        p.script = answer(500, ERROR)
        async with await fleet_.post() as response:
            assert response.status == 502
        assert p.served == 1


@pytest.mark.parametrize("most", [1, 2, 5])
async def test_a_request_is_tried_as_often_as_the_flag_says(most: int) -> None:
    async with fleet(max_tries=most) as fleet_:
        for kind in "PPPPPPD":
            await fleet_.engine(kind)
        for engine in fleet_.engines[:6]:
            engine.script = answer(500, ERROR)
        async with await fleet_.post() as response:
            assert response.status == 502
            told = "one try" if most == 1 else f"{most} tries"
            assert f"after {told}" in (await response.json())["error"]["message"]
        assert sum(engine.served for engine in fleet_.engines) == most


def test_the_flag_for_tries_is_checked() -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    for given, kept in ((["--max-tries=1"], 1), ([], 3), (["--max-tries=100"], 100)):
        assert read_config(parser.parse_args(["--kv-insecure", *given])).max_tries == kept
    for given in ("0", "101"):
        with pytest.raises(UserError, match="--max-tries: expected 1 to 100"):
            read_config(parser.parse_args(["--kv-insecure", f"--max-tries={given}"]))


async def test_refusals_of_draining_instances_cost_no_tries() -> None:
    async with fleet() as fleet_:
        for kind in "PPPPPPD":
            await fleet_.engine(kind)
        for engine in fleet_.engines[:6]:
            engine.script = answer(503, ERROR)
        fleet_.engines[3].script = serve_model
        for _ in range(6):
            await fleet_.json()
        refused = fleet_.metric("xpyd_router_errors_total", phase="prefill", cause="refused")
        assert refused > 5  # one of six turns meets the good one at once


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("body", [{}, {"max_tokens": 1}, {"echo": True}])
@pytest.mark.parametrize("stream", [False, True])
async def test_neither_ids_nor_addresses_of_engines_reach_the_client(
    is_ours: bool, body: dict[str, Any], stream: bool
) -> None:
    async with fleet() as fleet_:
        for kind in "PD":
            await fleet_.engine(kind, is_ours=is_ours)
        async with await fleet_.post(stream=stream, **body) as response:
            text = await response.text() + str(response.headers)
        assert response.status == 200
        assert not any(a in text for a in addresses(fleet_.engines))
        calls = [call for engine in fleet_.engines for call in engine.calls]
        assert calls
        assert not any(call.uuid in text for call in calls)
        assert response.headers["X-Request-Id"] in text


async def test_an_engines_error_is_cleared_of_addresses() -> None:
    async with pair() as (fleet_, p, d):

        async def script(engine: HttpEngine, call: Call, request: Any) -> Any:
            said = f"{call.request_id} {p.beat.http_address} {d.beat.zmq_address}"
            return await answer(400, {"error": {"message": said}})(engine, call, request)

        p.script = script
        async with await fleet_.post() as response:
            text = await response.text()
        assert not any(a in text for a in addresses([p, d]))
        assert p.calls[0].uuid not in text


@pytest.mark.parametrize("script", [serve_model, die, answer(400, ERROR)])
async def test_a_p_whose_call_is_over_has_no_load(script: Script) -> None:
    async with pair() as (fleet_, p, d):
        p.script = script
        view = fleet_.router.state.fleet
        loads = {one.beat.type: view.load(one.key) for one in view.instances}
        async with await fleet_.post() as response:
            await response.read()
        assert p.served == 1
        assert (loads["P"].own, loads["D"].own) == (Work(), Work())
        assert d.served == (script is serve_model)


async def test_a_p_whose_client_left_has_no_load() -> None:
    async with pair() as (fleet_, p, _):
        p.script = hang
        view = fleet_.router.state.fleet
        load = next(view.load(one.key) for one in view.instances if one.beat.type == "P")
        task = asyncio.create_task(fleet_.post())
        await until(lambda: load.ours == 1)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: fleet_.metric("xpyd_router_in_flight") == 0)
        assert load.own == Work()


@pytest.mark.parametrize("phase", ["prefill", "decode", "stream"])
async def test_a_client_that_leaves_ends_the_engines_call_at_once(
    phase: str, key_file: Path
) -> None:
    async with pair(kv_key_file=key_file) as (fleet_, p, d):
        busy = p if phase == "prefill" else d
        busy.script = begin_and_hang if phase == "stream" else hang

        async def client() -> None:
            async with await fleet_.post(stream=phase == "stream") as response:
                await response.read()

        task = asyncio.create_task(client())
        await until(lambda: busy.served == 1)
        if phase == "stream":
            await until(lambda: fleet_.metric("xpyd_router_in_flight") == 1)
            await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: busy.calls[0].is_closed)
        await until(lambda: fleet_.metric("xpyd_router_in_flight") == 0)
        if phase == "stream":
            assert d.releases == []
        else:
            await until(lambda: bool(d.releases))
            assert d.releases[0][0] == busy.calls[0].uuid


async def test_a_fleet_without_secret_releases_with_the_empty_key() -> None:
    async with fleet() as fleet_:
        bad, _ = await fleet_.engine("P"), await fleet_.engine("P")
        d = await fleet_.engine("D")
        bad.script = die
        await fleet_.json()
        await fleet_.json()
        await until(lambda: bool(d.releases))
        (uuid, mac), *_ = d.releases
        assert mac == call_mac(b"", "kv-release", uuid)


async def test_a_call_to_a_frozen_instance_ends_when_it_missed_its_beats() -> None:
    async with fleet() as fleet_:
        frozen = await fleet_.engine("P", period_ms=100)
        await fleet_.engine("P"), await fleet_.engine("D")
        frozen.script = hang
        for _ in range(2):
            await fleet_.json()
        assert fleet_.metric("xpyd_router_errors_total", phase="prefill", cause="lost") == 1
        assert frozen.calls[0].is_closed


async def test_a_slow_p_is_given_up_after_its_own_deadline() -> None:
    async with fleet(prefill_timeout_s=0.1) as fleet_:
        slow, _ = await fleet_.engine("P"), await fleet_.engine("P")
        await fleet_.engine("D")
        slow.script = hang
        for _ in range(2):
            await fleet_.json()
        await until(lambda: slow.calls[0].is_closed)


async def test_a_request_that_nobody_answers_ends_with_504() -> None:
    async with pair(request_timeout_s=0.2) as (fleet_, p, _):
        p.script = hang
        async with await fleet_.post() as response:
            assert response.status == 504


async def test_requests_wait_for_the_only_p_to_come_back() -> None:
    async with pair(pair_wait_s=20.0, max_tries=100) as (fleet_, p, _):
        p.script = die
        running = [asyncio.create_task(fleet_.json()) for _ in range(4)]
        await until(lambda: fleet_.metric("xpyd_router_waiting") == 4)
        p.script = serve_model
        await fleet_.beat(p, incarnation="next")
        for body in await asyncio.gather(*running):
            assert body["choices"][0]["text"] == "t0.0 t0.1 t0.2 t0.3 "


async def test_an_only_p_that_was_full_is_asked_again_though_no_beat_says_so() -> None:
    async with fleet(pair_wait_s=15.0) as fleet_:
        await fleet_.engine("D")
        p = await fleet_.engine("P")
        await fleet_.json()  # the model has been served: its requests wait
        p.script = once(answer(503, ERROR))
        await fleet_.json()
        assert p.served == 3
