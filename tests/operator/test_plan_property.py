"""plan() on 10,000 random walks: bounds hold, and nothing that serves goes without a successor.

What is checked after every step is in plan_world.py.
"""

from __future__ import annotations

import random

import pytest

from tests.operator.plan_world import World

WALKS = 500
"""Of one test; a failure names its seed."""


def walk(seed: int) -> None:
    """Edits, scales, deaths and time, with a plan after each; then quiet."""
    rng = random.Random(seed)
    world = World(rng)
    for _ in range(rng.randint(4, 24)):
        world.now += rng.random()
        world.turn()
        roll = rng.random()
        if roll < 0.5:
            world.progress()
        elif roll < 0.65 and world.running:
            world.misfortune()
        elif not world.stopping:
            world.edit()
            world.stopping = rng.random() < 0.04
    world.settle()


@pytest.mark.parametrize("first", range(0, 2_000, WALKS))
def test_random_walks_keep_bounds_and_what_serves(first):
    walk_all(first)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2_000, 10_000, WALKS))
def test_more_random_walks_keep_bounds_and_what_serves(first):
    walk_all(first)


def walk_all(first: int) -> None:
    for seed in range(first, first + WALKS):
        try:
            walk(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
