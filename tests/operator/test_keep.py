"""keep(): the processes of one workload, in virtual time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from xpyd_operator.plan.keep import BACKOFF_MOST_S, FORGIVES_S, KILL_GRACE_S, keep
from xpyd_operator.plan.values import (
    ENGINE_PROBES,
    DrainInstance,
    ForgetInstance,
    InstanceSeen,
    KillInstance,
    RestartInstance,
    StartInstance,
    Template,
    Workload,
)

DRAIN_S = 20.0


def workload(replicas: int) -> Workload:
    return Workload("d", "r1", replicas, Template("Decode"))


def running(*ordinals: int) -> list[InstanceSeen]:
    return [InstanceSeen(ordinal, started_at=0.0) for ordinal in ordinals]


def decide(replicas, seen, now=0.0, taken=()):
    return keep(
        workload(replicas),
        seen,
        now,
        drain_timeout_s=DRAIN_S,
        probes=ENGINE_PROBES,
        taken=taken,
    )


@pytest.mark.parametrize(
    ("replicas", "seen", "taken", "actions"),
    [
        (0, [], (), ()),
        (3, [], (), (StartInstance(0), StartInstance(1), StartInstance(2))),
        (3, running(0, 1, 2), (), ()),
        (3, running(0, 2), (), (StartInstance(1),)),  # a gap is filled, none is renumbered
        (2, running(0, 1, 2), (), (DrainInstance(2),)),
        (1, running(0, 1, 2), (), (DrainInstance(2), DrainInstance(1))),
        (
            2,
            [],
            (0, 2),
            (StartInstance(1), StartInstance(3)),
        ),  # ordinals of the pool's other revision
        (1, running(0, 3), (), (DrainInstance(3),)),
    ],
)
def test_instances_are_started_and_drained_by_ordinal(replicas, seen, taken, actions):
    assert decide(replicas, seen, taken=taken).actions == actions


@pytest.mark.parametrize(
    ("instance", "actions"),
    [
        (InstanceSeen(0, 0.0, lived_at=0.0, failed_probes=5), ()),
        (
            InstanceSeen(0, 0.0, lived_at=0.0, failed_probes=6),
            (RestartInstance(0, ENGINE_PROBES.liveness),),
        ),
        # It dies: once is enough.
        (InstanceSeen(0, 0.0, lived_at=0.0, failed_probes=7, killed=True), ()),
        # Before the first answer it may take as long as a kubelet gives it to start.
        (InstanceSeen(0, 0.0, failed_probes=599), ()),
        (InstanceSeen(0, 0.0, failed_probes=600), (RestartInstance(0, ENGINE_PROBES.startup),)),
        # One that leaves has the drain's deadline.
        (InstanceSeen(0, 0.0, lived_at=0.0, failed_probes=9, draining_since=1.0), ()),
    ],
)
def test_an_instance_that_does_not_answer_its_probe_so_often_is_restarted(instance, actions):
    wanted = 1 if instance.draining_since is None else 0
    assert decide(wanted, [instance], now=2.0).actions == actions


def test_those_that_lose_least_go_first():
    busy = [InstanceSeen(n, 0.0, lived_at=1.0, load=load) for n, load in enumerate((2, 7, 0, 5))]
    starting, gone = InstanceSeen(4, 0.0, load=9), InstanceSeen(5, 0.0, exited_at=1.0, lived_at=0.5)
    order = [gone, starting, busy[2], busy[0], busy[3], busy[1]]
    for wanted in range(6):
        found = decide(wanted, [*busy, starting, gone], now=1.5).actions
        victims = {a.ordinal for a in found if isinstance(a, DrainInstance | ForgetInstance)}
        assert victims == {one.ordinal for one in order[: 6 - wanted]}


def test_a_draining_instance_is_already_a_victim():
    leaving = InstanceSeen(0, 0.0, draining_since=1.0)
    assert decide(2, [leaving, *running(1, 2)], now=2.0).actions == ()


def test_an_ordinal_is_not_given_again_while_its_old_instance_drains():
    leaving = InstanceSeen(1, 0.0, draining_since=1.0)
    assert decide(2, [*running(0), leaving], now=2.0).actions == (StartInstance(2),)


def test_a_drain_has_its_timeout_and_a_grace_before_the_kill_and_one_kill():
    leaving = InstanceSeen(0, 0.0, draining_since=100.0)
    limit = 100.0 + DRAIN_S + KILL_GRACE_S
    before = decide(0, [leaving], now=limit - 1)
    assert (before.actions, before.recheck_after) == ((), 1.0)
    assert decide(0, [leaving], now=limit).actions == (KillInstance(0),)
    assert decide(0, [replace(leaving, killed=True)], now=limit + 1).actions == ()


def test_a_drained_instance_is_forgotten_however_it_exited():
    gone = InstanceSeen(0, 0.0, exited_at=5.0, draining_since=1.0)
    assert decide(1, [gone], now=5.0).actions == (ForgetInstance(0), StartInstance(1))


def test_a_victim_that_waits_for_its_restart_is_forgotten_at_once():
    crashed = InstanceSeen(1, 0.0, exited_at=5.0)
    assert decide(1, [*running(0), crashed], now=5.0).actions == (ForgetInstance(1),)


def test_restarts_back_off_exponentially_up_to_a_limit():
    delays, failures, now = [], 0, 0.0
    for _ in range(9):
        crashed = InstanceSeen(0, now, failures, exited_at=now)
        waiting = decide(1, [crashed], now=now)
        assert waiting.actions == ()
        assert waiting.recheck_after is not None
        delays.append(waiting.recheck_after)
        now += waiting.recheck_after
        (start,) = decide(1, [crashed], now=now).actions
        assert isinstance(start, StartInstance)
        failures = start.failures
    assert delays == [1, 2, 4, 8, 16, 32, BACKOFF_MOST_S, BACKOFF_MOST_S, BACKOFF_MOST_S]


def test_one_that_worked_is_started_again_at_once_but_only_the_first_time():
    once = InstanceSeen(0, 0.0, lived_at=0.0, exited_at=5.0)
    assert decide(1, [once], now=5.0).actions == (StartInstance(0, failures=1),)
    twice = replace(once, failures=1)
    assert decide(1, [twice], now=5.0).actions == ()


def test_a_long_row_of_failures_stays_a_number():
    crashed = InstanceSeen(0, 0.0, failures=100_000, exited_at=1.0)
    assert decide(1, [crashed], now=1.0).recheck_after == BACKOFF_MOST_S


def test_a_life_forgives_a_failure_for_each_while_that_it_lasts():
    def after(lived_s: float) -> int:
        once = InstanceSeen(0, 0.0, failures=5, lived_at=30.0, exited_at=30.0 + lived_s)
        (start,) = decide(1, [once], now=1000.0).actions
        assert isinstance(start, StartInstance)
        return start.failures

    assert [after(n * FORGIVES_S) for n in (0, 0.9, 1, 3, 5, 50)] == [6, 6, 5, 3, 1, 1]


def test_one_that_never_comes_up_is_not_forgiven_however_long_it_tries():
    crashed = InstanceSeen(0, 0.0, failures=5, exited_at=9 * FORGIVES_S)
    (start,) = decide(1, [crashed], now=1000.0).actions
    assert start == StartInstance(0, failures=6)


def test_one_that_is_killed_again_and_again_but_lives_between_waits_for_no_restart():
    """As a router among forty seconds of service: once its clients waited for a minute."""
    now, failures = 0.0, 0
    for _ in range(9):
        now += 4 * FORGIVES_S
        killed = InstanceSeen(0, 0.0, failures, lived_at=now - 4 * FORGIVES_S, exited_at=now)
        (start,) = decide(1, [killed], now=now).actions
        assert start == StartInstance(0, failures=1)
        failures = start.failures


@pytest.mark.parametrize("seed", range(100))
def test_a_random_walk_keeps_the_invariants(seed):
    rng = random.Random(seed)
    seen: dict[int, InstanceSeen] = {}
    replicas, now = rng.randint(0, 5), 0.0
    starts: list[float] = []
    for _ in range(300):
        now += rng.choice([0.1, 0.5, 1.0, 5.0, 20.0])
        if rng.random() < 0.1:
            replicas = rng.randint(0, 5)
        for ordinal, instance in list(seen.items()):
            if instance.exited_at is None and rng.random() < 0.15:
                seen[ordinal] = replace(instance, exited_at=now)
        result = decide(replicas, list(seen.values()), now)
        for action in result.actions:
            apply(action, seen, now, replicas, starts)
        assert sum(alive(i) for i in seen.values()) <= replicas
        again = decide(replicas, list(seen.values()), now).actions
        assert all(isinstance(action, ForgetInstance) for action in again)  # of those just killed
        if any(i.exited_at is not None or i.draining_since is not None for i in seen.values()):
            assert result.recheck_after is None or result.recheck_after > 0
    quiet(seen, replicas, now)


def apply(action, seen, now, replicas, starts) -> None:
    old = seen.get(action.ordinal)
    match action:
        case StartInstance(ordinal, failures):
            if old is not None:  # a restart: the same ordinal, after its back-off
                assert old.exited_at is not None
                assert old.draining_since is None
                assert now - old.exited_at >= 1.0
            starts.append(now)
            seen[ordinal] = InstanceSeen(ordinal, now, failures)
        case DrainInstance(ordinal):
            assert alive(old)
            stay = [i.ordinal for i in seen.values() if i.draining_since is None]
            assert ordinal == max(stay)
            seen[ordinal] = replace(old, draining_since=now)
        case KillInstance(ordinal):
            assert old.draining_since is not None
            assert now - old.draining_since >= DRAIN_S
            assert not old.killed
            seen[ordinal] = replace(old, killed=True, exited_at=now)
        case ForgetInstance(ordinal):
            assert old.exited_at is not None
            del seen[ordinal]


def alive(instance: InstanceSeen) -> bool:
    return instance.exited_at is None and instance.draining_since is None


def quiet(seen, replicas, now) -> None:
    """Without further trouble exactly `replicas` instances live and nothing is left to do."""
    for _ in range(500):
        result = decide(replicas, list(seen.values()), now)
        for action in result.actions:
            apply(action, seen, now, replicas, [])
        if not result.actions and result.recheck_after is None:
            break
        now += result.recheck_after or 0.0
    assert sorted(alive(i) for i in seen.values()) == [True] * replicas
