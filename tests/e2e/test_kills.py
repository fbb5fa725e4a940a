"""kill -9 and restart of each instance of 2P2D, and of all Ds at once, under an open loop of greedy
requests on new connections. Nothing hangs and no answer is wrong; the router's own probes verify
each pair again, and nobody helps. It prints how long that took.

The engines' own deadlines for KV are minutes here: what a death has to end and does not, hangs or
holds memory. Every other victim stands still before it dies, so that KV is on its way to it, and
stays dead until the router knows nothing of it any more.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.harness import Fleet, Process, fleet, wait_for
from tests.e2e.oracle import CUT_SHORT, Asked, Case, open_loop
from tests.e2e.test_forged_references import Forger, Told

pytestmark = [pytest.mark.slow, pytest.mark.long]

RATE_PER_S = 6.0
KILL_S = 4.0
"""Of load around each kill at least; it goes on until the fleet has recovered."""
STILL_S = 1.0
"""Less than what a router or a peer takes for a death."""
HANGS_S = 30.0
RECOVERS_S = 60.0
PATIENT = ("--kv-wait-seconds", "600", "--kv-lease-seconds", "600")
ROLES = ("Prefill", "Decode")
_PROBES = "xpyd_router_kv_probes_total"


@pytest.fixture
def two_by_two(tmp_path: Path) -> Iterator[Fleet]:
    with fleet(tmp_path, prefill=2, decode=2, flags=PATIENT) as running:
        yield running


@dataclass(frozen=True)
class Turn:
    """Those that are killed at once. Where `is_slow`, they stand still before, and start again when
    the router has forgotten them; else at once."""

    victims: Sequence[Process]
    is_slow: bool = False

    @property
    def kind(self) -> str:
        return f"{'all' if len(self.victims) > 1 else 'one'} {self.victims[0].role}"


@dataclass
class Killed:
    """What some kills of one kind cost. Times from the victims' next start on, in seconds."""

    kind: str
    kills: int = 0
    ready_s: list[float] = field(default_factory=list[float])
    """Until the router has each victim again."""
    verified_s: list[float] = field(default_factory=list[float])
    """Until a probe of each of its pairs has got through."""
    answers: Counter[str] = field(default_factory=Counter[str])
    errors: Counter[str] = field(default_factory=Counter[str])
    """The words of those that were told."""
    bad: list[str] = field(default_factory=list[str])

    def take(self, asked: Sequence[Asked]) -> None:
        for one in asked:
            kind = outcome(one)
            self.answers[kind] += 1
            if kind == "told" and one.what:
                self.errors[one.what[1][:160]] += 1
            if kind not in ("right", "told"):
                self.bad.append(f"{kind} after {one.ended_s - one.began_s:.1f} s: {one.what}")

    def figures(self) -> dict[str, object]:
        """A row of the table of docs/benchmarks/change.md."""
        return {
            "killed": self.kind,
            "kills": self.kills,
            "requests": self.answers.total(),
            **{name: self.answers[name] for name in ("right", "told", "wrong", "hung", "lost")},
            "errors": dict(self.errors.most_common(8)),
            "routableSeconds": spread(self.ready_s),
            "verifiedSeconds": spread(self.verified_s),
        }


def outcome(asked: Asked) -> str:
    """`right`, or `told` of an error by HTTP or SSE; what must not be: `wrong`, `hung`, or `lost`
    without a word."""
    if asked.what is None:
        return "right"
    kind, text = asked.what
    if kind == "wrong":
        return "wrong"
    if text.startswith("TimeoutError"):
        return "hung"
    is_told = kind == "broken" or text[:3].isdecimal()
    return "told" if is_told and text != CUT_SHORT else "lost"


def spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    last = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
    return {
        "median": round(statistics.median(ordered), 2),
        "p95": round(last, 2),
        "most": round(ordered[-1], 2),
    }


def probes(running: Fleet) -> dict[tuple[str, str], float]:
    """How many probes of each pair have got through."""
    found: dict[tuple[str, str], float] = {}
    for name, value in running.router.metrics().items():
        if name.startswith(_PROBES) and "outcome=moved" in name:
            labels = dict(one.split("=") for one in name[len(_PROBES) + 1 : -1].split(","))
            found[labels["prefill"], labels["decode"]] = value
    return found


def pairs_of(running: Fleet, victims: Sequence[Process]) -> set[tuple[str, str]]:
    names = {one.name for one in victims}
    by_role = {role: [e.name for e in running.engines if e.role == role] for role in ROLES}
    return {(p, d) for p in by_role[ROLES[0]] for d in by_role[ROLES[1]] if {p, d} & names}


