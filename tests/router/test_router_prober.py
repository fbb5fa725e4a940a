"""Probes over real sockets, and what they do to a router's fleet."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from tests.router.fakes import (
    Call,
    Fleet,
    HttpEngine,
    Script,
    answer,
    die,
    fleet,
    hang,
    serve_model,
    until,
)
from xpyd_core.request_id import Address
from xpyd_router.discovery.prober import probe_http
from xpyd_router.fleet.health import HealthRules
from xpyd_router.fleet.instances import Instance

QUICK = HealthRules(probe_interval_s=0.1, probe_timeout_s=0.1, slow_start_s=0.0)
"""For tests that wait for probes."""
PATIENT = HealthRules(probe_interval_s=60.0, probe_timeout_s=5.0, slow_start_s=0.0)
"""For tests in which only doubt leads to a probe."""
ERROR = {"error": {"message": "boom", "type": "server_error"}}


class Sayer(asyncio.Protocol):
    """Answers a request with `said`; None: never."""

    def __init__(self, said: bytes | None) -> None:
        self._said = said
        self.is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._said is not None:
            self._transport.write(self._said)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True


@contextlib.asynccontextmanager
async def listener(said: bytes | None) -> AsyncGenerator[Address]:
    """A port with Sayers behind it, none of which is left."""
    sayers: list[Sayer] = []

    def make() -> Sayer:
        sayers.append(Sayer(said))
        return sayers[-1]

    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    async with server:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
    await until(lambda: all(sayer.is_over for sayer in sayers))


@pytest.mark.parametrize(
    ("said", "result"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", "ok"),
        (b"HTTP/1.0 404 Not Found\r\n\r\n", "ok"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "status"),
        (b"SSH-2.0-OpenSSH_9.9\r\n", "status"),
        (b"", "reset"),
        (b"HTTP", "reset"),
        (None, "timeout"),
    ],
)
async def test_a_probe_tells_what_answers(said: bytes | None, result: str) -> None:
    async with listener(said) as address:
        timeout_s = 0.1 if said is None else 10.0
        assert await probe_http(address, timeout_s) == result


async def test_a_probe_of_a_port_that_nobody_listens_on_says_connect() -> None:
    async with listener(b"") as address:
        pass
    assert await probe_http(address, 10.0) == "connect"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EADDRNOTAVAIL])
async def test_want_of_files_or_ports_here_is_not_held_against_the_instance(number: int) -> None:
    async def no_more(*_: Any, **__: Any) -> None:
        raise OSError(number, "none left")

    asyncio.get_running_loop().create_connection = no_more  # type: ignore[method-assign]  # of this loop
    assert await probe_http(Address("127.0.0.1", 9), 10.0) == "void"


def standing(fleet_: Fleet, engine: HttpEngine) -> str:
    found = [i for i in fleet_.router.state.fleet.instances if i.beat == engine.beat]
    return found[0].standing


def instance(fleet_: Fleet, engine: HttpEngine) -> Instance:
    return next(i for i in fleet_.router.state.fleet.instances if i.beat == engine.beat)


async def test_every_instance_is_probed_though_nobody_calls_it() -> None:
    async with fleet(health=QUICK) as fleet_:
        engines = [await fleet_.engine(kind) for kind in "PDA"]
        await until(lambda: all(engine.probes >= 3 for engine in engines))
        assert {standing(fleet_, engine) for engine in engines} == {"Good"}
        # The router counts an answer a moment later than the engine a probe.
        await until(lambda: fleet_.metric("xpyd_router_probes_total", result="ok") >= 9)


async def test_an_instance_whose_http_died_is_out_though_it_beats_until_it_answers() -> None:
    async with fleet(health=QUICK) as fleet_:
        bad, good = await fleet_.engine("A"), await fleet_.engine("A")
        bad.health_status = 500
        await until(lambda: standing(fleet_, bad) == "Ejected")
        await fleet_.beat(bad)
        assert standing(fleet_, bad) == "Ejected"
        for _ in range(3):
            await fleet_.json()
        assert (bad.served, good.served) == (0, 3)
        assert fleet_.metric("xpyd_router_ejections_total", cause="status") == 1
        bad.health_status = 200
        await until(lambda: standing(fleet_, bad) == "Good")


async def test_calls_to_a_frozen_instance_end_long_before_its_beats_do() -> None:
    async with fleet(health=QUICK, missed_beats=100) as fleet_:
        frozen = await fleet_.engine("P", period_ms=1000)
        await fleet_.engine("P"), await fleet_.engine("D")
        frozen.script, frozen.health_status = hang, None
        for _ in range(2):  # turns: one of the two meets it
            await fleet_.json()
        assert fleet_.metric("xpyd_router_errors_total", phase="prefill", cause="lost") == 1
        assert standing(fleet_, frozen) == "Ejected"
        assert fleet_.metric("xpyd_router_ejections_total", cause="timeout") == 1
        frozen.script, frozen.health_status = serve_model, 200
        await fleet_.beat(frozen)
        await until(lambda: standing(fleet_, frozen) == "Good")
        before = frozen.served
        for _ in range(2):
            await fleet_.json()
        assert frozen.served == before + 1


async def test_an_instance_that_is_slow_to_answer_probes_but_beats_keeps_its_calls() -> None:
    async with fleet(health=QUICK) as fleet_:
        busy = await fleet_.engine("A", period_ms=60_000)
        busy.health_status = None
        gate = asyncio.Event()

        async def slow(engine: HttpEngine, call: Call, request: Any) -> Any:
            await gate.wait()
            return await serve_model(engine, call, request)

        busy.script = slow
        running = asyncio.create_task(fleet_.json())
        await until(lambda: standing(fleet_, busy) == "Ejected")
        gate.set()
        assert (await running)["choices"]
        assert fleet_.metric("xpyd_router_retries_total") == 0


async def test_a_connect_error_ejects_at_once_and_the_probe_brings_it_back() -> None:
    async with fleet(health=PATIENT) as fleet_:
        one, _ = await fleet_.engine("A"), await fleet_.engine("A")
        view = fleet_.router.state.fleet
        view.failed(instance(fleet_, one), "connect", b"x")
        assert standing(fleet_, one) == "Ejected"
        await until(lambda: standing(fleet_, one) == "Good")
        assert one.probes == 1


async def test_a_dead_instance_gets_no_second_request() -> None:
    async with fleet(health=PATIENT) as fleet_:
        dead, good = await fleet_.engine("A"), await fleet_.engine("A")
        await dead.stop()
        for _ in range(6):
            await fleet_.json()
        assert good.served == 6
        errors = fleet_.metric("xpyd_router_errors_total", phase="aggregated", cause="connect")
        assert errors == 1
        assert fleet_.metric("xpyd_router_ejections_total", cause="connect") == 1
        await fleet_.beat(dead)
        await fleet_.json()
        assert standing(fleet_, dead) == "Ejected"


async def test_an_instance_that_answers_500_is_left_alone_until_a_trial_succeeds() -> None:
    async with fleet(health=PATIENT) as fleet_:
        bad, good = await fleet_.engine("A"), await fleet_.engine("A")
        bad.script = answer(500, ERROR)
        for number in range(30):
            await fleet_.json(prompt=f"prompt {number}")
        assert bad.served == 5
        assert good.served == 30
        assert standing(fleet_, bad) == "Open"
        assert fleet_.metric("xpyd_router_breaker_openings_total") == 1
        async with fleet_.http.get(f"{fleet_.admin}/instances") as response:
            rows = (await response.json())["instances"]
        row = next(r for r in rows if r["instance"] == bad.beat.instance)
        assert row["state"] == "CircuitOpen"
        assert row["health"]["breaker"] == "Open"
        assert 0 < row["health"]["open_seconds"] <= 5
        bad.script = serve_model
        await until(lambda: standing(fleet_, bad) == "HalfOpen")
        for _ in range(2):
            await fleet_.json()
        assert standing(fleet_, bad) == "Good"
        assert bad.served == 6


@pytest.mark.parametrize("body", [{"prompt": "the same"}])
@pytest.mark.parametrize("broken", [answer(500, ERROR), answer(400, ERROR), answer(503, ERROR)])
async def test_one_request_many_times_opens_no_breaker(
    body: dict[str, Any], broken: Script
) -> None:
    async with fleet(health=PATIENT) as fleet_:
        engines = [await fleet_.engine("A") for _ in range(2)]
        for engine in engines:
            engine.script = broken
        for _ in range(20):
            async with await fleet_.post(**body) as response:
                assert response.status != 200
        assert {standing(fleet_, engine) for engine in engines} == {"Good"}


async def be_killed(engine: HttpEngine, call: Call, request: Any) -> Any:
    """An engine whose process dies of the request that says so."""
    if "kill" not in call.body["prompt"]:
        return await serve_model(engine, call, request)
    assert engine.runner is not None
    for site in tuple(engine.runner.sites):
        await site.stop()
    return await die(engine, call, request)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kinds", ["AAAA", "PPPPD"])
async def test_a_request_that_kills_instances_is_stopped_after_two(
    stream: bool, kinds: str
) -> None:
    async with fleet(health=PATIENT) as fleet_:
        engines = [await fleet_.engine(kind) for kind in kinds]
        for engine in engines[:4]:
            engine.script = be_killed
        for _ in range(3):
            async with await fleet_.post(prompt="kill", stream=stream) as response:
                assert response.status == 422
                error = (await response.json())["error"]
                assert error["code"] == "poisoned_request"
        dead = [e for e in engines[:4] if standing(fleet_, e) == "Ejected"]
        assert len(dead) == 2
        assert sum(e.served for e in engines[:4]) == 2
        for number in range(4):
            await fleet_.json(prompt=f"harmless {number}")
        assert fleet_.metric("xpyd_router_poisoned_requests_total") == 3


async def test_a_request_whose_calls_break_off_while_instances_live_is_tried_three_times() -> None:
    async with fleet(health=PATIENT) as fleet_:
        engines = [await fleet_.engine("A") for _ in range(3)]
        turns = iter([die, die])

        async def script(engine: HttpEngine, call: Call, request: Any) -> Any:
            return await next(turns, serve_model)(engine, call, request)

        for engine in engines:
            engine.script = script
        await fleet_.json()
        assert sum(e.served for e in engines) == 3
