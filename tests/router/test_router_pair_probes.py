"""Each pair is probed: at first, after each restart, again and again; the results are counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from tests.router.beats import beat
from tests.router.fakes import replace_beat, until
from xpyd_core.keys import is_call_mac
from xpyd_core.messages import Heartbeat, ReplicaBeat
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView
from xpyd_router.http.server import running
from xpyd_router.metrics import RouterMetrics
from xpyd_router.request import pair_probes
from xpyd_router.request.pair_probes import PairProber

KEY = b"k" * 32
_METRIC = "xpyd_router_kv_probes"


@dataclass
class World:
    """Ps whose probes answer as `says` has it for a D's KV address, and a clock that jumps."""

    view: FleetView
    metrics: RouterMetrics
    says: dict[str, Any] = field(default_factory=dict[str, Any])
    details: dict[str, str] = field(default_factory=dict[str, str])
    asked: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """By which P, and to which D."""
    by_replica: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """The replica of P that was asked, and its D."""
    status: int = 200
    now_s: float = 1000.0

    async def serve(self, stack: contextlib.AsyncExitStack) -> str:
        """Another P; its address."""
        app = web.Application()
        app.router.add_post("/kv/probe", self._probe)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"127.0.0.1:{runner.addresses[0][1]}"

    async def _probe(self, request: web.Request) -> web.Response:
        address = (await request.json())["address"]
        assert is_call_mac((KEY,), "kv-probe", address, request.headers["X-Xpyd-Mac"])
        self.asked.append((request.headers["Host"], address))
        self.by_replica.append((request.headers.get("X-data-parallel-rank", ""), address))
        reason = self.says.get(address, "")
        found = {"ok": not reason, "reason": reason, "seconds": 0.25}
        found["detail"] = self.details.get(address, "")
        return web.json_response(found, status=self.status)

    def add(self, kind: str, number: int, **fields: Any) -> Heartbeat:
        made = beat(kind, number, instance=f"{kind.lower()}{number}", **{**MODERN, **fields})
        self.view.apply(made)
        return made

    def gauge(self) -> dict[str, float]:
        """Pairs by state."""
        text = self.metrics.render(self.view.instances).decode()
        families = text_string_to_metric_families(text)
        (family,) = [one for one in families if one.name == "xpyd_router_kv_pairs"]
        return {one.labels["state"]: one.value for one in family.samples}

    def counted(self) -> dict[tuple[str, ...], float]:
        """By P, D, outcome and cause."""
        text = self.metrics.render(self.view.instances).decode()
        (family,) = [f for f in text_string_to_metric_families(text) if f.name == _METRIC]
        names = ("prefill", "decode", "outcome", "cause")
        return {tuple(map(one.labels.__getitem__, names)): one.value for one in family.samples}


MODERN = {
    "state": "Ready",
    "models": ("m",),
    "compatibility": "k",
    "incarnation": "i1",
    "continuation": 1,
    "version": 1,
}


@pytest.fixture
def world() -> World:
    return World(FleetView(Registry(period_s=1e6, missed_beats=3), lambda: 1.0), RouterMetrics())


@contextlib.asynccontextmanager
async def probing(world: World) -> AsyncGenerator[None]:
    prober = PairProber(
        world.view, world.metrics, keys=(KEY,), random=lambda: 0.0, clock=lambda: world.now_s
    )
    async with running(prober.run(), _time(world)):
        yield


async def _time(world: World) -> None:
    """A second of the world takes a hundredth."""
    while True:
        await asyncio.sleep(0.01)
        world.now_s += 1.0
        world.view.wake()


async def test_each_p_probes_each_d_that_it_may_send_to(world: World) -> None:
    async with contextlib.AsyncExitStack() as stack:
        ps = [await world.serve(stack) for _ in range(2)]
        for number, address in enumerate(ps):
            world.add("P", number, http_address=address)
        ds = [world.add("D", number + 10) for number in range(3)]
        world.add("D", 20, compatibility="other")
        world.add("D", 21, models=("another",))
        world.add("D", 22, dialect="nixl")
        world.add("A", 23)
        world.add("D", 24, state="Starting")
        async with probing(world):
            pairs = {(p, d.zmq_address) for p in ps for d in ds}
            await until(lambda: set(world.asked) >= pairs)
            await until(lambda: len(world.counted()) == len(pairs))
        assert set(world.asked) == pairs
        assert {row[2:] for row in world.counted()} == {("moved", "")}


