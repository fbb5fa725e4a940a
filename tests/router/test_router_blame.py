"""What a failed try is held against: the instance, the pair's transfer, or the request itself."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from tests.router.beats import beat
from tests.router.fakes import Call, HttpEngine, answer, die, fleet, serve_model, until
from tests.router.test_router_request_state import request_state
from xpyd_core.errors import ApiError
from xpyd_router.app_state import AppState
from xpyd_router.config import RouterConfig
from xpyd_router.errors import CallFailed
from xpyd_router.fleet.health import HealthRules
from xpyd_router.fleet.instances import Instance
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.poison import fingerprint
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics
from xpyd_router.policy.pairs import Alone, Pair
from xpyd_router.request.attempt import Attempt
from xpyd_router.request.failures import Failures
from xpyd_router.request.state import Sent

PATIENT = HealthRules(probe_interval_s=60.0, slow_start_s=0.0)
NO_KV: dict[str, Any] = {"error": {"message": "no KV", "code": "kv_transfer_failed"}}


def view_of(*kinds: str) -> FleetView:
    view = FleetView(Registry(period_s=3.0, missed_beats=3), time.monotonic)
    for host, kind in enumerate(kinds, start=1):
        view.apply(beat(kind, host=host))
    return view


def failures_of(view: FleetView, **config: Any) -> Failures:
    metrics = RouterMetrics(time.monotonic)
    unused = cast(Any, None)
    state = AppState(
        config=RouterConfig(**config), fleet=view, loads=LoadTable(), metrics=metrics,
        policy=unused, control=unused, admission=unused, access_log=unused,
        keys=(), admin_keys=(), client_keys=None, created=0, started_s=0.0, clock=lambda: 0.0,
    )  # fmt: skip
    return Failures(state)


def attempt_at(called: Instance | Pair, call_s: float) -> Attempt:
    """A try that called these, without a network."""
    unused = cast(Any, None)
    made = Attempt(
        Alone(called) if isinstance(called, Instance) else called,
        key=b"k" * 32,
        uuid="u", public="p", forwarded="",
        loads=LoadTable(), fleet=unused, upstream=unused, instance_metrics=unused,
    )  # fmt: skip
    made.call_s = call_s
    return made


@pytest.mark.parametrize(
    ("kind", "call_s", "counts"),
    [("P", 0.4, False), ("P", 0.5, True), ("D", 4.9, False), ("D", 5.0, True)],
)
async def test_a_timeout_counts_against_who_had_half_of_its_time(
    kind: str, call_s: float, counts: bool
) -> None:
    view = view_of(kind)
    failures = failures_of(view, prefill_timeout_s=1.0, request_timeout_s=10.0)
    tried = request_state()
    await failures.after(tried, attempt_at(view.instances[0], call_s), CallFailed("timeout"))
    assert bool(view._health.breakers) == counts
    assert tried.exclude == {view.instances[0].key}
    assert tried.trace.failures == [{"P": "prefill:timeout", "D": "decode:timeout"}[kind]]


async def test_refusals_cost_no_tries_but_are_bounded() -> None:
    view = view_of("A")
    failures, tried = failures_of(view, max_tries=1), request_state()
    for _ in range(15):
        await failures.after(tried, attempt_at(view.instances[0], 1.0), CallFailed("refused"))
    with pytest.raises(ApiError) as caught:
        await failures.after(tried, attempt_at(view.instances[0], 1.0), CallFailed("refused"))
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)


@pytest.mark.parametrize(
    ("sent", "code"), [(None, "decode_failed"), (Sent([[7]], "", {}, "m"), "")]
)
async def test_a_stream_is_tried_again_only_where_its_tokens_are_known(
    sent: Sent | None, code: str
) -> None:
    """However long it lasts: the request's deadline is for its beginning."""

    view = view_of("A")
    failures, tried = failures_of(view), request_state(sent)
    tried.has_decode_begun, tried.deadline_s = True, -1.0
    failed = failures.after(tried, attempt_at(view.instances[0], 1.0), CallFailed("status"))
    if not code:
        await failed
        return
    with pytest.raises(ApiError) as caught:
        await failed
    assert (caught.value.status, caught.value.code) == (502, code)


async def test_a_request_that_two_instances_died_of_is_refused_and_its_body_with_it() -> None:
    view = view_of("A", "A")
    failures, tried = failures_of(view), request_state()
    one, other = view.instances
    for each in (one, other):
        view._health.poison.died(each.key, view.now_s)
    await failures.after(tried, attempt_at(one, 1.0), CallFailed("reset"))
    with pytest.raises(ApiError) as caught:
        await failures.after(tried, attempt_at(other, 1.0), CallFailed("reset"))
    assert (caught.value.status, caught.value.code) == (422, "poisoned_request")
    with pytest.raises(ApiError, match="refused"):
        failures.refuse(tried.request)
    counted = failures._metrics.render(()).decode()
    assert "xpyd_router_poisoned_requests_total 2.0" in counted


async def test_a_request_whose_time_is_up_is_not_tried_again() -> None:
    view = view_of("A")
    failures, tried = failures_of(view), request_state()
    tried.deadline_s = 0.0
    with pytest.raises(ApiError) as caught:
        await failures.after(tried, attempt_at(view.instances[0], 1.0), CallFailed("status"))
    assert caught.value.status == 502


async def test_a_request_whose_body_was_convicted_meanwhile_is_not_tried_again() -> None:
    view = view_of("A")
    failures, tried = failures_of(view), request_state()
    view._health.poison.convict(fingerprint(tried.request.raw, view._secret), time.monotonic())
    with pytest.raises(ApiError, match="refused") as caught:
        await failures.after(tried, attempt_at(view.instances[0], 1.0), CallFailed("status"))
    assert caught.value.status == 422


