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


class Driver:
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
def driver() -> Driver:
    return Driver()


def test_it_dials_sends_and_compares(driver: Driver) -> None:
    driver.ask()
    assert (driver.dialled, driver.sent) == ([ADDRESS], [])
    driver.clock.now += 0.5
    peer = driver.up()
    assert driver.sent == [(peer, 1)]
    driver.clock.now += 0.25
    driver.answer(peer, 1)
    assert driver.only() == ProbeResult(
        ok=True, transport="uds", num_bytes=100, seconds=0.75, digest_matches=True
    )
    assert driver.outcomes == {"ok": 1}
    assert driver.probes.tick(driver.clock.now) is None


def test_a_connection_that_stands_is_used(driver: Driver) -> None:
    peer = SimPeer(ADDRESS, HELLO)
    driver.connected = [peer]
    driver.ask()
    assert driver.sent == [(peer, 1)]


def test_another_digest_is_a_failure_with_its_name(driver: Driver) -> None:
    driver.ask()
    driver.answer(driver.up(), 1, b"x" * 32)
    result = driver.only()
    assert (result.ok, result.digest_matches, result.reason) == (False, False, "digest")
    assert result.transport == "uds"


@pytest.mark.parametrize("reason", ["unreachable", "auth", "incompatible:model", "timeout"])
def test_a_dial_that_fails_says_why(driver: Driver, reason: str) -> None:
    driver.ask()
    driver.probes.dial_failed(ADDRESS, reason)
    assert (driver.only().ok, driver.only().reason) == (False, reason)


def test_a_connection_that_ends_meanwhile_says_why(driver: Driver) -> None:
    driver.ask()
    peer = driver.up()
    driver.probes.peer_down(SimPeer(ADDRESS, HELLO), "closed")  # type: ignore[arg-type]
    assert not driver.results
    driver.probes.peer_down(peer, "protocol")
    assert driver.only().reason == "protocol"


@pytest.mark.parametrize("is_up", [False, True])
def test_it_has_a_deadline_and_a_late_answer_changes_nothing(driver: Driver, is_up: bool) -> None:
    driver.ask()
    peer = driver.up() if is_up else SimPeer(ADDRESS, HELLO)
    assert driver.probes.tick(driver.clock.now) == driver.clock.now + 5
    driver.clock.now += 5
    driver.probes.tick(driver.clock.now)
    assert (driver.only().reason, driver.only().seconds) == ("timeout", 5.0)
    driver.answer(peer, 1)
    driver.probes.peer_up(peer)  # type: ignore[arg-type]
    assert len(driver.results) == 1
    assert len(driver.sent) == is_up


def test_a_late_answer_is_not_taken_for_the_next_probes(driver: Driver) -> None:
    peer = SimPeer(ADDRESS, HELLO)
    driver.connected = [peer]
    driver.ask()
    driver.clock.now += 5
    driver.probes.tick(driver.clock.now)
    driver.ask()
    driver.answer(peer, 1)
    assert len(driver.results) == 1
    driver.answer(peer, 2)
    assert [result.ok for result in driver.results] == [False, True]


def test_one_for_each_address_few_at_once_and_not_too_often(driver: Driver) -> None:
    driver.ask()
    driver.ask()
    assert driver.only().reason == "busy"
    for port in range(2000, 2020):
        driver.ask(Address("127.0.0.9", port))
    # Ten in a second.
    assert len(driver.dialled) == 10
    for port in range(3000, 3020):
        driver.clock.now += INTERVAL_S
        driver.ask(Address("127.0.0.9", port))
    assert len(driver.dialled) == MAX_OPEN
    assert {result.reason for result in driver.results} == {"busy"}
    assert driver.outcomes == {}


def between_ranks() -> tuple[Driver, Ranks, Any]:
    """A probe whose connection is well, so that ranks were asked; D takes no DATA there."""
    ranks = Ranks()
    driver = Driver(ranks)
    driver.ask()
    peer = driver.up()
    peer.pair = None
    driver.answer(peer, 1)
    assert ranks.asked == [1]
    assert not driver.results
    return driver, ranks, peer


def test_where_ranks_send_the_answer_waits_for_each_pair() -> None:
    driver, _, peer = between_ranks()
    well = ProbeResult(ok=True, transport="shm", num_bytes=100, digest_matches=True)
    driver.probes.pair_probed(1, (1, 0), well)
    driver.answer(peer, 1)
    driver.probes.pair_probed(2, (0, 0), well)
    driver.probes.pair_probed(1, (7, 7), well)
    assert not driver.results
    driver.probes.pair_probed(1, (0, 0), well)
    address = Address("127.0.0.9", 21002)
    pairs = (PairProbe(0, 0, address, well), PairProbe(1, 0, address, well))
    assert (driver.only().ok, driver.only().transport, driver.only().pairs) == (True, "uds", pairs)
    driver.probes.pair_probed(1, (0, 0), well)
    assert driver.outcomes == {"ok": 1}


def test_a_rank_that_says_nothing_has_a_deadline_of_its_own() -> None:
    driver, _, _ = between_ranks()
    driver.probes.pair_probed(1, (0, 0), ProbeResult(ok=True))
    due = driver.probes.tick(driver.clock.now)
    assert due is not None
    assert driver.clock.now + 5 < due <= driver.clock.now + 7, "after the rank itself gave up"
    driver.clock.now = due
    assert driver.probes.tick(due) is None
    assert (driver.only().ok, driver.only().reason) == (False, "timeout")
    assert [pair.result.reason for pair in driver.only().pairs] == ["", "timeout"]
    driver.probes.pair_probed(1, (1, 0), ProbeResult(ok=True))
    assert len(driver.results) == 1


def test_what_fails_between_engines_asks_no_ranks() -> None:
    ranks = Ranks()
    driver = Driver(ranks)
    driver.ask()
    peer = driver.up()
    peer.pair = None
    driver.answer(peer, 1, b"other" * 6)
    assert driver.only().reason == "digest"
    assert not ranks.asked


def test_a_d_whose_ranks_have_no_addresses_fails_the_probe() -> None:
    ranks = Ranks()
    ranks.pairs = None
    driver = Driver(ranks)
    driver.ask()
    peer = driver.up()
    peer.pair = None
    driver.answer(peer, 1)
    assert (driver.only().ok, driver.only().reason) == (False, "address")


def test_a_connection_that_ends_while_ranks_probe_ends_the_probe() -> None:
    driver, _, peer = between_ranks()
    driver.probes.peer_down(peer, "closed")
    assert (driver.only().ok, driver.only().reason) == (False, "closed")
