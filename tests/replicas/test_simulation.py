"""Random requests over replicas in lock step, in fast-forward: `make soak` runs 20,000 of each."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.replicas.simulation import Faults, HangError, LockStepError, Parts, Simulation
from xpyd_worker.replicas.coordinator import Coordinator
from xpyd_worker.replicas.waves import Iteration, ReplicaWave, Report, Vote

CASES = {
    "nothing fails": Faults(),
    "starts and reports are lost": Faults(lost_starts=0.3, lost_reports=0.3),
    "replicas die": Faults(killed_replicas=5),
    "the coordinator dies": Faults(killed_coordinators=20),
    "one replica is slow": Faults(slow_replica=4, stalls=10),
    "all of it": Faults(
        lost_starts=0.2,
        lost_reports=0.2,
        killed_replicas=3,
        killed_coordinators=10,
        stalls=5,
    ),
}


def _serve(requests: int, seed: int, replicas: int, faults: Faults) -> None:
    counted = Simulation(seed, replicas, faults=faults).run(requests)
    assert counted.answered == requests
    assert counted.waves > requests / 100
    assert (counted.fell > 0) == (faults.killed_replicas > 0)
    assert (counted.coordinators > 0) == (faults.killed_coordinators > 0)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_each_request_is_answered_and_replicas_keep_step(case: str, replicas: int) -> None:
    _serve(500, 1, replicas, CASES[case])


@pytest.mark.soak
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_each_of_20_000_requests_is_answered(case: str, replicas: int) -> None:
    _serve(20_000, random.SystemRandom().randrange(2**32), replicas, CASES[case])


@pytest.mark.parametrize("faults", [Faults(), CASES["all of it"]], ids=["calm", "faults"])
def test_replicas_end_in_whatever_state_a_stop_finds_them(faults: Faults) -> None:
    rng = random.Random(5)
    for seed in range(60):
        Simulation(seed, 3, faults=faults).run(30, stop_at_s=rng.random() * 2)


# --- what each rule is for: without it the same runs fail


class OneStartEach(Coordinator):
    """START is sent once in each wave."""

    _told = (0, False)

    def missing(self) -> Sequence[int]:
        told, self._told = self._told, (self.wave, self.is_running)
        return super().missing() if told != self._told else ()


class _HearsChanges(OneStartEach):
    """Reports count as events: one that says what the last one said is none."""

    def heard(self, replica: int, report: Report) -> Sequence[int]:
        last = self._reports[replica]
        is_news = last is None or last[:2] != report[:2]
        return super().heard(replica, report) if is_news else ()


class _TrustsItself(_HearsChanges):
    """A replica's start is not passed on while the coordinator still takes the wave before for
    running: the hang of vLLM's first coordinator, for which no message need be lost."""

    def heard(self, replica: int, report: Report) -> Sequence[int]:
        if self.is_running and report.is_running:
            self._reports[replica] = report
            return ()
        return super().heard(replica, report)


class _EndsAtOnce(Coordinator):
    def may_end(self) -> bool:
        return True


class _HidesLateRequests(ReplicaWave):
    """That a request of an older wave has started the replica is not reported."""

    _hidden = -1

    def take_request(self, wave: int) -> bool:
        if wave < self.wave and not self.is_running:
            self._hidden = self.wave
        return super().take_request(wave)

    def report(self, *, waiting: int, running: int) -> Report:
        report = super().report(waiting=waiting, running=running)
        return report._replace(is_running=report.is_running and report.wave != self._hidden)


class _SaysNothing(ReplicaWave):
    def take_request(self, wave: int) -> bool:
        super().take_request(wave)
        return False

    def report(self, *, waiting: int, running: int) -> Report:
        return super().report(waiting=waiting, running=running)._replace(is_running=False)


class _StartsOldWaves(ReplicaWave):
    def take_start(self, wave: int) -> bool:
        return super().take_start(max(wave, self.wave))


class SkipsACheck(ReplicaWave):
    """Rank 1 leaves its third finish check out."""

    _checks = 0

    def end_iteration(self) -> bool:
        is_due = super().end_iteration()
        self._checks += is_due
        if is_due and self.rank == 1 and self._checks == 3:
            self._iterations = 0
            return False
        return is_due


class _ChecksWhenItIsIdle(ReplicaWave):
    """A replica without requests asks the others at once."""

    def end_iteration(self) -> bool:
        return super().end_iteration() or self._iterations == 12 * (1 + self.rank)


class _NoDummies(ReplicaWave):
    def plan(self, *, has_unfinished: bool, has_finished: bool) -> Iteration:
        plan = super().plan(has_unfinished=has_unfinished, has_finished=has_finished)
        return plan._replace(in_wave=has_unfinished)


class _NeverEnds(ReplicaWave):
    def vote(self, *, has_unfinished: bool) -> Vote:
        return super().vote(has_unfinished=True)


class _KeepsItsNumber(ReplicaWave):
    """The number does not go up at a wave's end."""

    def settle(self, result: Vote) -> bool:
        says = super().settle(result)
        self.wave = result.wave
        return says


_LOST = Faults(lost_starts=0.3)
DEFECTS: dict[str, tuple[Parts, Faults]] = {
    "a lost start is not sent again": (Parts(coordinator=OneStartEach), _LOST),
    "a start depends on what the coordinator believes": (
        Parts(coordinator=_TrustsItself),
        Faults(),
    ),
    "a request of an older wave is not reported": (
        Parts(wave=_HidesLateRequests),
        Faults(),
    ),
    "replicas do not report that they run": (Parts(wave=_SaysNothing), Faults()),
    "a start of an older wave counts": (Parts(wave=_StartsOldWaves), Faults()),
    "a check is left out": (Parts(wave=SkipsACheck), Faults()),
    "replicas check at times of their own": (Parts(wave=_ChecksWhenItIsIdle), Faults()),
    "a replica without requests makes no forward": (Parts(wave=_NoDummies), Faults()),
    "a wave does not end": (Parts(wave=_NeverEnds), Faults()),
    "the number stays at a wave's end": (Parts(wave=_KeepsItsNumber), Faults()),
}


def _fails(parts: Parts, faults: Faults) -> bool:
    for seed in range(8):
        try:
            Simulation(seed, 3, faults=faults, parts=parts).run(500)
        except (HangError, LockStepError):
            return True
    return False


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_simulation_sees_each_defect(defect: str) -> None:
    parts, faults = DEFECTS[defect]
    assert _fails(parts, faults)
    # Not because of what fails beside it.
    assert not _fails(Parts(), faults)


def test_a_replica_that_ends_too_early_holds_up_the_others() -> None:
    def hangs(parts: Parts) -> bool:
        try:
            for seed in range(60):
                Simulation(seed, 3, faults=_LOST, parts=parts).run(30, stop_at_s=1.0)
        except HangError:
            return True
        return False

    assert hangs(Parts(coordinator=_EndsAtOnce))
    assert not hangs(Parts())


def test_reports_of_changes_alone_would_do_where_nothing_is_lost() -> None:
    """So it is not what else `_TrustsItself` leaves out that hangs."""
    assert not _fails(Parts(coordinator=_HearsChanges), Faults())
