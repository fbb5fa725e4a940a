"""Who leads, with a virtual clock: two candidates, an API server that delays and loses answers,
clocks that drift, partitions and kills. There is never more than one leader.
"""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest

from xpyd_operator.controller.decision.election import (
    OWNER_GONE_S,
    Election,
    OwnerWatch,
    Terms,
)
from xpyd_operator.controller.decision.kinds import Obj

TERMS = Terms(15.0)
TICK_S = 0.1


@dataclass
class Server:
    """One Lease behind a version."""

    lease: Obj | None = None
    version: int = 0

    def write(self, lease: Obj, *, is_new: bool) -> Obj | None:
        """What is stored; None: a Conflict."""
        given = lease["metadata"].get("resourceVersion")
        if is_new != (self.lease is None) or (self.lease and given != str(self.version)):
            return None
        self.version += 1
        before = self.lease["spec"] if self.lease else {}
        metadata = {**lease["metadata"], "resourceVersion": str(self.version)}
        self.lease = {**lease, "metadata": metadata, "spec": {**before, **lease["spec"]}}
        return deepcopy(self.lease)


@dataclass
class Candidate:
    """A replica: its clock runs at `rate`; a round's write and its answer take their time."""

    name: str
    server: Server
    rate: float = 1.0
    offset: float = 0.0
    cut_off: bool = False
    dead: bool = False
    delay_s: float = 0.0
    election: Election = field(init=False)
    due: float = 0.0
    writes: list[tuple[float, bool, Obj, float]] = field(default_factory=list[Any])
    answers: list[tuple[float, Obj, float]] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        self.election = Election(self.name, "ns", "xpyd", TERMS)

    def clock(self, t: float) -> float:
        return self.offset + t * self.rate

    def leads(self, t: float) -> bool:
        return not self.dead and self.election.leads(self.clock(t))

    def step(self, t: float) -> None:
        if self.dead:
            return
        for one in [one for one in self.answers if one[0] <= t]:
            self.answers.remove(one)
            self.election.won(one[1], begun=one[2], now=self.clock(t))
        for one in [one for one in self.writes if one[0] <= t]:
            self.writes.remove(one)
            after = self.server.write(one[2], is_new=one[1])
            if after is not None and not self.cut_off:
                self.answers.append((t + self.delay_s, after, one[3]))
        if self.clock(t) < self.due or self.writes or self.answers:
            return
        self.due = self.clock(t) + TERMS.retry_s
        if self.cut_off:
            return
        self.election.heard(deepcopy(self.server.lease), self.clock(t))
        proposal = self.election.proposal(self.clock(t), f"at {t:.3f} of {self.name}")
        if proposal is not None:
            self.writes.append((t + self.delay_s, *proposal, self.clock(t)))


def play(candidates: list[Candidate], seconds: float, start: float = 0.0) -> list[list[str]]:
    """Who leads at each tick."""
    found: list[list[str]] = []
    for number in range(int(seconds / TICK_S)):
        t = start + number * TICK_S
        for candidate in candidates:
            candidate.step(t)
        found.append([one.name for one in candidates if one.leads(t)])
    return found


def pair() -> tuple[Candidate, Candidate]:
    server = Server()
    return Candidate("a", server), Candidate("b", server)


def test_one_leads_and_renews_and_the_other_stands_by() -> None:
    a, b = pair()
    leaders = play([a, b], 120)
    assert leaders[-1] == ["a"]
    assert all(one in (["a"], []) for one in leaders)
    assert b.election.holder == "a"


def test_a_standby_takes_over_within_the_lease_after_a_kill() -> None:
    a, b = pair()
    play([a, b], 30)
    a.dead = True
    leaders = play([a, b], 30, start=30)
    first = leaders.index(["b"]) * TICK_S
    assert TERMS.give_up_s < first <= TERMS.lease_s + 2 * TERMS.retry_s


