"""A P's self-tests: what each end of one is called, its deadline, and that none is forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kv.kvsim import Clock, SimPeer
from tests.kv.test_session_sending import HELLO
from xpyd_core.request_id import Address
from xpyd_kv.figures import Names
from xpyd_kv.session.probing import INTERVAL_S, MAX_OPEN, ProbeResult, Probes
from xpyd_kv.wire import messages as wire

ADDRESS = Address("127.0.0.9", 21001)
DIGEST = b"d" * 32


class Bench:
    probe_bytes = 100

    def __init__(self) -> None:
        self.clock = Clock()
        self.connected: list[Any] = []
        self.dialled: list[Address] = []
        self.sent: list[tuple[Any, int]] = []
        self.results: list[ProbeResult] = []
        self.outcomes = Names()
        self.probes = Probes(
            self,  # type: ignore[arg-type]
            probe_s=5.0,
            clock=self.clock,
            outcomes=self.outcomes,
        )

    def connect(self, address: Address, *, data: bool = False) -> Any:
        self.dialled.append(address)
        return next((peer for peer in self.connected if peer.address == address), None)

    def send_probe(self, peer: Any, token: int) -> bytes:
        self.sent.append((peer, token))
        return DIGEST

    def ask(self, address: Address = ADDRESS) -> None:
        self.probes.ask(address, self.results.append)

    def up(self, address: Address = ADDRESS) -> Any:
        peer: Any = SimPeer(address, HELLO)
        self.probes.peer_up(peer)
        return peer

    def answer(self, peer: Any, token: int, digest: bytes = DIGEST) -> None:
        answer = wire.Probed(token=token, digest=digest, transport="uds")
        self.probes.probed(peer, answer)

    def only(self) -> ProbeResult:
        assert len(self.results) == 1
        return self.results[0]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_it_dials_sends_and_compares(bench: Bench) -> None:
    bench.ask()
    assert (bench.dialled, bench.sent) == ([ADDRESS], [])
    bench.clock.now += 0.5
    peer = bench.up()
    assert bench.sent == [(peer, 1)]
    bench.clock.now += 0.25
    bench.answer(peer, 1)
    assert bench.only() == ProbeResult(
        ok=True, transport="uds", num_bytes=100, seconds=0.75, digest_matches=True
    )
    assert bench.outcomes == {"ok": 1}
    assert bench.probes.tick(bench.clock.now) is None


def test_a_connection_that_stands_is_used(bench: Bench) -> None:
    peer = SimPeer(ADDRESS, HELLO)
    bench.connected = [peer]
    bench.ask()
    assert bench.sent == [(peer, 1)]


def test_another_digest_is_a_failure_with_its_name(bench: Bench) -> None:
    bench.ask()
    bench.answer(bench.up(), 1, b"x" * 32)
    result = bench.only()
    assert (result.ok, result.digest_matches, result.reason) == (False, False, "digest")
    assert result.transport == "uds"


@pytest.mark.parametrize("reason", ["unreachable", "auth", "incompatible:model", "timeout"])
def test_a_dial_that_fails_says_why(bench: Bench, reason: str) -> None:
    bench.ask()
    bench.probes.dial_failed(ADDRESS, reason)
    assert (bench.only().ok, bench.only().reason) == (False, reason)


def test_a_connection_that_ends_meanwhile_says_why(bench: Bench) -> None:
    bench.ask()
    peer = bench.up()
    bench.probes.peer_down(SimPeer(ADDRESS, HELLO), "closed")  # type: ignore[arg-type]
    assert not bench.results
    bench.probes.peer_down(peer, "protocol")
    assert bench.only().reason == "protocol"


@pytest.mark.parametrize("is_up", [False, True])
def test_it_has_a_deadline_and_what_comes_later_changes_nothing(bench: Bench, is_up: bool) -> None:
    bench.ask()
    peer = bench.up() if is_up else SimPeer(ADDRESS, HELLO)
    assert bench.probes.tick(bench.clock.now) == bench.clock.now + 5
    bench.clock.now += 5
    bench.probes.tick(bench.clock.now)
    assert (bench.only().reason, bench.only().seconds) == ("timeout", 5.0)
    bench.answer(peer, 1)
    bench.probes.peer_up(peer)  # type: ignore[arg-type]
    assert len(bench.results) == 1
    assert len(bench.sent) == is_up


def test_a_late_answer_is_not_taken_for_the_next_probes(bench: Bench) -> None:
    peer = SimPeer(ADDRESS, HELLO)
    bench.connected = [peer]
    bench.ask()
    bench.clock.now += 5
    bench.probes.tick(bench.clock.now)
    bench.ask()
    bench.answer(peer, 1)
    assert len(bench.results) == 1
    bench.answer(peer, 2)
    assert [result.ok for result in bench.results] == [False, True]


def test_one_for_each_address_few_at_once_and_not_too_often(bench: Bench) -> None:
    bench.ask()
    bench.ask()
    assert bench.only().reason == "busy"
    for port in range(2000, 2020):
        bench.ask(Address("127.0.0.9", port))
    # Ten in a second.
    assert len(bench.dialled) == 10
    for port in range(3000, 3020):
        bench.clock.now += INTERVAL_S
        bench.ask(Address("127.0.0.9", port))
    assert len(bench.dialled) == MAX_OPEN
    assert {result.reason for result in bench.results} == {"busy"}
    assert bench.outcomes == {}
