"""Which of several things that go wrong at about one time was the first, in looks instead of
seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.ranks.loss import (
    EXIT_RANK_ENDED,
    EXIT_RANK_SILENT,
    EXIT_STEP_STUCK,
    RANK_MISSES_OTHERS,
    Failure,
    Loss,
    rank_identity,
)
from xpyd_worker.ranks.watch.beats import Beat
from xpyd_worker.ranks.watch.judge import (
    DOWN_LOOKS,
    IDLE_LOOKS,
    LOOK_S,
    SILENT_LOOKS,
    STARTING_SILENT_LOOKS,
    Judge,
)

SIZES = Sizes(pipeline=2, tensor=2)
MISSES = Failure("no answer", misses_others=True)


class Ranks:
    """Four ranks that beat and compute, but for those told otherwise."""

    def __init__(self, *, started: bool = True) -> None:
        self.judge = Judge(4, lambda rank: rank_identity(rank, SIZES, pid=100 + rank))
        if started:
            for rank in range(4):
                self.judge.opened(rank)
            self.judge.started()
        self.beats = [Beat() for _ in range(4)]
        self.stopped: set[int] = set()
        self.computed_ns = 50_000_000
        self.working: set[int] = set()
        self.elsewhere: Callable[[], Sequence[Beat]] = tuple

    def look(self, times: int = 1) -> Loss | None:
        """The last of so many looks, or the first that finds something."""
        for _ in range(times):
            for rank, beat in enumerate(self.beats):
                if rank not in self.stopped:
                    ns = beat.processor_ns + self.computed_ns
                    self.beats[rank] = Beat(beat.beats + 1, int(rank in self.working), 0, ns)
            if loss := self.judge.look(self.beats, self.elsewhere()):
                return loss
        return None


def test_ranks_that_do_well_are_no_loss() -> None:
    ranks = Ranks()
    ranks.working = {0, 1, 2, 3}
    assert ranks.look(1000) is None


def test_a_killed_rank_is_named_at_once_with_its_place_and_its_end() -> None:
    ranks = Ranks()
    ranks.judge.ended(3, -9)
    loss = ranks.look()
    assert loss is not None
    assert loss.status == EXIT_RANK_ENDED
    assert loss.text.startswith("rank 3 (stage 1, tensor share 1, pid 103) was ended by SIGKILL")


def test_who_was_killed_comes_before_whom_its_end_made_fail() -> None:
    ranks = Ranks()
    ranks.judge.failed(0, MISSES)
    ranks.judge.ended(0, RANK_MISSES_OTHERS)
    assert ranks.look() is None
    ranks.judge.ended(2, -11)
    loss = ranks.look()
    assert loss is not None
    assert "rank 2" in loss.text
    assert "SIGSEGV" in loss.text


def test_who_fails_by_itself_comes_before_who_misses_it() -> None:
    ranks = Ranks()
    ranks.judge.failed(0, MISSES)
    ranks.judge.failed(1, Failure("no memory"))
    ranks.judge.ended(1, 1)
    loss = ranks.look(10)
    assert loss is not None
    assert "rank 1" in loss.text
    assert loss.text.endswith("ended with status 1: no memory")


def test_whom_the_others_miss_may_be_silent_soon() -> None:
    ranks = Ranks()
    ranks.stopped = {2}
    ranks.look()
    for rank in (0, 1, 3):
        ranks.judge.failed(rank, MISSES)
    loss = ranks.look(SILENT_LOOKS)
    assert loss is not None
    assert (loss.status, "rank 2" in loss.text) == (EXIT_RANK_SILENT, True)


def test_when_all_miss_each_other_the_first_says_so() -> None:
    ranks = Ranks()
    for rank in range(4):
        ranks.judge.failed(rank, MISSES)
    loss = ranks.look(2 * SILENT_LOOKS)
    assert loss is not None
    assert "rank 0" in loss.text
    assert loss.text.endswith("no answer")


@pytest.mark.parametrize(
    ("when", "looks"),
    [
        ("its libraries load", STARTING_SILENT_LOOKS),
        ("its weights load", SILENT_LOOKS),
        ("steps may come", SILENT_LOOKS),
    ],
)
def test_a_rank_without_beats_is_lost_after_so_many_looks(when: str, looks: int) -> None:
    ranks = Ranks(started=when == "steps may come")
    if when == "its weights load":
        ranks.judge.opened(1)
    ranks.look(3)
    ranks.stopped = {1}
    assert ranks.look(looks - 1) is None
    loss = ranks.look()
    assert loss is not None
    assert loss.status == EXIT_RANK_SILENT
    named = "rank 1 (stage 0, tensor share 1, pid 101)"
    assert loss.text.startswith(f"{named} has given no sign of life for {looks * LOOK_S:g} s")


def test_the_silence_of_libraries_does_not_count_when_they_are_there() -> None:
    """The word that they are may come before the next beat."""
    ranks = Ranks(started=False)
    ranks.stopped = {1}
    assert ranks.look(STARTING_SILENT_LOOKS - 1) is None
    ranks.judge.opened(1)
    assert ranks.look(SILENT_LOOKS - 1) is None
    loss = ranks.look()
    assert loss is not None
    assert loss.status == EXIT_RANK_SILENT


def test_a_beat_ends_the_silence() -> None:
    ranks = Ranks()
    for _ in range(5):
        ranks.stopped = {1}
        assert ranks.look(SILENT_LOOKS - 1) is None
        ranks.stopped = set()
        assert ranks.look() is None


def test_a_step_in_which_nobody_computes_is_stuck() -> None:
    ranks = Ranks()
    ranks.computed_ns, ranks.working = 100_000, {2, 3}
    assert ranks.look(IDLE_LOOKS - 1) is None
    loss = ranks.look(2)
    assert loss is not None
    assert loss.status == EXIT_STEP_STUCK
    assert "rank 2 (stage 1, tensor share 0, pid 102), rank 3" in loss.text


@pytest.mark.parametrize("case", ["between steps", "one computes", "starting"])
def test_ranks_that_wait_are_not_stuck(case: str) -> None:
    ranks = Ranks(started=case != "starting")
    ranks.computed_ns, ranks.working = 100_000, {0, 1, 2, 3}
    for _ in range(3 * IDLE_LOOKS):
        if case == "between steps":
            ranks.working ^= {0, 1, 2, 3}
        if case == "one computes":
            beat = ranks.beats[2]
            ranks.beats[2] = beat._replace(processor_ns=beat.processor_ns + 20_000_000)
        assert ranks.look() is None


def test_ranks_that_wait_for_another_replica_s_are_stuck_only_with_them() -> None:
    """Replicas that share experts meet in every step."""
    ranks = Ranks()
    ranks.working = {0, 1, 2, 3}
    ranks.computed_ns = 0
    elsewhere = Beat(beats=1, begun=1)
    ranks.elsewhere = lambda: [elsewhere]
    for look in range(2 * IDLE_LOOKS):
        elsewhere = elsewhere._replace(processor_ns=look * 50_000_000)
        assert ranks.look() is None
    loss = ranks.look(IDLE_LOOKS + 1)
    assert loss is not None
    assert loss.status == EXIT_STEP_STUCK


def test_what_the_user_can_mend_is_said_so_whoever_fails_with_it() -> None:
    ranks = Ranks(started=False)
    ranks.judge.failed(1, Failure("--kv-cache-memory: too small", is_user_error=True))
    loss = ranks.look(10)
    assert loss == Loss(
        "--kv-cache-memory: too small (rank 1 (stage 0, tensor share 1, pid 101))",
        EXIT_RANK_ENDED,
        is_user_error=True,
    )


def test_a_rank_is_shown_down_while_it_is_silent_and_when_it_has_failed() -> None:
    ranks = Ranks()
    up = [True] * 4
    assert [one.is_up for one in ranks.judge.show()] == up
    ranks.look()
    ranks.stopped = {2}
    assert ranks.look(DOWN_LOOKS - 1) is None
    assert [one.is_up for one in ranks.judge.show()] == up
    assert ranks.look() is None
    assert [one.is_up for one in ranks.judge.show()] == [True, True, False, True]
    ranks.stopped = set()
    ranks.look()
    assert [one.is_up for one in ranks.judge.show()] == up
    ranks.judge.ended(1, -9)
    ranks.judge.failed(3, MISSES)
    assert [one.is_up for one in ranks.judge.show()] == [True, False, True, False]
    assert [one.beat for one in ranks.judge.show()] == ranks.beats
