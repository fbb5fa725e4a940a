"""The registry in virtual time: who is known, who may be picked, who comes back."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.router.beats import beat
from xpyd_core.errors import ProtocolError
from xpyd_core.messages import ReplicaBeat
from xpyd_router.fleet.instances import MAX_INSTANCES, InstanceKey, build_snapshot
from xpyd_router.fleet.registry import Registry


def registry() -> Registry:
    return Registry(period_s=3.0, missed_beats=3)


def names(found: Registry) -> list[str]:
    return [instance.key.http for instance in found.instances]


def test_an_instance_leaves_after_three_missed_beats_of_three_seconds() -> None:
    found = registry()
    found.apply(beat("P"), now=100.0)
    assert found.expire(now=108.99) == ()
    assert found.expire(now=109.0) == (InstanceKey("10.0.0.1:20001", ""),)
    assert names(found) == []


@pytest.mark.parametrize(
    ("period_ms", "ttl_s"), [(0, 9.0), (500, 1.5), (10_000, 30.0), (1, 0.15), (10**9, 180.0)]
)
def test_the_beats_own_period_counts_within_bounds(period_ms: int, ttl_s: float) -> None:
    found = registry()
    found.apply(beat("P", period_ms=period_ms), now=0.0)
    assert found.instances[0].expires_at_s == pytest.approx(ttl_s)


def test_a_goodbye_removes_at_once_and_a_late_beat_does_not_undo_it() -> None:
    found = registry()
    found.apply(beat("P", incarnation="a"), now=0.0)
    assert found.apply(beat("P", incarnation="a", state="Gone"), now=1.0)[0] == "gone"
    assert names(found) == []
    assert found.apply(beat("P", incarnation="a"), now=1.1)[0] == "stale"
    assert names(found) == []
    assert found.apply(beat("P", incarnation="b"), now=2.0)[0] == "new"


def test_another_incarnation_replaces_at_once_and_its_predecessor_stays_away() -> None:
    found = registry()
    found.apply(beat("P", incarnation="a"), now=0.0)
    outcome, dead = found.apply(beat("P", incarnation="b"), now=1.0)
    assert (outcome, dead) == ("replaced", (InstanceKey("10.0.0.1:20001", "a"),))
    assert found.apply(beat("P", incarnation="a"), now=1.1)[0] == "stale"
    assert found.apply(beat("P", incarnation="a", state="Gone"), now=1.2)[0] == "stale"
    assert [i.beat.incarnation for i in found.instances] == ["b"]


def test_an_expired_instance_may_come_back_under_its_incarnation() -> None:
    found = registry()
    found.apply(beat("P", incarnation="a"), now=0.0)
    found.expire(now=9.0)
    assert found.apply(beat("P", incarnation="a"), now=10.0)[0] == "new"


def test_the_same_http_address_with_another_kv_address_overwrites() -> None:
    found = registry()
    found.apply(beat("P", zmq_address="10.0.0.1:1"), now=0.0)
    found.apply(beat("P", zmq_address="10.0.0.1:2"), now=1.0)
    assert [i.kv.port for i in found.instances] == [2]
    assert found.snapshot.any_model.groups[0].prefill[0].kv.port == 2


@pytest.mark.parametrize("state", ["Starting", "Draining"])
def test_who_is_not_ready_is_seen_but_not_picked(state: Any) -> None:
    found = registry()
    found.apply(beat("P"), now=0.0)
    found.apply(beat("D", host=2), now=0.0)
    assert found.snapshot.is_ready
    found.apply(beat("D", host=2, state=state), now=1.0)
    assert not found.snapshot.is_ready
    assert len(found.instances) == 2


@pytest.mark.parametrize("standing", ["Ejected", "Open", "Trial", "HalfOpen"])
def test_a_beat_does_not_change_how_an_instance_stands(standing: Any) -> None:
    found = registry()
    found.apply(beat("A"), now=0.0)
    found.apply(beat("A", host=2), now=0.0)
    assert found.set_standing(found.instances[0].key, standing)
    assert not found.set_standing(found.instances[0].key, standing)
    found.apply(beat("A"), now=1.0)
    assert [i.standing for i in found.instances] == [standing, "Good"]
    picked = {i.key.http for i in found.snapshot.any_model.aggregated}
    assert ("10.0.0.1:20001" in picked) == (standing == "HalfOpen")
    assert found.set_standing(found.instances[0].key, "Good")
    assert len(found.snapshot.any_model.aggregated) == 2


def test_what_is_said_of_an_earlier_incarnation_does_not_hit_its_successor() -> None:
    found = registry()
    found.apply(beat("A", incarnation="a"), now=0.0)
    old = found.instances[0].key
    found.set_standing(old, "Ejected")
    found.apply(beat("A", incarnation="b"), now=0.0)
    assert found.snapshot.is_ready
    assert not found.set_standing(old, "Ejected")
    assert found.snapshot.is_ready


@pytest.mark.parametrize(
    ("standings", "picked"),
    [
        (("Open", "Good"), [2]),
        (("Open", "HalfOpen"), [2]),
        (("Open", "Ejected"), [1]),
        (("Trial", "Open"), [1, 2]),
        (("Ejected", "Ejected"), []),
    ],
)
def test_an_open_breaker_takes_no_side_its_last_instance(
    standings: tuple[Any, Any], picked: list[int]
) -> None:
    found = registry()
    found.apply(beat("P", host=9), now=0.0)
    for host, standing in enumerate(standings, start=1):
        found.apply(beat("D", host=host), now=0.0)
        found.set_standing(InstanceKey(f"10.0.0.{host}:20001", ""), standing)
    groups = found.snapshot.any_model.groups
    decode = [i.key.http for group in groups for i in group.decode]
    assert decode == [f"10.0.0.{host}:20001" for host in picked]


@pytest.mark.parametrize(("period_ms", "late_s"), [(0, 3.9), (1000, 1.3)])
def test_a_beat_is_late_after_a_period_and_a_bit(period_ms: int, late_s: float) -> None:
    found = registry()
    found.apply(beat("A", period_ms=period_ms), now=0.0)
    assert not found.instances[0].is_late(late_s - 0.01)
    assert found.instances[0].is_late(late_s + 0.01)


def test_the_snapshot_is_the_same_object_while_only_loads_change() -> None:
    found = registry()
    found.apply(beat("A", running=1), now=0.0)
    before = found.snapshot
    found.apply(beat("A", running=7), now=1.0)
    assert found.snapshot is before
    assert found.instances[0].beat.running == 7


@pytest.mark.parametrize(
    "address", ["[10.0.0.1\r\nX: y]:20001", "a b:20001", "under_score:20001", "host/x:20001"]
)
@pytest.mark.parametrize("name", ["http_address", "zmq_address"])
def test_an_address_that_cannot_stand_in_a_header_is_refused(name: str, address: str) -> None:
    with pytest.raises(ProtocolError):
        registry().apply(beat("P", **{name: address}), now=0.0)


def test_the_registry_is_bounded() -> None:
    found = registry()
    found._belongings.places = MAX_INSTANCES - 2  # 4096 rebuilds are slow
    two = tuple(ReplicaBeat(zmq_address=f"10.0.0.1:{port}") for port in (21001, 21003))
    assert found.apply(beat("P", zmq_address="10.0.0.1:21001"), now=0.0)[0] == "new"
    assert found.apply(beat("D", host=2, replicas=two), now=0.0)[0] == "conflict"
    three = tuple(ReplicaBeat(zmq_address=f"10.0.0.2:{port}") for port in range(21001, 21004))
    assert found.apply(beat("D", host=2, replicas=three[:2]), now=0.0)[0] == "full"
    assert found.apply(beat("D", host=2), now=0.0)[0] == "new"
    assert found.apply(beat("D", host=2, replicas=three), now=1.0)[0] == "full"


def test_models_are_listed_where_a_pair_or_an_aggregated_instance_serves_them() -> None:
    beats = [
        beat("P", host=1, models=("m", "only-p")),
        beat("D", host=2, models=("m",)),
        beat("A", host=3, models=("a",)),
    ]
    found = registry()
    for one in beats:
        found.apply(one, now=0.0)
    assert found.snapshot.models == ("a", "m")
    assert found.snapshot.knows("only-p")
    assert not found.snapshot.knows("other")


def test_random_walk_keeps_the_registrys_promises() -> None:
    """Against a plain model: address -> (incarnation, expiry, state)."""
    draw = random.Random(4)
    found = registry()
    now = 0.0
    alive: dict[str, tuple[str, float, str]] = {}
    dead: set[tuple[str, str]] = set()
    for _ in range(5000):
        now += draw.choice([0.0, 0.5, 2.0])
        host, incarnation = draw.randrange(1, 6), draw.choice("abcdefgh")
        state = draw.choice(["Ready", "Ready", "Ready", "Draining", "Starting", "Gone"])
        address = f"10.0.0.{host}:20001"
        kind = "PDA"[host % 3]
        found.apply(beat(kind, host=host, incarnation=incarnation, state=state), now=now)
        if (address, incarnation) not in dead:
            known = alive.get(address)
            if state == "Gone":
                dead.add((address, incarnation))
                if known and known[0] == incarnation:
                    del alive[address]
            else:
                if known and known[0] != incarnation:
                    dead.add((address, known[0]))
                alive[address] = (incarnation, now + 9.0, state)
        if draw.random() < 0.3:
            found.expire(now)
            alive = {a: entry for a, entry in alive.items() if entry[1] > now}
        if draw.random() < 0.01:  # a fleet in which everyone was replaced once would end the walk
            found, alive, dead = registry(), {}, set()
        seen = {
            i.key.http: (i.key.incarnation, i.expires_at_s, i.beat.state) for i in found.instances
        }
        assert seen == alive
        fresh = build_snapshot(found.instances)
        assert fresh.is_ready == found.snapshot.is_ready
        assert fresh.models == found.snapshot.models
        assert fresh.is_empty == found.snapshot.is_empty
