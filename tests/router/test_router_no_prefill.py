"""No P, or no D: what requests do then, by --on-no-prefill and --on-no-decode."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import aiohttp
import pytest

from tests.router.fakes import (
    Call,
    Fleet,
    HttpEngine,
    answer,
    begin_and_die,
    die,
    fleet,
    text_of,
    until,
)
from tests.router.several import Client, process, when
from xpyd_core.messages import InstanceType
from xpyd_router.admission import AdmissionLimits
from xpyd_router.config import RouterConfig
from xpyd_router.fleet.instances import Lost
from xpyd_router.policy.base import (
    OnNoDecode,
    OnNoPrefill,
    Want,
    WithoutPair,
)
from xpyd_router.request.attempt import pair_deadline_s

TEXT = "t0.0 t0.1 t0.2 t0.3 "
READY = "/readiness?pairs=true"


async def status_of(fleet_: Fleet, path: str) -> int:
    async with fleet_.http.get(fleet_.base + path) as response:
        return response.status


async def gone(fleet_: Fleet, engine: HttpEngine) -> None:
    await fleet_.beat(engine, state="Gone")


@pytest.mark.parametrize(
    ("want", "on", "expected"),
    [
        (Want("m"), "PrefillOnDecode", ["D"]),
        (Want("m", alone="P"), "PrefillOnDecode", ["D"]),
        (Want("m", alone="D"), "PrefillOnDecode", []),
        (Want("m", continue_at="k"), "PrefillOnDecode", ["D"]),
        (Want("m"), "Queue", []),
        (Want("m"), "Reject", []),
    ],
)
def test_only_prefill_on_decode_has_a_second_wish(
    want: Want, on: OnNoPrefill, expected: list[str]
) -> None:
    assert [one.alone for one in WithoutPair(on).wishes(want)] == expected


@pytest.mark.parametrize(
    ("want", "on", "expected"),
    [
        (Want("m"), WithoutPair("Queue", "DecodeOnPrefill"), ["P"]),
        (Want("m", alone="P"), WithoutPair("Queue", "DecodeOnPrefill"), []),
        (Want("m"), WithoutPair("PrefillOnDecode", "DecodeOnPrefill"), ["D", "P"]),
        (Want("m"), WithoutPair("PrefillOnDecode", "Reject"), ["D"]),
    ],
)
def test_a_p_is_asked_behind_the_ds(want: Want, on: WithoutPair, expected: list[str]) -> None:
    assert [one.alone for one in on.wishes(want)] == expected


REJECTING: list[tuple[OnNoPrefill, OnNoDecode | None, set[Lost]]] = [
    ("Queue", None, set()),
    ("PrefillOnDecode", None, set()),
    ("Reject", None, {"prefill", "decode", "both", "pair"}),
    ("Reject", "Queue", {"prefill", "both", "pair"}),
    ("Reject", "DecodeOnPrefill", {"prefill", "both", "pair"}),
    ("Queue", "Reject", {"decode", "both"}),
]


@pytest.mark.parametrize(("on_no_prefill", "on_no_decode", "rejected"), REJECTING)
def test_who_is_not_to_wait_goes_by_the_side_that_is_missing(
    on_no_prefill: OnNoPrefill, on_no_decode: OnNoDecode | None, rejected: set[Lost]
) -> None:
    on = RouterConfig(on_no_prefill=on_no_prefill, on_no_decode=on_no_decode).without_pair
    everything: tuple[Lost, ...] = ("prefill", "decode", "both", "pair")
    assert {lost for lost in everything if on.rejects(lost)} == rejected


def no_pair(fleet_: Fleet) -> dict[tuple[str, str], float]:
    """The router's counts of tries without a pair, those above 0."""
    found = {
        (lost, then): fleet_.metric("xpyd_router_no_pair_total", lost=lost, then=then)
        for lost in ("prefill", "decode", "both", "pair")
        for then in ("waited", "alone", "rejected")
    }
    return {key: value for key, value in found.items() if value}


