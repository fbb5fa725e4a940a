"""An instance that leaves goes when every router has said that it picks it no more, and has nothing
there: HeartbeatSender.part and the discovery port's answer, over their socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.router.fakes import until
from xpyd_core.heartbeat import HeartbeatSender, Parting
from xpyd_core.keys import INSECURE_KEYS, word_mac
from xpyd_core.messages import (
    DrainAck,
    Heartbeat,
    InstanceState,
    ReplicaBeat,
    decode_heartbeat,
    encode_heartbeat,
    encode_word,
)
from xpyd_core.request_id import Address
from xpyd_router.discovery.discovery import Discovery
from xpyd_router.fleet.instances import Instance, InstanceKey
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
INSTANCE = InstanceKey("127.0.0.1:20001", "inc")
LONG_S = 60.0
SHORT_MS = 100
"""A beat's period; a router that says nothing is waited for three times as long."""


@dataclass
class Engine:
    """What beats. A test sets its state."""

    beats: HeartbeatSender
    gone: list[str]
    """KV addresses of others that a router said are dead."""
    state: InstanceState = "Ready"
    replicas: tuple[ReplicaBeat, ...] = ()

    def part_with(self, *replicas: ReplicaBeat) -> asyncio.Task[Parting]:
        """The instance stays, and has these replicas."""
        self.replicas = replicas
        return asyncio.create_task(self.beats.part(LONG_S))

    def part(self, timeout_s: float = LONG_S) -> asyncio.Task[Parting]:
        self.state = "Draining"
        return asyncio.create_task(self.beats.part(timeout_s))


@contextlib.asynccontextmanager
async def engine(*ports: int, key: bytes = KEY, period_s: float = LONG_S) -> AsyncGenerator[Engine]:
    made: Engine
    gone: list[str] = []

    def beat() -> Heartbeat:
        return Heartbeat(
            type="A",
            http_address=INSTANCE.http,
            zmq_address="127.0.0.1:21001",
            incarnation=INSTANCE.incarnation,
            period_ms=round(1000 * period_s),
            state=made.state,
            replicas=made.replicas,
        )

    sender = HeartbeatSender(
        [Address("127.0.0.1", port) for port in ports],
        identity="127.0.0.1:21001/inc",
        source_host="127.0.0.1",
        period_s=period_s,
        make=beat,
        keys=(key,),
        on_gone=lambda address: gone.append(str(address)),
    )
    made = Engine(sender, gone)
    sender.start()
    try:
        yield made
    finally:
        await sender.close()


@dataclass
class Router:
    """A router's view and its discovery port."""

    fleet: FleetView
    discovery: Discovery

    @property
    def port(self) -> int:
        return self.discovery.port

    @property
    def picks(self) -> bool:
        return self.fleet.has_pair


@contextlib.asynccontextmanager
async def router(
    key: bytes = KEY, clock: Callable[[], float] = time.monotonic
) -> AsyncGenerator[Router]:
    fleet = FleetView(Registry(period_s=3.0, missed_beats=3), clock)
    discovery = Discovery(fleet, RouterMetrics(), host="127.0.0.1", port=0, keys=(key,))
    task = asyncio.create_task(discovery.run())
    try:
        yield Router(fleet, discovery)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        discovery.close()


@pytest.mark.parametrize("key", [KEY, *INSECURE_KEYS])
async def test_an_instance_stays_until_no_router_has_a_request_there(key: bytes) -> None:
    async with router(key) as one, router(key) as two, engine(one.port, two.port, key=key) as d:
        await until(lambda: one.picks and two.picks)
        load = two.fleet.load(INSTANCE)
        load.begin(10)
        leaving = d.part()
        await until(lambda: not one.picks and not two.picks)
        # Some beats later, too.
        await two.fleet.wait_change(0.6)
        assert not leaving.done(), "a request of one router is not over"
        load.end(10)
        assert await leaving == Parting()


async def test_what_is_still_there_at_the_deadline_is_said() -> None:
    async with router() as one, engine(one.port) as d:
        await until(lambda: one.picks)
        one.fleet.load(INSTANCE).begin(10)
        assert await d.part(timeout_s=0.6) == Parting(in_flight=1)


async def test_a_router_that_ended_holds_no_instance_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with router() as one, engine(one.port, port) as d:
        await until(lambda: one.picks)
        assert await d.part() == Parting()


async def test_a_router_that_says_nothing_holds_an_instance_up_for_three_beats() -> None:
    period_s = SHORT_MS / 1000
    async with (
        router() as one,
        mute_router() as (_, port),
        engine(one.port, port, period_s=period_s) as d,
    ):
        await until(lambda: one.picks)
        assert await d.part() == Parting(silent=(Address("127.0.0.1", port),))


