"""The only instance of a pool on a cordoned node: another one first, then it goes."""

from __future__ import annotations

from typing import Any

import pytest

from xpyd_operator.plan.fleet import plan, pools_guarded, pools_moving
from xpyd_operator.plan.values import (
    ROUTER,
    FleetSeen,
    FleetWant,
    PoolRole,
    PoolSeen,
    PoolWant,
    PutWorkload,
    Template,
    Workload,
    WorkloadSeen,
)


def asked(
    *,
    ready: int = 1,
    cordoned: int = 1,
    now: int = 1,
    replicas: int = 1,
    old: int = 0,
    role: PoolRole = "Decode",
    **pool: Any,
) -> tuple[list[int], bool, bool]:
    """The replicas that plan() puts, whether the pool moves, and whether it is guarded. `now`: what
    the workload asks for; `old`: instances of another revision."""
    name = ROUTER if role == ROUTER else "decode"
    want = FleetWant("f", (PoolWant(name, Template(role), "new", replicas, **pool),))
    workloads = [WorkloadSeen(Workload(name, "new", now, Template(role)), now, ready, 0, cordoned)]
    if old:
        workloads.append(WorkloadSeen(Workload(name, "old", old, Template(role)), old, old))
    seen = FleetSeen((PoolSeen(name, replicas, replicas),), tuple(workloads))
    puts = [a.workload for a in plan(want, seen, 0.0).actions if isinstance(a, PutWorkload)]
    found = [one.replicas for one in puts if one.revision == "new"]
    return found, name in pools_moving(want, seen), name in pools_guarded(want, seen)


@pytest.mark.parametrize("role", ["Decode", "Prefill", "Aggregated", ROUTER])
def test_another_instance_starts_and_the_first_one_stays(role: PoolRole) -> None:
    assert asked(role=role) == ([2], True, True)
    assert asked(role=role, now=2) == ([], True, True), "until it serves"


def test_the_first_one_goes_when_the_other_serves() -> None:
    assert asked(ready=2, now=2) == ([1], False, True)
    assert asked(ready=2, now=1) == ([], False, True), "while it drains"


def test_where_both_are_on_cordoned_nodes_one_goes_and_the_next_starts_elsewhere() -> None:
    assert asked(ready=2, cordoned=2, now=2)[0] == [1]


def test_an_uncordoned_node_takes_the_second_one_back() -> None:
    assert asked(cordoned=0, now=2) == ([1], False, True)


def test_one_that_does_not_serve_is_not_moved() -> None:
    """No budget keeps it from being evicted."""
    assert asked(ready=0, cordoned=0) == ([], False, True)


def test_of_several_instances_none_is_moved() -> None:
    assert asked(ready=2, cordoned=1, now=2, replicas=2) == ([], False, False)


def test_a_document_without_surge_lets_it_go() -> None:
    assert asked(surge_percent=0, unavailable_percent=100) == ([], False, False)


def test_a_rollout_replaces_it_by_its_own_steps() -> None:
    assert asked(old=1)[1] is False