@pytest.mark.parametrize("stream", [False, True])
async def test_p_makes_the_whole_answer_where_there_is_no_d_and_only_then(stream: bool) -> None:
    async with fleet(on_no_decode="DecodeOnPrefill") as fleet_:
        p = await fleet_.engine("P")
        assert await status_of(fleet_, READY) == 200
        if stream:
            events = await fleet_.events()
            assert text_of(events) == TEXT
            assert events[-1] == "[DONE]"
        else:
            assert (await fleet_.json())["choices"][0]["text"] == TEXT
        (call,) = p.calls
        assert len(call.request_id) == 32, "alone: an id without addresses"
        assert no_pair(fleet_) == {("decode", "alone"): 1}
        d = await fleet_.engine("D")
        await fleet_.json()
        assert d.served == 1, "it goes back with the next request"
        assert no_pair(fleet_) == {("decode", "alone"): 1}


async def test_p_takes_over_a_stream_whose_only_d_died() -> None:
    async with fleet(on_no_decode="DecodeOnPrefill") as fleet_:
        p, d = await fleet_.engine("P"), await fleet_.engine("D")
        d.script = begin_and_die
        events = await fleet_.events()
        assert text_of(events) == TEXT
        assert events[-1] == "[DONE]"
        assert (p.served, d.served) == (2, 1)


async def test_a_p_of_another_key_does_not_go_on_behind_tokens() -> None:
    async with fleet(on_no_decode="DecodeOnPrefill", pair_wait_s=0.05) as fleet_:
        p, d = await fleet_.engine("P"), await fleet_.engine("D")

        async def lose_p_and_die(engine: HttpEngine, call: Call, request: Any) -> Any:
            await gone(fleet_, p)
            await fleet_.engine("P", compatibility="other")
            return await begin_and_die(engine, call, request)

        d.script = lose_p_and_die
        assert "error" in (await fleet_.events())[-1]


async def test_a_p_that_cannot_serve_alone_does_not_stand_in() -> None:
    async with fleet(on_no_decode="DecodeOnPrefill", pair_wait_s=0.05) as fleet_:
        await fleet_.engine("P", is_ours=False)
        assert await status_of(fleet_, READY) == 503
        async with await fleet_.post() as response:
            assert response.status == 503


@pytest.mark.parametrize(("lost", "word"), [("P", "prefill"), ("D", "decode")])
@pytest.mark.parametrize("then", ["waited", "rejected"])
async def test_what_a_request_without_a_pair_lacks_is_counted(
    lost: str, word: str, then: str
) -> None:
    on: Any = "Reject" if then == "rejected" else "Queue"
    async with fleet(on_no_prefill=on, on_no_decode=on, pair_wait_s=0.05) as fleet_:
        engines = {kind: await fleet_.engine(kind) for kind in "PD"}
        await fleet_.json()
        assert no_pair(fleet_) == {}
        await gone(fleet_, engines[lost])
        async with await fleet_.post() as response:
            assert response.status == 503
        assert no_pair(fleet_) == {(word, then): 1}


@pytest.mark.parametrize("max_tokens", [4, 1])
async def test_d_computes_the_prompt_where_there_is_no_p(max_tokens: int) -> None:
    async with fleet(on_no_prefill="PrefillOnDecode") as fleet_:
        assert await status_of(fleet_, READY) == 503
        d = await fleet_.engine("D")
        assert await status_of(fleet_, READY) == 200
        body = await fleet_.json(max_tokens=max_tokens)
        assert body["choices"][0]["text"] == TEXT[: 5 * max_tokens]
        (call,) = d.calls
        assert len(call.request_id) == 32, "alone: an id without addresses"
        assert "kv_transfer_params" not in call.body
        assert fleet_.metric("xpyd_router_prefill_on_decode_total") == 1
        p = await fleet_.engine("P")
        await fleet_.json()
        assert p.served == 1
        assert fleet_.metric("xpyd_router_prefill_on_decode_total") == 1


async def test_an_aggregated_instance_is_used_before_d_computes_prompts() -> None:
    async with fleet(on_no_prefill="PrefillOnDecode") as fleet_:
        d = await fleet_.engine("D")
        a = await fleet_.engine("A")
        await fleet_.json()
        assert (a.served, d.served) == (1, 0)


