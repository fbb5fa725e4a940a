"""The circuit breaker in virtual time: what opens it, what closes it."""

from __future__ import annotations

import random

import pytest

from xpyd_router.fleet.breaker import (
    CONSECUTIVE,
    FAILING_SHARE,
    LEAST_CALLS,
    LONGEST_OPEN_S,
    OPEN_S,
    TRIAL_S,
    WINDOW_S,
    Breaker,
)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for number in range(CONSECUTIVE):
        breaker.failed(bytes([number]), now)
    assert breaker.state == "Open"
    return breaker


def play(calls: str, *, step_s: float = 0.0) -> Breaker:
    """A letter is a failed request of that body, a dot a served one."""
    breaker, now = Breaker(), 100.0
    for call in calls:
        if call == ".":
            breaker.succeeded()
        else:
            breaker.failed(call.encode(), now)
        now += step_s
    return breaker


@pytest.mark.parametrize(
    ("calls", "state"),
    [
        ("abcd", "Closed"),
        ("abcde", "Open"),
        ("ababa", "Open"),
        ("a" * 1000, "Closed"),  # one body says nothing, however often it is tried
        ("a" * 1000 + "b", "Open"),
        ("abcd.abcd", "Closed"),
        ("ab.cd.ab.c", "Open"),  # 7 of 10
        ("a.a.a.a.a." * 9, "Closed"),
        ("a.b.c.d.e", "Closed"),  # 5 of 9: too few calls
        ("a.b.c.d.e.f", "Open"),
        ("a..b..c..d..e..f..", "Closed"),  # a third fails
    ],
)
def test_it_opens_for_several_failures_of_several_requests(calls: str, state: str) -> None:
    assert play(calls).state == state


def test_failures_far_apart_are_not_counted_together() -> None:
    assert play("abcdefghij", step_s=WINDOW_S / 4).state == "Closed"
    assert play("abcdefghij", step_s=WINDOW_S / 5).state == "Open"


def test_after_its_time_one_trial_decides() -> None:
    breaker = opened()
    breaker.tick(OPEN_S - 0.01)
    assert breaker.state == "Open"
    breaker.tick(OPEN_S)
    assert breaker.state == "HalfOpen"
    assert not breaker.is_on_trial
    breaker.begin_trial(OPEN_S)
    assert breaker.is_on_trial
    breaker.succeeded()
    assert breaker.state == "Closed"
    assert breaker.is_idle(OPEN_S + 1)


def test_each_failed_trial_doubles_the_time_up_to_a_bound() -> None:
    breaker, now = opened(), 0.0
    waits: list[float] = []
    for _ in range(6):
        waits.append(breaker.left_s(now))
        now += waits[-1]
        breaker.tick(now)
        breaker.begin_trial(now)
        breaker.failed(b"x", now)
    assert waits == [OPEN_S, 2 * OPEN_S, 4 * OPEN_S, 8 * OPEN_S, LONGEST_OPEN_S, LONGEST_OPEN_S]
    now += LONGEST_OPEN_S
    breaker.tick(now)
    breaker.succeeded()
    for number in range(CONSECUTIVE):
        breaker.failed(bytes([number]), now)
    assert breaker.left_s(now) == OPEN_S


def test_a_trial_without_an_end_makes_room_for_another() -> None:
    breaker = opened()
    breaker.tick(OPEN_S)
    breaker.begin_trial(OPEN_S)
    breaker.tick(OPEN_S + TRIAL_S - 0.01)
    assert breaker.is_on_trial
    breaker.tick(OPEN_S + TRIAL_S)
    assert breaker.state == "HalfOpen"
    assert not breaker.is_on_trial


def test_calls_that_began_before_it_opened_change_nothing() -> None:
    breaker = opened()
    for number in range(CONSECUTIVE):
        breaker.failed(b"late%d" % number, 1.0)
    breaker.succeeded()
    breaker.begin_trial(3.0)
    assert (breaker.state, breaker.left_s(0.0)) == ("Open", OPEN_S)


def test_random_walk_agrees_with_a_list_of_calls() -> None:
    """The model keeps the calls since the first failure of the window, and counts them anew."""
    draw = random.Random(7)
    opened_times = 0
    for _ in range(400):
        breaker, now = Breaker(), 0.0
        calls: list[bytes | None] = []  # a body that failed, None: served
        window_ends_s = 0.0
        failing = draw.choice([0.2, 0.5, 0.9])
        bodies = draw.choice([1, 2, 9])
        for _ in range(60):
            now += draw.choice([0.0, 0.1, 5.0])
            body = bytes([draw.randrange(bodies)]) if draw.random() < failing else None
            if now >= window_ends_s:
                calls = []
                window_ends_s = now + WINDOW_S if body is not None else 0.0
            if now < window_ends_s:
                calls.append(body)
            if body is None:
                breaker.succeeded()
            else:
                breaker.failed(body, now)
            failed = [one for one in calls if one is not None]
            run = 0
            for one in reversed(calls):
                if one is None:
                    break
                run += 1
            is_failing = (
                len(calls) >= LEAST_CALLS and len(failed) / len(calls) >= FAILING_SHARE
            ) or run >= CONSECUTIVE
            expected = body is not None and len(set(failed)) >= 2 and is_failing
            assert (breaker.state == "Open") == expected
            if expected:
                opened_times += 1
                break
    assert opened_times > 50
