"""The buddy allocator against a model: a set of free units."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpyd_kv.memory.buddy import Buddy, Extent

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def units_of(extents: tuple[Extent, ...]) -> set[int]:
    return {unit for e in extents for unit in range(e.offset, e.offset + e.units)}


@pytest.mark.parametrize("gib", [20, 33, 48])
def test_the_size_asked_for_is_the_size_taken_not_the_next_power_of_two(gib: int) -> None:
    unit = 64 * KIB
    buddy = Buddy(gib * GIB // unit)
    assert buddy.total_units * unit == gib * GIB
    assert buddy.take(gib * GIB // unit) is not None
    assert buddy.free_units == 0


def test_tensors_of_two_mebibytes_and_a_page_fill_at_least_95_percent() -> None:
    unit = 64 * KIB
    buddy = Buddy(64 * MIB // unit)
    tensor = 2 * MIB + 4 * KIB
    units = -(-tensor // unit)
    count = 0
    while buddy.take(units) is not None:
        count += 1
    assert count * tensor / (64 * MIB) >= 0.95
    # With the transfer's own unit (one block of all layers) nothing is lost but the remainder.
    exact = Buddy(64 * MIB // (4 * KIB))
    count = 0
    while exact.take(tensor // (4 * KIB)) is not None:
        count += 1
    assert count * tensor / (64 * MIB) >= 0.95


def test_a_request_gets_the_binary_digits_of_its_size_largest_first() -> None:
    extents = Buddy(64).take(13)
    assert extents is not None
    assert [e.units for e in extents] == [8, 4, 1]


@given(
    total=st.integers(0, 300),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=150, deadline=None)
def test_a_random_walk_never_overlaps_and_coalesces_to_the_start(total: int, seed: int) -> None:
    rng = random.Random(seed)
    buddy = Buddy(total)
    largest = buddy.largest_free_units
    free = set(range(total))
    held: list[tuple[Extent, ...]] = []
    high_water = 0
    for _ in range(60):
        if held and rng.random() < 0.45:
            extents = held.pop(rng.randrange(len(held)))
            buddy.free(extents)
            free |= units_of(extents)
        else:
            wanted = rng.randint(1, max(1, total // 2))
            taken = buddy.take(wanted)
            assert (taken is None) == (wanted > len(free))
            if taken is not None:
                units = units_of(taken)
                assert len(units) == wanted == sum(e.units for e in taken)
                assert units <= free
                assert all(e.offset % e.units == 0 for e in taken)
                free -= units
                held.append(taken)
        high_water = max(high_water, total - len(free))
        assert buddy.free_units == len(free)
        assert buddy.used_units == total - len(free)
        assert buddy.high_water_units == high_water
        assert 0.0 <= buddy.fragmentation < 1.0
    for extents in held:
        buddy.free(extents)
    assert buddy.free_units == total
    assert buddy.largest_free_units == largest
    assert total == 0 or buddy.take(total) is not None


def test_with_every_second_unit_free_all_of_them_can_still_be_had() -> None:
    buddy = Buddy(16)
    singles = [buddy.take(1) for _ in range(16)]
    for extents in singles:
        assert extents is not None
        if extents[0].offset % 2:
            buddy.free(extents)
    assert buddy.fragmentation == pytest.approx(1 - 1 / 8)
    assert buddy.take(8) is not None
    assert buddy.take(1) is None


def test_freeing_twice_or_what_was_never_taken_changes_nothing() -> None:
    buddy = Buddy(8)
    extents = buddy.take(3)
    assert extents is not None
    buddy.free(extents)
    with pytest.raises(ValueError, match="not taken"):
        buddy.free(extents)
    with pytest.raises(ValueError, match="not taken"):
        buddy.free((Extent(0, 8),))
    assert buddy.free_units == 8
    assert buddy.largest_free_units == 8


@pytest.mark.parametrize("units", [0, -1])
def test_a_request_for_nothing_is_a_mistake_of_the_caller(units: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        Buddy(8).take(units)
