"""Objectives of requests: where they come from, what is learned of engines, who met them."""

from __future__ import annotations

import argparse
import asyncio

import pytest
from aiohttp import web

from tests.router.beats import beat
from tests.router.choosing import key_of
from tests.router.fakes import (
    Call,
    Fleet,
    Generated,
    HttpEngine,
    answer,
    begin_and_die,
    fleet,
    hang,
    pair,
    sse,
    start_stream,
    until,
)
from tests.router.test_router_request_state import request_state
from xpyd_core.errors import UserError
from xpyd_router.command import command, read_config
from xpyd_router.fleet.loads import LoadTable, Pace
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView
from xpyd_router.policy.base import NO_SLO, Slo
from xpyd_router.policy.pairs import Alone
from xpyd_router.request.client_request import HeadReader
from xpyd_router.request.objectives import Objectives
from xpyd_router.request.state import RequestState, Sent
from xpyd_router.request_metrics import InstanceTable, ObjectiveTable

LOOSE, STRICT = Slo(3000.0, 3000.0), Slo(1e-9, 1e-9)


def counted(fleet_: Fleet, objective: str, predicted: str, result: str) -> float:
    return fleet_.metric(
        "xpyd_router_objectives_total", objective=objective, predicted=predicted, result=result
    )


def all_counted(fleet_: Fleet) -> int:
    """Of all words together."""
    words = ("met", "missed", "unknown")
    return int(
        sum(
            counted(fleet_, objective, predicted, result)
            for objective in ("ttft", "itl")
            for predicted in words
            for result in words
        )
    )


async def drip(engine: HttpEngine, call: Call, request: web.Request) -> web.StreamResponse:
    """The contract's engine, one chunk at a time."""
    generated = Generated(engine, call)
    if not generated.body.get("stream"):
        return web.json_response(generated.whole())
    response = await start_stream(request)
    for chunk in generated.chunks():
        await response.write(sse(chunk))
        await asyncio.sleep(0.005)
    await response.write(b"data: [DONE]\n\n")
    return response


@pytest.mark.parametrize(("slo", "word"), [(LOOSE, "met"), (STRICT, "missed")])
async def test_streams_are_judged_by_the_routers_objectives(slo: Slo, word: str) -> None:
    async with pair(slo=slo) as (fleet_, _, __):
        await fleet_.events(max_tokens=8)
        # Nothing was known of either.
        assert counted(fleet_, "ttft", "unknown", word) == 1
        assert counted(fleet_, "itl", "unknown", word) == 1
        await fleet_.json()
        await fleet_.events(max_tokens=8)
        assert counted(fleet_, "ttft", word, word) == 1
        assert counted(fleet_, "itl", word, word) == 1
        assert all_counted(fleet_) == 4


async def test_headers_win_over_the_routers_objectives_each_for_itself() -> None:
    async with pair(slo=STRICT) as (fleet_, _, __):
        await fleet_.events(headers={"X-SLO-TTFT-Ms": "3000000"})
        assert counted(fleet_, "ttft", "unknown", "met") == 1
        assert counted(fleet_, "itl", "unknown", "missed") == 1


async def test_a_header_alone_is_an_objective_where_the_policy_goes_by_them() -> None:
    async with pair(policy="SloAware") as (fleet_, _, __):
        await fleet_.events()
        assert all_counted(fleet_) == 0
        await fleet_.events(headers={"x-slo-tpot-ms": "3000000.5"})
        assert counted(fleet_, "itl", "unknown", "met") == 1
        assert all_counted(fleet_) == 1


async def test_without_a_policy_or_an_objective_nothing_is_learned() -> None:
    async with pair() as (fleet_, p, _):
        await fleet_.events(headers={"X-SLO-TTFT-Ms": "1"})
        assert all_counted(fleet_) == 0
        assert not fleet_.router.state.fleet.load(key_of(p.beat)).pace.first.is_known


@pytest.mark.parametrize("value", ["0", "-1", "soon", "1e3", "3600001", "", "9" * 40, "٣"])
def test_a_wrong_objective_is_the_clients_fault(value: str) -> None:
    head = HeadReader().read([(b"x-slo-ttft-ms", value.encode())])
    assert head.complaint is not None
    assert (head.complaint.status, head.complaint.param) == (400, "X-Slo-Ttft-Ms")


