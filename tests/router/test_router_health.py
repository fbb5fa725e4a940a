"""The health of instances in virtual time: who is out, who comes back, with what share."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.router.beats import beat
from xpyd_router.errors import FailureCause
from xpyd_router.fleet.breaker import CONSECUTIVE, OPEN_S, WINDOW_S
from xpyd_router.fleet.health import (
    SILENT,
    SILENT_AND_LATE,
    WEIGHT_FLOOR,
    Health,
    HealthRules,
    ProbeResult,
)
from xpyd_router.fleet.instances import Instance, InstanceKey, kind_of
from xpyd_router.fleet.poison import Break, judge
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView

ONE = InstanceKey("10.0.0.1:20001", "inc")
TWO = InstanceKey("10.0.0.2:20001", "inc")
THREE = InstanceKey("10.0.0.3:20001", "inc")
SIDE = kind_of(beat("D"))


def health(*keys: InstanceKey, seed: int = 1, **rules: float) -> Health:
    found = Health(HealthRules(**rules), random.Random(seed).random)
    for key in keys:
        found.ready(key, SIDE, 0.0)
    return found


def fail(
    found: Health,
    cause: FailureCause = "connect",
    *,
    key: InstanceKey = ONE,
    body: bytes = b"a",
    now: float = 0.0,
) -> Break | None:
    return found.failed(key, cause, body, now)


def probe(
    found: Health,
    result: ProbeResult = "ok",
    *,
    key: InstanceKey = ONE,
    now: float = 0.0,
    is_late: bool = False,
) -> bool:
    return found.probed(key, result, began_s=now, is_late=is_late, now=now)


def next_probe_s(found: Health, now: float) -> float:
    """When the only instance is probed next, after it was taken for a probe."""
    found.plan.take(now, 0)
    return now + found.plan.wait_s(now)


@pytest.mark.parametrize(
    ("cause", "standing"),
    [
        ("connect", "Ejected"),
        ("reset", "Ejected"),
        ("incomplete", "Ejected"),
        ("timeout", "Good"),
        ("status", "Good"),
        ("answer", "Good"),
        ("refused", "Good"),
        ("too_large", "Good"),
        ("lost", "Good"),
        ("transfer", "Good"),
    ],
)
def test_a_call_that_broke_off_ejects_at_once(cause: Any, standing: str) -> None:
    found = health(ONE)
    fail(found, cause)
    assert found.standing(ONE) == standing
    assert found.standing(TWO) == "Good"


def test_a_beat_does_not_bring_it_back_and_a_probe_does() -> None:
    found = health(ONE)
    fail(found, now=1.0)
    found.ready(ONE, SIDE, 3.0)
    assert found.standing(ONE) == "Ejected"
    probe(found, now=4.0)
    assert found.standing(ONE) == "Good"


def test_an_ejected_instance_is_probed_at_once_then_less_and_less_often() -> None:
    found, now = health(ONE), 100.0
    fail(found, now=now)
    waits: list[float] = []
    for _ in range(9):
        assert found.plan.take(now, 9) == [ONE]
        probe(found, "connect", now=now)
        due_s = next_probe_s(found, now)
        waits.append(due_s - now)
        now = due_s
    assert waits == pytest.approx([0.25, 0.5, 1, 2, 4, 8, 10, 10, 10])


def test_an_answer_to_a_probe_that_began_before_the_fault_does_not_count() -> None:
    found = health(ONE)
    fail(found, now=2.0)
    found.probed(ONE, "ok", began_s=1.9, is_late=False, now=2.1)
    assert found.standing(ONE) == "Ejected"


def test_who_is_ejected_again_and_again_stays_out_for_longer() -> None:
    found, now = health(ONE), 100.0
    holds: list[float] = []
    for number in range(8):
        fail(found, body=bytes([number]), now=now)
        began_s = now
        while found.standing(ONE) == "Ejected":
            probe(found, now=now)
            now = next_probe_s(found, now)
        holds.append(found._records[ONE].returned_s - began_s)
    assert holds == pytest.approx([0, 1, 2, 4, 8, 16, 30, 30])
    now += 61.0
    fail(found, now=now)
    probe(found, now=now)
    assert found.standing(ONE) == "Good"


def test_one_request_that_breaks_off_again_does_not_make_it_stay_out_longer() -> None:
    found, now = health(ONE), 100.0
    for _ in range(5):
        fail(found, "reset", body=b"same", now=now)
        probe(found, now=now)
        assert found.standing(ONE) == "Good"
        now += 1.0


@pytest.mark.parametrize(
    ("results", "is_late", "standing", "is_dead"),
    [
        (["timeout"], True, "Good", False),
        (["timeout"] * SILENT_AND_LATE, True, "Ejected", True),
        (["timeout"] * (SILENT - 1), False, "Good", False),
        (["timeout"] * SILENT, False, "Ejected", False),
        (["timeout", "ok", "timeout"], True, "Good", False),
        (["timeout", "void", "timeout"], True, "Ejected", True),
        (["void"] * 20, True, "Good", False),
        (["connect"], False, "Ejected", False),
        (["status"], False, "Good", False),
        (["status", "status"], False, "Ejected", False),
        (["reset", "status"], False, "Ejected", False),
        (["status", "ok", "status"], False, "Good", False),
    ],
)
def test_probes_take_an_instance_out(
    results: list[ProbeResult], is_late: bool, standing: str, is_dead: bool
) -> None:
    found = health(ONE)
    said = [probe(found, result, now=float(n), is_late=is_late) for n, result in enumerate(results)]
    assert found.standing(ONE) == standing
    assert said == [False] * (len(results) - 1) + [is_dead]
    probe(found, now=50.0)
    assert found.standing(ONE) == "Good"


def test_a_silent_instance_is_probed_again_without_a_pause() -> None:
    found = health(ONE)
    assert found.plan.take(2.0, 9) == [ONE]
    probe(found, "timeout", now=4.0)
    assert next_probe_s(found, 4.0) == 4.0


def test_a_frozen_instance_is_told_once() -> None:
    found = health(ONE)
    said = [probe(found, "timeout", now=float(n), is_late=True) for n in range(6)]
    assert said == [False, True, False, False, False, False]


def test_the_first_beat_of_a_frozen_instance_has_it_probed_at_once() -> None:
    found = health(ONE)
    found.plan.take(2.0, 9)
    for now in (4.0, 6.0, 8.0, 10.0, 12.0, 14.0):
        probe(found, "timeout", now=now, is_late=True)
    assert next_probe_s(found, 14.0) == 16.0
    found.ready(ONE, SIDE, 15.0)
    assert found.plan.take(15.0, 9) == [ONE]


def test_five_failures_of_two_requests_open_the_breaker_and_one_trial_closes_it() -> None:
    found = health(ONE, TWO)
    for number in range(CONSECUTIVE):
        fail(found, "status", body=bytes([number % 2]))
    assert (found.standing(ONE), found.standing(TWO)) == ("Open", "Good")
    assert found.tick(OPEN_S) == (ONE,)
    assert found.standing(ONE) == "HalfOpen"
    found.begin_trial(ONE, OPEN_S)
    assert found.standing(ONE) == "Trial"
    found.succeeded(ONE, OPEN_S + 1)
    assert found.standing(ONE) == "Good"
    assert found.share(ONE, OPEN_S + 1) == WEIGHT_FLOOR


def test_calls_that_break_off_together_are_one_fault() -> None:
    found = health(ONE)
    for number in range(50):
        fail(found, "reset", body=bytes([number]))
    probe(found)
    assert found.standing(ONE) == "Good"


def test_who_failed_once_is_forgotten_when_nothing_follows() -> None:
    found = health(ONE)
    fail(found, "status")
    assert found.breakers
    found.tick(59.0)
    assert found.breakers
    found.tick(60.0)
    assert not found.breakers
    assert found._records[ONE].breaker is None


def met(broken: Break | None) -> Break:
    assert broken is not None
    return broken


def test_a_break_is_a_death_when_a_probe_finds_nobody() -> None:
    found = health(ONE, TWO)
    breaks = [met(fail(found, "reset", key=key)) for key in (ONE, TWO)]
    assert judge(breaks) == "open"
    probe(found, "connect")
    assert judge(breaks) == "open"
    probe(found, "connect", key=TWO)
    assert judge(breaks) == "guilty"


def test_a_break_is_none_when_the_instance_answers_a_probe() -> None:
    found = health(ONE, TWO)
    breaks = [met(fail(found, "incomplete", key=key)) for key in (ONE, TWO)]
    probe(found, "connect")
    probe(found, key=TWO)
    assert judge(breaks) == "innocent"


@pytest.mark.parametrize(
    "cause", ["connect", "timeout", "status", "refused", "answer", "too_large", "transfer"]
)
def test_only_a_call_that_broke_off_may_be_a_death(cause: Any) -> None:
    assert fail(health(ONE), cause) is None


def test_an_instance_that_is_silent_is_not_dead() -> None:
    """It may be slow, or its machine."""
    found = health(ONE, TWO)
    breaks = [met(fail(found, "reset", key=ONE, now=0.0))]
    for now in (1.0, 2.0):
        probe(found, "timeout", key=ONE, now=now, is_late=True)
        probe(found, "timeout", key=TWO, now=now, is_late=True)
    breaks.append(met(fail(found, "lost", key=TWO, now=2.0)))
    found.leave(ONE, 3.0, "silent")
    found.leave(TWO, 3.0, "silent")
    assert judge(breaks) == "open"
    assert fail(found, "lost", key=TWO, now=3.0) is None


def test_a_frozen_instance_that_is_killed_is_a_death() -> None:
    found = health(ONE, TWO)
    for now in (1.0, 2.0):
        probe(found, "timeout", now=now, is_late=True)
    broken = met(fail(found, "lost", now=2.0))
    probe(found, "connect", now=3.0)
    assert broken.fate == "dead"


def test_an_instance_that_was_replaced_had_died() -> None:
    found = health(ONE, TWO)
    broken = met(fail(found, "reset", now=0.0))
    found.leave(ONE, 1.0, "replaced")
    assert broken.fate == "dead"
    assert met(fail(found, "lost", now=1.0)) is broken


@pytest.mark.parametrize("cause", ["reset", "incomplete", "lost"])
def test_an_instance_that_drained_was_not_killed(cause: Any) -> None:
    found = health(ONE)
    before = met(fail(found, "reset"))
    found.leave(ONE, 1.0, "goodbye")
    assert before.fate == "alive"
    found.leave(ONE, 2.0, "replaced")  # its grace was over
    assert fail(found, cause, now=2.0) is None
    assert before.fate == "alive"


THREE = InstanceKey("10.0.0.3:20001", "inc")


def fail_transfers(found: Health, *pairs: tuple[InstanceKey, InstanceKey]) -> None:
    """As many as open a breaker, each of another request."""
    for number in range(CONSECUTIVE + 1):
        prefill, decode = pairs[number % len(pairs)]
        found.transfer_failed(prefill, decode, bytes([number]), 0.0)


def test_transfers_that_fail_between_two_count_for_neither() -> None:
    found = health(ONE, TWO)
    fail_transfers(found, (ONE, TWO))
    assert not found.breakers


def test_transfers_that_fail_with_several_partners_count_for_what_they_share() -> None:
    found = health(ONE, TWO, THREE)
    fail_transfers(found, (ONE, TWO), (ONE, THREE))
    assert [found.standing(key) for key in (ONE, TWO, THREE)] == ["Open", "Good", "Good"]


def test_partners_long_apart_do_not_count_together() -> None:
    found = health(ONE, TWO, THREE)
    for number in range(2 * CONSECUTIVE):
        partner = (TWO, THREE)[number % 2]
        found.transfer_failed(ONE, partner, bytes([number]), number * WINDOW_S)
    assert not found.breakers


def test_after_a_failed_transfer_both_are_probed() -> None:
    found = health(ONE, TWO)
    found.plan.take(100.0, 9)
    for key in (ONE, TWO):
        probe(found, key=key, now=100.0)
    found.transfer_failed(ONE, TWO, b"a", 100.1)
    assert set(found.plan.take(100.1, 9)) == {ONE, TWO}


def members(*hosts: int, now: float = 0.0) -> tuple[Instance, ...]:
    registry = Registry(period_s=3.0, missed_beats=3)
    for host in hosts:
        registry.apply(beat("D", host=host, incarnation="inc"), now)
    return registry.instances


def test_a_new_instance_begins_with_little_and_grows() -> None:
    found = health(ONE)
    found.ready(TWO, SIDE, 100.0)
    both = members(1, 2)
    shares = [found.weights(both, 100.0 + age_s).get(TWO, 1.0) for age_s in (0.0, 5.0, 10.0)]
    assert shares == pytest.approx([WEIGHT_FLOOR, (1 + WEIGHT_FLOOR) / 2, 1.0])
    assert found.weights(both, 100.0).get(ONE, 1.0) == 1.0


def test_where_all_are_new_all_have_the_same_share() -> None:
    found = health(ONE, TWO)
    assert found.weights(members(1, 2), 0.0) == {}


def test_who_begins_within_the_fleets_first_moments_begins_with_the_others() -> None:
    found = health(ONE)
    found.ready(TWO, SIDE, 9.9)
    assert found.weights(members(1, 2), 9.9) == {}
    found.ready(THREE, SIDE, 10.0)
    assert found.weights(members(1, 2, 3), 10.0) == {THREE: WEIGHT_FLOOR}


def test_an_old_instance_of_another_side_or_one_that_left_is_nobody_to_join() -> None:
    found = health(ONE)
    found.ready(TWO, kind_of(beat("P")), 100.0)
    found.leave(ONE, 101.0, "silent")
    found.ready(THREE, SIDE, 102.0)
    assert found.share(TWO, 102.0) == found.share(THREE, 102.0) == 1.0


def test_where_none_is_whole_shares_are_compared_with_the_largest() -> None:
    found = health(ONE)
    found.ready(TWO, SIDE, 100.0)
    found.ready(THREE, SIDE, 105.0)
    found.leave(ONE, 105.0, "goodbye")
    largest = (1 + WEIGHT_FLOOR) / 2
    assert found.weights(members(2, 3), 105.0) == {THREE: pytest.approx(WEIGHT_FLOOR / largest)}


def test_an_idle_new_fleet_is_used_evenly_and_who_joins_it_later_is_not() -> None:
    now = 0.0
    view = FleetView(Registry(period_s=3.0, missed_beats=3), lambda: now)
    for host in (1, 2, 3):
        view.apply(beat("D", host=host))
        view.tick()
        now += 0.5
    keys = [instance.key for instance in view.instances]
    assert [view.load(key).weight for key in keys] == [1.0, 1.0, 1.0]
    now = 60.0
    view.apply(beat("D", host=4))
    (late,) = (one.key for one in view.instances if one.key not in keys)
    for age_s, weight in ((0.0, WEIGHT_FLOOR), (5.0, (1 + WEIGHT_FLOOR) / 2), (10.0, 1.0)):
        now = 60.0 + age_s
        view.tick()
        assert view.load(late).weight == pytest.approx(weight)
    assert [view.load(key).weight for key in keys] == [1.0, 1.0, 1.0]


def test_where_the_old_ones_are_out_a_new_one_has_its_whole_share() -> None:
    found = health(ONE)
    found.ready(TWO, SIDE, 100.0)
    registry = Registry(period_s=3.0, missed_beats=3)
    for host in (1, 2):
        registry.apply(beat("D", host=host, incarnation="inc"), 100.0)
    registry.set_standing(ONE, "Ejected")
    assert found.weights(registry.instances, 100.0) == {}


def test_slow_start_is_only_for_who_was_away_for_a_while() -> None:
    found = health(ONE, TWO)
    fail(found, now=100.0)
    probe(found, now=100.5)
    assert found.weights(members(1, 2), 100.5) == {}
    fail(found, key=TWO, now=100.0)
    probe(found, key=TWO, now=110.0)
    assert found.weights(members(1, 2), 110.0) == {TWO: WEIGHT_FLOOR}


def test_without_slow_start_all_shares_are_whole() -> None:
    found = health(ONE, slow_start_s=0.0)
    found.ready(TWO, SIDE, 100.0)
    assert found.weights(members(1, 2), 100.0) == {}


def test_what_left_is_forgotten() -> None:
    found = health(ONE)
    fail(found, "status")
    found.leave(ONE, 1.0, "goodbye")
    assert not any((found._records, found._rising, found.breakers))
    found.succeeded(ONE, 2.0)
    assert not probe(found, "timeout", now=3.0)
    assert found.plan.take(100.0, 9) == []


def act_at_random(found: Health, key: InstanceKey, now: float, draw: random.Random) -> str:
    """One thing that happens to an instance; its name, a probe's with its result."""
    act = draw.choice(["fail", "fail", "serve", "probe", "beat", "tick", "trial"])
    if act == "fail":
        causes: list[FailureCause] = ["status", "timeout", "answer", "refused"]
        if draw.random() < 0.05:
            causes = ["connect", "reset"]
        fail(found, draw.choice(causes), key=key, body=bytes([draw.randrange(4)]), now=now)
    elif act == "serve" and found.breakers:
        found.succeeded(key, now)
    elif act == "probe":
        results: list[ProbeResult] = [*["ok"] * 20, "timeout", "connect", "status"]
        result = draw.choice(results)
        probe(found, result, key=key, now=now, is_late=draw.random() < 0.5)
        return f"probe {result}"
    elif act == "beat":
        found.ready(key, SIDE, now)
    elif act == "tick":
        found.tick(now)
    elif act == "trial" and found.standing(key) == "HalfOpen":
        found.begin_trial(key, now)
    return act


@pytest.mark.parametrize("seed", range(20))
def test_random_walk_keeps_the_promises(seed: int) -> None:
    """Who is out got there by a fault; who comes back was proved to answer since, and not early."""
    draw = random.Random(seed)
    found, now = health(ONE, TWO, seed=seed), 0.0
    seen: set[str] = set()
    for _ in range(2000):
        now += draw.choice([0.0, 0.1, 0.1, 0.5, 3.0])
        key = draw.choice([ONE, TWO])
        before, hold_until_s = found.standing(key), found._records[key].hold_until_s
        act = act_at_random(found, key, now, draw)
        after = found.standing(key)
        seen.add(after)
        if before == "Ejected" and after != "Ejected":
            assert act == "probe ok"
            assert now >= hold_until_s
        if after != before and after in ("Ejected", "Open"):
            assert act.split()[0] in ("fail", "probe")
        if (before, after) == ("Open", "HalfOpen"):
            assert act == "tick"
        if before in ("HalfOpen", "Trial") and after == "Good":
            assert act == "serve"
        assert WEIGHT_FLOOR <= found.share(key, now) <= 1.0
        assert key in found.plan._due  # nobody is forgotten
    assert seen == {"Good", "Ejected", "Open", "HalfOpen", "Trial"}