async def test_each_replica_of_p_probes_each_of_d_and_one_that_comes_back_at_once(
    world: World,
) -> None:
    def two(host: int, *serving: int) -> dict[str, Any]:
        ports = zip((21001, 21003), serving, strict=True)
        each = [(f"10.0.0.{host}:{port}", one) for port, one in ports]
        return {"replicas": tuple(ReplicaBeat(zmq_address=a, serving=one) for a, one in each)}

    async with contextlib.AsyncExitStack() as stack:
        world.add("P", 1, http_address=await world.serve(stack), **two(1, 1, 1))
        d = world.add("D", 11, **two(11, 1, 1))
        async with probing(world):
            pairs = {(rank, f"10.0.0.11:{port}") for rank in "01" for port in (21001, 21003)}
            await until(lambda: set(world.by_replica) >= pairs)
            await until(lambda: world.gauge()["verified"] == 4)
            world.view.apply(replace_beat(d, two(11, 1, 0)))
            await until(lambda: world.gauge()["verified"] == 2)
            world.by_replica.clear()
            world.view.apply(replace_beat(d, two(11, 1, 1)))
            await until(lambda: world.gauge()["verified"] == 4)
            assert {("0", "10.0.0.11:21003"), ("1", "10.0.0.11:21003")} <= set(world.by_replica)
        assert set(world.by_replica) <= pairs
        assert {row[:2] for row in world.counted()} == {("p1", "d11")}, "counted by instance"


async def test_a_pair_that_works_is_probed_again_each_minute_and_one_that_fails_at_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        world.add("P", 1, http_address=await world.serve(stack))
        good, bad = world.add("D", 11), world.add("D", 12)
        world.says[bad.zmq_address] = "timeout"
        async with probing(world):
            await until(lambda: [d for _, d in world.asked].count(good.zmq_address) == 2)
            times = [d for _, d in world.asked].count(bad.zmq_address)
            assert 3 <= times <= 7, "after 2, 4, 8 seconds"
            counted = world.counted()
            assert counted["p1", "d12", "failed", "timeout"] >= 3
            assert caplog.text.count("a probe does not get from P p1 to D d12: timeout at ") == 1
            del world.says[bad.zmq_address]
            await until(lambda: ("p1", "d12", "moved", "") in world.counted())
    assert world.counted()["p1", "d11", "moved", ""] >= 2


async def test_a_pair_is_verified_by_its_probe_and_fails_with_what_p_says(world: World) -> None:
    async with contextlib.AsyncExitStack() as stack:
        p = world.add("P", 1, http_address=await world.serve(stack))
        good, bad = world.add("D", 11), world.add("D", 12)
        world.says[bad.zmq_address] = "no_answer"
        world.details[bad.zmq_address] = "not connected in time\n"
        async with probing(world):
            await until(lambda: world.view.pair_problems() != [])
            await until(lambda: world.gauge() == {"unprobed": 0, "verified": 1, "failed": 1})
            [problem] = world.view.pair_problems()
            assert problem[:2] == (p.instance, bad.instance)
            assert problem.found.cause == "no_answer"
            assert problem.found.detail == "no_answer at 10.0.0.12:21001: not connected in time"
            slowest = world.view.slowest_probe()
            assert slowest is not None
            assert (slowest.decode, slowest.found.seconds) == (good.instance, 0.25)
            del world.says[bad.zmq_address]
            await until(lambda: world.view.pair_problems() == [])
        assert world.gauge() == {"unprobed": 0, "verified": 2, "failed": 0}


async def test_a_new_instance_is_probed_before_pairs_that_are_due_again(world: World) -> None:
    """There may be more of those than probes in a period."""
    async with contextlib.AsyncExitStack() as stack:
        p = await world.serve(stack)
        world.add("P", 1, http_address=p)
        for number in range(11, 41):
            world.add("D", number)
        async with probing(world):
            await until(lambda: len(set(world.asked)) == 30)
            world.now_s += 10 * pair_probes.PERIOD_S  # all are due
            new = world.add("D", 99)
            asked = len(world.asked)
            await until(lambda: (p, new.zmq_address) in world.asked)
            # Those that had begun, and one step of the clock.
            assert world.asked.index((p, new.zmq_address)) - asked < 8


async def test_each_of_many_new_instances_has_one_probe_before_any_has_two(world: World) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for number in range(4):
            world.add("P", number, http_address=await world.serve(stack))
        for number in range(4):
            world.add("D", 30 + number)
        async with probing(world):
            await until(lambda: len(world.asked) >= 4)
        first = world.asked[:4]
        assert len({p for p, _ in first}) == len({d for _, d in first}) == 4