def test_objectives_in_headers_are_milliseconds() -> None:
    head = HeadReader().read([(b"x-slo-ttft-ms", b"250.5"), (b"x-slo-tpot-ms", b"40")])
    assert head.complaint is None
    assert head.slo == Slo(0.2505, 0.04)
    assert HeadReader().read([(b"x-other", b"1")]).slo == NO_SLO


async def test_objectives_do_not_reach_the_engines() -> None:
    async with pair(slo=LOOSE) as (fleet_, p, d):
        await fleet_.events(headers={"X-SLO-TTFT-Ms": "100", "X-SLO-TPOT-Ms": "10"})
        for call in (*p.calls, *d.calls):
            assert not [name for name in call.headers if "slo" in name]


async def test_what_calls_took_is_learned_of_each_side() -> None:
    async with pair(slo=LOOSE) as (fleet_, p, d):
        loads = [fleet_.router.state.fleet.load(key_of(one.beat)) for one in (p, d)]
        d.script = drip
        while not loads[1].pace.gap.is_known:
            await fleet_.events()
        assert loads[0].pace.first.is_known
        assert not loads[1].pace.first.is_known
        assert not loads[0].pace.gap.is_known


async def test_of_answers_that_are_not_streamed_ds_time_per_token_is_learned() -> None:
    async with pair(slo=LOOSE) as (fleet_, p, d):
        await fleet_.json()
        ps, ds = (fleet_.router.state.fleet.load(key_of(one.beat)).pace for one in (p, d))
        assert (ps.first.is_known, ps.gap.is_known) == (True, False)
        assert (ds.first.is_known, ds.gap.is_known) == (False, True)
        assert all_counted(fleet_) == 0


async def test_of_an_answer_that_ended_on_p_nothing_is_learned_of_d() -> None:
    async with pair(slo=LOOSE) as (fleet_, p, d):
        p.stop_at = {0: 1}
        await fleet_.json()
        assert d.served == 0
        pace = fleet_.router.state.fleet.load(key_of(d.beat)).pace
        assert not pace.first.is_known
        assert not pace.gap.is_known


@pytest.mark.parametrize("is_stream", [True, False])
async def test_one_that_serves_alone_is_known_by_its_streams(is_stream: bool) -> None:
    async with fleet(policy="SloAware") as fleet_:
        aggregated = await fleet_.engine("A")
        pace = fleet_.router.state.fleet.load(key_of(aggregated.beat)).pace
        aggregated.script = drip
        while not pace.gap.is_known:
            await (fleet_.events() if is_stream else fleet_.json())
        assert pace.first.is_known is is_stream


async def test_the_first_token_of_p_alone_is_learned_of_its_whole_answer() -> None:
    async with pair(slo=LOOSE) as (fleet_, p, _):
        await fleet_.json(max_tokens=1)
        assert fleet_.router.state.fleet.load(key_of(p.beat)).pace.first.is_known


async def test_a_client_that_leaves_is_a_miss_once_its_time_is_over() -> None:
    async with pair(slo=Slo(0.2)) as (fleet_, p, _):
        p.script = hang
        for header, missed in (({"X-SLO-TTFT-Ms": "3000000"}, 0), ({"X-SLO-TTFT-Ms": "1"}, 1)):
            served = p.served
            call = asyncio.create_task(fleet_.events(headers=header))
            await until(lambda served=served: p.served > served)
            await asyncio.sleep(0.01)  # longer than the second one's objective
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await until(lambda: p.calls[-1].is_closed)
            await until(lambda: fleet_.metric("xpyd_router_in_flight") == 0)
            assert counted(fleet_, "ttft", "unknown", "missed") == missed
        assert all_counted(fleet_) == 1


async def test_a_request_that_the_engine_refuses_missed_nothing() -> None:
    async with pair(slo=STRICT) as (fleet_, p, _):
        p.script = answer(400, {"error": {"message": "no"}})
        async with await fleet_.post(stream=True) as response:
            assert response.status == 400
        assert all_counted(fleet_) == 0


async def test_a_stream_that_goes_on_elsewhere_is_judged_once() -> None:
    async with pair(slo=LOOSE) as (fleet_, _, d):
        other = await fleet_.engine("D")
        d.script = other.script = begin_and_die
        third = await fleet_.engine("D")
        await fleet_.events(max_tokens=8)
        assert third.served == 1
        assert all_counted(fleet_) == 2


