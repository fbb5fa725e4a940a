"""The load table: entries come with beats and go with their instances."""

from __future__ import annotations

import random

from tests.router.beats import beat
from xpyd_router.fleet.instances import InstanceKey
from xpyd_router.fleet.loads import Load, LoadTable
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView

KEY = InstanceKey("10.0.0.1:20001", "")


def test_an_unknown_instance_has_a_load_that_nobody_keeps() -> None:
    table = LoadTable()
    load = table.of(KEY)
    load.begin(10)
    load.end(10)
    assert len(table) == 0
    assert table.of(KEY) is not load


def test_beats_keep_what_is_in_flight() -> None:
    table = LoadTable()
    table.take(KEY, beat("P"))
    load = table.of(KEY)
    load.begin(100)
    table.take(KEY, beat("P", running=1))
    assert table.of(KEY) is load
    assert (load.own.requests, load.own.prompt_tokens) == (1, 100)


def test_free_blocks_are_carried_on_until_the_next_beat() -> None:
    load = Load(KEY)
    for _ in range(4):
        load.begin(10)
    load.take(beat("D", running=4, free_blocks=600, total_blocks=1000))
    assert abs(1 / load.scale - 0.6) < 1e-9
    load.begin(10)
    load.begin(10)
    assert abs(1 / load.scale - 0.4) < 1e-9  # 0.1 for each request
    for _ in range(9):
        load.begin(10)
    assert abs(1 / load.scale - 0.05) < 1e-9  # never nothing
    for _ in range(15):
        load.end(10)
    assert abs(1 / load.scale - 1.0) < 1e-9


def test_a_beat_cannot_claim_more_free_blocks_than_there_are() -> None:
    load = Load(KEY)
    load.take(beat("D", free_blocks=5000, total_blocks=10))
    assert load.scale == 1.0


def test_weights_are_kept_in_bounds() -> None:
    load = Load(KEY)
    for given, kept in ((0.5, 0.5), (0.0, 0.01), (7.0, 1.0)):
        load.weight = given
        assert load.weight == kept
        assert abs(load.scale - 1 / kept) < 1e-9


def test_the_table_holds_the_members_of_the_fleet_and_no_other() -> None:
    """Whoever beats, restarts, says goodbye or falls silent."""
    chance, now, gone = random.Random(5), 0.0, []
    table = LoadTable()
    registry = Registry(period_s=3.0, missed_beats=3)
    view = FleetView(registry, lambda: now, table)
    view.on_gone(gone.append)
    members: set[InstanceKey] = set()
    for _ in range(2000):
        now += 0.5
        state = chance.choice(["Ready", "Ready", "Ready", "Draining", "Gone"])
        one = beat(
            "P", host=chance.randrange(12), incarnation=str(chance.randrange(40)), state=state
        )
        before, told = members, len(gone)
        view.apply(one)
        if chance.random() < 0.2:
            view.expire()
        members = {instance.key for instance in view.instances}
        assert {load.key for load in table} == members
        assert before - members <= set(gone[told:])
        assert members.isdisjoint(gone[told:])
    assert len(gone) > 100
