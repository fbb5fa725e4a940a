"""Distributions, names in metrics and log limits: bounded, and never more than what was put in."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_core.distribution import SECONDS, Distribution
from xpyd_kv.metrics import MAX_NAMES, Names, RateLimits


@given(st.lists(st.floats(0, 100)))
def test_a_distribution_counts_each_value_below_every_bound_that_it_is_below(values):
    seen = Distribution()
    for value in values:
        seen.observe(value)
    assert seen.count == len(values)
    assert seen.sum == sum(values)
    expected = [sum(value <= bound for value in values) for bound in SECONDS]
    assert seen.cumulative() == [*expected, len(values)]


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 5))))
def test_equal_values_count_at_once_as_one_by_one(pairs):
    at_once, singly = Distribution(), Distribution()
    for value, count in pairs:
        at_once.observe_each(value, count)
        for _ in range(count):
            singly.observe(value)
    assert at_once.cumulative() == singly.cumulative()
    assert at_once.sum == pytest.approx(singly.sum)


def test_the_bounds_are_in_order():
    assert all(a < b for a, b in pairwise(SECONDS))


def test_names_over_the_bound_become_other():
    names = Names()
    for number in range(1000):
        names.add(f"reason{number}")
    names.add("reason1")
    assert names["reason1"] == 2
    assert len(names) == MAX_NAMES + 1
    assert names["other"] == 1000 - MAX_NAMES


def test_each_key_has_a_line_in_a_while_and_old_keys_are_forgotten():
    limits = RateLimits(60.0)
    assert [limits.take("a", now) for now in (0.0, 1.0, 59.0)] == [0, None, None]
    assert limits.take("b", 2.0) == 0
    assert limits.take("a", 60.0) == 2
    for number in range(300):
        limits.take(number, 61.0)
    assert limits.take("a", 61.0) == 0
