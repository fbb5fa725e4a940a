"""The discovery port's connections: what a stranger's costs, and that it costs nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from tests.router.fakes import until
from tests.router.zmtp_kit import GREETING, HELLO, frame, message
from xpyd_router.discovery.discovery import Discovery, PortLimits
from xpyd_router.discovery.zmtp import Receiver
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics

LONG_S = 60.0
"""Longer than a test: what must not end by itself."""


def beat(number: int = 1, **fields: Any) -> bytes:
    """A message with a base beat of instance `number`."""
    base = {
        "type": "A",
        "http_address": f"127.0.0.1:{20000 + number}",
        "zmq_address": f"127.0.0.1:{21000 + number}",
        "period_ms": 60_000,
    }
    return message(msgspec.msgpack.encode({**base, **fields}))


@dataclass
class Client:
    """A raw connection to the port."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def ended(self) -> None:
        """Until the router has closed it."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass

    def abort(self) -> None:
        """End it at once. The writer must outlive that: dropped first, it warns of itself."""
        self.writer.transport.abort()

    @property
    def is_open(self) -> bool:
        return not self.reader.at_eof() and self.reader.exception() is None


@dataclass
class Port:
    """A discovery port with its fleet."""

    discovery: Discovery
    fleet: FleetView
    metrics: RouterMetrics
    clients: list[Client]

    async def client(self, data: bytes = b"") -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.discovery.port)
        client = Client(reader, writer)
        self.clients.append(client)
        client.send(data)
        return client

    async def instance(self, number: int = 1) -> Client:
        """A connection that has proved itself."""
        client = await self.client(HELLO + beat(number))
        await until(lambda: any(i.http.port == 20000 + number for i in self.fleet.instances))
        return client

    def count(self, result: str) -> float:
        samples = self.metrics.heartbeats.collect()[0].samples
        return sum(
            s.value for s in samples if s.labels == {"result": result} and s.name.endswith("_total")
        )


@contextlib.asynccontextmanager
async def port(**limits: Any) -> AsyncGenerator[Port]:
    metrics = RouterMetrics()
    fleet = FleetView(Registry(period_s=3.0, missed_beats=3), time.monotonic)
    patient: dict[str, Any] = {"handshake_s": LONG_S, "message_s": LONG_S}
    discovery = Discovery(
        fleet, metrics, host="127.0.0.1", port=0, limits=PortLimits(**{**patient, **limits})
    )
    task = asyncio.create_task(discovery.run())
    made = Port(discovery, fleet, metrics, [])
    try:
        yield made
    finally:
        for client in made.clients:
            client.abort()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        discovery.close()


@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        GREETING + message(b"no handshake"),
        HELLO + b"\x02" + (1 << 40).to_bytes(8, "big"),
        HELLO + message(*[b"x"] * 100),
        HELLO + message(b"junk") * 16,
        HELLO + b"\xff\xff",
    ],
    ids=["http", "no-ready", "huge-frame", "many-frames", "sixteen-bad", "flags"],
)
async def test_junk_ends_its_own_connection(junk: bytes) -> None:
    async with port() as made:
        good = await made.instance()
        await (await made.client(junk)).ended()
        assert made.count("closed") == 1
        good.send(beat(running=1))
        await until(lambda: made.count("refreshed") == 1)


@pytest.mark.parametrize(
    ("limit", "data"),
    [
        ("handshake_s", b""),
        ("handshake_s", GREETING[:63]),
        ("handshake_s", GREETING + b"\x04\x80\x05READY"),
        ("message_s", HELLO + b"\x02" + (60_000).to_bytes(8, "big") + b"x" * 100),
        ("message_s", HELLO + frame(b"begun", more=True)),
        ("silence_s", HELLO),
        ("silence_s", HELLO + message(b"junk")),
    ],
    ids=["mute", "greeting", "ready", "frame", "message", "idle", "useless"],
)
async def test_who_takes_too_long_is_cut(limit: str, data: bytes) -> None:
    async with port(**{limit: 0.05}) as made:
        await (await made.client(data)).ended()


async def test_a_sender_whose_messages_end_is_not_slow_though_one_has_always_begun() -> None:
    async with port(message_s=1.0) as made:
        client = await made.instance()
        one, loop = beat(), asyncio.get_running_loop()
        client.send(one[:10])
        begin = loop.time()
        while loop.time() < begin + 2.5:
            client.send(one[10:] + one[:10])
            await asyncio.sleep(0.02)
        assert client.is_open


async def test_over_the_limit_the_oldest_stranger_goes_and_who_beats_stays() -> None:
    async with port(connections=4) as made:
        good = [await made.instance(number) for number in (1, 2)]
        strangers = [await made.client() for _ in range(2)]
        await asyncio.gather(*(c.reader.readexactly(len(Receiver.HELLO)) for c in strangers))
        newest = await made.client()
        await strangers[0].ended()
        assert strangers[1].is_open
        assert newest.is_open
        late = await made.instance(3)
        for number, client in enumerate([*good, late], 1):
            client.send(beat(number, running=1))
        await until(lambda: made.count("refreshed") == 3)


async def test_who_beats_is_not_replaced_where_there_are_no_strangers() -> None:
    async with port(connections=2) as made:
        good = [await made.instance(number) for number in (1, 2)]
        await (await made.client(HELLO)).ended()
        assert all(client.is_open for client in good)


async def test_messages_that_do_not_end_hold_a_bounded_number_of_bytes() -> None:
    async with port(held_bytes=300_000) as made:
        good = await made.instance()
        begun = HELLO + b"\x02" + (60_000).to_bytes(8, "big") + b"x" * 50_000
        clients = [await made.client(begun) for _ in range(8)]
        await until(lambda: made.count("closed") == 3)
        await asyncio.wait(
            [asyncio.ensure_future(client.ended()) for client in clients],
            return_when=asyncio.FIRST_COMPLETED,
        )
        good.send(beat(running=1))
        await until(lambda: made.count("refreshed") == 1)
        assert made.discovery.beats.held_bytes <= 300_000


async def test_a_flood_waits_in_its_own_socket_and_is_then_read_to_the_end() -> None:
    async with port(burst=10, per_second=100.0) as made:
        good = await made.instance()
        flood = await made.client(HELLO + b"".join(beat(n) for n in range(2, 42)))
        await until(lambda: len(made.fleet.instances) > 5)
        assert len(made.fleet.instances) < 20
        good.send(beat(running=1))
        await until(lambda: made.count("refreshed") == 1)
        assert len(made.fleet.instances) < 41
        await until(lambda: len(made.fleet.instances) == 41)
        assert flood.is_open


@pytest.mark.parametrize(
    "flood",
    [frame(b"\x04PING\x00\x64context", is_command=True), frame(b"\x03FOO", is_command=True)],
    ids=["ping", "unknown"],
)
async def test_a_flood_of_commands_costs_as_much_as_one_of_messages(flood: bytes) -> None:
    async with port(burst=10, per_second=20.0) as made:
        good = await made.instance()
        await made.client(HELLO + flood * 10_000)
        good.send(beat(running=1))
        await until(lambda: made.count("refreshed") == 1)
        assert made.discovery.beats.held_bytes > 0, "most of it was not read yet"


async def test_who_pings_and_does_not_read_is_cut() -> None:
    async with port(burst=10**9, per_second=1e9) as made:
        client = await made.client(HELLO)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # of TCP
        ping = frame(b"\x04PING\x00\x64" + b"c" * 16, is_command=True)
        while not made.count("closed"):
            client.send(ping * 1000)
            await asyncio.sleep(0)


async def test_ending_the_port_ends_its_connections() -> None:
    checks: list[Callable[[], bool]] = []
    async with port() as made:
        for data in (b"", HELLO, HELLO + beat()):
            client = await made.client(data)
            checks.append(lambda client=client: not client.is_open)
        await until(lambda: len(made.discovery.beats) == 3)
        made.discovery.close()
        for client in made.clients:
            await client.ended()
        assert len(made.discovery.beats) == 0
        assert all(check() for check in checks)