async def test_d_takes_over_a_request_whose_only_p_died() -> None:
    async with fleet(on_no_prefill="PrefillOnDecode") as fleet_:
        p, d = await fleet_.engine("P"), await fleet_.engine("D")
        p.script = die
        assert (await fleet_.json())["choices"][0]["text"] == TEXT
        assert (p.served, d.served) == (1, 1)


@pytest.mark.parametrize("compatibility", ["k", "other"])
async def test_a_stream_goes_on_alone_only_on_a_d_of_its_own_key(compatibility: str) -> None:
    async with fleet(on_no_prefill="PrefillOnDecode") as fleet_:
        p, d = await fleet_.engine("P"), await fleet_.engine("D")

        async def lose_p_and_die(engine: HttpEngine, call: Call, request: Any) -> Any:
            await gone(fleet_, p)
            await fleet_.engine("D", compatibility=compatibility)
            return await begin_and_die(engine, call, request)

        d.script = lose_p_and_die
        events = await fleet_.events()
        if compatibility == "k":
            assert text_of(events) == TEXT
            assert events[-1] == "[DONE]"
        else:
            assert events[-1]["error"]["code"] == "no_instances"


async def test_a_d_that_failed_alone_is_not_asked_again() -> None:
    async with fleet(on_no_prefill="PrefillOnDecode", pair_wait_s=1000.0) as fleet_:
        d = await fleet_.engine("D")
        await fleet_.json()
        d.script = answer(500, {})
        async with await fleet_.post() as response:
            assert response.status == 502
        assert d.served == 2


@pytest.mark.parametrize("on", ["Queue", "Reject"])
async def test_a_router_that_does_not_let_d_compute_prompts_has_no_pair_by_a_d(
    on: OnNoPrefill,
) -> None:
    async with fleet(on_no_prefill=on) as fleet_:
        await fleet_.engine("D")
        assert await status_of(fleet_, READY) == 503
        await fleet_.engine("P")
        assert await status_of(fleet_, READY) == 200


async def test_an_engine_that_cannot_serve_alone_does_not_stand_in() -> None:
    async with fleet(on_no_prefill="PrefillOnDecode") as fleet_:
        await fleet_.engine("D", is_ours=False)
        assert await status_of(fleet_, READY) == 503
        async with await fleet_.post() as response:
            assert response.status == 503
            assert "Retry-After" in response.headers


@pytest.mark.parametrize("lost", ["P", "D"])
async def test_reject_answers_503_at_once_though_the_fleet_served_before(lost: str) -> None:
    async with fleet(on_no_prefill="Reject", pair_wait_s=1000.0) as fleet_:
        engines = {kind: await fleet_.engine(kind) for kind in "PD"}
        await fleet_.json()
        await gone(fleet_, engines[lost])
        async with await fleet_.post() as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
            assert (await response.json())["error"]["code"] == "no_instances"


async def test_a_router_that_starts_holds_requests_until_engines_had_time_to_beat() -> None:
    waits: dict[str, Any] = {"on_no_prefill": "Reject", "pair_wait_s": 1000.0}
    async with fleet(heartbeat_interval_s=500.0, **waits) as fleet_:
        running = asyncio.create_task(fleet_.json())
        await until(lambda: fleet_.metric("xpyd_router_waiting") == 1)
        await fleet_.engine("P")
        await fleet_.engine("D")
        assert (await running)["choices"][0]["text"] == TEXT
    async with fleet(heartbeat_interval_s=0.05, **waits) as fleet_, await fleet_.post() as response:
        assert response.status == 503


@pytest.mark.parametrize("on", ["Queue", "PrefillOnDecode"])
async def test_without_a_d_requests_wait_for_one(on: OnNoPrefill) -> None:
    async with fleet(on_no_prefill=on, pair_wait_s=1000.0) as fleet_:
        await fleet_.engine("P")
        d = await fleet_.engine("D")
        await fleet_.json()
        await gone(fleet_, d)
        running = asyncio.create_task(fleet_.json())
        await until(lambda: fleet_.metric("xpyd_router_waiting") == 1)
        one = await fleet_.json(max_tokens=1)
        assert one["choices"][0]["text"] == TEXT[:5], "P needs no D for one token"
        await fleet_.engine("D")
        assert (await running)["choices"][0]["text"] == TEXT


