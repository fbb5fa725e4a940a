"""Where experts go by their load, and how they get there: random loads, and all placements of small
sizes."""

from __future__ import annotations

import itertools
import random

import pytest

from xpyd_worker.model.placement import (
    Placement,
    balanced,
    first_placement,
    holders,
    imbalance,
    towards,
    writes,
)

# Experts, copies, ranks.
SHAPES = ((4, 2, 2), (6, 0, 2), (6, 3, 3), (5, 1, 3), (4, 4, 4), (16, 8, 4), (128, 32, 8))


def random_load(rng: random.Random, experts: int) -> list[int]:
    """Even, uneven, or with experts that nobody chose."""
    power = rng.choice((0, 1, 4, 12))
    return [
        int(rng.choice((1, 1, 1, rng.random() > 0.2)) * 10000 * rng.random() ** power)
        for _ in range(experts)
    ]


def check(placement: Placement, *, experts: int, redundant: int, ranks: int) -> None:
    """What every placement is."""
    assert [len(slots) for slots in placement] == [(experts + redundant) // ranks] * ranks
    assert {expert for slots in placement for expert in slots} == set(range(experts))
    assert all(len(set(slots)) == len(slots) for slots in placement), "two copies on one rank"


@pytest.mark.parametrize(("experts", "redundant", "ranks"), SHAPES)
def test_every_placement_on_the_way_has_each_expert_and_no_rank_has_one_twice(
    experts: int, redundant: int, ranks: int
) -> None:
    rng = random.Random(f"{experts} {redundant} {ranks}")
    now = first_placement(experts, redundant, ranks)
    check(now, experts=experts, redundant=redundant, ranks=ranks)
    for _ in range(12):
        tokens = random_load(rng, experts)
        goal = balanced(now, tokens)
        check(goal, experts=experts, redundant=redundant, ranks=ranks)
        assert imbalance(goal, tokens) <= imbalance(now, tokens)
        assert balanced(now, tokens) == goal, "the same everywhere"
        most = rng.choice((1, 2, 5))
        while now != goal:
            further = towards(now, goal, most)
            check(further, experts=experts, redundant=redundant, ranks=ranks)
            assert len(writes(further, goal)) < len(writes(now, goal))
            now = further


@pytest.mark.parametrize(("experts", "redundant", "ranks"), SHAPES[:5])
def test_the_busiest_rank_has_hardly_more_than_in_the_best_of_all_placements(
    experts: int, redundant: int, ranks: int
) -> None:
    """Within a third always, and on average within a twentieth."""
    rng = random.Random(experts)
    each = (experts + redundant) // ranks
    everything = [
        placement
        for placement in itertools.combinations_with_replacement(
            itertools.combinations(range(experts), each), ranks
        )
        if len({expert for slots in placement for expert in slots}) == experts
    ]
    worse: list[float] = []
    now = first_placement(experts, redundant, ranks)
    for _ in range(12):
        tokens = random_load(rng, experts)
        now = balanced(now, tokens)
        best = min(imbalance(placement, tokens) for placement in everything)
        worse.append(imbalance(now, tokens) / best - 1)
    assert max(worse) < 1 / 3
    assert sum(worse) / len(worse) < 1 / 20


def test_many_experts_come_close_to_the_mean_with_few_moves() -> None:
    rng = random.Random(5)
    now = first_placement(128, 32, 8)
    tokens = [int(1e5 * rng.random() ** 4) for _ in range(128)]
    goal = balanced(now, tokens)
    assert imbalance(now, tokens) > 1.2
    assert imbalance(goal, tokens) < 1.03
    assert len(writes(now, goal)) < 40, "of 160 slots"
    # Noise in the load is worth nothing, or little.
    again = [round(one * rng.uniform(0.95, 1.05)) for one in tokens]
    assert len(writes(goal, balanced(goal, again))) < 10


def test_an_expert_that_all_tokens_choose_gets_as_many_copies_as_ranks() -> None:
    goal = balanced(first_placement(6, 6, 4), [1000, 1, 1, 1, 1, 1])
    assert len(holders(goal, 6)[0]) == 4


@pytest.mark.parametrize("tokens", [[0] * 6, [7] * 6, [100, 101, 99, 100, 100, 100]])
def test_nothing_moves_where_no_rank_has_much_more_than_the_mean(tokens: list[int]) -> None:
    now = first_placement(6, 0, 2)
    assert balanced(now, tokens) is now


def test_first_come_the_experts_then_the_first_ones_again() -> None:
    assert first_placement(6, 2, 2) == ((0, 1, 2, 3), (4, 5, 0, 1))
    assert first_placement(6, 0, 3) == ((0, 1), (2, 3), (4, 5))


def test_a_load_is_divided_over_copies() -> None:
    assert imbalance(((0, 1), (2, 0)), [10, 3, 3]) == 1.0
    assert imbalance(((0, 1), (2, 1)), [10, 0, 0]) == 2.0
    assert imbalance(((0, 1), (2, 0)), [0, 0, 0]) == 1.0


def test_ranks_that_have_an_expert_take_turns_in_giving_it() -> None:
    before: Placement = ((0, 1), (0, 2), (3, 4), (3, 5))
    after: Placement = ((0, 1), (0, 2), (0, 4), (3, 0))
    found = writes(before, after)
    assert [(one.rank, one.slot, one.expert) for one in found] == [(2, 0, 0), (3, 1, 0)]
    assert [(one.source_rank, one.source_slot) for one in found] == [(0, 0), (1, 0)]


def test_an_exchange_that_cannot_be_divided_is_made_at_once() -> None:
    """Each of four ranks gives its only expert to the next."""
    before: Placement = ((0,), (1,), (2,), (3,))
    after: Placement = ((3,), (0,), (1,), (2,))
    assert towards(before, after, 1) == after


def test_a_step_gives_and_gets_no_more_than_its_bound() -> None:
    before: Placement = ((0, 1, 2, 3), (4, 5, 6, 7))
    after: Placement = ((4, 5, 6, 3), (0, 1, 2, 7))
    steps = 0
    while before != after:
        further = towards(before, after, 1)
        assert len(writes(before, further)) == 2
        before, steps = further, steps + 1
    assert steps == 3
