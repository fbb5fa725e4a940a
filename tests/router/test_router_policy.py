"""Round robin: fair over pairs, never across compatibility keys."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.router.choosing import Bench, make_policy, snapshot, some
from xpyd_router.fleet.instances import Snapshot
from xpyd_router.policy.base import Want
from xpyd_router.policy.pairs import Pair


def pairs(found: Snapshot, turns: int, want: Want | None = None) -> Counter[tuple[str, str]]:
    policy = make_policy()
    tally: Counter[tuple[str, str]] = Counter()
    for _ in range(turns):
        choice = policy.pick(found, want or Want("m"))
        assert isinstance(choice, Pair)
        tally[choice.prefill.key.http, choice.decode.key.http] += 1
    return tally


@pytest.mark.parametrize(("ps", "ds"), [(1, 3), (3, 1), (2, 2), (2, 4), (3, 2), (4, 6), (1, 1)])
def test_all_pairs_come_equally_often(ps: int, ds: int) -> None:
    found = snapshot(*some("P", ps), *some("D", ds))
    tally = pairs(found, ps * ds * 5)
    assert len(tally) == ps * ds
    assert set(tally.values()) == {5}


@pytest.mark.parametrize(("ps", "ds"), [(1, 3), (3, 1), (2, 3)])
def test_at_every_moment_each_side_is_even(ps: int, ds: int) -> None:
    found = snapshot(*some("P", ps), *some("D", ds))
    for turns in range(1, 13):
        tally = pairs(found, turns)
        for side, count in ((0, ps), (1, ds)):
            used = Counter()
            for pair, times in tally.items():
                used[pair[side]] += times
            assert max(used.values()) - min([*used.values(), *[0] * (count - len(used))]) <= 1


def test_one_p_meets_its_ds_in_strict_turn() -> None:
    found = snapshot(*some("P", 1), *some("D", 3))
    policy, order = make_policy(), []
    for _ in range(9):
        choice = policy.pick(found, Want("m"))
        assert isinstance(choice, Pair)
        order.append(choice.decode.key.http)
    assert order == order[:3] * 3
    assert len(set(order)) == 3


def test_only_equal_compatibility_keys_pair() -> None:
    beats = [*some("P", 2, compatibility="a"), *some("D", 1, compatibility="a")]
    beats += [*some("P", 1, compatibility="b"), *some("D", 3, compatibility="b")]
    beats += some("D", 1, compatibility="c")
    key = {one.http_address: one.compatibility for one in beats}
    tally = pairs(snapshot(*beats), 40)
    assert all(key[p] == key[d] for p, d in tally)
    by_group = Counter()
    for (_, d), times in tally.items():
        by_group[key[d]] += times
    assert by_group == {"a": 10, "b": 30}  # in proportion to the Ds


def test_interleaved_models_do_not_disturb_each_others_turns() -> None:
    beats = [*some("P", 1, models=("m",), compatibility="m")]
    beats += some("D", 2, models=("m",), compatibility="m")
    beats += [*some("P", 1, models=("x",), compatibility="x")]
    beats += some("D", 2, models=("x",), compatibility="x")
    found, policy = snapshot(*beats), make_policy()
    seen: dict[str, Counter[str]] = {"m": Counter(), "x": Counter()}
    for turn in range(8):
        model = "mx"[turn % 2]
        choice = policy.pick(found, Want(model))
        assert isinstance(choice, Pair)
        seen[model][choice.decode.key.http] += 1
    assert all(sorted(tally.values()) == [2, 2] for tally in seen.values())


def test_adding_or_removing_one_instance_keeps_the_others_in_turn() -> None:
    beats = [*some("P", 1), *some("D", 3)]
    policy = make_policy()
    seen: Counter[str] = Counter()
    for found in (snapshot(*beats), snapshot(*beats, *some("D", 1)), snapshot(*beats[:3])):
        for _ in range(12):
            choice = policy.pick(found, Want("m"))
            assert isinstance(choice, Pair)
            seen[choice.decode.key.http] += 1
    assert seen[beats[1].http_address] == seen[beats[2].http_address] == 4 + 3 + 6


@pytest.mark.parametrize(
    ("prefill", "decode"), [("RoundRobin", "Random"), ("Random", "RoundRobin")]
)
def test_one_side_alone_goes_by_turns_too(prefill: str, decode: str) -> None:
    bench = Bench(3, 3, "Random", prefill_policy=prefill, decode_policy=decode)
    side = bench.p_index if prefill == "RoundRobin" else bench.d_index
    order = [side() for _ in range(9)]
    assert order == order[:3] * 3
    assert sorted(order[:3]) == [0, 1, 2]


@pytest.mark.parametrize("policies", [{}, {"prefill_policy": "Random"}])
def test_who_comes_back_gets_its_share_of_turns_and_the_others_the_rest(policies: Any) -> None:
    bench = Bench(2, 4, "RoundRobin", **policies)
    bench.load(bench.d[1]).weight = 0.25
    tally = Counter(bench.d_index() for _ in range(1300))
    assert tally == {0: 400, 1: 100, 2: 400, 3: 400}


def test_a_fleet_that_comes_back_as_a_whole_is_used_evenly() -> None:
    bench = Bench(2, 2, "RoundRobin")
    for one in (*bench.p, *bench.d):
        bench.load(one).weight = 0.1
    tally = Counter(bench.d_index() for _ in range(400))
    assert set(tally) == {0, 1}
    assert abs(tally[0] - tally[1]) < 40


def test_nothing_is_saved_up_for_who_left() -> None:
    bench = Bench(1, 2, "RoundRobin")
    light = bench.load(bench.d[0])
    light.weight = 0.5
    order: list[int] = []
    for _ in range(12):
        order.append(bench.d_index())
        bench.policy.forget(light.key)
    assert order == [1] * 12