@contextlib.asynccontextmanager
async def mute_router() -> AsyncGenerator[tuple[zmq.asyncio.Socket, int]]:
    """A router as an older version of ours: it reads."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.bind("tcp://127.0.0.1:*")
        yield sock, int(sock.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


@pytest.mark.parametrize("lie", ["key", "incarnation", "before", "junk", "none"])
async def test_only_a_router_of_the_fleet_lets_this_start_of_an_instance_go(lie: str) -> None:
    async with mute_router() as (sock, port), engine(port, period_s=0.3) as d:
        _, first, _ = await sock.recv_multipart()
        leaving = d.part(timeout_s=LONG_S)
        while not leaving.done():
            sender, frame, _ = await sock.recv_multipart()
            beat = decode_heartbeat(frame)
            before = decode_heartbeat(first).sent_us
            ack = DrainAck(
                incarnation="another" if lie == "incarnation" else beat.incarnation,
                sent_us=before if lie == "before" else beat.sent_us,
                in_flight=0,
            )
            answer = b"\xc1" if lie == "junk" else encode_word(ack)
            mac = word_mac(OTHER_KEY if lie == "key" else KEY, answer)
            await sock.send_multipart([sender, answer, mac])  # pyright: ignore[reportUnknownMemberType] - pyzmq
            await asyncio.wait({leaving}, timeout=0.1)
        silent = (await leaving).silent
        assert silent == (() if lie == "none" else (Address("127.0.0.1", port),))


def other(incarnation: str, **fields: Any) -> Heartbeat:
    """A beat of another instance."""
    base = {"http_address": "127.0.0.2:20001", "zmq_address": "127.0.0.2:21001"}
    return Heartbeat(type="P", incarnation=incarnation, **{**base, **fields})


class Passing:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.mark.parametrize("how", ["replaced", "silent"])
async def test_an_engine_hears_at_once_which_other_one_is_dead(how: str) -> None:
    clock = Passing()
    async with router(clock=clock) as one, engine(one.port) as d:
        await until(lambda: one.picks)
        hear(one, other("first"))
        if how == "replaced":
            hear(one, other("second"))
        else:
            clock.ahead_s = 20.0
            one.fleet.expire()
        await until(lambda: d.gone == ["127.0.0.2:21001"])


async def test_a_replica_leaves_when_every_router_has_let_go_of_it_and_so_does_the_next() -> None:
    stays = ReplicaBeat(zmq_address="127.0.0.1:21001")
    more = ReplicaBeat(zmq_address="127.0.0.1:21003")
    leaves = msgspec.structs.replace(more, draining=1)
    async with router() as one, router() as other, engine(one.port, other.port) as d:
        await until(lambda: one.picks and other.picks)
        places = (INSTANCE, INSTANCE._replace(replica=1))
        for _ in range(2):
            d.replicas = (stays, more)
            d.beats.beat_now()
            for fleet in (one.fleet, other.fleet):
                await until(lambda fleet=fleet: len(fleet.instances[0].places) == 2)
            one.fleet.load(places[0]).begin(10)  # of one that stays
            other.fleet.load(places[1]).begin(10)
            parting = d.part_with(stays, leaves)
            await until(lambda: not any(i.replica for i in picked(one)))
            await asyncio.sleep(0.6)  # two beats more
            assert not parting.done()
            assert one.picks, "the other replica"
            other.fleet.load(places[1]).end(10)
            assert await parting == Parting()
            one.fleet.load(places[0]).end(10)
            d.replicas = (stays,)
            d.beats.beat_now()
            await until(lambda: len(one.fleet.instances[0].places) == 1)
            await until(lambda: len(other.fleet.instances[0].places) == 1)


def picked(one: Router) -> tuple[Instance, ...]:
    return one.fleet.snapshot.of_model("").everyone


async def test_an_engine_hears_which_replica_of_another_one_is_gone_and_when_all_are() -> None:
    def two(*serving: Literal[0, 1]) -> tuple[ReplicaBeat, ...]:
        ports = zip((21001, 21003), serving, strict=True)
        return tuple(ReplicaBeat(zmq_address=f"127.0.0.2:{p}", serving=s) for p, s in ports)

    async with router() as one, engine(one.port) as d:
        await until(lambda: one.picks)
        for number, serving in enumerate(((1, 1), (1, 0), (1, 0), (1, 1)), 1):
            hear(one, other("first", replicas=two(*serving), sent_us=number))
        hear(one, other("second", sent_us=9))
        await until(lambda: len(d.gone) == 3)
        assert d.gone == ["127.0.0.2:21003", "127.0.0.2:21001", "127.0.0.2:21003"]


async def test_an_engine_that_says_goodbye_is_dead_to_nobody() -> None:
    async with router() as one, engine(one.port) as d:
        await until(lambda: one.picks)
        hear(one, other("first"))
        hear(one, other("first", state="Gone", sent_us=2))
        hear(one, other("second", http_address="127.0.0.3:20001"))
        hear(one, other("third", http_address="127.0.0.3:20001"))
        await until(lambda: d.gone)
        assert d.gone == ["127.0.0.2:21001"], "of the second alone"


def hear(one: Router, beat: Heartbeat) -> None:
    """As if it came by another connection."""
    frame = encode_heartbeat(beat)
    assert one.discovery.beats.take((frame,), "127.0.0.2", lambda _: None)
