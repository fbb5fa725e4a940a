"""Rows take turns: each case by all of them within a minute, whoever is not on stopped.

The machine's speed changes from minute to minute by more than what is measured, so ratios are of
one round; and the order changes from round to round, so that nobody always comes first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from bench.router.interpreter import Interpreter, fastest
from bench.router.mocks import Mocks, engines
from bench.router.programs import Programs
from bench.router.routers import PEERS, ContenderFailed, Router, running
from bench.router.shape import DUEL_CASES, KEYED, OWN, TLS, TLS_PEER, Case, Row, Times
from bench.router.turns import Turn, turn

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is run. `own_args`: more flags of `xpyd router`; `python`: what runs it."""

    rows: Sequence[Row]
    cases: Sequence[Case]
    rounds: int
    duels: int
    times: Times
    own_args: Sequence[str] = ()
    python: Interpreter = field(default_factory=fastest)


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
    """By row: RSS before any load and some time after all of it; by row and case, a Turn per round,
    or why there are none: who failed once in a case is not asked for it again."""

    idle_gib: dict[str, float] = field(default_factory=dict[str, float])
    after_gib: dict[str, float] = field(default_factory=dict[str, float])
    turns: dict[tuple[str, str], list[Turn]] = field(
        default_factory=dict[tuple[str, str], list[Turn]]
    )
    duels: dict[tuple[str, str], list[Turn]] = field(
        default_factory=dict[tuple[str, str], list[Turn]]
    )
    """The same of the repeated turns, that ratios are of."""
    failed: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])


def measure(plan: Plan, programs: Programs, folder: Path, say: Say) -> Found:
    """Start everybody, let them take turns, end them. `folder`: for logs. ContenderFailed where
    one does not start."""
    found = Found()
    cores = Cores(tuple(sorted(os.sched_getaffinity(0))))
    with _kept_to(cores.load), engines(programs.engine) as mocks, ExitStack() as stack:
        routers = {row.name: _started(row, plan, mocks, folder, cores, stack) for row in plan.rows}
        for name, router in routers.items():
            if router is not None:
                found.idle_gib[name] = router.rss_gib()
                router.stop()
                say(f"{name}: pid {router.process.pid}, {found.idle_gib[name] * 1024:.0f} MiB")
        a_turn = partial(_turn, mocks=mocks, times=plan.times, programs=programs)
        for number in range(plan.rounds):
            for case in plan.cases:
                take_turns(routers, case, number, found, a_turn=a_turn, say=say)
        rivals = {
            name: one
            for name, one in routers.items()
            if name in (OWN, KEYED, TLS, TLS_PEER) or name in PEERS
        }
        for case in plan.cases:
            for number in range(plan.duels if case.name in DUEL_CASES and len(rivals) > 1 else 0):
                # Together they are done within seconds.
                take_turns(rivals, case, number, found, turns=found.duels, a_turn=a_turn, say=say)
        alive = {n: one for n, one in routers.items() if one and one.process.poll() is None}
        for router in alive.values():
            router.go_on()
        say(f"memory, after {plan.times.rest_s:g} s without load")
        time.sleep(plan.times.rest_s)
        found.after_gib |= {name: router.rss_gib() for name, router in alive.items()}
    return found


def _started(
    row: Row, plan: Plan, mocks: Mocks, folder: Path, cores: Cores, stack: ExitStack
) -> Router | None:
    if row.program == "direct":
        return None
    own_args = plan.own_args if row.program == "xpyd" else ()
    return stack.enter_context(
        running(
            row,
            mocks,
            folder,
            cores=cores.router(row),
            python=plan.python.path,
            own_args=own_args,
        )
    )


def _turn(
    router: Router | None, case: Case, *, mocks: Mocks, times: Times, programs: Programs
) -> Turn:
    if router is None:
        return turn(programs.load, case, mocks.decodes[0], times)
    load = programs.tls_load if router.row.is_tls else programs.load
    assert load is not None, "programs() are made for the rows of the plan"
    return turn(load, case, router.port, times, router, key=router.row.key)


def take_turns(
    routers: Mapping[str, Router | None],
    case: Case,
    number: int,
    found: Found,
    *,
    turns: dict[tuple[str, str], list[Turn]] | None = None,
    a_turn: Callable[[Router | None, Case], Turn],
    say: Say,
) -> None:
    """All but those who failed in this case, one after another; who comes first changes.
    They are noted in `turns`, else in those of `found`."""
    noted = found.turns if turns is None else turns
    names = list(routers)
    for name in [*names[number % len(names) :], *names[: number % len(names)]]:
        key = (name, case.name)
        if key in found.failed:
            continue
        router = routers[name]
        if router is not None and router.row.cases and case.name not in router.row.cases:
            continue
        try:
            if router is not None:
                router.go_on()
                router.wait_ready()
            one = a_turn(router, case)
        except ContenderFailed as error:
            found.failed[key] = str(error)
            noted.pop(key, None)
            say(f"round {number + 1}, {case.name}, {name} FAILED: {error}")
        else:
            noted.setdefault(key, []).append(one)
            say(f"round {number + 1}, {case.name}, {name}: {one.said}")
        if router is not None:
            router.stop()
            router.forget_log()


@contextmanager
def _kept_to(cores: set[int]) -> Generator[None]:
    """This process, and what it starts, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
