"""Who is measured, in which order. Contenders take turns in each round, so that what else the
machine does hits all of them alike, and each begins a round once.

A contender whose bytes are wrong ends the run; one that does not start, or stops, is left out and
named with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bench.kv.pair import Batch, Pair, SideFailed
from bench.kv.shape import Case, cases

MEMCPY = "memcpy"
OWN = ("shm", "uds", "tcp", "tcp-2", "tcp-no-key", "tls")
CONTROL = ("control-shm", "control-uds", "control-tcp")
BESIDE = ("plain-tcp", "plain-tcp-2", "gloo")
CONTROL_CASE = Case(16, "whole")
"""One block."""


@dataclass(frozen=True)
class Plan:
    """How much is measured. `turn_s`: about so long is one contender's turn with one prompt."""

    prompts: tuple[int, ...] = (128, 1024, 8192)
    rounds: int = 6
    turn_s: float = 0.3
    most: int = 40
    control_count: int = 100


@dataclass
class Group:
    """Contenders that run in one pair of processes."""

    pair: Pair
    names: list[str]


@dataclass
class Moves:
    """What was measured: for each contender and prompt a batch for each round; control transfers
    stand under CONTROL_CASE."""

    batches: dict[tuple[str, Case], list[Batch]] = field(
        default_factory=dict[tuple[str, Case], list[Batch]]
    )
    absent: dict[str, str] = field(default_factory=dict[str, str])


class WrongBytesError(Exception):
    """A contender did not move what it was given."""


class Run:
    """One run of the benchmark."""

    def __init__(self, groups: list[Group], plan: Plan, say: Callable[[str], None]) -> None:
        self._groups = groups
        self._plan = plan
        self._say = say
        self._counts: dict[tuple[str, Case], int] = {}
        self.found = Moves()

    def measure(self) -> Moves:
        """Warm up, check, measure. WrongBytesError."""
        for group in self._groups:
            for name in list(group.names):
                self._say(f"{name}: bytes")
                self._turn(group, name, self._check)
            group.pair.pause()
        for round_ in range(self._plan.rounds):
            self._say(f"round {round_ + 1} of {self._plan.rounds}")
            for case in cases(self._plan.prompts):
                turns = [(group, name) for group in self._groups for name in group.names]
                turns = [turn for turn in turns if turn[1] not in CONTROL]
                first = round_ % len(turns)
                for group, name in turns[first:] + turns[:first]:
                    self._measure(group, name, case)
            for group in self._groups:
                for name in [name for name in group.names if name in CONTROL]:
                    self._measure(group, name, CONTROL_CASE)
        return self.found

    def _measure(self, group: Group, name: str, case: Case) -> None:
        def measure() -> None:
            batch = self._move(group.pair, name, case, self._counts[name, case])
            self.found.batches.setdefault((name, case), []).append(batch)

        group.pair.go_on()
        self._guard(group, name, measure)
        group.pair.pause()

    def _turn(self, group: Group, name: str, step: Callable[[Pair, str], None]) -> None:
        self._guard(group, name, lambda: step(group.pair, name))

    def _guard(self, group: Group, name: str, step: Callable[[], None]) -> None:
        try:
            step()
        except SideFailed as error:
            self._say(f"{name} is left out: {error}")
            self.found.absent[name] = str(error)
            group.names.remove(name)

    def _check(self, pair: Pair, name: str) -> None:
        """Connect; each prompt once, compared; how many make a turn."""
        if name in CONTROL:
            pair.open(name)
            pair.move(name, CONTROL_CASE, 10)
            self._counts[name, CONTROL_CASE] = self._plan.control_count
            return
        if name != MEMCPY:
            pair.open(name)
        for case in cases(self._plan.prompts):
            if name != MEMCPY and not pair.is_right(name, case):
                raise WrongBytesError(f"{name}, {case.tokens} tokens {case.layout}: wrong bytes")
            once = self._move(pair, name, case, 2).seconds[-1]
            count = int(self._plan.turn_s / once)
            self._counts[name, case] = max(1, min(self._plan.most, count))

    @staticmethod
    def _move(pair: Pair, name: str, case: Case, count: int) -> Batch:
        return pair.copy(case, count) if name == MEMCPY else pair.move(name, case, count)
