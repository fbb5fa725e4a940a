"""--pairing: a P and a D of different fleet revisions are no pair, or are where KV is alike."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.router.beats import beat
from tests.router.fakes import begin_and_die, die, fleet, text_of
from xpyd_router.fleet.instances import InstanceKey, Snapshot
from xpyd_router.fleet.introductions import mixed_pairs
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.registry import Registry
from xpyd_router.policy.base import PAIRINGS, Pairing, Want
from xpyd_router.policy.pairs import Pair, PairPolicy, build_policy

TEXT = "t0.0 t0.1 t0.2 t0.3 "
COUNTS = "xpyd_router_pair_revisions_total"


class Known:
    """A registry, and a policy that picks from its snapshots."""

    def __init__(self, *, same_revision: bool = True, policy: str = "RoundRobin") -> None:
        self.registry = Registry(period_s=3.0, missed_beats=3, same_revision=same_revision)
        self.loads = LoadTable()
        self.policy: PairPolicy = build_policy(
            policy, loads=self.loads, random=random.Random(1).random
        )
        self._number = 0

    def add(self, kind: str, revision: str, **fields: Any) -> InstanceKey:
        self._number += 1
        own = {"compatibility": "k", "models": ("m",), "continuation": 1}
        said = beat(
            kind,
            self._number,
            **{**own, "incarnation": "i", "fleet_revision": revision, **fields},
        )
        assert self.registry.apply(said, 0.0)[0] == "new"
        return InstanceKey(said.http_address, "i")

    @property
    def snapshot(self) -> Snapshot:
        return self.registry.snapshot

    def picks(self, times: int = 40, **want: Any) -> set[tuple[str, str]]:
        """The fleet revisions of P and D of so many picks."""
        found: set[tuple[str, str]] = set()
        for _ in range(times):
            choice = self.policy.pick(self.snapshot, Want("m", **want))
            if isinstance(choice, Pair):
                revisions = choice.prefill.beat.fleet_revision, choice.decode.beat.fleet_revision
                found.add(revisions)
        return found


@pytest.mark.parametrize("policy", ["RoundRobin", "LeastLoaded", "PowerOfTwo", "PrefixAware"])
def test_p_and_d_of_two_revisions_are_never_picked_together(policy: str) -> None:
    known = Known(policy=policy)
    for revision in ("a", "b"):
        for kind in "PPDD":
            known.add(kind, revision)
    assert known.picks() == {("a", "a"), ("b", "b")}


def test_all_that_are_compatible_are_picked_together_where_the_document_wants_it() -> None:
    known = Known(same_revision=False)
    for revision in ("a", "b"):
        for kind in "PPDD":
            known.add(kind, revision)
    assert known.picks() == {("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")}


@pytest.mark.parametrize("come", ["P", "D"])
def test_while_a_revision_has_one_side_only_the_old_pairs_serve(come: str) -> None:
    known = Known()
    known.add("P", "a")
    known.add("D", "a")
    for _ in range(3):
        known.add(come, "b")
    assert known.picks() == {("a", "a")}
    known.add("D" if come == "P" else "P", "b")
    assert known.picks() == {("a", "a"), ("b", "b")}


def test_an_instance_that_names_no_revision_is_a_partner_of_all() -> None:
    known = Known()
    for kind, revision in [("P", "a"), ("P", "b"), ("P", ""), ("D", "a"), ("D", "")]:
        known.add(kind, revision)
    assert known.picks(80) == {("a", "a"), ("", "a"), ("a", ""), ("b", ""), ("", "")}


def test_an_attempt_after_a_failure_keeps_the_rule() -> None:
    known = Known()
    first = known.add("D", "a")
    for kind, revision in [("P", "a"), ("P", "b"), ("D", "a"), ("D", "b")]:
        known.add(kind, revision)
    assert known.picks(exclude=frozenset({first})) == {("a", "a"), ("b", "b")}
    assert known.picks(continue_at="k", exclude=frozenset({first})) == {("a", "a"), ("b", "b")}


@pytest.mark.parametrize("standing", ["Open", "Trial"])
def test_an_open_breaker_takes_no_d_whose_revision_has_no_other(standing: Any) -> None:
    known = Known()
    known.add("P", "a")
    old = known.add("D", "a")
    known.add("D", "b")
    known.registry.set_standing(old, standing)
    assert known.picks() == {("a", "a")}
    known.add("P", "b")
    assert known.picks() == {("b", "b")}, "the other revision has a pair that works"


def test_a_beat_with_another_revision_moves_the_instance() -> None:
    known = Known()
    known.add("P", "a")
    known.add("D", "b")
    assert known.picks() == set()
    assert not known.snapshot.is_ready
    (d,) = [one for one in known.registry.instances if one.beat.type == "D"]
    known.registry.apply(beat("D", 2, **_fields(d.beat, fleet_revision="a")), 1.0)
    assert known.picks() == {("a", "a")}


def _fields(of: Any, **changes: Any) -> dict[str, Any]:
    names = ("compatibility", "models", "continuation", "incarnation")
    return {**{name: getattr(of, name) for name in names}, **changes}


@pytest.mark.parametrize(("same_revision", "pairs"), [(True, 0), (False, 1)])
def test_engines_of_two_revisions_are_not_introduced(same_revision: bool, pairs: int) -> None:
    known = Known(same_revision=same_revision)
    said: dict[str, Any] = {"dialect": "pair-id", "prompt_ids": 1}
    known.add("P", "a", engine="vllm 0.32.0", **said)
    known.add("D", "b", engine="vllm 0.33.0", **said)
    assert len(list(mixed_pairs(known.registry.instances))) == pairs


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_and_goes_a_pick_is_a_pair_of_one_revision_if_there_is_one(
    seed: int,
) -> None:
    chance, known = random.Random(seed), Known(policy="LeastLoaded")
    there: dict[InstanceKey, tuple[str, str]] = {}
    for _ in range(60):
        if there and chance.random() < 0.4:
            key = chance.choice(sorted(there))
            known.registry.drop([key])
            del there[key]
        else:
            kind, revision = chance.choice("PD"), chance.choice(["a", "b", "c", ""])
            there[known.add(kind, revision)] = kind, revision
        ps, ds = ({r for kind, r in there.values() if kind == side} for side in "PD")
        allowed = {(p, d) for p in ps for d in ds if p == d or not p or not d}
        assert known.picks(5) <= allowed
        assert bool(known.picks(1)) == bool(allowed) == known.snapshot.is_ready


@pytest.mark.parametrize("pairing", PAIRINGS)
async def test_a_router_in_the_middle_of_a_rollout_pairs_as_it_is_told(pairing: Pairing) -> None:
    async with fleet(pairing=pairing, policy="RoundRobin", max_tries=10) as fleet_:
        engines = [
            await fleet_.engine(kind, fleet_revision=revision)
            for revision in ("a", "b")
            for kind in "PPDD"
        ]
        engines[0].script = die  # a P that fails prompts
        engines[6].script = begin_and_die  # a D that fails in the middle of answers
        for events in await asyncio.gather(*(fleet_.events() for _ in range(24))):
            assert text_of(events) == TEXT
        same = fleet_.metric(COUNTS, revisions="same")
        other = fleet_.metric(COUNTS, revisions="other")
        assert fleet_.metric(COUNTS, revisions="unknown") == 0
        assert fleet_.metric("xpyd_router_retries_total") > 0
        assert same > 0
        assert (other > 0) == (pairing == "Compatible")


async def test_pairs_without_a_revision_are_counted_as_unknown() -> None:
    async with fleet() as fleet_:
        await fleet_.engine("P")
        await fleet_.engine("D", fleet_revision="a")
        await fleet_.json()
        assert fleet_.metric(COUNTS, revisions="unknown") == 1
        assert fleet_.metric(COUNTS, revisions="same") == 0
