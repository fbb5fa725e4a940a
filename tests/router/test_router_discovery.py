"""The discovery port with real sockets: beats, goodbyes, silence, strangers."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.router.fakes import Fleet, fleet, pair, until
from xpyd_core.errors import ProtocolError
from xpyd_core.messages import decode_heartbeat, encode_heartbeat

BASE = {"type": "P", "http_address": "127.0.0.1:20001", "zmq_address": "127.0.0.1:21001"}
# One more member than BASE: a list in a list in a list; a name that is no UTF-8.
NESTED = b"\x84" + msgspec.msgpack.encode(BASE)[1:] + b"\xa1x" + b"\x91" * 60_000 + b"\xc0"
NOT_TEXT = b"\x84" + msgspec.msgpack.encode(BASE)[1:] + b"\xa8instance\xa3\xff\xfe\xfd"


def known(fleet_: Fleet) -> list[str]:
    return [instance.key.http for instance in fleet_.router.state.fleet.instances]


async def say(fleet_: Fleet, *parts: bytes) -> None:
    """Send a message and wait until it is taken, as whatever."""
    taken = fleet_.taken()
    await fleet_.dealer.send_multipart(parts)
    await until(lambda: fleet_.taken() > taken)


@pytest.mark.parametrize(
    "frames",
    [
        (b"",),
        (b"\xc1",),
        (b"\x00" * 60_000,),
        (msgspec.msgpack.encode([1, 2]),),
        (msgspec.msgpack.encode({}),),
        (msgspec.msgpack.encode({**BASE, "type": "X"}),),
        (msgspec.msgpack.encode({**BASE, "type": 3}),),
        (msgspec.msgpack.encode({**BASE, "http_address": "nowhere"}),),
        (msgspec.msgpack.encode({**BASE, "http_address": "h:99999"}),),
        (msgspec.msgpack.encode({**BASE, "models": ["m"] * 1000}),),
        (msgspec.msgpack.encode({**BASE, "instance": "a\nb"}),),
        (msgspec.msgpack.encode({**BASE, "period_ms": -1}),),
        (msgspec.msgpack.encode({**BASE, "sent_us": 2**63}),),
        (msgspec.msgpack.encode({**BASE, "models": ["a\nb"]}),),
        (msgspec.msgpack.encode({**BASE, "fleet": "a\x1b[2J"}),),
        (NESTED,),
        (NOT_TEXT,),
        (b"", msgspec.msgpack.encode(BASE)),
    ],
    ids=lambda frames: f"{len(frames[-1])}-bytes",  # as text they would be names of 240 kB
)
async def test_what_is_no_heartbeat_is_counted_and_dropped(frames: tuple[bytes, ...]) -> None:
    async with fleet() as fleet_:
        await say(fleet_, *frames)
        assert fleet_.metric("xpyd_router_heartbeats_total", result="malformed") == 1
        assert known(fleet_) == []
        await fleet_.engine("A")
        await fleet_.json()


def test_the_decoders_own_limits_are_no_end_of_discovery() -> None:
    """Each of these raised something else than the decoder's error, which ended the task."""
    for frame in (NESTED, NOT_TEXT):
        with pytest.raises(ProtocolError):
            decode_heartbeat(frame)


@pytest.mark.parametrize(
    "more", [{}, {"future_field": [1, {"a": 2}]}, {"http_address": "http://127.0.0.1:20001"}]
)
async def test_the_base_beat_registers_with_fields_that_nobody_knows(more: dict[str, Any]) -> None:
    async with fleet() as fleet_:
        await say(fleet_, msgspec.msgpack.encode({**BASE, **more}), b"ignored")
        assert known(fleet_) == ["127.0.0.1:20001"]


