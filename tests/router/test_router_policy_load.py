"""Random, PowerOfTwo, LeastLoaded: who is taken for what the instances have to do."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from tests.router.choosing import Bench, key_of
from xpyd_router.fleet.loads import Work
from xpyd_router.policy.base import Want
from xpyd_router.policy.pairs import installed


def test_random_is_even_in_the_long_run_and_not_in_turn() -> None:
    bench = Bench(1, 3, "Random")
    order = [bench.d_index() for _ in range(3000)]
    assert all(850 < times < 1150 for times in Counter(order).values())
    assert sum(one == two for one, two in pairwise(order)) > 800


def test_random_honours_weights() -> None:
    bench = Bench(1, 2, "Random")
    bench.load(bench.d[0]).weight = 0.25
    tally = Counter(bench.d_index() for _ in range(5000))
    assert 0.2 < tally[0] / tally[1] < 0.3


@pytest.mark.parametrize("policy", sorted(installed()))
def test_an_instance_that_starts_slowly_gets_less_work_by_every_policy(policy: str) -> None:
    bench = Bench(1, 2, policy)
    bench.load(bench.d[0]).weight = 0.25
    tally: Counter[int] = Counter()
    for turn in range(400):
        place = bench.d_index(Want("m", session=str(turn), marks=((64, b"%d" % turn),)))
        bench.load(bench.d[place]).begin(10)
        tally[place] += 1
    assert 0 < tally[0] < 0.5 * tally[1]


@pytest.mark.parametrize("policy", ["PowerOfTwo", "LeastLoaded"])
def test_of_two_the_less_loaded_is_taken(policy: str) -> None:
    bench = Bench(2, 2, policy)
    bench.load(bench.p[0]).begin(1000)
    bench.load(bench.d[1]).begin(1000, 100)
    assert {bench.p_index() for _ in range(20)} == {1}
    assert {bench.d_index() for _ in range(20)} == {0}
    bench.load(bench.p[0]).end(1000)
    bench.load(bench.d[1]).end(1000, 100)
    assert {bench.p_index() for _ in range(40)} == {0, 1}
    assert {bench.d_index() for _ in range(40)} == {0, 1}


def test_power_of_two_draws_all_pairs_of_different_instances_and_never_takes_the_most_loaded():
    bench = Bench(1, 4, "PowerOfTwo")
    for place, one in enumerate(bench.d):
        for _ in range(place):
            bench.load(one).begin(10)
    tally = Counter(bench.d_index() for _ in range(6000))
    # Of 6 pairs the least loaded is in 3, the next wins 2, then 1.
    assert [round(tally[place] / 1000) for place in range(4)] == [3, 2, 1, 0]
    assert tally[3] == 0


def test_long_prompts_weigh_more_than_many_short_ones_on_p() -> None:
    bench = Bench(2, 1, "LeastLoaded")
    bench.load(bench.p[0]).begin(8000)
    for _ in range(10):
        bench.load(bench.p[1]).begin(100)
    assert {bench.p_index(Want("m", prompt_tokens=50)) for _ in range(4)} == {1}


def test_the_batch_weighs_more_than_contexts_on_d_until_they_are_long() -> None:
    bench = Bench(1, 2, "LeastLoaded")
    bench.load(bench.d[0]).begin(1500)
    for _ in range(3):
        bench.load(bench.d[1]).begin(100)
    assert {bench.d_index() for _ in range(4)} == {0}
    bench.load(bench.d[0]).begin(30_000)
    assert {bench.d_index() for _ in range(4)} == {1}


def test_what_other_processes_have_in_flight_counts() -> None:
    bench = Bench(2, 2, "LeastLoaded")
    bench.load(bench.p[0]).set_others(Work(1, 500, 0))
    bench.load(bench.d[0]).set_others(Work(1, 500, 10))
    assert {bench.p_index() for _ in range(4)} == {1}
    assert {bench.d_index() for _ in range(4)} == {1}


def test_their_requests_count_also_where_their_tokens_are_unknown() -> None:
    bench = Bench(1, 2, "LeastLoaded")
    bench.load(bench.d[0]).set_others(Work(2, 0, 0))
    bench.load(bench.d[1]).begin(0)
    assert {bench.d_index() for _ in range(4)} == {1}


def busy(bench: Bench, place: int, **figures: Any) -> None:
    """The next beat of one D."""
    beat = replace(bench.d[place], **figures)
    bench.loads.take(key_of(beat), beat)


def test_requests_of_other_routers_count_and_our_own_do_not_twice() -> None:
    bench = Bench(1, 2, "LeastLoaded")
    for _ in range(3):
        bench.load(bench.d[0]).begin(10)
    busy(bench, 0, running=2, waiting=1)
    busy(bench, 1, running=4, waiting=1)
    assert bench.load(bench.d[0]).active == 3
    assert bench.load(bench.d[1]).active == 5
    assert {bench.d_index() for _ in range(4)} == {0}


def test_a_foreign_prompt_is_taken_to_be_as_long_as_ours_are() -> None:
    bench = Bench(2, 1, "LeastLoaded")
    first, second = (bench.load(one) for one in bench.p)
    for _ in range(200):
        first.begin(1000)
        first.end(1000)
    bench.loads.take(first.key, replace(bench.p[0], waiting=1))
    second.begin(900)
    assert {bench.p_index() for _ in range(4)} == {1}
    second.begin(200)
    assert {bench.p_index() for _ in range(4)} == {0}


def test_who_has_few_kv_blocks_left_is_spared() -> None:
    bench = Bench(1, 2, "LeastLoaded")
    for one in bench.d:
        for _ in range(8):
            bench.load(one).begin(10)
    bench.load(bench.d[1]).begin(10)
    busy(bench, 0, running=8, free_blocks=100, total_blocks=1000)
    busy(bench, 1, running=9, free_blocks=600, total_blocks=1000)
    assert {bench.d_index() for _ in range(4)} == {1}


@pytest.mark.parametrize("policy", ["PowerOfTwo", "LeastLoaded"])
def test_a_p_of_few_kv_blocks_is_spared_by_what_the_prompt_would_wait_for(policy: str) -> None:
    bench, want = Bench(2, 1, policy), Want("m", prompt_tokens=1000)
    full = replace(bench.p[0], free_blocks=100, total_blocks=1000)
    bench.loads.take(key_of(full), full)  # a token there counts for ten
    assert {bench.p_index(want) for _ in range(8)} == {1}
    bench.load(bench.p[1]).begin(500)
    assert {bench.p_index(want) for _ in range(8)} == {1}
    bench.load(bench.p[1]).begin(19_500)
    assert {bench.p_index(want) for _ in range(8)} == {0}


def test_mixed_fleets_share_by_room() -> None:
    """A D with four times the KV gets more, and neither is filled while the other has room."""
    bench = Bench(1, 2, "LeastLoaded")
    blocks, running = [1000, 4000], [0, 0]
    for _ in range(100):
        chosen = bench.d_index()
        running[chosen] += 1
        bench.load(bench.d[chosen]).begin(300)
        for place in (0, 1):
            free = max(0, blocks[place] - 20 * running[place])
            figures = {"free_blocks": free, "total_blocks": blocks[place]}
            busy(bench, place, running=running[place], **figures)
    assert running[0] < 45
    assert running[1] < 200
    assert running[0] > 15


@pytest.mark.parametrize("policy", ["LeastLoaded", "PowerOfTwo"])
@pytest.mark.parametrize("seed", range(8))
def test_a_walk_of_requests_stays_balanced(policy: str, seed: int) -> None:
    """Arrivals and ends in any order: nobody is far above the mean, all figures end at zero."""
    chance = random.Random(seed)
    bench = Bench(3, 5, policy)
    running: list[tuple[int, int]] = []
    for _ in range(2000):
        if running and chance.random() < len(running) / 80:
            place, tokens = running.pop(chance.randrange(len(running)))
            bench.load(bench.d[place]).end(tokens, 16)
        else:
            tokens = chance.randrange(1, 60)
            place = bench.d_index(Want("m", prompt_tokens=tokens))
            bench.load(bench.d[place]).begin(tokens, 16)
            running.append((place, tokens))
        active = [bench.load(one).active for one in bench.d]
        slack = 3 if policy == "LeastLoaded" else 8
        assert max(active) <= sum(active) / len(active) + slack
    for place, tokens in running:
        bench.load(bench.d[place]).end(tokens, 16)
    assert all(bench.load(one).own == Work() for one in bench.d)


def test_second_tries_do_not_shift_the_turns_of_first_ones() -> None:
    """With two idle instances every first try would else meet the same, failing one."""
    bench = Bench(1, 2, "LeastLoaded")
    failing = key_of(bench.d[0])
    met: Counter[int] = Counter()
    for _ in range(10):
        chosen = bench.d_index()
        met[chosen] += 1
        if chosen == 0:
            assert bench.d_index(Want("m", exclude=frozenset({failing}))) == 1
    assert met == {0: 5, 1: 5}