def test_flags_are_milliseconds_and_have_bounds() -> None:
    def config(*flags: str):
        parser = argparse.ArgumentParser()
        command.configure(parser)
        return read_config(parser.parse_args(["--kv-insecure", *flags]))

    assert config().slo == NO_SLO
    assert config("--slo-ttft-ms=500", "--slo-itl-ms=25").slo == Slo(0.5, 0.025)
    for flag in ("--slo-ttft-ms", "--slo-itl-ms"):
        for value in ("0", "3600001"):
            with pytest.raises(UserError, match=f"{flag}: expected 1 to 3600000"):
                config(f"{flag}={value}")


class Sampled:
    """One D, and samples of it at the times of a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        loads, registry = LoadTable(), Registry(period_s=3.0, missed_beats=3)
        view = FleetView(registry, lambda: self.now_s, loads)
        view.apply(beat("D"))
        (self.instance,) = view.instances
        self.load = loads.of(self.instance.key)
        self.instance_metrics = InstanceTable(lambda: self.now_s)
        self.table = ObjectiveTable()
        self.objectives = Objectives(
            NO_SLO,
            fleet=view,
            loads=loads,
            instance_metrics=self.instance_metrics,
            table=self.table,
            clock=lambda: self.now_s,
        )


def test_a_sample_is_the_mean_gap_since_the_last_one_over_the_requests_meanwhile() -> None:
    world = Sampled()
    world.objectives.sample()
    calls = [world.instance_metrics.call(world.instance, 0) for _ in range(4)]
    for _ in calls:
        world.load.begin(10)
    world.objectives.sample()  # nothing came yet
    assert not world.load.pace.gap.is_known
    for _ in range(6):
        world.now_s += 0.02
        for call in calls:
            call.streamed(1, 1)
    world.objectives.sample()
    assert world.load.pace.gap.at(4) == pytest.approx(0.02)
    line = (world.load.pace.gap.base, world.load.pace.gap.slope)
    world.objectives.sample()
    assert (world.load.pace.gap.base, world.load.pace.gap.slope) == line
    for busy, gap_s in ((2, 0.01), (4, 0.02)) * 10:
        while world.load.active > busy:
            world.load.end(10)
        while world.load.active < busy:
            world.load.begin(10)
        for call in calls:
            call.interrupted()  # of the pause the engine knows nothing
            call.streamed(1, 1)
        world.objectives.sample()
        for _ in range(5):
            world.now_s += gap_s
            for call in calls[:busy]:
                call.streamed(1, 1)
        world.objectives.sample()
    assert world.load.pace.gap.at(2) == pytest.approx(0.01, rel=0.1)
    assert world.load.pace.gap.at(4) == pytest.approx(0.02, rel=0.1)


def test_what_a_name_had_before_its_process_is_not_the_processes() -> None:
    """Figures go by the name: a restarted engine goes on with those of its predecessor."""
    world = Sampled()
    call = world.instance_metrics.call(world.instance, 0)
    for _ in range(5):
        world.now_s += 9.0
        call.streamed(1, 1)
    world.objectives.sample()
    assert not world.load.pace.gap.is_known


def given(ttft_s: float | None = None, itl_s: float | None = None, ids: int = 0) -> RequestState:
    """A request that came 10 s before the sampled world's beginning; the client has `ids`."""
    sent = Sent([list(range(ids))], "k", {}, "m") if ids else None
    made = request_state(sent)
    made.trace.started_s, made.slo = 90.0, Slo(ttft_s, itl_s)
    return made


def test_time_that_passed_is_taken_off_and_whoever_has_a_first_token_wants_none() -> None:
    world = Sampled()
    assert world.objectives.left(given(15.0, 0.1)) == Slo(5.0, 0.1)
    assert world.objectives.left(given(4.0)) == Slo(-6.0, None)
    assert world.objectives.left(given(15.0, 0.1, ids=3)) == Slo(None, 0.1)
    assert world.objectives.left(given(None, 0.1)) == Slo(None, 0.1)


def verdicts(world: Sampled) -> dict[tuple[str, str, str], int]:
    """What is counted."""
    return dict(world.table.counts)


