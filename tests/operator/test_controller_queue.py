"""Which fleet is looked at next: coalescing, spacing, back-off, and the workers that wait."""

from __future__ import annotations

import asyncio
import random

import pytest

from xpyd_operator.controller.decision.cache import FleetKey
from xpyd_operator.controller.workqueue import (
    BACKOFF_MOST_S,
    GATHER_S,
    MAX_SPACING_S,
    SPACING_S,
    FleetQueue,
    Schedule,
)

A = FleetKey("ns", "a")
B = FleetKey("ns", "b")


def test_many_wakes_are_one_turn() -> None:
    schedule = Schedule()
    for step in range(100):
        schedule.wake(A, step / 10000)
    assert schedule.take(GATHER_S / 2) is None
    assert schedule.take(GATHER_S) == A
    assert schedule.take(1000.0) is None
    assert schedule.wait_s(1000.0) is None


def test_the_fleet_that_is_due_longest_comes_first() -> None:
    schedule = Schedule()
    schedule.wake(B, 0.0, after=1.0)
    schedule.wake(A, 0.0, after=2.0)
    assert [schedule.take(5.0), schedule.take(5.0)] == [B, A]


def test_a_fleet_is_in_one_workers_hands_and_a_wake_meanwhile_is_not_lost() -> None:
    schedule = Schedule()
    schedule.wake(A, 0.0, after=0.0)
    assert schedule.take(0.0) == A
    schedule.wake(A, 0.1)
    schedule.wake(A, 0.2)
    assert schedule.take(10.0) is None
    schedule.done(A, 10.0, took_s=0.0, recheck_after=None)
    assert schedule.take(10.0) is None
    assert schedule.take(10.0 + SPACING_S) == A


@pytest.mark.parametrize(
    ("took_s", "quiet_s"), [(0.0, SPACING_S), (0.1, 0.9), (30.0, MAX_SPACING_S)]
)
def test_a_long_turn_is_followed_by_a_long_quiet(took_s: float, quiet_s: float) -> None:
    schedule = Schedule()
    schedule.wake(A, 0.0, after=0.0)
    schedule.take(0.0)
    schedule.done(A, 0.0, took_s=took_s, recheck_after=None)
    schedule.wake(A, 0.0)
    assert schedule.wait_s(0.0) == pytest.approx(quiet_s)


def test_a_document_that_changes_while_its_turn_fails_is_looked_at_at_once() -> None:
    schedule = Schedule()
    schedule.wake(A, 0.0, after=0.0)
    for now in range(7):
        assert schedule.take(now * 100.0) == A
        schedule.failed(A, now * 100.0)
    assert schedule.take(700.0) == A
    schedule.wake(A, 700.0, urgent=True)
    assert schedule.failed(A, 701.0) == BACKOFF_MOST_S
    assert schedule.take(701.0 + GATHER_S) == A
    # Not so what was no change of its document.
    schedule.wake(A, 702.0)
    schedule.failed(A, 703.0)
    assert schedule.take(710.0) is None


def test_nobody_else_makes_a_fleet_wait_longer_than_the_longest_back_off() -> None:
    schedule = Schedule()
    schedule.wake(A, 0.0, after=0.0)
    assert schedule.take(0.0) == A
    assert schedule.failed(A, 0.0, at_least=86400.0) == BACKOFF_MOST_S


def test_a_recheck_comes_by_itself_and_an_event_comes_before_it() -> None:
    schedule = Schedule()
    schedule.wake(A, 0.0, after=0.0)
    schedule.take(0.0)
    schedule.done(A, 0.0, took_s=0.0, recheck_after=10.0)
    assert schedule.wait_s(0.0) == 10.0
    schedule.wake(A, 5.0)
    assert schedule.take(5.0 + GATHER_S) == A
    # The earlier plan was overtaken, not kept beside it.
    schedule.done(A, 6.0, took_s=0.0, recheck_after=None)
    assert schedule.take(100.0) is None


