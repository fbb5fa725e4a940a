"""Who is probed when, in virtual time."""

from __future__ import annotations

import math
import random
from collections import Counter

from xpyd_router.fleet.health import MAX_PROBES_PER_S, ProbePlan
from xpyd_router.fleet.instances import InstanceKey


def instance(number: int) -> InstanceKey:
    return InstanceKey(f"10.0.{number // 250}.{number % 250}:20001", "inc")


def plan(seed: int = 1) -> ProbePlan:
    return ProbePlan(interval_s=2.0, draw=random.Random(seed).random)


def test_each_instance_is_probed_about_once_per_interval() -> None:
    found, probes = plan(), Counter[InstanceKey]()
    for number in range(20):
        found.add(instance(number), 0.0)
    for step in range(2000):
        now = step / 20
        for key in found.take(now, 64):
            probes[key] += 1
            found.again(key, now)
    assert len(probes) == 20
    assert all(40 <= count <= 60 for count in probes.values())


def test_probes_of_instances_that_came_together_are_spread() -> None:
    found = plan()
    for number in range(100):
        found.add(instance(number), 0.0)
    taken = [len(found.take(step / 10, 64)) for step in range(1, 21)]
    assert sum(taken) == 100
    assert max(taken) <= 16


def test_a_big_fleet_is_probed_more_slowly_and_doubts_do_not_flood() -> None:
    found = plan()
    for number in range(4096):
        found.add(instance(number), 0.0)
    assert found.interval_s == 40.96
    for number in range(4096):
        found.hasten(instance(number), 0.0)
    seconds = 30
    taken: list[InstanceKey] = []
    for step in range(seconds * 50):
        batch = found.take(step / 50, 64)
        assert len(batch) <= 16
        taken += batch
        for key in batch:
            found.again(key, step / 50)
    assert len(taken) <= MAX_PROBES_PER_S * seconds + 16
    assert len(set(taken)) == 4096


def test_who_is_hastened_comes_first_and_at_once() -> None:
    found = plan()
    for number in range(5):
        found.add(instance(number), 0.0)
    found.hasten(instance(3), 0.0)
    assert found.wait_s(0.0) == 0.0
    assert found.take(0.0, 1) == [instance(3)]


def test_a_doubt_during_a_probe_means_another_one() -> None:
    found = plan()
    found.add(instance(1), 0.0)
    assert found.take(2.0, 1) == [instance(1)]
    found.hasten(instance(1), 2.1)
    found.again(instance(1), 2.2)
    assert found.take(2.2, 1) == [instance(1)]
    found.again(instance(1), 2.3)
    assert found.take(2.3, 1) == []


def test_who_left_is_probed_no_more() -> None:
    found = plan()
    found.add(instance(1), 0.0)
    found.add(instance(2), 0.0)
    found.take(0.0, 0)
    found.discard(instance(1))
    taken = found.take(2.0, 9)
    assert taken == [instance(2)]
    found.discard(instance(2))
    found.again(instance(2), 2.0)
    found.hasten(instance(2), 2.0)
    assert found.take(9.0, 9) == []
    assert found.wait_s(9.0) == math.inf


def test_at_most_so_many_as_there_is_room_for() -> None:
    found = plan()
    for number in range(10):
        found.add(instance(number), 0.0)
    assert len(found.take(2.0, 3)) == 3
    assert found.take(2.0, 0) == []
    assert len(found.take(2.0, 64)) == 7


def test_what_it_keeps_does_not_grow_with_time() -> None:
    found = plan()
    for number in range(10):
        found.add(instance(number), 0.0)
    for step in range(20_000):
        now = step / 10
        found.hasten(instance(step % 10), now)
        for key in found.take(now, 64):
            found.again(key, now)
    assert len(found._heap) < 500
