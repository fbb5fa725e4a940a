"""Mixed pairs get no requests until the router's own prompts have shown that D uses P's KV."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.router import fakes
from tests.router.fakes import (
    Call,
    Fleet,
    HttpEngine,
    answer,
    die,
    hang,
    replace_beat,
    serve_model,
    until,
)
from tests.router.several import Client, several, when
from tests.router.test_router_blame import NO_KV
from tests.router.test_router_mixed_pairs import OTHER, VLLM, spoken
from xpyd_core.keys import call_mac
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView
from xpyd_router.http.server import running
from xpyd_router.metrics import RouterMetrics
from xpyd_router.request.introductions import Introducer, prompt_for, words

pytestmark = pytest.mark.usefixtures("uv_loop")
# Engines of these tests beat once: with the usual period a machine without a free core for some
# seconds makes them late, then gone.
fleet = partial(fakes.fleet, heartbeat_interval_s=60.0)
DIFFERS = "recomputed; reason=incompatible:kv_values"


def test_prompts_are_words_that_no_cache_knows() -> None:
    assert words(bytes(range(64))) != words(bytes(range(1, 65)))
    assert len(words(bytes(128)).split()) == 64


@dataclass
class Comparing:
    """A D that compares: the first prompt of a P is not used, the next ones are as `then` says."""

    made: Fleet
    engine: HttpEngine
    then: str = "moved"
    has_room: bool = True
    known: set[str] = field(default_factory=set[str])
    counts: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])

    async def __call__(
        self, engine: HttpEngine, call: Call, request: web.Request
    ) -> web.StreamResponse:
        p, _, _ = call.request_id.removeprefix("___prefill_addr_").partition("___")
        said = self.then if p in self.known else "recomputed; reason=unverified"
        if self.has_room:
            self.known.add(p)
        engine.said_of_kv = said
        word = said.partition("reason=")[2]
        cause = word.partition(":")[0]
        self.counts.setdefault(p, {}).setdefault(cause, 0)
        self.counts[p][cause] += 1
        return await serve_model(engine, call, request)


async def mixed_p(made: Fleet, engine: str, **more: Any) -> HttpEngine:
    said: dict[str, Any] = {"continuation": 0, **spoken(engine), **more}
    return await made.engine("P", **said)


async def mixed_d(made: Fleet, engine: str, context: int = 0, **how: Any) -> Comparing:
    """A D that is Ready when it compares: the router is quick."""
    said: dict[str, Any] = {"continuation": 0, **spoken(engine), "state": "Starting"}
    said["max_model_len"] = context
    d = await made.engine("D", **said)
    d.script = comparing = Comparing(made, d, **how)
    await made.beat(d, state="Ready")
    return comparing


async def mixed(
    made: Fleet, of_p: str = VLLM, of_d: str = "", **how: Any
) -> tuple[HttpEngine, Comparing]:
    """A P and a D of two engines."""
    return await mixed_p(made, of_p), await mixed_d(made, of_d, **how)


def introductions_of(made: Fleet, result: str) -> float:
    return made.metric("xpyd_router_introductions_total", result=result)


async def report(made: Fleet, engine: HttpEngine) -> dict[str, Any]:
    async with made.http.get(f"{made.admin}/instances") as response:
        found = (await response.json())["instances"]
    (one,) = (one for one in found if one["instance"] == engine.beat.instance)
    return one


@pytest.mark.parametrize(("of_p", "of_d"), [(VLLM, ""), ("", VLLM), (VLLM, OTHER)])
async def test_the_first_request_of_a_client_gets_kv_already(
    of_p: str, of_d: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with fleet(pair_wait_s=60.0) as made:
        p, d = await mixed(made, of_p, of_d)
        await until(lambda: made.router.state.fleet.has_pair)
        assert [call.request_id for call in p.calls] == [c.request_id for c in d.engine.calls]
        before = len(d.engine.calls)
        assert before == 2
        assert introductions_of(made, "met") == introductions_of(made, "unverified") == 1
        await made.json(prompt="a client's")
        assert len(d.engine.calls) == before + 1
        assert d.counts[p.beat.zmq_address] == {"unverified": 1, "": 2}
        assert (await report(made, p))["unmet"] == []
    assert f"({of_p or 'xpyd'})" in caplog.text
    assert "have met" in caplog.text


async def test_introductions_are_short_signed_prompts_each_another_one(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a secret of the whole fleet\n")

    async with fleet(kv_key_file=tmp_path / "key", kv_insecure=False) as made:
        p, d = await mixed(made)
        await until(lambda: made.router.state.fleet.has_pair)
        assert made.key is not None
        for call in (*p.calls, *d.engine.calls):
            mac = call_mac(made.key, "pair", call.request_id)
            assert call.headers["x-xpyd-pair-mac"] == mac
            assert call.body["kv_transfer_params"]["pair_mac"] == mac
            assert call.body["temperature"] == 0
        assert [call.body["max_tokens"] for call in p.calls] == [1, 1]
        assert [call.body["max_tokens"] for call in d.engine.calls] == [2, 2]
        prompts = [call.body["prompt"] for call in p.calls]
        assert prompts == [call.body["prompt"] for call in d.engine.calls]
        assert len(set(prompts)) == 2
        assert all(len(set(prompt.split())) >= 16 for prompt in prompts)


async def test_introductions_count_as_no_requests_of_clients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with fleet() as made:
        await mixed(made)
        await until(lambda: made.router.state.fleet.has_pair)
        text = made.router.state.metrics.render(made.router.state.fleet.instances).decode()
        counted = [
            line for line in text.splitlines() if "_requests_total" in line or "kv_outcomes" in line
        ]
        assert [
            line
            for line in counted
            if not line.startswith("#") and not line.endswith((" 0.0", " 0"))
        ] == []
    assert "completions" not in capsys.readouterr().err


async def test_until_it_has_met_a_p_a_mixed_d_serves_alone() -> None:
    async with fleet(on_no_prefill="PrefillOnDecode") as made:
        p, d = await mixed(made, has_room=False)
        await until(lambda: introductions_of(made, "unverified") >= 2)
        sent = len(p.calls)
        await made.json(prompt="a client's")
        assert all(call.body["prompt"] != "a client's" for call in p.calls)
        assert len(p.calls) - sent <= 2
        assert (await report(made, p))["unmet"] == [d.engine.beat.instance]
        assert (await report(made, d.engine))["unmet"] == [p.beat.instance]
        d.has_room = True
        await until(lambda: introductions_of(made, "met") == 1)


async def test_a_pair_whose_kv_differs_gets_no_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fleet() as made:
        p, d = await mixed(made, then=DIFFERS)
        await until(lambda: introductions_of(made, "refused") == 1)
        sent = len(p.calls)
        async with await made.post(prompt="a client's") as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "no_instances"
        assert (await report(made, p))["refused"] == [d.engine.beat.instance]
        assert (await report(made, d.engine))["unmet"] == []
        # A P of D's own engine is a pair at once; the refused one is not asked any more.
        other = await made.engine("P", **spoken(""))
        await made.json(prompt="a client's")
        assert (len(other.calls), len(p.calls)) == (1, sent)
    assert "are never a pair" in caplog.text
    assert "incompatible:kv_values: see `first contact` in D's log" in caplog.text


async def test_a_d_that_fails_its_calls_instead_of_computing_is_refused_by_its_word() -> None:
    async with fleet() as made:
        _, d = await mixed(made)
        said = DIFFERS.replace("recomputed", "failed")
        d.engine.script = answer(503, NO_KV, **{"X-Xpyd-Kv": said})
        await until(lambda: introductions_of(made, "refused") == 1)


@pytest.mark.parametrize("not_sent", ["incompatible:kv_layout", "refused:limit"])
async def test_what_p_says_of_kv_that_it_does_not_send_counts_as_ds_word(not_sent: str) -> None:
    async with fleet() as made:
        p, d = await mixed_p(made, VLLM, state="Starting"), await mixed_d(made, "")
        p.not_sent, d.then = not_sent, "recomputed; reason=not_sent"
        d.known.add(p.beat.zmq_address)
        await made.beat(p, state="Ready")
        is_for_good = not_sent.startswith("incompatible")
        if not is_for_good:
            await until(lambda: introductions_of(made, "unverified") >= 2)
            p.not_sent, d.then = "", "moved"
        await until(lambda: introductions_of(made, "refused" if is_for_good else "met") == 1)


async def test_a_p_that_d_refuses_for_a_while_is_tried_again() -> None:
    async with fleet() as made:
        _, d = await mixed(made, then="recomputed; reason=refused:limit")
        await until(lambda: introductions_of(made, "unverified") >= 3)
        d.then = "moved"
        await until(lambda: introductions_of(made, "met") == 1)
        assert introductions_of(made, "refused") == 0


@pytest.mark.parametrize("by_ids", [False, True])
def test_a_prompt_fits_whatever_the_tokenizer_and_is_long_enough_to_compare(by_ids: bool) -> None:
    for context in (0, *range(18, 400)):
        prompt = prompt_for(context, os.urandom, by_ids=by_ids)
        assert prompt is not None
        if isinstance(prompt, str):
            least, most = len(prompt.split()), len(prompt.encode()) + 1
        else:
            least = most = len(prompt)
            assert max(prompt) < 128
        assert least >= 16
        assert most + 2 <= (context or 300)
        assert isinstance(prompt, list) is (by_ids or 0 < context < 67)


def test_a_context_without_room_for_a_comparison_has_no_prompt() -> None:
    assert [prompt_for(context, os.urandom) for context in range(1, 18)] == [None] * 17


async def test_engines_of_a_short_context_are_introduced_by_token_ids() -> None:
    async with fleet() as made:
        p = await mixed_p(made, VLLM, max_model_len=18)
        await mixed_d(made, "", context=4096)
        await until(lambda: made.router.state.fleet.has_pair)
        assert [len(call.body["prompt"]) for call in p.calls] == [16, 16]


async def test_an_engine_that_refuses_a_text_gets_token_ids() -> None:
    async with fleet() as made:
        p, d = await mixed_p(made, VLLM, state="Starting"), await mixed_d(made, "")

        async def by_ids(engine: HttpEngine, call: Call, req: web.Request) -> web.StreamResponse:
            if isinstance(call.body["prompt"], str):
                return web.json_response({"error": {"message": "ids alone"}}, status=400)
            return await serve_model(engine, call, req)

        p.script = by_ids
        await made.beat(p, state="Ready")
        await until(lambda: made.router.state.fleet.has_pair)
        assert (len(p.calls), len(d.engine.calls)) == (3, 2)


async def test_a_context_too_short_to_compare_is_in_the_log_and_d_serves_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fleet(on_no_prefill="PrefillOnDecode") as made:
        p = await mixed_p(made, VLLM, max_model_len=4096)
        d = await mixed_d(made, "", context=17)
        await until(lambda: introductions_of(made, "refused") == 1)
        assert (await report(made, p))["refused"] == [d.engine.beat.instance]
        await made.json(prompt="a client's")
        assert (p.calls, len(d.engine.calls)) == ([], 1)
    assert "holds fewer than 18: start it with a larger --max-model-len" in caplog.text


async def test_a_p_that_restarts_is_introduced_again() -> None:
    async with fleet() as made:
        p, d = await mixed(made)
        await until(lambda: made.router.state.fleet.has_pair)
        d.known.clear()
        await made.beat(p, incarnation="another")
        assert not made.router.state.fleet.has_pair
        await until(lambda: made.router.state.fleet.has_pair)
        assert introductions_of(made, "met") == 2
        assert introductions_of(made, "unverified") == 2


async def test_failed_introductions_eject_nobody_and_are_tried_again() -> None:
    async with fleet() as made:
        p, d = await mixed_p(made, VLLM, state="Starting"), await mixed_d(made, "")
        d.engine.script = die
        await made.beat(p, state="Ready")
        await until(lambda: introductions_of(made, "failed") >= 3)
        for engine in (p, d.engine):
            found = await report(made, engine)
            assert found["state"] == "Ready"
            assert made.metric("xpyd_router_ejections_total", cause="reset") == 0
        # What P had for a D that failed is given back.
        await until(lambda: len(d.engine.releases) == len(p.calls))
        d.engine.script = d
        await until(lambda: made.router.state.fleet.has_pair)


async def test_a_d_that_dies_under_an_introduction_ends_it() -> None:
    async with fleet() as made:
        p, d = await mixed_p(made, VLLM, state="Starting"), await mixed_d(made, "")
        d.engine.script = hang
        await made.beat(p, state="Ready")
        await until(lambda: len(d.engine.calls) == 1)
        d.engine.script = d
        await made.beat(d.engine, incarnation="another")
        await until(lambda: made.router.state.fleet.has_pair)
        assert d.engine.calls[0].is_closed
        assert introductions_of(made, "failed") >= 1


@pytest.mark.parametrize(
    ("is_silent", "why"),
    [
        (False, "s: unverified: D has not compared it yet"),
        (True, "s: D's answers have no X-Xpyd-Kv: a vLLM needs VLLM_PLUGINS=xpyd"),
    ],
)
async def test_a_pair_that_waits_long_is_in_the_log(
    caplog: pytest.LogCaptureFixture, is_silent: bool, why: str
) -> None:
    async with fleet() as made:
        p, d = await mixed_p(made, VLLM, state="Starting"), await mixed_d(made, "", has_room=False)
        if is_silent:
            d.engine.script = serve_model
        # A fleet of its own, whose minute is short.
        begun_s = time.monotonic()
        view = FleetView(Registry(period_s=1e6, missed_beats=3), lambda: 1.0)
        for one in (replace_beat(p.beat, {"state": "Ready"}), d.engine.beat):
            view.apply(one)
        introducer = Introducer(
            view,
            RouterMetrics(),
            keys=(b"k" * 32,),
            clock=lambda: 100 * (time.monotonic() - begun_s),
        )
        async with running(introducer.run()):
            await until(lambda: "are no pair after" in caplog.text)
        assert why in caplog.text
        assert f"P {p.beat.instance} ({VLLM}) and D {d.engine.beat.instance} (xpyd)" in caplog.text
        assert not view.has_pair


async def test_each_pair_of_several_is_introduced_one_at_a_time_for_an_engine() -> None:
    async with fleet() as made:
        running, overlaps = set[str](), list[str]()

        async def once(engine: HttpEngine, call: Call, request: web.Request) -> web.StreamResponse:
            overlaps.extend(running & {engine.beat.instance})
            running.add(engine.beat.instance)
            await asyncio.sleep(0.01)
            running.remove(engine.beat.instance)
            return await serve_model(engine, call, request)

        ps = [await mixed_p(made, VLLM, state="Starting") for _ in range(3)]
        for p in ps:
            p.script = once
            await made.beat(p, state="Ready")
        ds = [await mixed_d(made, "") for _ in range(3)]
        await until(lambda: introductions_of(made, "met") == 9)
        (group,) = made.router.state.fleet.snapshot.of_model("m").groups
        assert (len(group.prefill), len(group.decode)) == (3, 3)
        assert [len(d.known) for d in ds] == [3, 3, 3]
        assert overlaps == []


async def has_met(client: Client, p: HttpEngine) -> bool:
    found = (await client.get("/instances"))["instances"]
    (one,) = (one for one in found if one["instance"] == p.beat.instance)
    return one["unmet"] == []


@pytest.mark.slow
async def test_all_processes_know_who_has_met_also_those_that_start_later() -> None:
    async with several(processes=2, pair_wait_s=60.0) as made:
        p, d = await mixed(made)
        await until(lambda: introductions_of(made, "met") == 1)
        clients = [await made.client(0), await made.client(1)]
        for client in clients:
            await when(lambda client=client: has_met(client, p))
            assert await client.status() == 200
        worker = made.workers[0]
        assert worker.pid is not None
        old = worker.pid
        os.kill(old, signal.SIGKILL)
        await until(lambda: made.workers[0].pid not in (None, old))
        late = await made.client(0)
        assert await has_met(late, p)
        assert await late.status() == 200
        assert d.counts[p.beat.zmq_address] == {"unverified": 1, "": 4}
        assert (await late.samples())['xpyd_router_introductions_total{result="met"}'] == 1
