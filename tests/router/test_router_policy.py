"""Round robin: fair over pairs, never across compatibility keys."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from tests.router.beats import beat
from xpyd_core.messages import Heartbeat
from xpyd_router.fleet.registry import InstanceKey, Registry, Snapshot
from xpyd_router.policy.round_robin import Alone, Pair, RoundRobin, Want

_hosts = itertools.count(1)


def snapshot(*beats: Heartbeat) -> Snapshot:
    registry = Registry(period_s=3.0, missed_beats=3)
    for one in beats:
        registry.apply(one, now=0.0)
    return registry.snapshot


def some(kind: str, count: int, **fields: Any) -> list[Heartbeat]:
    return [beat(kind, host=next(_hosts), **fields) for _ in range(count)]


def pairs(found: Snapshot, turns: int, want: Want | None = None) -> Counter[tuple[str, str]]:
    policy = RoundRobin()
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
    policy, order = RoundRobin(), []
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


def test_old_beats_without_a_key_pair_with_each_other_only() -> None:
    assert RoundRobin().pick(snapshot(*some("P", 1), *some("D", 1)), Want("m")) is not None
    mixed = snapshot(*some("P", 1), *some("D", 1, compatibility="k"))
    assert RoundRobin().pick(mixed, Want("m")) is None


def test_models_decide_and_old_beats_take_any() -> None:
    named = snapshot(*some("P", 1, models=("m",)), *some("D", 1, models=("m", "x")))
    assert RoundRobin().pick(named, Want("m")) is not None
    assert RoundRobin().pick(named, Want("x")) is None
    old = snapshot(*some("P", 1), *some("D", 1, models=("m",)))
    assert RoundRobin().pick(old, Want("m")) is not None
    assert RoundRobin().pick(old, Want("other")) is None


def test_interleaved_models_do_not_disturb_each_others_turns() -> None:
    beats = [*some("P", 1, models=("m",), compatibility="m")]
    beats += some("D", 2, models=("m",), compatibility="m")
    beats += [*some("P", 1, models=("x",), compatibility="x")]
    beats += some("D", 2, models=("x",), compatibility="x")
    found, policy = snapshot(*beats), RoundRobin()
    seen: dict[str, Counter[str]] = {"m": Counter(), "x": Counter()}
    for turn in range(8):
        model = "mx"[turn % 2]
        choice = policy.pick(found, Want(model))
        assert isinstance(choice, Pair)
        seen[model][choice.decode.key.http] += 1
    assert all(sorted(tally.values()) == [2, 2] for tally in seen.values())


def test_the_excluded_are_not_picked() -> None:
    beats = [*some("P", 2), *some("D", 2)]
    bad = frozenset(
        {InstanceKey(beats[0].http_address, ""), InstanceKey(beats[3].http_address, "")}
    )
    tally = pairs(snapshot(*beats), 6, Want("m", exclude=bad))
    assert list(tally) == [(beats[1].http_address, beats[2].http_address)]


def test_aggregated_instances_serve_where_no_pair_is() -> None:
    policy = RoundRobin()
    found = snapshot(*some("P", 1), *some("A", 2))
    picks = [policy.pick(found, Want("m")) for _ in range(4)]
    assert all(isinstance(choice, Alone) for choice in picks)
    assert len({choice.instance.key for choice in picks if isinstance(choice, Alone)}) == 2
    with_pair = snapshot(*some("P", 1), *some("D", 1), *some("A", 1))
    assert isinstance(policy.pick(with_pair, Want("m")), Pair)


@pytest.mark.parametrize("side", ["P", "D"])
def test_alone_means_on_that_side_if_the_engine_is_ours(side: Any) -> None:
    ours = snapshot(*some("P", 1, continuation=1), *some("D", 1, continuation=1))
    choice = RoundRobin().pick(ours, Want("m", alone=side))
    assert isinstance(choice, Alone)
    assert choice.instance.beat.type == side
    old = snapshot(*some("P", 1), *some("D", 1))
    assert isinstance(RoundRobin().pick(old, Want("m", alone=side)), Pair)


@pytest.mark.parametrize(("p", "d", "continuing"), [(1, 1, True), (1, 0, False), (0, 1, False)])
def test_a_pair_continues_only_if_both_declare_it(p: Any, d: Any, continuing: bool) -> None:
    found = snapshot(*some("P", 1, continuation=p), *some("D", 1, continuation=d))
    choice = RoundRobin().pick(found, Want("m"))
    assert isinstance(choice, Pair)
    assert choice.is_continuing == continuing


def test_sent_tokens_go_on_only_on_a_continuing_pair_of_the_same_key() -> None:
    beats = [*some("P", 1), *some("D", 1), *some("A", 1)]
    beats += [*some("P", 1, compatibility="k", continuation=1)]
    beats += some("D", 2, compatibility="k", continuation=1)
    tally = pairs(snapshot(*beats), 4, Want("m", continue_at="k"))
    assert {p for p, _ in tally} == {beats[3].http_address}
    assert RoundRobin().pick(snapshot(*beats), Want("m", continue_at="")) is None
    assert RoundRobin().pick(snapshot(*beats), Want("m", continue_at="other")) is None


def test_adding_or_removing_one_instance_keeps_the_others_in_turn() -> None:
    beats = [*some("P", 1), *some("D", 3)]
    policy = RoundRobin()
    seen: Counter[str] = Counter()
    for found in (snapshot(*beats), snapshot(*beats, *some("D", 1)), snapshot(*beats[:3])):
        for _ in range(12):
            choice = policy.pick(found, Want("m"))
            assert isinstance(choice, Pair)
            seen[choice.decode.key.http] += 1
    assert seen[beats[1].http_address] == seen[beats[2].http_address] == 4 + 3 + 6