async def test_an_instance_without_a_partner_is_probed_for_what_differs(world: World) -> None:
    async with contextlib.AsyncExitStack() as stack:
        world.add("P", 1, http_address=await world.serve(stack))
        d = world.add("D", 11, compatibility="other")
        world.says[d.zmq_address] = "incompatible:tokenizer"
        world.details[d.zmq_address] = "tokenizer: P has a, D has b"
        async with probing(world):
            await until(lambda: world.view.pair_problems() != [])
        [problem] = world.view.pair_problems()
        assert problem.found.cause == "incompatible"
        assert problem.found.detail.endswith("tokenizer: P has a, D has b")


async def test_another_start_of_an_instance_is_probed_at_once(world: World) -> None:
    async with contextlib.AsyncExitStack() as stack:
        world.add("P", 1, http_address=await world.serve(stack))
        d = world.add("D", 11)
        async with probing(world):
            await until(lambda: len(world.asked) == 1)
            began_s = world.now_s
            world.view.apply(replace_beat(d, {"incarnation": "i2"}))
            await until(lambda: len(world.asked) == 2)
            assert world.now_s - began_s < pair_probes.PERIOD_S


@pytest.mark.parametrize("status", [404, 409, 501])
async def test_an_engine_that_knows_no_probe_is_not_asked_again(world: World, status: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        world.add("P", 1, http_address=await world.serve(stack))
        world.add("D", 11)
        world.add("D", 12)
        world.status = status
        async with probing(world):
            await until(lambda: len(world.asked) == 1)
            ends_s = world.now_s + 2 * pair_probes.PERIOD_S
            await until(lambda: world.now_s > ends_s)
        assert len(world.asked) == 1
        assert world.counted() == {}


@pytest.mark.parametrize("dialect", ["xpyd", "pair-id"])
async def test_where_pairs_must_be_verified_the_log_names_an_engine_that_knows_no_probe(
    world: World, dialect: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Such a P gets no requests, though nothing of it fails."""
    registry = Registry(period_s=1e6, missed_beats=3, only_verified=True)
    world.view, world.status = FleetView(registry, lambda: 1.0), 404
    async with contextlib.AsyncExitStack() as stack:
        world.add("P", 1, http_address=await world.serve(stack), dialect=dialect)
        world.add("D", 11, dialect=dialect)
        async with probing(world):
            await until(lambda: "P p1 knows no probes" in caplog.text)
    assert ("VLLM_PLUGINS=xpyd" in caplog.text) == (dialect == "pair-id")


@pytest.mark.parametrize("busy", ["status", "reason"])
async def test_a_busy_p_is_asked_again_and_says_nothing_of_the_pair(
    world: World, busy: str
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        world.add("P", 1, http_address=await world.serve(stack))
        d = world.add("D", 11)
        if busy == "status":
            world.status = 429
        else:
            world.says[d.zmq_address] = "busy"
        async with probing(world):
            await until(lambda: len(world.asked) >= 3)
            assert world.counted() == {}
            world.status, world.says = 200, {}
            await until(lambda: ("p1", "d11", "moved", "") in world.counted())


async def test_probes_of_a_large_fleet_are_so_many_a_second(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_probes, "_MOST_PER_S", 2)
    async with contextlib.AsyncExitStack() as stack:
        for number in range(4):
            world.add("P", number, http_address=await world.serve(stack))
        for number in range(25):
            world.add("D", 30 + number)
        async with probing(world):
            await until(lambda: len(set(world.asked)) == 100)
        # The clock stands while a turn of the loop lasts: so no upper bound.
        assert world.now_s - 1000.0 >= 100 / 2 - 2


async def test_instances_that_come_while_others_are_probed_are_probed_once_each(
    world: World,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await world.serve(stack) for _ in range(3)]
        async with probing(world):
            for number, address in enumerate(addresses):
                world.add("P", number, http_address=address)
                world.add("D", 10 + number)
                await until(lambda number=number: len(world.asked) > number)
            await until(lambda: len(set(world.asked)) == 9)
            assert len(world.asked) == 9


async def test_the_next_d_of_a_p_is_probed_as_soon_as_the_one_before_has_answered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A P has one probe at a time: the others once waited seconds for a change of the fleet."""
    monkeypatch.setattr(pair_probes, "_IDLE_S", 1e6)
    async with contextlib.AsyncExitStack() as stack:
        world.add("P", 1, http_address=await world.serve(stack))
        for number in range(3):
            world.add("D", 10 + number)
        prober = PairProber(
            world.view, world.metrics, keys=(KEY,), random=lambda: 0.0, period_s=1e6
        )
        async with running(prober.run()):
            await until(lambda: len(world.asked) == 3)