def test_failures_back_off_to_a_minute_and_a_good_turn_ends_that() -> None:
    schedule, now, waits = Schedule(), 0.0, []
    schedule.wake(A, now, after=0.0)
    for _ in range(9):
        assert schedule.take(now) == A
        waits.append(schedule.failed(A, now))
        now += waits[-1]
    assert waits == [1, 2, 4, 8, 16, 32, BACKOFF_MOST_S, BACKOFF_MOST_S, BACKOFF_MOST_S]
    assert schedule.take(now) == A
    schedule.done(A, now, took_s=0.0, recheck_after=None)
    schedule.wake(A, now, after=SPACING_S)
    assert schedule.take(now + SPACING_S) == A
    assert schedule.failed(A, now) == 1.0


def test_events_do_not_shorten_a_back_off_but_a_new_document_does() -> None:
    schedule = Schedule()
    schedule.wake(A, 0.0, after=0.0)
    schedule.take(0.0)
    assert schedule.failed(A, 0.0, at_least=30.0) == 30.0
    schedule.wake(A, 1.0)
    assert schedule.wait_s(1.0) == 29.0
    schedule.wake(A, 2.0, urgent=True)
    assert schedule.wait_s(2.0) == pytest.approx(GATHER_S)


def test_a_forgotten_fleet_is_not_looked_at() -> None:
    schedule = Schedule()
    schedule.wake(A, 0.0)
    schedule.forget(A)
    assert schedule.take(100.0) is None
    assert len(schedule) == 0


def test_the_depth_counts_what_is_due() -> None:
    schedule = Schedule()
    schedule.wake(A, 0.0, after=1.0)
    schedule.wake(B, 0.0, after=5.0)
    assert [schedule.depth(t) for t in (0.0, 2.0, 6.0)] == [0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_wake_is_lost_and_no_fleet_is_taken_twice(seed: int) -> None:
    chance, schedule, now = random.Random(seed), Schedule(), 0.0
    keys = [FleetKey("ns", str(n)) for n in range(5)]
    taken: set[FleetKey] = set()
    owed: set[FleetKey] = set()
    for _ in range(400):
        now += chance.choice([0.0, 0.01, 0.1, 1.0])
        move = chance.randrange(4)
        if move == 0:
            key = chance.choice(keys)
            schedule.wake(key, now, urgent=chance.random() < 0.2)
            owed.add(key)
        elif move == 1:
            found = schedule.take(now)
            if found is not None:
                assert found not in taken
                taken.add(found)
                owed.discard(found)
        elif taken:
            key = chance.choice(sorted(taken))
            taken.discard(key)
            if move == 2:
                schedule.done(key, now, took_s=chance.random(), recheck_after=None)
            else:
                schedule.failed(key, now)
                owed.add(key)
    for key in sorted(taken):
        schedule.done(key, now, took_s=0.0, recheck_after=None)
    later: set[FleetKey] = set()
    while (found := schedule.take(now + 1000.0)) is not None:
        later.add(found)
    assert owed <= later


def test_workers_wait_until_a_fleet_is_due_and_each_gets_one() -> None:
    async def main() -> None:
        queue = FleetQueue(asyncio.get_running_loop().time)
        workers = [asyncio.create_task(queue.take()) for _ in range(3)]
        await asyncio.sleep(0)
        queue.wake(A, after=0.0)
        queue.wake(B, after=0.0)
        async with asyncio.timeout(5):
            first, rest = await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
            while len(first) < 2:
                more, rest = await asyncio.wait(rest, return_when=asyncio.FIRST_COMPLETED)
                first |= more
            assert {task.result() for task in first} == {A, B}
            queue.done(A, took_s=0.0, recheck_after=0.0)
            assert await rest.pop() == A

    asyncio.run(main())


def test_a_closed_queue_sends_everybody_home() -> None:
    async def main() -> None:
        queue = FleetQueue(asyncio.get_running_loop().time)
        workers = [asyncio.create_task(queue.take()) for _ in range(3)]
        await asyncio.sleep(0)
        queue.close()
        async with asyncio.timeout(5):
            assert await asyncio.gather(*workers) == [None, None, None]
        assert await queue.take() is None

    asyncio.run(main())


def test_a_worker_that_gives_up_takes_no_wake_with_it() -> None:
    async def main() -> None:
        queue = FleetQueue(asyncio.get_running_loop().time)
        gone = asyncio.create_task(queue.take())
        stays = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        gone.cancel()
        queue.wake(A, after=0.0)
        async with asyncio.timeout(5):
            assert await stays == A
        with pytest.raises(asyncio.CancelledError):
            await gone

    asyncio.run(main())