@pytest.mark.parametrize(
    "limits", [AdmissionLimits(queue_entries=1), AdmissionLimits(queue_bytes=100)]
)  # of 2 * 63
async def test_those_who_wait_for_instances_are_bounded_too(limits: AdmissionLimits) -> None:
    async with fleet(limits=limits, pair_wait_s=1000.0) as fleet_:
        await fleet_.engine("P")
        d = await fleet_.engine("D")
        await fleet_.json()
        for _ in range(2):
            await gone(fleet_, d)
            running = asyncio.create_task(fleet_.json())
            await until(lambda: fleet_.metric("xpyd_router_waiting") == 1)
            async with await fleet_.post() as response:
                assert response.status == 503
            d = await fleet_.engine("D")
            await running


@pytest.mark.parametrize("first", [(), ("P",), ("D",)], ids=str)
async def test_a_request_that_comes_before_the_first_pair_waits_for_it(
    first: tuple[InstanceType, ...],
) -> None:
    """As after a scale from 0, or at a router that has just started."""
    async with fleet(pair_wait_s=1000.0) as fleet_:
        for kind in first:
            await fleet_.engine(kind)
        running = asyncio.create_task(fleet_.json())
        await until(lambda: fleet_.metric("xpyd_router_waiting") == 1)
        for kind in {"P", "D"} - set(first):
            await fleet_.engine(kind)
        assert (await running)["choices"][0]["text"] == TEXT


@pytest.mark.parametrize(("model", "status", "code"), [
    ("m", 503, "no_instances"), ("other", 404, "model_not_found"),
])  # fmt: skip
async def test_a_wait_without_a_pair_ends_with_503_and_an_unknown_model_does_not_wait(
    model: str, status: int, code: str
) -> None:
    async with fleet(pair_wait_s=0.05 if model == "m" else 1000.0) as fleet_:
        await fleet_.engine("D")
        async with await fleet_.post(model=model) as response:
            assert response.status == status
            assert (await response.json())["error"]["code"] == code


@pytest.mark.parametrize(
    ("waited_s", "request_ends_s", "until_s"),
    [(0.0, 1000.0, 160.0), (45.0, 1000.0, 115.0), (70.0, 1000.0, 100.0), (0.0, 130.0, 130.0)],
)
def test_the_time_in_the_queue_of_the_limits_counts_for_the_wait_for_a_pair(
    waited_s: float, request_ends_s: float, until_s: float
) -> None:
    found = pair_deadline_s(100.0, waited_s, wait_s=60.0, request_ends_s=request_ends_s)
    assert found == until_s


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_a_router_process_that_drains_without_instances_answers_503_at_once(
    processes: str,
) -> None:
    flags = ("--drain-seconds", "0", "--queue-timeout-seconds", "3600", "--processes", processes)
    ports = ("--port", "0", "--admin-port", "0", "--discovery-port", "0")
    async with process(*ports, *flags) as (child, url, admin), aiohttp.ClientSession() as http:
        body = {"model": "m", "prompt": "a", "max_tokens": 1}
        asked = [
            asyncio.create_task(http.post(f"{url}/v1/completions", json=body)) for _ in range(8)
        ]
        client = Client(url, http, admin, http)

        async def all_wait() -> bool:
            return (await client.samples())["xpyd_router_waiting"] == len(asked)

        await when(all_wait)
        child.send_signal(signal.SIGINT)
        for answered in await asyncio.gather(*asked):
            async with answered:
                assert answered.status == 503
                assert (await answered.json())["error"]["code"] == "no_instances"
        assert await child.wait() == 0


async def test_a_draining_router_waits_only_while_an_instance_stays() -> None:
    async with fleet(pair_wait_s=1000.0, drain_s=1000.0) as fleet_:
        d = await fleet_.engine("D")
        running = asyncio.create_task(fleet_.post())
        await until(lambda: fleet_.metric("xpyd_router_waiting") == 1)
        fleet_.router.stop()
        p = await fleet_.engine("P")
        async with await running as response:
            assert response.status == 200, "an instance that came in time served it"
        await gone(fleet_, p)
        running = asyncio.create_task(fleet_.post())
        await until(lambda: fleet_.metric("xpyd_router_waiting") == 1)
        await fleet_.beat(d, state="Draining")
        async with await running as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
