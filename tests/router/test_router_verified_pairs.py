"""--kv-verify strict: a P and a D are a pair only while probes get from one to the other."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.router.beats import beat
from tests.router.fakes import fleet, replace_beat
from xpyd_core.messages import Heartbeat
from xpyd_router.fleet.instances import InstanceKey
from xpyd_router.fleet.introductions import PairFound, unlike_pairs, without_pair
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView
from xpyd_router.policy.base import OnNoDecode, OnNoPrefill, Want
from xpyd_router.policy.pairs import Alone, Pair, PairPolicy, build_policy

PASSED, FAILED = PairFound(), PairFound("no_answer", "no_answer at 10.0.0.2:21001")


class Known:
    """A registry that wants verified pairs, and a policy that picks from its snapshots."""

    def __init__(self, policy: str = "RoundRobin", **registry: Any) -> None:
        self.registry = Registry(period_s=3.0, missed_beats=3, only_verified=True, **registry)
        self.policy: PairPolicy = build_policy(
            policy, loads=LoadTable(), random=random.Random(1).random
        )
        self.beats: dict[InstanceKey, Heartbeat] = {}

    def add(self, kind: str, number: int, **fields: Any) -> InstanceKey:
        own = {"compatibility": "k", "models": ("m",), "continuation": 1, "incarnation": "i"}
        said = beat(kind, number, **{**own, **fields})
        assert self.registry.apply(said, 0.0)[0] in ("new", "replaced")
        key = InstanceKey(said.http_address, said.incarnation)
        self.beats[key] = said
        return key

    def picks(self, times: int = 40, **want: Any) -> set[tuple[InstanceKey, ...]]:
        """The instances of so many picks."""
        found = (self.policy.pick(self.registry.snapshot, Want("m", **want)) for _ in range(times))
        return {tuple(one.key for one in choice) for choice in found if choice is not None}


def test_a_pair_is_one_from_its_first_probe_on_and_leaves_and_comes_back_with_its_probes() -> None:
    known = Known()
    p, d = known.add("P", 1), known.add("D", 2)
    assert known.picks() == set()
    assert not known.registry.snapshot.is_ready
    assert known.registry.snapshot.of_model("m").lost == "pair"
    for found in (PASSED, FAILED, PASSED):
        assert known.registry.prove(p, d, found)
        assert known.picks() == ({(p, d)} if found is PASSED else set())
        assert known.registry.snapshot.is_ready == (found is PASSED)
        assert not known.registry.prove(p, d, found), "no news"


@pytest.mark.parametrize("kind", ["P", "D"])
def test_another_start_of_an_instance_needs_another_probe(kind: str) -> None:
    known = Known()
    keys = {"P": known.add("P", 1), "D": known.add("D", 2)}
    known.registry.prove(keys["P"], keys["D"], PASSED)
    again = replace_beat(known.beats[keys[kind]], {"incarnation": "j"})
    assert known.registry.apply(again, 0.0)[0] == "replaced"
    assert known.picks() == set()
    keys[kind] = InstanceKey(again.http_address, "j")
    known.registry.prove(keys["P"], keys["D"], PASSED)
    assert known.picks() == {(keys["P"], keys["D"])}


def test_what_a_probe_of_an_instance_that_left_has_found_is_forgotten() -> None:
    known = Known()
    p, d = known.add("P", 1), known.add("D", 2)
    known.registry.prove(p, d, PASSED)
    known.registry.drop([p])
    assert not known.registry.prove(p, d, PASSED)
    known.registry.apply(known.beats[p], 1.0)
    assert known.picks() == set()


@pytest.mark.parametrize("policy", ["RoundRobin", "LeastLoaded", "PowerOfTwo", "PrefixAware"])
def test_whatever_probes_find_requests_go_to_verified_pairs_alone(policy: str) -> None:
    for seed in range(20):
        rng, known = random.Random(seed), Known(policy)
        ps = [known.add("P", number) for number in range(1, 5)]
        ds = [known.add("D", number) for number in range(11, 15)]
        verified: set[tuple[InstanceKey, ...]] = set()
        for _ in range(30):
            pair = rng.choice(ps), rng.choice(ds)
            is_passed = rng.random() < 0.6
            known.registry.prove(*pair, PASSED if is_passed else FAILED)
            verified = verified | {pair} if is_passed else verified - {pair}
            picked = known.picks(60)
            assert picked <= verified
            assert {d for _, d in picked} == {d for _, d in verified}, "each D has requests"


def test_an_unverified_pair_is_one_where_the_fleet_only_reports() -> None:
    known = Known()
    known.registry.only_verified = False
    p, d = known.add("P", 1), known.add("D", 2)
    known.registry.prove(p, d, FAILED)
    assert known.picks() == {(p, d)}


@pytest.mark.parametrize(("alone", "expected"), [("decode_alone", ["D"]), ("prefill_alone", ["P"])])
def test_without_a_verified_pair_one_instance_serves_where_the_document_wants_it(
    alone: str, expected: list[str]
) -> None:
    known = Known("RoundRobin", **{alone: True})
    known.add("P", 1)
    known.add("D", 2)
    assert known.registry.snapshot.is_ready
    choice = known.policy.pick(known.registry.snapshot, Want("m", alone=expected[0]))  # type: ignore[arg-type]
    assert isinstance(choice, Alone)
    assert [one.beat.type for one in choice] == expected
    assert not isinstance(known.policy.pick(known.registry.snapshot, Want("m")), Pair)


@pytest.mark.parametrize(
    ("on_p", "on_d", "served"),
    [
        ("PrefillOnDecode", None, "D"),
        ("Queue", "DecodeOnPrefill", "P"),
        ("Reject", None, ""),
        ("Queue", None, ""),
    ],
)
async def test_requests_of_a_fleet_without_a_verified_pair_do_as_without_a_side(
    on_p: OnNoPrefill, on_d: OnNoDecode | None, served: str
) -> None:
    """The fakes know no probe, so that no pair is ever verified."""
    config: dict[str, Any] = {"on_no_prefill": on_p, "on_no_decode": on_d, "pair_wait_s": 0.5}
    async with fleet(kv_verify="strict", **config) as made:
        engines = {kind: await made.engine(kind) for kind in ("P", "D")}
        begun_s = time.monotonic()
        async with await made.post(max_tokens=4) as response:
            await response.read()
            assert response.status == (200 if served else 503)
        if on_p == "Queue" and not served:
            assert time.monotonic() - begun_s >= 0.4, "it waited for its deadline"
        assert {kind: bool(one.served) for kind, one in engines.items()} == {
            "P": served == "P",
            "D": served == "D",
        }
        async with made.http.get(f"{made.admin}/instances") as response:
            said = await response.json()
        names = [one["instance"] for one in said["instances"]]
        assert said["kv_verify"] == "strict"
        assert [one["unverified"] for one in said["instances"]] == [names[1:], names[:1]]
        assert {one["type"] for one in said["instances"] if not one["unpaired"]} == set(served)


def test_instances_without_a_partner_are_paired_with_one_of_the_other_key() -> None:
    known = Known()
    p, d = known.add("P", 1), known.add("D", 2)
    lonely = known.add("P", 3, compatibility="other")
    known.add("P", 4, compatibility="third", models=("another",))
    found = {(a.key, b.key) for a, b in unlike_pairs(known.registry.instances)}
    assert found == {(lonely, d)}
    known.registry.drop([p])
    found = {(a.key, b.key) for a, b in unlike_pairs(known.registry.instances)}
    assert found == {(lonely, d)}


def test_pools_of_two_revisions_of_a_fleet_are_not_compared() -> None:
    known = Known()
    known.add("P", 1, fleet_revision="a")
    known.add("D", 2, fleet_revision="b", compatibility="other")
    assert not list(unlike_pairs(known.registry.instances))


def unpaired(known: Known) -> set[InstanceKey]:
    return set(without_pair(known.registry.instances, known.registry.snapshot))


def test_an_instance_is_without_a_pair_only_where_the_other_side_is_there() -> None:
    known = Known()
    p = known.add("P", 1)
    assert unpaired(known) == set(), "its other side is not there yet"
    d = known.add("D", 2)
    assert unpaired(known) == {p, d}
    known.registry.prove(p, d, PASSED)
    assert unpaired(known) == set()
    late = known.add("D", 3)
    assert unpaired(known) == {late}, "no probe yet"
    known.registry.prove(p, late, FAILED)
    assert unpaired(known) == {late}
    known.registry.set_standing(p, "Ejected")
    assert unpaired(known) == set(), "a role is lost"


@pytest.mark.parametrize(
    ("fields", "is_refused"),
    [
        ({"compatibility": "other"}, True),
        ({"compatibility": "other", "models": ()}, True),
        ({"compatibility": "other", "models": ("another",)}, False),
        ({"compatibility": "other", "fleet_revision": "b"}, False),
        ({"compatibility": "other", "fleet_revision": "a"}, True),
        ({}, False),
    ],
)
def test_without_probes_an_instance_of_another_compatibility_is_without_a_pair(
    fields: dict[str, Any], is_refused: bool
) -> None:
    known = Known()
    known.registry.only_verified = False
    known.add("P", 1, fleet_revision="a")
    known.add("D", 2, fleet_revision="a")
    new = known.add("D", 3, **fields)
    assert unpaired(known) == ({new} if is_refused else set())


def test_both_sides_of_a_new_revision_are_a_pair_as_soon_as_both_are_known() -> None:
    known = Known()
    known.registry.only_verified = False
    for number, kind in enumerate("PD", 1):
        known.add(kind, number, fleet_revision="a")
    for number, kind in enumerate("PD", 3):
        known.add(kind, number, fleet_revision="b", compatibility="new")
        assert unpaired(known) == set()


@pytest.mark.parametrize(("alone", "left"), [("decode_alone", "P"), ("prefill_alone", "D")])
def test_one_that_serves_alone_needs_no_pair_until_others_are_one(alone: str, left: str) -> None:
    known = Known("RoundRobin", **{alone: True})
    keys = {"P": known.add("P", 1), "D": known.add("D", 2)}
    assert unpaired(known) == {keys[left]}
    p, d = known.add("P", 3), known.add("D", 4)
    known.registry.prove(p, d, PASSED)
    assert unpaired(known) == set(keys.values()), "all requests go to the pair"


def test_aggregated_instances_and_those_that_leave_need_no_pair() -> None:
    known = Known()
    known.add("A", 1)
    known.add("P", 2)
    known.add("D", 3, state="Draining")
    assert unpaired(known) == set()


def test_the_probe_says_why_there_is_no_pair_and_else_what_is_known_of_the_two() -> None:
    known = Known()
    view = FleetView(known.registry, lambda: 0.0)
    known.registry.prove(known.add("P", 1), known.add("D", 2), PASSED)
    late, other = known.add("D", 3), known.add("D", 4, compatibility="other")
    p = known.registry.instances[0]
    assert view.unpaired() == {
        late: f"no pair with {p.name}: no probe has got from P to D yet",
        other: f"no pair with {p.name}: P's compatibility is k, D's is other",
    }
    known.registry.prove(p.key, other, FAILED)
    assert view.unpaired()[other] == f"no pair with {p.name}: {FAILED.detail}"
