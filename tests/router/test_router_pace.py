"""Lines learned from what calls took."""

from __future__ import annotations

import random

import pytest

from xpyd_router.fleet.loads import FittedLine, Pace


@pytest.mark.parametrize(("base", "slope"), [(0.05, 1 / 8000), (0.0, 0.002), (0.3, 0.0)])
def test_a_line_is_found_again(base: float, slope: float) -> None:
    chance, line = random.Random(3), FittedLine()
    for _ in range(200):
        x = chance.uniform(100, 8000)
        line.observe(x, base + slope * x)
    for x in (100, 4000, 8000):
        assert line.at(x) == pytest.approx(base + slope * x, rel=0.05)


def test_noise_is_averaged_out() -> None:
    chance, line = random.Random(5), FittedLine()
    for _ in range(500):
        x = chance.uniform(1, 32)
        line.observe(x, (0.01 + 0.001 * x) * chance.uniform(0.8, 1.2))
    assert line.at(1) == pytest.approx(0.011, rel=0.15)
    assert line.at(32) == pytest.approx(0.042, rel=0.15)


def test_an_instance_that_became_slower_is_known_to_be_after_some_dozen_observations() -> None:
    chance, line = random.Random(7), FittedLine()
    for count in range(400):
        x = chance.uniform(1, 32)
        line.observe(x, x * (0.001 if count < 300 else 0.003))
    assert line.at(16) == pytest.approx(0.048, rel=0.2)


def test_what_was_seen_at_one_load_only_is_more_at_higher_loads() -> None:
    pace = Pace()
    for _ in range(50):
        pace.first.observe(1000, 0.1)
        pace.gap.observe(4, 0.020)
    assert pace.first.at(1000) == pytest.approx(0.1)
    assert pace.first.at(4000) == pytest.approx(0.4)
    assert pace.gap.at(4) == pytest.approx(0.020)
    assert pace.gap.at(24) == pytest.approx(0.040)


def test_times_never_fall_with_the_load_and_are_never_below_0() -> None:
    falling, steep = FittedLine(), FittedLine()
    for x in range(1, 60):
        falling.observe(x, 10.0 / x)
        steep.observe(x, max(0.0, x - 30.0))
    for line in (falling, steep):
        assert line.slope >= 0.0
        assert line.base >= 0.0
        assert 0.0 <= line.at(0) <= line.at(100)


def test_a_line_that_would_begin_below_0_goes_through_the_origin_and_the_mean() -> None:
    line = FittedLine()
    for _ in range(50):
        line.observe(10, 0.0)
        line.observe(20, 10.0)
    assert line.base == 0.0
    assert line.at(15) == pytest.approx(5.0, rel=0.05)


def test_loads_that_hardly_differ_say_nothing_of_a_slope() -> None:
    line = FittedLine()
    for _ in range(50):
        line.observe(999, 0.11)
        line.observe(1001, 0.09)
    assert line.at(4000) == pytest.approx(0.4, rel=0.1)


def test_one_observation_is_known() -> None:
    line = FittedLine()
    assert not line.is_known
    line.observe(10, 0.5)
    assert line.is_known
    assert line.at(10) == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(5))
def test_any_observations_leave_a_line_that_grows(seed: int) -> None:
    chance, line = random.Random(seed), FittedLine()
    for _ in range(2000):
        line.observe(chance.choice([0.0, 1.0, 1e-9, 5e5]) + 1e-6, chance.choice([0.0, 1e-9, 300.0]))
        assert line.slope >= 0.0
        assert line.base >= 0.0
