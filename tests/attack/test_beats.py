"""Recorded beats that somebody sends again: they bring nobody back, send nobody elsewhere, and give
their sender no place of an instance. Their signature is right: it is the instance's own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.router.fakes import Fleet, HttpEngine, fleet, now_us, until
from tests.router.test_router_discovery_port import beat, port
from tests.router.zmtp_kit import HELLO
from xpyd_core.keys import beat_mac
from xpyd_core.messages import encode_heartbeat
from xpyd_router.fleet.instances import Instance
from xpyd_router.fleet.registry import MAX_SKEW_S

KEY = b"k" * 32
Recorded = list[bytes]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    return path


def record(engine: HttpEngine, **changes: Any) -> Recorded:
    """A beat of `engine` as somebody on the way sees it."""
    frame = encode_heartbeat(replace(engine.beat, **{"sent_us": now_us(), **changes}))
    return [frame, beat_mac(KEY, frame)]


async def send(made: Fleet, recorded: Recorded) -> str:
    """What the router counts it as."""
    counts = made.router.state.metrics.heartbeats
    results = ("new", "refreshed", "replaced", "gone", "repeated", "stale", "skewed", "forged")
    before, taken = {r: counts.labels(r)._value.get() for r in results}, made.taken()
    await made.dealer.send_multipart(recorded)
    await until(lambda: made.taken() > taken)
    (changed,) = (r for r in results if counts.labels(r)._value.get() != before[r])
    return changed


def instances(made: Fleet) -> list[Instance]:
    return list(made.router.state.fleet.instances)


async def test_an_instance_that_fell_silent_is_not_revived(key_file: Path) -> None:
    async with fleet(kv_key_file=key_file) as made:
        engine = await made.engine("A", period_ms=60_000)
        beats = [record(engine, period_ms=50) for _ in range(3)]
        for recorded in beats:
            assert await send(made, recorded) == "refreshed"
        await until(lambda: not instances(made))
        for recorded in beats:
            assert await send(made, recorded) == "stale"
        assert not instances(made)


async def test_an_instance_that_said_goodbye_is_not_revived(key_file: Path) -> None:
    async with fleet(kv_key_file=key_file) as made:
        engine = await made.engine("A")
        recorded = record(engine)
        assert await send(made, recorded) == "refreshed"
        assert await send(made, record(engine, state="Gone")) == "gone"
        assert await send(made, recorded) == "stale"
        assert not instances(made)


async def test_a_beat_sent_again_prolongs_no_life(key_file: Path) -> None:
    async with fleet(kv_key_file=key_file) as made:
        engine = await made.engine("A", period_ms=60_000)
        recorded = record(engine, period_ms=50)
        assert await send(made, recorded) == "refreshed"
        while instances(made):
            await made.dealer.send_multipart(recorded)
            await asyncio.sleep(0.01)
        assert made.metric("xpyd_router_heartbeats_total", result="repeated") > 0


async def test_the_past_of_an_address_does_not_take_it_back(key_file: Path) -> None:
    """An engine was started anew, with another KV address: its former self stays away."""
    async with fleet(kv_key_file=key_file) as made:
        engine = await made.engine("P")
        past = [record(engine), record(engine, state="Gone"), record(engine, state="Draining")]
        newer = {"incarnation": "next", "zmq_address": "127.0.0.1:29999"}
        assert await send(made, record(engine, **newer)) == "replaced"
        for recorded in past:
            assert await send(made, recorded) == "stale"
        (found,) = instances(made)
        assert (found.key.incarnation, str(found.kv)) == ("next", "127.0.0.1:29999")
        assert found.beat.state == "Ready"


async def test_what_is_changed_in_a_recorded_beat_breaks_its_signature(key_file: Path) -> None:
    async with fleet(kv_key_file=key_file) as made:
        engine = await made.engine("P")
        frame, mac = record(engine)
        for was, now in ((b"inc-", b"INC-"), (b"127.0.0.1", b"127.0.0.9"), (b"sent", b"sEnt")):
            assert was in frame
            assert await send(made, [frame.replace(was, now), mac]) == "forged"
        assert [found.key.http for found in instances(made)] == [engine.beat.http_address]


async def test_a_router_that_starts_takes_no_old_beat(key_file: Path) -> None:
    async with fleet(kv_key_file=key_file) as made:
        engine = await made.engine("A")
        assert await send(made, record(engine, state="Gone")) == "gone"
        sent_us = now_us() - round((MAX_SKEW_S + 1) * 1e6)
        old = record(engine, incarnation="before", sent_us=sent_us)
        assert await send(made, old) == "skewed"


async def test_a_young_beat_at_a_router_that_starts_yields_to_the_instance_itself(
    key_file: Path,
) -> None:
    """A new router cannot know that an instance ended seconds ago. What it gets of it ends with the
    next beat of that address, and else as soon as beats are missed, and does not come again."""
    async with fleet(kv_key_file=key_file) as first:
        engine = await first.engine("D", period_ms=60_000)
        young = record(engine)
        leaving = record(engine, period_ms=50, incarnation="other", http_address="127.0.0.9:1")
        now = record(engine, incarnation="now")
    async with fleet(kv_key_file=key_file) as second:
        assert await send(second, young) == "new"
        assert await send(second, now) == "replaced"
        assert await send(second, young) == "stale"
        (found,) = instances(second)
        assert found.key.incarnation == "now"
    async with fleet(kv_key_file=key_file) as third:
        assert await send(third, leaving) == "new"
        await until(lambda: not instances(third))
        assert await send(third, leaving) == "stale"


async def test_who_sends_a_recorded_beat_takes_no_instances_place_at_the_port() -> None:
    async with port(connections=3) as made:
        recorded = beat(1, sent_us=now_us())
        first = await made.client(HELLO + recorded)
        await until(lambda: made.count("new") == 1)
        strangers = [await made.client(HELLO + recorded) for _ in range(2)]
        await until(lambda: made.count("repeated") == 2)
        # A router in which every place is an instance's takes nobody any more.
        second = await made.client(HELLO + beat(2))
        await until(lambda: made.count("new") == 2)
        await strangers[0].ended()
        third = await made.client(HELLO + beat(3))
        await until(lambda: made.count("new") == 3)
        await strangers[1].ended()
        assert all(client.is_open for client in (first, second, third))


async def test_a_beat_that_comes_by_two_ways_ends_neither() -> None:
    """An engine that reaches a router by two addresses sends each beat twice."""
    async with port() as made:
        ways = [await made.client(HELLO) for _ in range(2)]
        for number in range(20):
            for way in ways:
                way.send(beat(1, sent_us=now_us() + number))
                await asyncio.sleep(0)
        same = beat(1, sent_us=now_us() + 1_000_000)
        for _ in range(20):
            ways[1].send(same)
        await until(lambda: made.count("repeated") >= 19)
        assert all(way.is_open for way in ways)
        assert not made.count("closed")