def kill(running: Fleet, turn: Turn, seen: Killed) -> None:
    """Kill all of them at once, start each again, and wait until the router pairs them again."""
    victims, names = turn.victims, {one.name for one in turn.victims}
    time.sleep(KILL_S / 4)  # under load
    before, old = (
        probes(running),
        {row["instance"]: row["incarnation"] for row in running.instances()},
    )
    if turn.is_slow:
        for victim in victims:
            victim.popen.send_signal(signal.SIGSTOP)
        time.sleep(STILL_S)
    for victim in victims:
        victim.popen.kill()
    if turn.is_slow:
        wait_for("the router forgets the dead", lambda: not names & running.states().keys())
    began_s = time.monotonic()
    for victim in victims:
        victim.restart()

    def are_back() -> bool:
        rows = {row["instance"]: row for row in running.instances()}
        return all(
            victim.name in rows
            and rows[victim.name]["state"] == "Ready"
            and rows[victim.name]["incarnation"] != old[victim.name]
            for victim in victims
        )

    def are_verified() -> bool:
        now = probes(running)
        # A pair's row begins anew where the router had forgotten the instance.
        return all(now.get(pair, 0) not in (0, before.get(pair)) for pair in pairs)

    pairs = pairs_of(running, victims)
    wait_for("all are routable again", are_back, RECOVERS_S)
    seen.ready_s.append(time.monotonic() - began_s)
    wait_for(f"probes of {pairs}", are_verified, RECOVERS_S)
    seen.verified_s.append(time.monotonic() - began_s)
    seen.kills += len(victims)
    time.sleep(KILL_S / 4)  # the next requests are of the whole fleet


def kill_under_load(running: Fleet, cases: list[Case], turns: Sequence[Turn]) -> list[Killed]:
    """What the kinds of kills cost, in order of their names."""
    found: dict[str, Killed] = {}
    wait_for("each pair is verified", lambda: len(probes(running)) == 4, RECOVERS_S)
    for turn in turns:
        seen = found.setdefault(turn.kind, Killed(turn.kind))
        load = open_loop(
            running.router.url,
            cases,
            rate=RATE_PER_S,
            seconds=KILL_S,
            disturb=lambda t=turn, s=seen: kill(running, t, s),
            timeout_s=HANGS_S,
        )
        seen.take(asyncio.run(load))
        what = f"kill {seen.kills} of {turn.kind}"
        assert not seen.bad, f"{what}: {seen.bad}"
        running.wait_ready()
        # Those that lived: the next turn may kill who holds what this one left.
        wait_for(f"all KV memory free after {what}", running.holds_nothing)
    return [found[kind] for kind in sorted(found)]


def turns_of(running: Fleet, rounds: int, seed: int) -> list[Turn]:
    """In each round every instance once, in any order, and then all Ds at once."""
    rng = random.Random(seed)
    engines = list(running.engines)
    decodes = [one for one in engines if one.role == "Decode"]
    victims: list[list[Process]] = []
    for _ in range(rounds):
        victims += [[one] for one in rng.sample(engines, len(engines))]
        victims.append(decodes)
    return [Turn(each, is_slow=number % 2 == 1) for number, each in enumerate(victims)]


def test_killed_instances_come_back_by_themselves_and_no_request_hangs_or_is_wrong(
    two_by_two: Fleet, cases: list[Case]
) -> None:
    found = kill_under_load(two_by_two, cases, turns_of(two_by_two, 1, seed=1))
    assert [one.kind for one in found] == ["all Decode", "one Decode", "one Prefill"]
    assert all(one.answers["right"] > 0 for one in found)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2])
def test_twenty_five_kills_of_each_instance(
    two_by_two: Fleet, cases: list[Case], seed: int
) -> None:
    found = kill_under_load(two_by_two, cases, turns_of(two_by_two, 25, seed))
    sys.stdout.write(json.dumps([one.figures() for one in found], indent=1) + "\n")


def test_a_p_that_dies_before_its_offer_costs_a_request_another_try_and_holds_nothing(
    two_by_two: Fleet, cases: list[Case]
) -> None:
    """It has taken the request, and never gets to read it."""
    victim = two_by_two.engine("Prefill")
    victim.popen.send_signal(signal.SIGSTOP)

    def end() -> None:
        time.sleep(KILL_S / 4)
        victim.popen.kill()

    load = open_loop(two_by_two.router.url, cases, rate=RATE_PER_S, seconds=KILL_S, disturb=end)
    assert [one.what for one in asyncio.run(load) if one.what] == []
    assert two_by_two.router.metric("xpyd_router_retries_total") > 0
    wait_for("all KV memory free", two_by_two.holds_nothing)


def test_a_d_that_waits_for_a_p_that_dies_before_its_offer_computes_at_once(
    tmp_path: Path, cases: list[Case]
) -> None:
    """As where a router asks both at a time: D is there first, and P will never offer."""
    flags = ("--kv-wait-seconds", "600")
    with fleet(tmp_path, prefill=1, decode=2, flags=flags) as running:
        forger = Forger(running)
        forger.p.popen.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(forger.decode, cases[0], secrets.token_hex(16), forger.d)
            wait_for("it waits", lambda: forger.d.metric("xpyd_engine_requests_waiting") == 1)
            forger.p.popen.kill()
            assert asked.result(RECOVERS_S) == Told(cases[0].ids, "recomputed; reason=peer_lost")
        wait_for("all KV memory free", running.holds_nothing)
