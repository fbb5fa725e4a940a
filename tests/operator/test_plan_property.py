"""plan() on 2,000 random walks, and on one of 1,000 operations; in the soak on 10,000, and of
10,000: bounds hold, nothing that serves goes without a successor, and revisions move together.

What is checked after every step is in plan_world.py.
"""

from __future__ import annotations

import random

import pytest

from tests.operator.plan_world import World

WALKS = 500
"""Of one test; a failure names its seed."""


def walk(seed: int, operations: int | None = None) -> None:
    """Edits, scales, deaths and time, with a plan after each; then quiet. A walk of so many
    `operations` never deletes its fleet."""
    rng = random.Random(seed)
    world = World(rng)
    for _ in range(operations or rng.randint(4, 24)):
        world.now += rng.random()
        world.turn()
        roll = rng.random()
        if roll < 0.5:
            world.progress()
        elif roll < 0.65 and world.running:
            world.misfortune()
        elif not world.stopping:
            world.edit()
            world.stopping = rng.random() < 0.04 and operations is None
    world.settle()


@pytest.mark.parametrize("first", range(0, 2_000, WALKS))
def test_random_walks_keep_bounds_and_what_serves(first: int) -> None:
    walk_all(first)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(2_000, 10_000, WALKS))
def test_more_random_walks_keep_bounds_and_what_serves(first: int) -> None:
    walk_all(first)


def test_a_fleet_that_lives_through_a_thousand_operations_keeps_them_too() -> None:
    """What a short walk does not reach: a fleet whose history is long."""
    try_walk(1, operations=1_000)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_a_fleet_that_lives_through_ten_thousand_operations_keeps_them_too(seed: int) -> None:
    try_walk(seed, operations=10_000)


def walk_all(first: int) -> None:
    for seed in range(first, first + WALKS):
        try_walk(seed)


def try_walk(seed: int, operations: int | None = None) -> None:
    try:
        walk(seed, operations)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error
