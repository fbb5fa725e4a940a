"""From looks at the ranks to the first that went wrong. Pure: time enters as looks.

When one rank goes, the others fail soon after, for they wait for it; so the cause is searched among
all that is seen within a moment. Silence and standstill are counted in looks, not in seconds: when
the whole machine was suspended, no look was made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from xpyd_worker.ranks.loss import (
    EXIT_RANK_ENDED,
    EXIT_RANK_SILENT,
    EXIT_STEP_STUCK,
    RANK_MISSES_OTHERS,
    Failure,
    Loss,
    RankIdentity,
    how_ended,
)
from xpyd_worker.ranks.watch.beats import Beat

LOOK_S = 0.25
SILENT_LOOKS = 20
"""5 s without a beat."""
STARTING_SILENT_LOOKS = 240
"""60 s, until a rank's libraries are there: from a cold disk they are loaded without letting other
threads of the process run. Weights are not: while 770 MB came from a cold disk, no thread waited
for 50 ms on two cores that twenty processes shared."""
IDLE_LOOKS = 24
"""6 s in which a step was under way and no rank computed anything."""
DOWN_LOOKS = 8
"""2 s: a rank that misses so many beats is shown to be down. It may come back."""
_GRACE_LOOKS = 2
"""The looks that a verdict waits for what is seen later, but happened before."""
_BUSY_NS = 5_000_000
"""The time of a processor in IDLE_LOOKS that makes a rank busy; its beats take a fifth of it."""


@dataclass
class _Seen:
    beat: Beat = field(default_factory=Beat)
    looks_silent: int = 0
    is_open: bool = False
    returncode: int | None = None
    failure: Failure | None = None

    @property
    def was_killed(self) -> bool:
        return self.returncode is not None and self.returncode < 0

    @property
    def misses_others(self) -> bool:
        said = self.failure is not None and self.failure.misses_others
        return said or self.returncode == RANK_MISSES_OTHERS

    @property
    def is_wrong(self) -> bool:
        return self.returncode is not None or self.failure is not None


class Shown(NamedTuple):
    """What is known of a rank now. `is_up`: it is there, has not failed, and gives signs of
    life."""

    is_up: bool
    beat: Beat


class Judge:
    """Judges an instance's ranks, each by its number."""

    def __init__(self, ranks: int, name: Callable[[int], RankIdentity]) -> None:
        self._seen = [_Seen() for _ in range(ranks)]
        self._name = name
        self._is_starting = True
        self._given_up: Loss | None = None
        self._looks_wrong = 0
        self._looks_idle = 0
        self._spent_ns = 0
        self._steps = 0

    def ended(self, rank: int, returncode: int) -> None:
        """The process is over, and was not asked to end; `returncode` as Popen has it."""
        self._seen[rank].returncode = returncode

    def failed(self, rank: int, failure: Failure) -> None:
        """The rank says why it ends."""
        self._seen[rank].failure = self._seen[rank].failure or failure

    def opened(self, rank: int) -> None:
        """The rank has its libraries: from now on it shows itself without delay."""
        self._seen[rank].is_open = True
        self._seen[rank].looks_silent = 0

    def started(self) -> None:
        """Note that steps may come from now on."""
        self._is_starting = False

    def give_up(self, loss: Loss) -> None:
        """Another part of the instance has found what is wrong."""
        self._given_up = loss

    def look(self, beats: Sequence[Beat], elsewhere: Sequence[Beat] = ()) -> Loss | None:
        """Take in what the ranks show now, LOOK_S after the last time; what is lost, when that is
        sure. `elsewhere`: what the ranks of other replicas show, where they meet in steps: while
        they compute, ours may wait."""
        for seen, beat in zip(self._seen, beats, strict=True):
            seen.looks_silent = 0 if beat.beats != seen.beat.beats else seen.looks_silent + 1
            seen.beat = beat
        self._watch_idle(beats, elsewhere)
        return self._silent() or self._wrong() or self._given_up or self._stuck()

    def show(self) -> list[Shown]:
        """What is shown of each rank, as of the last look. Any thread."""
        return [
            Shown(not seen.is_wrong and seen.looks_silent < DOWN_LOOKS, seen.beat)
            for seen in self._seen
        ]

    def _watch_idle(self, beats: Sequence[Beat], elsewhere: Sequence[Beat]) -> None:
        everywhere = [*beats, *elsewhere]
        spent_ns = sum(beat.processor_ns for beat in everywhere)
        steps = sum(beat.begun + beat.ended for beat in everywhere)
        is_at_work = not self._is_starting and any(beat.is_working for beat in beats)
        computes = spent_ns - self._spent_ns >= _BUSY_NS * len(everywhere)
        if is_at_work and steps == self._steps and not computes:
            self._looks_idle += 1
        else:
            self._looks_idle = 0
            self._spent_ns = spent_ns
            self._steps = steps

    def _silent(self) -> Loss | None:
        for rank, seen in enumerate(self._seen):
            most = SILENT_LOOKS if seen.is_open else STARTING_SILENT_LOOKS
            if not seen.is_wrong and seen.looks_silent >= most:
                return Loss(
                    f"{self._name(rank)} has given no sign of life for {most * LOOK_S:g} s: it is "
                    "stopped, or gets no processor",
                    EXIT_RANK_SILENT,
                )
        return None

    def _wrong(self) -> Loss | None:
        """A killed rank comes before one that says a cause, which comes before one that misses
        another."""
        wrong = [rank for rank, seen in enumerate(self._seen) if seen.is_wrong]
        if not wrong:
            return None
        self._looks_wrong += 1
        killed = [rank for rank in wrong if self._seen[rank].was_killed]
        own = [rank for rank in wrong if not self._seen[rank].misses_others]
        # Whom the others miss may still be there, and only silent.
        waits = _GRACE_LOOKS if own else SILENT_LOOKS + _GRACE_LOOKS
        if not killed and self._looks_wrong <= waits:
            return None
        first = (killed or own or wrong)[0]
        seen = self._seen[first]
        said = seen.failure
        if said is not None and said.is_user_error:
            return Loss(f"{said.text} ({self._name(first)})", EXIT_RANK_ENDED, is_user_error=True)
        how = "fails" if seen.returncode is None else how_ended(seen.returncode)
        cause = f": {said.text}" if said is not None else ""
        return Loss(f"{self._name(first)} {how}{cause}", EXIT_RANK_ENDED)

    def _stuck(self) -> Loss | None:
        if self._looks_idle < IDLE_LOOKS:
            return None
        inside = [str(self._name(r)) for r, seen in enumerate(self._seen) if seen.beat.is_working]
        return Loss(
            f"a step is stuck: no rank has computed anything for {IDLE_LOOKS * LOOK_S:g} s; in it "
            f"are {', '.join(inside)}",
            EXIT_STEP_STUCK,
        )
