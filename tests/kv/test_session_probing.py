"""A P's self-tests: what each end of one is called, its deadline, and that none is forgotten."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kv.kvsim import Clock, SimPeer
from tests.kv.test_session_sending import HELLO
from xpyd_core.request_id import Address
from xpyd_kv.metrics import Names
from xpyd_kv.session.probing import INTERVAL_S, MAX_OPEN, PairProbe, ProbeResult, Probes
from xpyd_kv.wire import messages as wire

ADDRESS = Address("127.0.0.9", 21001)
DIGEST = b"d" * 32


class Ranks:
    """Ours; what they say is the test's."""

    pairs: dict[tuple[int, int], Address] | None

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.pairs = {(1, 0): Address("127.0.0.9", 21002), (0, 0): Address("127.0.0.9", 21002)}

    def probe(self, number: int, peer: Any) -> dict[tuple[int, int], Address] | None:
        self.asked.append(number)
        return self.pairs


class Bench:
    probe_bytes = 100

    def __init__(self, ranks: Ranks | None = None) -> None:
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
            ask_ranks=(ranks or Ranks()).probe,
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


def between_ranks() -> tuple[Bench, Ranks, Any]:
    """A probe whose connection is well, so that ranks were asked; D takes no DATA there."""
    ranks = Ranks()
    bench = Bench(ranks)
    bench.ask()
    peer = bench.up()
    peer.pair = None
    bench.answer(peer, 1)
    assert ranks.asked == [1]
    assert not bench.results
    return bench, ranks, peer


def test_where_ranks_send_the_answer_waits_for_each_pair() -> None:
    bench, _, peer = between_ranks()
    well = ProbeResult(ok=True, transport="shm", num_bytes=100, digest_matches=True)
    bench.probes.pair_probed(1, (1, 0), well)
    bench.answer(peer, 1)
    bench.probes.pair_probed(2, (0, 0), well)
    bench.probes.pair_probed(1, (7, 7), well)
    assert not bench.results
    bench.probes.pair_probed(1, (0, 0), well)
    address = Address("127.0.0.9", 21002)
    pairs = (PairProbe(0, 0, address, well), PairProbe(1, 0, address, well))
    assert (bench.only().ok, bench.only().transport, bench.only().pairs) == (True, "uds", pairs)
    bench.probes.pair_probed(1, (0, 0), well)
    assert bench.outcomes == {"ok": 1}


def test_a_rank_that_says_nothing_has_a_deadline_of_its_own() -> None:
    bench, _, _ = between_ranks()
    bench.probes.pair_probed(1, (0, 0), ProbeResult(ok=True))
    due = bench.probes.tick(bench.clock.now)
    assert due is not None
    assert bench.clock.now + 5 < due <= bench.clock.now + 7, "after the rank itself gave up"
    bench.clock.now = due
    assert bench.probes.tick(due) is None
    assert (bench.only().ok, bench.only().reason) == (False, "timeout")
    assert [pair.result.reason for pair in bench.only().pairs] == ["", "timeout"]
    bench.probes.pair_probed(1, (1, 0), ProbeResult(ok=True))
    assert len(bench.results) == 1


def test_what_fails_between_engines_asks_no_ranks() -> None:
    ranks = Ranks()
    bench = Bench(ranks)
    bench.ask()
    peer = bench.up()
    peer.pair = None
    bench.answer(peer, 1, b"other" * 6)
    assert bench.only().reason == "digest"
    assert not ranks.asked


def test_a_d_whose_ranks_have_no_addresses_fails_the_probe() -> None:
    ranks = Ranks()
    ranks.pairs = None
    bench = Bench(ranks)
    bench.ask()
    peer = bench.up()
    peer.pair = None
    bench.answer(peer, 1)
    assert (bench.only().ok, bench.only().reason) == (False, "address")


def test_a_connection_that_ends_while_ranks_probe_ends_the_probe() -> None:
    bench, _, peer = between_ranks()
    bench.probes.peer_down(peer, "closed")
    assert (bench.only().ok, bench.only().reason) == (False, "closed")