async def test_a_request_is_not_convicted_where_no_probe_tells_in_time() -> None:
    rules = HealthRules(probe_timeout_s=0.01)
    view = FleetView(Registry(period_s=3.0, missed_beats=3), time.monotonic, rules=rules)
    for host in (1, 2):
        view.apply(beat("A", host=host))
    broken = [view.failed(one, "reset", b"x") for one in view.instances]
    breaks = [one for one in broken if one is not None]
    assert len(breaks) == 2
    assert not await view.convicts(breaks, b"x")
    assert not view.refused
    for one in view.instances:
        view.probed(one, "connect", view.now_s)
    assert await view.convicts(breaks, b"x")
    assert view.refused_s(b"x") > 0


async def test_a_body_that_is_served_after_all_is_refused_no_more() -> None:
    async with fleet() as fleet_:
        engine, may_go = await fleet_.engine("A"), asyncio.Event()

        async def script(one: HttpEngine, call: Call, request: Any) -> Any:
            await may_go.wait()
            return await serve_model(one, call, request)

        engine.script = script
        running = asyncio.create_task(fleet_.json())
        await until(lambda: engine.served == 1)
        view = fleet_.router.state.fleet
        body = fingerprint(engine.calls[0].raw, view._secret)
        view._health.poison.convict(body, view.now_s)
        async with await fleet_.post() as response:
            assert response.status == 422
        may_go.set()
        await running
        assert not view.refused
        await fleet_.json()


@pytest.mark.parametrize("stream", [False, True])
async def test_where_all_broke_off_who_lives_is_tried_again(stream: bool) -> None:
    async with fleet(health=PATIENT) as fleet_:
        engines = [await fleet_.engine("A") for _ in range(2)]

        def asked() -> int:
            return sum(engine.served for engine in engines)

        def are_well() -> bool:
            found = fleet_.router.state.fleet.instances
            return sum(one.standing == "Good" for one in found) == 2

        async def script(engine: HttpEngine, call: Call, request: Any) -> Any:
            # The first is there again when the second breaks off: none is to be waited for.
            await until(are_well)
            return await (die if asked() <= 2 else serve_model)(engine, call, request)

        for engine in engines:
            engine.script = script
        async with await fleet_.post(stream=stream) as response:
            text = await response.text()
            assert response.status == 200, text
        assert sorted(engine.served for engine in engines) == [1, 2]


async def test_requests_that_met_the_same_death_are_tried_apart() -> None:
    """Else the next death would say as little as the first about which of them it was."""

    async with fleet(policy="SessionAffinity", health=PATIENT) as fleet_:
        engines = [await fleet_.engine("A") for _ in range(3)]

        def asked() -> int:
            return sum(engine.served for engine in engines)

        async def script(engine: HttpEngine, call: Call, request: Any) -> Any:
            is_first = asked() <= 2
            await until(lambda: asked() >= (2 if is_first else 4))
            return await (die if is_first else serve_model)(engine, call, request)

        for engine in engines:
            engine.script = script
        await asyncio.gather(*(fleet_.json(user="one", prompt=p) for p in ("a", "b")))
        assert sorted(e.served for e in engines) == [1, 1, 2]
        assert not fleet_.router.state.fleet._loads.suspected()


async def test_failed_transfers_count_against_who_they_have_in_common() -> None:
    view = view_of("P", "P", "D")
    failures, tried = failures_of(view), request_state()
    (d,) = (one for one in view.instances if one.beat.type == "D")
    for p in (one for one in view.instances if one.beat.type == "P"):
        assert not view._health.breakers
        await failures.after(tried, attempt_at(Pair(p, d), 1.0), CallFailed("transfer"))
    assert set(view._health.breakers) == {d.key}
    assert not tried.exclude


async def test_a_failed_transfer_is_tried_on_a_pair_that_shares_nobody_with_it() -> None:
    async with fleet(policy="SessionAffinity") as fleet_:
        ps = [await fleet_.engine("P") for _ in range(3)]
        ds = [await fleet_.engine("D") for _ in range(3)]
        turns = iter([answer(503, NO_KV)])

        async def script(engine: HttpEngine, call: Call, request: Any) -> Any:
            return await next(turns, serve_model)(engine, call, request)

        for d in ds:
            d.script = script
        await fleet_.json(user="one")
        assert sorted(e.served for e in ps) == [0, 1, 1]
        assert sorted(e.served for e in ds) == [0, 1, 1]
        errors = fleet_.metric("xpyd_router_errors_total", phase="decode", cause="transfer")
        assert errors == 1


@pytest.mark.parametrize("kinds", ["PD", "PPD", "PDD"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_transfer_is_tried_again_where_there_is_no_other_pair(
    kinds: str, stream: bool
) -> None:
    async with fleet(policy="SessionAffinity") as fleet_:
        engines = [await fleet_.engine(kind) for kind in kinds]
        turns = iter([answer(503, NO_KV)])

        async def script(engine: HttpEngine, call: Call, request: Any) -> Any:
            return await next(turns, serve_model)(engine, call, request)

        for engine in engines:
            if engine.beat.type == "D":
                engine.script = script
        async with await fleet_.post(user="one", stream=stream) as response:
            text = await response.text()
            assert response.status == 200, text
        twice = [e.beat.type for e in engines if e.served == 2]
        assert twice == {"PD": ["P", "D"], "PPD": ["D"], "PDD": ["P"]}[kinds]