def test_what_is_said_is_of_the_first_try_and_with_the_time_before_it() -> None:
    world = Sampled()
    for _ in range(40):
        world.load.pace.first.observe(1000, 3.0)
        world.load.pace.gap.observe(1, 0.05)
    asked = given(12.0, 0.1, ids=5)
    for _ in range(2):
        world.objectives.placed(asked, Alone(world.instance), 999)
        for _ in range(90):
            world.load.pace.first.observe(1000, 1.0)
    assert asked.forecast is not None
    assert asked.forecast.ttft_s == pytest.approx(3.0)
    asked.trace.first_s = 11.0
    world.now_s = 101.0 + 0.2
    world.objectives.judge(asked, is_whole=True)
    # 10 s before, 3 s from the pick on; four gaps in 0.2 s.
    assert verdicts(world) == {("ttft", "missed", "met"): 1, ("itl", "met", "met"): 1}


@pytest.mark.parametrize("reason", ["cut", "paused", "one token"])
def test_gaps_that_are_not_the_engines_are_not_judged(reason: str) -> None:
    world = Sampled()
    asked = given(None, 0.1, ids=1 if reason == "one token" else 3)
    world.objectives.placed(asked, Alone(world.instance), 10)
    asked.trace.first_s = 1.0
    asked.was_interrupted = reason == "paused"
    world.objectives.judge(asked, is_whole=reason != "cut")
    assert verdicts(world) == {}


def test_of_several_choices_the_longest_tells_the_gaps() -> None:
    world = Sampled()
    asked = given(None, 0.1, ids=11)
    assert asked.sent is not None
    asked.sent.token_ids.append([1] * 11)
    world.objectives.placed(asked, Alone(world.instance), 10)
    asked.trace.first_s = 8.5  # ten gaps in 1.5 s
    world.objectives.judge(asked, is_whole=True)
    assert verdicts(world) == {("itl", "unknown", "missed"): 1}


def test_the_first_token_of_one_alone_is_told_from_its_own_call() -> None:
    world, asked = Sampled(), given()
    asked.trace.first_s = 8.0
    world.objectives.streamed(asked, world.load, 100.0, 1.5)
    assert not world.load.pace.first.is_known  # it came 2 s ago, from an earlier try
    world.objectives.streamed(asked, world.load, 100.0, 2.25)
    assert world.load.pace.first.at(100) == pytest.approx(0.25)


def test_the_time_per_token_of_a_whole_answer_is_of_one_choice() -> None:
    world, asked = Sampled(), given()
    asked.request = request_state(n=4, max_tokens=20).request
    asked.trace.output_tokens = 80
    world.load.begin(10)
    world.objectives.answered(asked, world.load, 100.0, 2.0, is_prefill=False)
    assert world.load.pace.gap.at(1) == pytest.approx(0.1)


def test_a_sample_counts_the_requests_between_its_ends() -> None:
    world = Sampled()
    calls = [world.instance_metrics.call(world.instance, 0) for _ in range(8)]
    for call in calls:
        world.load.begin(1)
        call.streamed(1, 1)
    world.objectives.sample()
    world.now_s += 0.05
    for call in calls:
        call.streamed(1, 1)
        world.load.end(1)
    world.objectives.sample()
    other = Pace()
    other.gap.observe(4.0, 0.05)
    assert world.load.pace.gap.at(20) == pytest.approx(other.gap.at(20))


async def test_a_clients_objective_decides_who_serves_it() -> None:
    async with fleet(policy="SloAware") as fleet_:
        await fleet_.engine("P")
        fast, slow = await fleet_.engine("D"), await fleet_.engine("D")
        for engine, gap_s in ((fast, 0.001), (slow, 0.002)):
            load = fleet_.router.state.fleet.load(key_of(engine.beat))
            for requests in (1, 40) * 20:
                load.pace.gap.observe(requests, gap_s * (10 + requests))
        load = fleet_.router.state.fleet.load(key_of(fast.beat))
        for _ in range(8):
            load.begin(0)  # of 18 more with which it still meets 30 ms
        await fleet_.json()
        assert (fast.served, slow.served) == (1, 0)
        await fleet_.json(headers={"X-Slo-Tpot-Ms": "30"})
        assert (fast.served, slow.served) == (1, 1)
