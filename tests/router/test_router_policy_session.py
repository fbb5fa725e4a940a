"""SessionAffinity: a session stays, few move when the fleet changes, nobody is drowned."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from tests.router.choosing import Bench, key_of, make_policy, snapshot, some
from xpyd_core.messages import Heartbeat
from xpyd_router.fleet.loads import Load, LoadTable
from xpyd_router.policy.base import Candidate, PolicyContext, Side, Want
from xpyd_router.policy.pairs import Pair, PairPolicy
from xpyd_router.policy.session_affinity import SessionAffinity


def of(session: int) -> Want:
    return Want("m", session=f"session {session}")


def test_a_session_has_one_pair_and_sessions_are_spread_evenly() -> None:
    bench = Bench(3, 5, "SessionAffinity")
    tally: Counter[tuple[int, int]] = Counter()
    for session in range(3000):
        pair = bench.pair(of(session))
        assert bench.pair(of(session)) == pair
        tally[bench.p.index(pair.prefill.beat), bench.d.index(pair.decode.beat)] += 1
    assert len(tally) == 15
    assert all(140 < times < 260 for times in tally.values())  # 200 each, four deviations


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_neighbouring_addresses_share_evenly(size: int) -> None:
    """Ports that follow each other, sessions that count up."""
    ds = some("D", size)
    found = snapshot(*some("P", 1), *ds)
    policy = make_policy("SessionAffinity")
    picks = [policy.pick(found, of(session)) for session in range(400 * size)]
    tally = Counter(pick.decode.key for pick in picks if isinstance(pick, Pair))
    assert all(320 < times < 480 for times in tally.values())
    assert len(tally) == size


def test_when_one_leaves_only_its_sessions_move_and_they_come_back() -> None:
    beats = [*some("P", 1), *some("D", 4)]
    whole, less = snapshot(*beats), snapshot(*beats[:-1])
    policy = make_policy("SessionAffinity")
    gone = key_of(beats[-1])

    def homes(found: Any) -> list[object]:
        picks = [policy.pick(found, of(session)) for session in range(400)]
        return [pick.decode.key for pick in picks if isinstance(pick, Pair)]

    before, after = homes(whole), homes(less)
    assert sum(home == gone for home in before) > 60
    assert [home for home in before if home != gone] == [
        new for old, new in zip(before, after, strict=True) if old != gone
    ]
    assert gone not in after
    policy.forget(gone)
    assert homes(whole) == before


def test_all_routers_choose_alike() -> None:
    beats = [*some("P", 3), *some("D", 3)]
    one, other = make_policy("SessionAffinity"), make_policy("SessionAffinity")
    for _ in range(5):
        other.pick(snapshot(*beats), Want("m"))
    found = snapshot(*reversed(beats))
    assert [one.pick(snapshot(*beats), of(session)) for session in range(100)] == [
        other.pick(found, of(session)) for session in range(100)
    ]


def test_who_has_far_more_to_do_is_passed_over_for_one_other_instance() -> None:
    bench = Bench(3, 3, "SessionAffinity")
    home, way = bench.d_index(of(1)), bench.p_index(of(1))
    load, prefill = bench.load(bench.d[home]), bench.load(bench.p[way])
    for _ in range(8):
        load.begin(10)
    prefill.begin(8000)
    assert (bench.d_index(of(1)), bench.p_index(of(1))) == (home, way)
    for _ in range(30):
        load.begin(10)
    prefill.begin(30_000)
    seconds = {(bench.d_index(of(1)), bench.p_index(of(1))) for _ in range(9)}
    assert len(seconds) == 1
    second = seconds.pop()
    assert second[0] != home
    assert second[1] != way
    bench.load(bench.d[second[0]]).begin(90_000)
    third = ({0, 1, 2} - {home, second[0]}).pop()
    assert {bench.d_index(of(1)) for _ in range(4)} == {third}


def test_a_busy_fleet_moves_nobody() -> None:
    bench = Bench(1, 3, "SessionAffinity")
    homes = [bench.d_index(of(session)) for session in range(60)]
    for one in bench.d:
        for _ in range(100):
            bench.load(one).begin(10)
    assert [bench.d_index(of(session)) for session in range(60)] == homes


def test_who_comes_back_has_a_part_of_its_sessions_each_as_a_whole() -> None:
    bench = Bench(1, 4, "SessionAffinity")
    homes = [bench.d_index(of(session)) for session in range(2000)]
    bench.load(bench.d[0]).weight = 0.25
    light = [bench.d_index(of(session)) for session in range(2000)]
    assert [bench.d_index(of(session)) for session in range(2000)] == light
    assert 0.15 < light.count(0) / homes.count(0) < 0.35
    assert all(old == new for old, new in zip(homes, light, strict=True) if old != 0)


def occupy(load: Load, requests: int, prompt_tokens: int = 0) -> None:
    for _ in range(requests):
        load.begin(prompt_tokens)


@pytest.mark.parametrize(
    ("kind", "little", "much"),
    [("P", (1, 8000), (1, 400)), ("D", (8, 0), (9, 0)), ("A", (8, 0), (9, 0))],
)
def test_a_session_leaves_its_home_only_for_much_less_to_do(
    kind: str, little: tuple[int, int], much: tuple[int, int]
) -> None:
    bench = Bench(3, 3, "SessionAffinity") if kind != "A" else Bench(0, 0, "SessionAffinity", a=3)

    def home() -> Heartbeat:
        choice = bench.policy.pick(bench.snapshot, of(1))
        assert choice is not None
        return choice[0 if kind != "D" else 1].beat

    first = home()
    occupy(bench.load(first), *little)
    assert home() == first
    occupy(bench.load(first), *much)
    assert home() != first


def test_the_prompts_of_a_prefill_instance_count_for_more_where_its_room_ends() -> None:
    bench = Bench(2, 1, "SessionAffinity")
    home = bench.p_index(of(1))
    occupy(bench.load(bench.p[home]), 1, 5000)
    assert bench.p_index(of(1)) == home
    full = replace(bench.p[home], running=1, free_blocks=100, total_blocks=1000)
    bench.loads.take(key_of(full), full)
    assert bench.p_index(of(1)) == 1 - home


def test_who_is_passed_over_is_stood_in_for_by_the_next_of_the_sessions_order() -> None:
    """It has its sessions alone: each goes where it would be at home if the first were gone."""
    bench = Bench(1, 5, "SessionAffinity")
    homes = [bench.d_index(of(session)) for session in range(60)]
    for session, home in enumerate(homes):
        without = bench.d_index(replace(of(session), exclude=frozenset({key_of(bench.d[home])})))
        load = bench.load(bench.d[home])
        occupy(load, 30)
        assert bench.d_index(of(session)) == without
        for _ in range(30):
            load.end(0)


def test_an_engine_that_starts_anew_at_its_address_has_its_sessions_again() -> None:
    before = [*some("P", 1), *some("D", 4, incarnation="first")]
    after = [before[0], *(replace(one, incarnation=f"{n}") for n, one in enumerate(before[1:]))]

    def homes(policy: PairPolicy, beats: list[Heartbeat]) -> list[str]:
        picks = [policy.pick(snapshot(*beats), of(session)) for session in range(60)]
        return [pick.decode.key.http for pick in picks if isinstance(pick, Pair)]

    policy = make_policy("SessionAffinity")
    assert len(set(homes(policy, before))) == 4
    assert homes(policy, after) == homes(policy, before)
    assert homes(make_policy("SessionAffinity"), after) == homes(policy, before)


def test_nothing_is_kept_of_those_that_left() -> None:
    loads = LoadTable()
    policy = SessionAffinity(PolicyContext("D", loads, random.Random(1).random))
    for _ in range(50):
        found = snapshot(*some("P", 1), *some("D", 2)).any_model.groups[0].decode
        policy.choose(
            Side("D", tuple(Candidate(one, loads.of(one.key)) for one in found), ()), of(1)
        )
        for one in found:
            policy.forget(one.key)
    assert not policy._seeds  # pyright: ignore[reportPrivateUsage] - what would grow


@pytest.mark.parametrize("kind", ["P", "D"])
def test_who_comes_back_to_a_busy_fleet_draws_nobody_but_its_part(kind: str) -> None:
    """It is idle, but those that it may not have stay where their caches are."""
    bench = Bench(4, 1, "SessionAffinity") if kind == "P" else Bench(1, 4, "SessionAffinity")
    index, side = (bench.p_index, bench.p) if kind == "P" else (bench.d_index, bench.d)
    homes = [index(of(session)) for session in range(200)]
    for one in side[1:]:
        occupy(bench.load(one), 40, 1000)
    back = bench.load(side[0])
    back.weight = 0.1
    now = [index(of(session)) for session in range(200)]
    stayed = sum(old == new for old, new in zip(homes, now, strict=True) if old != 0)
    assert stayed >= 0.8 * sum(home != 0 for home in homes)
    assert now.count(0) < 40


def test_without_a_session_the_least_loaded_is_taken() -> None:
    bench = Bench(1, 3, "SessionAffinity")
    bench.load(bench.d[1]).begin(10)
    assert {bench.d_index() for _ in range(6)} == {0, 2}


def test_a_second_try_goes_to_another_always_the_same() -> None:
    bench = Bench(1, 3, "SessionAffinity")
    for session in range(20):
        failed = key_of(bench.d[bench.d_index(of(session))])
        again = Want("m", session=f"session {session}", exclude=frozenset({failed}))
        second = bench.pair(again).decode.key
        assert second != failed
        assert bench.pair(again).decode.key == second


def test_only_policies_that_read_sessions_ask_for_them() -> None:
    assert make_policy("SessionAffinity").needs_session
    assert make_policy("RoundRobin", decode_policy="SessionAffinity").needs_session
    assert not make_policy("LeastLoaded").needs_session


def test_a_walk_of_loads_never_lets_one_drown() -> None:
    """One session has nearly all requests: it spreads before its home has more than its bound."""
    chance, bench = random.Random(3), Bench(1, 4, "SessionAffinity")
    running: list[int] = []
    for _ in range(1500):
        if len(running) > 100:
            place = running.pop(chance.randrange(len(running)))
            bench.load(bench.d[place]).end(10)
        active = [bench.load(one).active for one in bench.d]
        place = bench.d_index(of(0 if chance.random() < 0.9 else chance.randrange(1, 50)))
        bench.load(bench.d[place]).begin(10)
        running.append(place)
        assert active[place] <= 2 * min(active) + 8
    assert max(running.count(place) for place in range(4)) > 35
