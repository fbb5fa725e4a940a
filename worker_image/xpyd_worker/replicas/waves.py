"""Waves: what one replica's loop does so that all replicas make the same forwards.

Replicas that share experts meet in every forward and in every finish check; one that does not come
holds all others up. A wave is the time from the first request to the check that finds no replica
with an unfinished one. In it each iteration of the loop makes exactly one forward: a step's, or a
dummy one. Every 24th iteration ends with the check, an all-reduce over the replicas.

    idle at w --request, or START w' >= w--> running --check: nobody has any--> idle at w + 1

A replica tells the coordinator its state (`Report`) when it starts, when it takes over a newer
number, at a wave's end (local rank 0 alone) and with each statistics. A report is a state, not an
event: a later one makes up for one that was lost. Used by a replica's loop, which has the sockets,
the collectives and the scheduler; models without shared experts need none of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

CHECK_EVERY = 24
"""Iterations from one finish check to the next: idle replicas make at most 23 dummy forwards more,
and busy ones pay for the all-reduce once in 24 steps (vLLM's number)."""


class Report(NamedTuple):
    """What a replica says of itself: the wave, whether it runs, and its requests."""

    wave: int
    is_running: bool
    waiting: int = 0
    running: int = 0


class Iteration(NamedTuple):
    """What one iteration of the loop does behind the input.

    `steps`: the scheduler makes a step, for unfinished requests or to let go of finished ones.
    `in_wave`: the iteration makes exactly one forward, a dummy one where the step computed nothing
    (none was due, or all requests wait for KV), and `end_iteration` follows. Where it is False the
    loop waits for input; no other replica waits for a forward.
    """

    steps: bool
    in_wave: bool


class Vote(NamedTuple):
    """A replica's part of the finish check; the all-reduce takes the maximum of each number.

    The wave goes with it: replicas that were told different numbers agree at the wave's end. Else
    the one behind would take a START of the wave that is over, and wait in it alone. `meeting`:
    the number of a change of how many replicas there are, which comes with the next forward.
    `known`: of the last one that the replica has made.
    """

    unfinished: int
    wave: int
    meeting: int = 0
    known: int = 0


@dataclass
class ReplicaWave:
    """The wave as one replica has it. The loop's thread owns it.

    `rank` is the replica's number on its host; rank 0 reports a wave's end at once, the others with
    their next statistics. `wave` and `is_running` start as those of a replica that knows nothing.
    """

    rank: int
    wave: int = 0
    is_running: bool = False
    _iterations: int = 0

    def take_request(self, wave: int) -> bool:
        """A request came, sent when its front end knew of `wave`. Whether to report now.

        An idle replica starts by itself and reports, whatever the front end knows: the start that
        the front end asks for may be lost, or be of a wave that has ended since. A newer wave's
        number is taken over.
        """
        is_news = not self.is_running or wave > self.wave
        self.wave = max(self.wave, wave)
        self.is_running = True
        return is_news

    def take_start(self, wave: int) -> bool:
        """START_DP_WAVE came. Whether to report now. One of a wave that has ended is ignored."""
        if wave < self.wave:
            return False
        is_news = not self.is_running or wave > self.wave
        self.wave = wave
        self.is_running = True
        return is_news

    def plan(self, *, has_unfinished: bool, has_finished: bool) -> Iteration:
        """The iteration behind the input that was taken. `has_finished`: requests have ended that
        the executor has not been told of."""
        assert self.is_running or not has_unfinished, "take_request comes before a request's step"
        return Iteration(steps=has_unfinished or has_finished, in_wave=self.is_running)

    def end_iteration(self) -> bool:
        """The iteration's forward is made. Whether the finish check is due; `settle` follows it."""
        self._iterations += 1
        return self._iterations == CHECK_EVERY

    def vote(self, *, has_unfinished: bool, meeting: int = 0, known: int = 0) -> Vote:
        """What this replica brings into the finish check. A wave does not end before a change that
        is due: its forward is one more."""
        return Vote(int(has_unfinished or meeting > 0), self.wave, meeting, known)

    def settle(self, result: Vote) -> bool:
        """The finish check's result. Whether to report now: the wave is over, and this is the
        replica that says so."""
        self._iterations = 0
        self.wave = result.wave
        if result.unfinished:
            return False
        self.wave += 1
        self.is_running = False
        return self.rank == 0

    def enter(self, wave: int) -> None:
        """The replica makes its next forward with others that it did not meet in the one before,
        and runs their wave from here on."""
        self.wave, self.is_running, self._iterations = max(self.wave, wave), True, 0

    def leave(self) -> None:
        """The replica goes: the others make their forwards without it."""
        self.is_running = False

    def report(self, *, waiting: int, running: int) -> Report:
        """The state as of now."""
        return Report(self.wave, self.is_running, waiting, running)
