"""Heartbeats reach every router, the newest first, and never wait for one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from xpyd_core.heartbeat import HeartbeatSender
from xpyd_core.keys import is_beat_mac, key_ids
from xpyd_core.messages import Heartbeat, InstanceState, decode_heartbeat
from xpyd_core.request_id import Address

KEY, NEW_KEY = b"k" * 32, b"n" * 32


class States:
    """A heartbeat whose state the test sets."""

    state: InstanceState = "Ready"

    def beat(self) -> Heartbeat:
        return Heartbeat(
            type="D", http_address="127.0.0.1:1", zmq_address="127.0.0.1:2", state=self.state
        )


@contextmanager
def router(port: int = 0) -> Iterator[tuple[zmq.asyncio.Socket, int]]:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.ROUTER_HANDOVER, 1)
        sock.bind(f"tcp://127.0.0.1:{port or '*'}")
        yield sock, int(sock.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])


def sender(states: States, *ports: int, host: str = "127.0.0.1", **more: Any) -> HeartbeatSender:
    return HeartbeatSender(
        [Address(host, port) for port in ports],
        identity="127.0.0.1:2/inc",
        source_host="127.0.0.2",
        make=states.beat,
        **{"keys": (KEY,), "period_s": 60, **more},
    )


async def next_state(sock: zmq.asyncio.Socket) -> str:
    identity, frame, mac = await sock.recv_multipart()
    assert identity.startswith(b"127.0.0.1:2/inc/")
    assert is_beat_mac((KEY,), frame, mac)
    return decode_heartbeat(frame).state


async def test_every_router_gets_beats_changes_and_the_goodbye() -> None:
    with router() as (one, port_one), router() as (two, port_two):
        states = States()
        beats = sender(states, port_one, port_two)
        beats.start()
        assert [await next_state(one), await next_state(two)] == ["Ready", "Ready"]
        states.state = "Draining"
        beats.beat_now()
        assert [await next_state(one), await next_state(two)] == ["Draining", "Draining"]
        states.state = "Gone"
        beats.beat_now()
        await beats.close()
        assert [await next_state(one), await next_state(two)] == ["Gone", "Gone"]


async def next_routers(sock: zmq.asyncio.Socket) -> int:
    _, frame, _ = await sock.recv_multipart()
    return decode_heartbeat(frame).routers


async def test_a_beat_says_to_how_many_routers_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first one to a router that has just come, and as they are by now."""
    loop = asyncio.get_running_loop()
    with router() as (sock, port):
        here, there = [await loop.getaddrinfo(f"127.0.0.{n}", port) for n in (1, 9)]
        answers = [here, [*here, *there], here]

        async def look_up(*_where: object, **_how: object) -> list[Any]:
            return answers.pop(0) if len(answers) > 1 else answers[0]

        monkeypatch.setattr(loop, "getaddrinfo", look_up)
        beats = sender(States(), port, host="routers.test", period_s=0.01)
        beats.start()
        assert [await next_routers(sock) for _ in range(3)] == [1, 2, 1]
        await beats.close()


async def test_a_name_is_looked_up() -> None:
    with router() as (sock, port):
        beats = sender(States(), port, host="localhost")
        beats.start()
        assert await next_state(sock) == "Ready"
        await beats.close()


async def test_a_failed_look_up_drops_no_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that fails does not say which routers are gone; one that answers does."""
    answers = ["found", "failed", "failed", "found"]

    is_gone = asyncio.Event()
    with router() as (sock, port):
        found = await asyncio.get_running_loop().getaddrinfo("127.0.0.1", port)

        async def look_up(*_where: object, **_how: object) -> list[Any]:
            if not answers:
                is_gone.set()
                return []
            if answers.pop(0) == "failed":
                raise OSError("no resolver")
            return found[:1]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        beats = sender(States(), port, host="routers.test", period_s=0.01)
        beats.start()
        assert [await next_state(sock) for _ in range(4)] == ["Ready"] * 4
        await is_gone.wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(next_state(sock), 0.2)
        await beats.close()


async def test_a_router_that_was_away_long_ends_at_the_newest_state() -> None:
    with router() as (_, port):
        pass
    states = States()
    beats = sender(states, port)
    beats.start()
    await asyncio.sleep(0.05)
    for _ in range(20):
        beats.beat_now()
    states.state = "Draining"
    beats.beat_now()
    with router(port) as (sock, _):
        read = [await next_state(sock)]
        while read[-1] != "Draining":
            read.append(await next_state(sock))
        assert len(read) < 12  # of 21: the last sockets' queues, not all that was ever said
        await beats.close()


async def test_a_closed_socket_that_still_connects_takes_no_newer_beat_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ZMQ ends a closed socket on another thread: its connection may come after its successor's."""
    late: list[zmq.Socket[bytes]] = []
    really_close = zmq.Socket.close

    def close_late(self: zmq.Socket[bytes], linger: int | None = None) -> None:
        late.append(self)

    with router() as (_, port):
        pass
    states = States()
    beats = sender(states, port)
    beats.start()
    await asyncio.sleep(0.05)
    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, "close", close_late)
        for _ in range(8):
            beats.beat_now()
        states.state = "Draining"
        beats.beat_now()
    assert late
    with router(port) as (sock, _):
        read = [await next_state(sock) for _ in range(10)]
        assert read.count("Draining") == 1
    for old in late:
        really_close(old, 0)
    await beats.close()


async def test_beats_say_when_they_were_sent_and_never_an_earlier_time() -> None:
    clock_ns = [5_000_000_000, 9_000_000_000, 1_000_000_000]
    with router() as (sock, port):
        beats = sender(States(), port, wall_clock_ns=lambda: clock_ns.pop(0))
        beats.start()
        times = [decode_heartbeat((await sock.recv_multipart())[1]).sent_us]
        for _ in range(2):
            beats.beat_now()
            times.append(decode_heartbeat((await sock.recv_multipart())[1]).sent_us)
        assert times == [5_000_000, 9_000_000, 9_000_001]
        await beats.close()


async def test_an_instance_without_a_key_beats_unsigned() -> None:
    with router() as (sock, port):
        beats = sender(States(), port, keys=())
        beats.start()
        _, frame = await sock.recv_multipart()
        assert decode_heartbeat(frame).state == "Ready"
        await beats.close()


async def test_a_beat_is_signed_with_the_first_key_and_names_all() -> None:
    keys = [KEY]
    with router() as (sock, port):
        beats = sender(States(), port, keys=keys)
        beats.start()
        for mixture in ([KEY], [KEY, NEW_KEY], [NEW_KEY, KEY], [NEW_KEY]):
            keys[:] = mixture
            await sock.recv_multipart()
            beats.beat_now()
            _, frame, mac = await sock.recv_multipart()
            assert is_beat_mac(mixture[:1], frame, mac)
            assert decode_heartbeat(frame).key_ids == key_ids(mixture)
            beats.beat_now()
        await beats.close()


async def test_no_router_means_no_beat_and_a_quick_end() -> None:
    beats = sender(States())
    beats.start()
    beats.beat_now()
    await beats.close()
