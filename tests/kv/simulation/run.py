"""Play a plan; when it fails, say which, and what happened last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from tests.kv.simulation.plan import Plan
from tests.kv.simulation.schedule import START_S
from tests.kv.simulation.world import World
from xpyd_core.request_id import TransferKey


class SimulationError(AssertionError):
    """An invariant was broken, or the code under test has raised (`__cause__`)."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to. `trace` is whole only where it was to be kept."""

    outcomes: Counter[str]
    seen: Counter[str]
    boundaries: int
    steps: int
    trace: tuple[tuple[Any, ...], ...]


def run(plan: Plan, *, keep_all: bool = False) -> Outcome:
    """To the end of the plan; SimulationError when something does not hold."""
    world = World(plan, keep_all=keep_all)
    try:
        world.run()
    except Exception as error:
        raise SimulationError(_report(plan, world, error)) from error
    return Outcome(world.outcomes, world.seen, world.boundaries, world.steps, tuple(world.trace))


def lines(trace: Iterable[tuple[Any, ...]]) -> list[str]:
    """The trace as text."""
    return [
        f"{at - START_S:11.6f} {who:6} {what} {' '.join(map(_text, details))}".rstrip()
        for at, who, what, *details in trace
    ]


def _text(detail: Any) -> str:
    if isinstance(detail, TransferKey):
        return f"{detail.uuid.lstrip('0') or '0'}/{detail.prompt_index}"
    if not isinstance(detail, msgspec.Struct):
        return str(detail)
    fields = {f: getattr(detail, f) for f in detail.__struct_fields__}
    uuid = str(fields.pop("uuid", "")).lstrip("0") or "0"
    shown = " ".join(f"{f}={v}" for f, v in fields.items() if not isinstance(v, bytes))
    return f"{type(detail).__name__.upper()} {uuid} {shown}"


def _report(plan: Plan, world: World, error: Exception) -> str:
    strikes = ", ".join(str(strike) for strike in plan.strikes)
    return "\n".join(
        [
            f"seed {plan.seed}: {type(error).__name__}: {error}",
            f"replay: .venv/bin/python -m tests.kv.simulation {plan.seed}",
            f"strikes: {strikes or 'none'}",
            f"the last {len(world.trace)} of {world.steps} steps, seconds from the start:",
            *lines(world.trace),
        ]
    )
