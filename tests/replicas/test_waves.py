"""The rules of waves, one by one; test_simulation has all parties together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from xpyd_worker.replicas.choice import FrontEnd, score
from xpyd_worker.replicas.coordinator import PUBLISH_S, Coordinator, Counts, Statistics
from xpyd_worker.replicas.waves import CHECK_EVERY, Iteration, ReplicaWave, Report, Vote


@pytest.mark.parametrize(
    ("is_running", "has_unfinished", "has_finished", "expected"),
    [
        (True, True, False, Iteration(steps=True, in_wave=True)),
        (True, True, True, Iteration(steps=True, in_wave=True)),
        (True, False, True, Iteration(steps=True, in_wave=True)),
        (True, False, False, Iteration(steps=False, in_wave=True)),
        (False, False, True, Iteration(steps=True, in_wave=False)),
        (False, False, False, Iteration(steps=False, in_wave=False)),
    ],
)
def test_what_an_iteration_does(
    *, is_running: bool, has_unfinished: bool, has_finished: bool, expected: Iteration
) -> None:
    """Article fact 56. Idle and not running: no forward, and with it no dummy and no check."""
    wave = ReplicaWave(rank=1, is_running=is_running)
    assert wave.plan(has_unfinished=has_unfinished, has_finished=has_finished) == expected


def _iterations_until_idle(finished_after: int) -> Iterator[tuple[int, bool]]:
    """Number of each iteration and whether it checked, until the replica finds all idle."""
    wave = ReplicaWave(rank=0)
    wave.take_request(0)
    for number in range(1, 1000):
        if not wave.plan(has_unfinished=number <= finished_after, has_finished=False).in_wave:
            return
        is_due = wave.end_iteration()
        if is_due:
            wave.settle(wave.vote(has_unfinished=number < finished_after))
        yield number, is_due


@pytest.mark.parametrize("finished_after", [1, 23, 24, 25, 47, 48, 49, 100])
def test_idle_is_found_at_the_first_multiple_of_24_behind_the_last_finish(
    finished_after: int,
) -> None:
    """Article fact 57."""
    assert CHECK_EVERY == 24
    seen = list(_iterations_until_idle(finished_after))
    assert [number for number, is_due in seen if is_due] == [*range(24, len(seen) + 1, 24)]
    assert len(seen) == -(-finished_after // 24) * 24
    assert len(seen) - finished_after <= 23


def test_the_end_of_a_wave_and_the_start_of_the_next() -> None:
    """Article fact 58."""
    waves = [ReplicaWave(rank, wave=4, is_running=True) for rank in range(3)]
    says = [wave.settle(Vote(0, 4)) for wave in waves]
    assert says == [True, False, False]
    assert [(wave.wave, wave.is_running) for wave in waves] == [(5, False)] * 3
    idle = waves[1]
    assert not idle.take_start(4)
    assert (idle.wave, idle.is_running) == (5, False)
    assert idle.take_start(5)
    assert (idle.wave, idle.is_running) == (5, True)
    assert not idle.take_start(5)
    assert idle.take_start(7)
    assert (idle.wave, idle.is_running) == (7, True)


@pytest.mark.parametrize(
    ("is_running", "of_request", "after", "reports"),
    [
        (False, 5, 5, True),
        (False, 6, 6, True),  # a newer wave raises the local one
        (False, 3, 5, True),  # a wave that has ended: the next one starts
        (True, 5, 5, False),
        (True, 3, 5, False),
        (True, 6, 6, True),
    ],
)
def test_a_request_starts_an_idle_replica_which_says_so(
    *, is_running: bool, of_request: int, after: int, reports: bool
) -> None:
    wave = ReplicaWave(rank=1, wave=5, is_running=is_running)
    assert wave.take_request(of_request) is reports
    assert wave.report(waiting=1, running=0) == Report(after, is_running=True, waiting=1)


def test_replicas_that_were_told_different_waves_agree_at_the_end() -> None:
    """Else a START of the newer number, still on its way, would start the older one alone."""
    waves = [ReplicaWave(0), ReplicaWave(1)]
    waves[0].take_request(7)
    waves[1].take_start(0)
    votes = [wave.vote(has_unfinished=False) for wave in waves]
    for wave in waves:
        wave.settle(Vote(*map(max, zip(*votes, strict=True))))
    assert [wave.wave for wave in waves] == [8, 8]
    assert not waves[1].take_start(7)
    assert not waves[1].is_running


def test_a_wave_goes_on_while_any_replica_has_a_request() -> None:
    wave = ReplicaWave(rank=0, wave=2, is_running=True)
    for number in range(1, 25):
        assert wave.end_iteration() is (number == 24)
    assert not wave.settle(Vote(1, 2))
    assert (wave.wave, wave.is_running) == (2, True)
    assert not wave.end_iteration()


# --- the coordinator


def _coordinator(*reports: Report) -> Coordinator:
    coordinator = Coordinator(len(reports))
    for replica, report in enumerate(reports):
        coordinator.heard(replica, report)
    return coordinator


IDLE, RUNS = Report(5, is_running=False), Report(5, is_running=True)


def test_who_runs_is_told_to_all_others_until_they_say_that_they_run() -> None:
    coordinator = _coordinator(IDLE, IDLE, IDLE)
    assert coordinator.missing() == ()
    assert coordinator.heard(1, RUNS) == [0, 2]
    assert coordinator.missing() == [0, 2]
    assert coordinator.heard(0, RUNS) == ()
    assert coordinator.missing() == [2]
    assert coordinator.heard(2, RUNS) == ()
    assert coordinator.missing() == []


def test_a_question_starts_all_unless_it_is_of_a_wave_that_is_over() -> None:
    coordinator = _coordinator(IDLE, IDLE)
    assert coordinator.asked(4) == ()
    assert coordinator.asked(5) == [0, 1]
    assert coordinator.asked(5) == ()
    assert coordinator.statistics().is_running


def test_a_wave_ends_with_the_report_of_the_next_one() -> None:
    coordinator = _coordinator(RUNS, RUNS)
    coordinator.heard(0, Report(6, is_running=False))
    # A report from before is no start of a wave that is over.
    assert coordinator.heard(1, RUNS) == ()
    assert coordinator.statistics() == Statistics((Counts(0, 0), Counts(0, 0)), 6, False)


def test_a_start_that_overtakes_the_end_of_the_wave_before_counts() -> None:
    coordinator = _coordinator(RUNS, RUNS)
    assert coordinator.heard(1, Report(6, is_running=True)) == [0]
    coordinator.heard(0, Report(6, is_running=False))
    assert coordinator.missing() == [0]


def test_a_coordinator_without_memory_learns_the_wave() -> None:
    coordinator = Coordinator(3)
    assert coordinator.heard(2, RUNS) == []
    assert coordinator.heard(0, Report(5, is_running=False, waiting=3)) == ()
    assert coordinator.missing() == [0]
    assert coordinator.statistics() == Statistics((Counts(3, 0), None, Counts(0, 0)), 5, True)


def test_a_lost_replica_has_no_counts_and_the_last_one_takes_the_wave_along() -> None:
    coordinator = _coordinator(RUNS, RUNS)
    coordinator.lost(0)
    assert coordinator.statistics() == Statistics((None, Counts(0, 0)), 5, True)
    coordinator.lost(1)
    assert coordinator.statistics() == Statistics((None, None), 0, False)
    assert coordinator.heard(0, Report(0, is_running=False)) == ()


def test_replicas_may_end_when_all_have_said_that_they_are_idle_behind_the_last_wave() -> None:
    assert not _coordinator(IDLE, RUNS).may_end()
    assert not _coordinator(IDLE, Report(6, is_running=False)).may_end()
    assert not _coordinator(IDLE, Report(5, is_running=False, running=1)).may_end()
    coordinator = _coordinator(IDLE, IDLE)
    assert coordinator.may_end()
    coordinator.asked(5)
    assert not coordinator.may_end()


# --- the front end


def test_the_replica_with_the_smallest_4_x_waiting_plus_running_gets_the_request() -> None:
    """Article fact 59."""
    assert PUBLISH_S == 0.1
    assert (score(Counts(1, 0)), score(Counts(0, 5))) == (4, 5)
    front_end = FrontEnd(2)
    front_end.take(Statistics((Counts(1, 0), Counts(0, 5)), 0, True))
    assert front_end.pick() == 0
    front_end.take(Statistics((Counts(0, 5), Counts(1, 0)), 0, True))
    assert front_end.pick() == 1


def test_a_burst_between_two_statistics_is_divided() -> None:
    front_end = FrontEnd(3)
    sent: list[int] = []
    for _ in range(6):
        replica = front_end.pick()
        assert replica is not None
        front_end.send(replica)
        sent.append(replica)
    assert sent == [0, 1, 2, 0, 1, 2]
    front_end.publish([Counts(0, 9), Counts(0, 0), None])
    assert front_end.pick() == 1


def test_front_ends_with_the_same_counts_do_not_meet_on_one_replica() -> None:
    front_ends = [FrontEnd(4, number=number, front_ends=2) for number in range(2)]
    assert [front_end.pick() for front_end in front_ends] == [0, 2]
    # What one sends the other sends likely, too.
    front_ends[0].publish([Counts(0, 0), Counts(1, 1), Counts(9, 0), Counts(9, 0)])
    front_ends[0].send(0)
    assert front_ends[0].pick() == 1


def test_no_replica_is_picked_where_none_is_there() -> None:
    front_end = FrontEnd(2)
    front_end.publish([None, None])
    assert front_end.pick() is None
    assert front_end.send(1)


def test_a_start_is_asked_for_once_while_no_wave_runs() -> None:
    front_end = FrontEnd(2)
    assert front_end.send(0)
    assert not front_end.send(1)
    front_end.take(Statistics((Counts(0, 0), Counts(0, 0)), 3, False))
    assert (front_end.wave, front_end.send(0)) == (3, True)