@pytest.mark.parametrize(
    ("beat", "result", "count"),
    [({"fleet": "b/chat"}, "foreign", 0), ({"fleet": "a/chat"}, "new", 1), ({}, "new", 1)],
    ids=["another-fleet", "own", "unnamed"],
)
async def test_a_fleet_takes_only_its_own_instances(
    beat: dict[str, Any], result: str, count: int
) -> None:
    async with fleet(fleet="a/chat") as fleet_:
        await say(fleet_, msgspec.msgpack.encode({**BASE, **beat}))
        assert fleet_.metric("xpyd_router_heartbeats_total", result=result) == 1
        assert len(known(fleet_)) == count


async def test_strangers_on_the_port_harm_nobody() -> None:
    async with pair() as (fleet_, p, _):
        draw = random.Random(1)
        port = fleet_.router.discovery_port
        writers: list[asyncio.StreamWriter] = []
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 9, draw.randbytes(50_000), b""):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            writers.append(writer)
        context = zmq.asyncio.Context()
        huge = context.socket(zmq.DEALER)
        huge.connect(f"tcp://127.0.0.1:{port}")
        await huge.send(b"x" * 200_000)  # over MAXMSGSIZE: its connection ends
        await fleet_.json()
        await fleet_.beat(p, running=1)
        await fleet_.json()
        assert len(known(fleet_)) == 2
        context.destroy(0)
        for writer in writers:
            writer.transport.abort()


async def test_the_router_never_replies() -> None:
    async with fleet() as fleet_:
        await fleet_.engine("A")
        assert await fleet_.dealer.poll(50) == 0


async def test_a_second_socket_may_take_over_an_identity() -> None:
    async with fleet() as fleet_:
        context = zmq.asyncio.Context()
        dealers = [context.socket(zmq.DEALER) for _ in range(2)]  # both stay connected
        for number, dealer in enumerate(dealers, 1):
            dealer.setsockopt(zmq.IDENTITY, b"127.0.0.1:21001")
            dealer.connect(f"tcp://127.0.0.1:{fleet_.router.discovery_port}")
            address = f"127.0.0.1:2000{number}"
            own = {"http_address": address, "zmq_address": f"127.0.0.1:2100{number}"}
            await dealer.send(msgspec.msgpack.encode({**BASE, **own}))
            await until(lambda address=address: address in known(fleet_))
        context.destroy(0)


async def test_who_falls_silent_leaves_and_who_says_goodbye_leaves_at_once() -> None:
    async with fleet(heartbeat_interval_s=60.0) as fleet_:
        leaving, silent = await fleet_.engine("P"), await fleet_.engine("D", period_ms=100)
        await fleet_.beat(leaving, state="Gone")
        assert leaving.beat.http_address not in known(fleet_)
        await until(lambda: silent.beat.http_address not in known(fleet_))


async def test_an_instance_that_joins_takes_part_and_a_draining_one_no_more() -> None:
    async with pair() as (fleet_, _, d):
        await fleet_.json()
        other = await fleet_.engine("D")
        for _ in range(4):
            await fleet_.json()
        assert (d.served, other.served) == (3, 2) or (d.served, other.served) == (2, 3)
        await fleet_.beat(d, state="Draining")
        before = d.served
        for _ in range(3):
            await fleet_.json()
        assert d.served == before


async def test_beats_that_wait_count_before_anyone_expires() -> None:
    """A router that was stopped for long finds its instances' beats waiting for it."""

    async with fleet() as fleet_:
        one = await fleet_.engine("A", period_ms=100)
        loop = asyncio.get_running_loop()
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{fleet_.router.discovery_port}")
        dealer.send(encode_heartbeat(one.beat))
        await until(lambda: fleet_.taken() == 2)  # connected
        begin = loop.time()
        while loop.time() < begin + 0.6:  # the loop stands still for longer than the beats last
            dealer.send(encode_heartbeat(one.beat))
            dealer.poll(20)
        gone: list[str] = []
        for _ in range(20):
            await asyncio.sleep(0)
            gone += [] if known(fleet_) else ["gone"]
        assert gone == []
        context.destroy(0)
