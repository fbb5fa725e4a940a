"""What holds under every policy: who may serve with whom, who must not be taken."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.router.choosing import Bench, make_policy, snapshot, some
from xpyd_router.fleet.instances import InstanceKey, Snapshot
from xpyd_router.policy.base import Want
from xpyd_router.policy.pairs import Alone, Pair, installed

every_policy = pytest.mark.parametrize("name", sorted(installed()))


def pairs(name: str, found: Snapshot, turns: int, want: Want) -> Counter[tuple[str, str]]:
    policy = make_policy(name)
    tally: Counter[tuple[str, str]] = Counter()
    for _ in range(turns):
        choice = policy.pick(found, want)
        assert isinstance(choice, Pair)
        tally[choice.prefill.key.http, choice.decode.key.http] += 1
    return tally


@every_policy
def test_only_equal_compatibility_keys_pair(name: str) -> None:
    beats = [*some("P", 2, compatibility="a"), *some("D", 1, compatibility="a")]
    beats += [*some("P", 1, compatibility="b"), *some("D", 3, compatibility="b")]
    beats += some("D", 1, compatibility="c")
    key = {one.http_address: one.compatibility for one in beats}
    tally = pairs(name, snapshot(*beats), 40, Want("m"))
    assert all(key[p] == key[d] for p, d in tally)
    assert {key[d] for _, d in tally} == {"a", "b"}


@every_policy
def test_old_beats_without_a_key_pair_with_each_other_only(name: str) -> None:
    assert make_policy(name).pick(snapshot(*some("P", 1), *some("D", 1)), Want("m")) is not None
    mixed = snapshot(*some("P", 1), *some("D", 1, compatibility="k"))
    assert make_policy(name).pick(mixed, Want("m")) is None


@every_policy
def test_models_decide_and_old_beats_take_any(name: str) -> None:
    named = snapshot(*some("P", 1, models=("m",)), *some("D", 1, models=("m", "x")))
    assert make_policy(name).pick(named, Want("m")) is not None
    assert make_policy(name).pick(named, Want("x")) is None
    old = snapshot(*some("P", 1), *some("D", 1, models=("m",)))
    assert make_policy(name).pick(old, Want("m")) is not None
    assert make_policy(name).pick(old, Want("other")) is None


@every_policy
def test_the_excluded_are_not_picked(name: str) -> None:
    beats = [*some("P", 2), *some("D", 2)]
    bad = frozenset(
        {InstanceKey(beats[0].http_address, ""), InstanceKey(beats[3].http_address, "")}
    )
    tally = pairs(name, snapshot(*beats), 6, Want("m", exclude=bad))
    assert list(tally) == [(beats[1].http_address, beats[2].http_address)]


@every_policy
def test_aggregated_instances_serve_where_no_pair_is(name: str) -> None:
    policy = make_policy(name)
    found = snapshot(*some("P", 1), *some("A", 2))
    picks = [policy.pick(found, Want("m")) for _ in range(4)]
    assert all(isinstance(choice, Alone) for choice in picks)
    assert len({choice.instance.key for choice in picks if isinstance(choice, Alone)}) == 2
    with_pair = snapshot(*some("P", 1), *some("D", 1), *some("A", 1))
    assert isinstance(policy.pick(with_pair, Want("m")), Pair)


@pytest.mark.parametrize("side", ["P", "D"])
@every_policy
def test_alone_means_on_that_side_if_the_engine_is_ours(side: Any, name: str) -> None:
    ours = snapshot(*some("P", 1, continuation=1), *some("D", 1, continuation=1))
    choice = make_policy(name).pick(ours, Want("m", alone=side))
    assert isinstance(choice, Alone)
    assert choice.instance.beat.type == side
    old = snapshot(*some("P", 1), *some("D", 1))
    assert isinstance(make_policy(name).pick(old, Want("m", alone=side)), Pair)


@pytest.mark.parametrize(("p", "d", "continuing"), [(1, 1, True), (1, 0, False), (0, 1, False)])
@every_policy
def test_a_pair_continues_only_if_both_declare_it(
    p: Any, d: Any, continuing: bool, name: str
) -> None:
    found = snapshot(*some("P", 1, continuation=p), *some("D", 1, continuation=d))
    choice = make_policy(name).pick(found, Want("m"))
    assert isinstance(choice, Pair)
    assert choice.is_continuing == continuing


@every_policy
def test_sent_tokens_go_on_only_on_a_continuing_pair_of_the_same_key(name: str) -> None:
    beats = [*some("P", 1), *some("D", 1), *some("A", 1)]
    beats += [*some("P", 1, compatibility="k", continuation=1)]
    beats += some("D", 2, compatibility="k", continuation=1)
    tally = pairs(name, snapshot(*beats), 4, Want("m", continue_at="k"))
    assert {p for p, _ in tally} == {beats[3].http_address}
    assert make_policy(name).pick(snapshot(*beats), Want("m", continue_at="")) is None
    assert make_policy(name).pick(snapshot(*beats), Want("m", continue_at="other")) is None


@every_policy
def test_a_choice_follows_the_fleet_from_one_snapshot_to_the_next(name: str) -> None:
    policy = make_policy(name)
    for _ in range(3):
        beats = [*some("P", 1), *some("D", 1)]
        choice = policy.pick(snapshot(*beats), Want("m"))
        assert isinstance(choice, Pair)
        assert [one.beat for one in choice] == beats


@every_policy
def test_an_idle_fleet_is_used_evenly(name: str) -> None:
    bench = Bench(4, 4, name)
    found = [bench.pair() for _ in range(400)]
    for side in (0, 1):
        tally = Counter(pair[side].key for pair in found)
        assert len(tally) == 4
        assert max(tally.values()) < 2 * min(tally.values())


@every_policy
def test_who_comes_back_gets_less_than_the_others(name: str) -> None:
    bench = Bench(1, 4, name, a=0)
    bench.load(bench.d[2]).weight = 0.2
    tally: Counter[int] = Counter()
    for _ in range(400):
        chosen = bench.d_index()
        tally[chosen] += 1
        bench.load(bench.d[chosen]).begin(100, 10)
    others = [tally[place] for place in (0, 1, 3)]
    assert 0.1 * min(others) < tally[2] < 0.6 * min(others)


@every_policy
def test_each_model_has_its_own_instances(name: str) -> None:
    beats = {m: [*some("P", 1, models=(m,)), *some("D", 1, models=(m,))] for m in ("x", "y")}
    beats[""] = [*some("P", 1), *some("D", 1)]
    found, policy = snapshot(*(one for group in beats.values() for one in group)), make_policy(name)
    for model, group in (("x", "x"), ("other", ""), ("y", "y"), ("another", "")) * 3:
        choice = policy.pick(found, Want(model))
        assert isinstance(choice, Pair)
        allowed = [*beats[group], *beats[""]]
        assert all(one.beat in allowed for one in choice)
        if not group:
            assert [one.beat for one in choice] == beats[""]


def test_names_that_clients_make_up_leave_nothing_behind() -> None:
    found, policy = (
        snapshot(*some("P", 1, models=("x",)), *some("D", 1, models=("x",))),
        make_policy(),
    )
    for number in range(50):
        assert policy.pick(found, Want(f"made-up-{number}")) is None
        assert policy.pick(found, Want("x"))
    assert len(policy._sides_by_model) == 2  # pyright: ignore[reportPrivateUsage] - what would grow
