"""Rows take turns: each case by all of them within a minute, whoever is not on stopped.

The machine's speed changes from minute to minute by more than what is measured, so ratios are of
one round; and the order changes from round to round, so that nobody always comes first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.router.bench.mocks import Mocks, engines
from tests.router.bench.programs import Programs
from tests.router.bench.routers import Router, running
from tests.router.bench.shape import Case, Row, Times
from tests.router.bench.turns import Turn, turn

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is run. `own_args`: more flags of `xpyd router`."""

    rows: Sequence[Row]
    cases: Sequence[Case]
    rounds: int
    times: Times
    own_args: Sequence[str] = ()


@dataclass(frozen=True)
class Cores:
    """Who runs where. The first core is the router's alone, the others the load's and engines'."""

    all: tuple[int, ...]

    @property
    def load(self) -> set[int]:
        """Of the load generator and the engines; with one core there is nothing to part."""
        return set(self.all[1:] or self.all)

    def router(self, row: Row) -> str:
        """As taskset has it: one core for each process."""
        return ",".join(map(str, self.all[: row.processes]))


@dataclass
class Found:
    """By row: PSS before any load and after all of it; by row and case, a Turn per round."""

    idle_gib: dict[str, float] = field(default_factory=dict[str, float])
    after_gib: dict[str, float] = field(default_factory=dict[str, float])
    turns: dict[tuple[str, str], list[Turn]] = field(
        default_factory=dict[tuple[str, str], list[Turn]]
    )


def measure(plan: Plan, programs: Programs, folder: Path, say: Say) -> Found:
    """Start everybody, let them take turns, end them. `folder`: for logs. ContenderFailed."""
    found = Found()
    cores = Cores(tuple(sorted(os.sched_getaffinity(0))))
    with _kept_to(cores.load), engines(programs.engine) as mocks, ExitStack() as stack:
        routers = {row.name: _started(row, plan, mocks, folder, cores, stack) for row in plan.rows}
        for name, router in routers.items():
            if router is not None:
                found.idle_gib[name] = router.pss_gib()
                router.stop()
                say(f"{name}: pid {router.process.pid}, {found.idle_gib[name] * 1024:.0f} MiB")
        for number in range(plan.rounds):
            for case in plan.cases:
                _round(routers, case, mocks, plan, programs.load, number, found, say)
        for name, router in routers.items():
            if router is not None:
                found.after_gib[name] = router.pss_gib()
    return found


def _started(
    row: Row, plan: Plan, mocks: Mocks, folder: Path, cores: Cores, stack: ExitStack
) -> Router | None:
    if row.program == "direct":
        return None
    own_args = plan.own_args if row.program == "xpyd" else ()
    return stack.enter_context(
        running(row, mocks, folder, cores=cores.router(row), own_args=own_args)
    )


def _round(
    routers: Mapping[str, Router | None],
    case: Case,
    mocks: Mocks,
    plan: Plan,
    load: Path,
    number: int,
    found: Found,
    say: Say,
) -> None:
    names = list(routers)
    names = names[number % len(names) :] + names[: number % len(names)]
    for name in names:
        router = routers[name]
        if router is None:
            one = turn(load, case, mocks.decodes[0], plan.times)
        else:
            router.go_on()
            router.wait_ready()
            one = turn(load, case, router.port, plan.times, router)
            router.stop()
            router.forget_log()
        found.turns.setdefault((name, case.name), []).append(one)
        say(f"round {number + 1}, {case.name}, {name}: {one.said}")


@contextmanager
def _kept_to(cores: set[int]) -> Generator[None]:
    """This process, and what it starts, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