def test_a_standby_begins_at_once_when_the_lease_is_given_back() -> None:
    a, b = pair()
    play([a, b], 30)
    farewell = a.election.farewell()
    assert farewell is not None
    a.server.write(farewell, is_new=False)
    a.election.left()
    assert not a.leads(30)
    a.dead = True
    leaders = play([a, b], 10, start=30)
    assert leaders.index(["b"]) * TICK_S <= TERMS.retry_s + TICK_S
    assert b.election.farewell() is not None
    assert a.election.farewell() is not None  # what it knows; the API server refuses the version
    assert a.server.write(farewell, is_new=False) is None


def test_a_leader_that_cannot_renew_stops_before_its_lease_ends() -> None:
    a, b = pair()
    play([a, b], 30)
    a.cut_off = True
    leaders = play([a, b], 40, start=30)
    stopped = next(i for i, one in enumerate(leaders) if "a" not in one)
    began = leaders.index(["b"])
    assert stopped * TICK_S <= TERMS.give_up_s
    assert (began - stopped) * TICK_S >= TERMS.lease_s - TERMS.give_up_s - TERMS.retry_s


def test_a_write_must_be_over_before_the_lease_is() -> None:
    a, _ = pair()
    assert a.election.write_s(0.0) == 0.0
    play([a], 1)
    left = a.election.write_s(a.clock(1.0))
    assert TERMS.lease_s - 2 < left <= TERMS.lease_s
    assert a.election.write_s(a.clock(TERMS.give_up_s)) == 0.0


@pytest.mark.parametrize("group", range(8))
def test_there_are_never_two_leaders(group: int) -> None:
    assert sum(_led(random.Random(100 * group + number)) for number in range(10))


def _led(chance: random.Random) -> int:
    """Clocks that begin anywhere and run up to a quarter apart, cuts, delays and kills; ticks with
    a leader."""
    server = Server()
    candidates = [
        Candidate(f"c{n}", server, chance.uniform(0.9, 1.12), chance.uniform(-1e6, 1e6))
        for n in range(chance.choice((2, 2, 3)))
    ]
    made, t, led = len(candidates), 0.0, 0
    for _ in range(40):
        for one in candidates:
            one.cut_off = chance.random() < 0.3
            one.delay_s = chance.choice((0.0, 0.0, 0.3, 3.0, 12.0))
        if chance.random() < 0.15:
            gone = chance.randrange(len(candidates))
            candidates[gone] = Candidate(
                f"c{made}", server, chance.uniform(0.9, 1.12), chance.uniform(-1e6, 1e6)
            )
            made += 1
        seconds = chance.uniform(1, 25)
        for leaders in play(candidates, seconds, start=t):
            assert len(leaders) <= 1, (t, leaders)
            led += bool(leaders)
        t += seconds
    return led


def test_a_lease_that_another_client_wrote_is_taken_when_it_is_old() -> None:
    server = Server()
    spec = {"holderIdentity": "other", "leaseDurationSeconds": 40, "renewTime": "never"}
    server.write({"metadata": {"namespace": "ns", "name": "xpyd"}, "spec": spec}, is_new=True)
    a = Candidate("a", server)
    leaders = play([a], 60)
    assert 40 <= leaders.index(["a"]) * TICK_S <= 40 + 2 * TERMS.retry_s
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 1


def test_an_owner_is_gone_when_its_lease_has_not_changed_for_long() -> None:
    watch = OwnerWatch()

    def lease(renewed: str) -> Obj:
        return {"spec": {"holderIdentity": "x", "renewTime": renewed}}

    assert not watch.is_gone("ns/x", lease("1"), 0.0)
    assert not watch.is_gone("ns/x", lease("1"), OWNER_GONE_S - 1)
    assert not watch.is_gone("ns/x", lease("2"), OWNER_GONE_S)
    assert not watch.is_gone("ns/x", lease("2"), 2 * OWNER_GONE_S - 1)
    assert watch.is_gone("ns/x", lease("2"), 2 * OWNER_GONE_S)
    assert not watch.is_gone("ns/y", None, 0.0)
    assert watch.is_gone("ns/y", None, OWNER_GONE_S)
    assert not watch.is_gone("ns/y", lease("1"), OWNER_GONE_S + 1)
