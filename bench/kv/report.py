"""From measurements to the numbers that are kept, with what they were measured on."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median, quantiles
from typing import Any, NamedTuple

from bench.kv.fleet import Turn
from bench.kv.moves import CONTROL, CONTROL_CASE, MEMCPY, OWN, Moves
from bench.kv.pair import Batch
from bench.kv.shape import Case
from bench.operator.report import machine


class Aim(NamedTuple):
    """`ours` in `layout` is to be at least `factor` times as fast as `than`, in one run."""

    ours: str
    than: str
    layouts: tuple[str, ...]
    factor: float


AIMS = (
    Aim("shm", MEMCPY, ("whole",), 0.85),
    Aim("shm", MEMCPY, ("paged",), 0.65),
    Aim("uds", MEMCPY, ("whole", "paged"), 0.33),
    Aim("tcp", "plain-tcp-2", ("whole", "paged"), 1.0),
    Aim("tcp", "tcp-no-key", ("whole", "paged"), 0.9),
    Aim("tcp-2", "plain-tcp-2", ("whole", "paged"), 1.0),
    Aim("tcp-2", "nixl", ("whole", "paged"), 4.0),
    Aim("tcp-2", "mooncake", ("whole", "paged"), 2.0),
    Aim("tcp", "nixl", ("whole", "paged"), 4.0),
    Aim("tcp", "mooncake", ("whole", "paged"), 2.0),
)
CONTROL_AIM_US = 150.0


def report(moves: Moves, modes: dict[str, Turn], versions: dict[str, str]) -> dict[str, Any]:
    """The JSON that a run ends with. `versions`: of the peers."""
    found = sorted({case for name, case in moves.batches if name not in CONTROL})
    return {
        "benchmark": "kv",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "moves": [
            _move(moves, name, case)
            for case in found
            for name in dict.fromkeys(name for name, of in moves.batches if of == case)
        ],
        "control": {
            name.removeprefix("control-"): _control(moves.batches[name, CONTROL_CASE])
            for name in CONTROL
            if (name, CONTROL_CASE) in moves.batches
        },
        "aims": [one for aim in AIMS for one in _aims(moves, aim, found)],
        "modes": {mode: _mode(turn) for mode, turn in modes.items()},
        "absent": moves.absent,
        "versions": {
            "xpyd": version("xpyd"),
            "python": platform.python_version(),
            "torch": version("torch"),
            **versions,
        },
        "machine": machine(),
    }


def broken(made: dict[str, Any]) -> list[str]:
    """What must hold on every machine and does not. Wrong bytes have ended the run before."""
    return [f"{name}: {why}" for name, why in made["absent"].items() if name in (*OWN, *CONTROL)]


def _move(moves: Moves, name: str, case: Case) -> dict[str, Any]:
    batches = moves.batches[name, case]
    seconds = [s for batch in batches for s in batch.seconds]
    return {
        "contender": name,
        "tokens": case.tokens,
        "layout": case.layout,
        "gbPerS": round(case.size_bytes / median(seconds) / 1e9, 2),
        "toMemcpy": ratio(moves, name, MEMCPY, case),
        "p50Ms": round(median(seconds) * 1e3, 3),
        "p99Ms": round(_p99(seconds) * 1e3, 3),
        "cpuSecondsPerGb": round(
            sum(batch.cpu_s for batch in batches) / (len(seconds) * case.size_bytes / 1e9), 3
        ),
        "transfers": len(seconds),
    }


def ratio(moves: Moves, name: str, than: str, case: Case) -> float | None:
    """How many times as fast as `than`: each round for itself, and of these the median."""
    pairs = zip(
        moves.batches.get((name, case), []), moves.batches.get((than, case), []), strict=False
    )
    found = [median(peer.seconds) / median(own.seconds) for own, peer in pairs]
    return round(median(found), 2) if found else None


def _aims(moves: Moves, aim: Aim, found: Iterable[Case]) -> list[dict[str, Any]]:
    return [
        {
            "ours": aim.ours,
            "than": aim.than,
            "layout": case.layout,
            "tokens": case.tokens,
            "factor": aim.factor,
            "reached": reached,
        }
        for case in found
        if case.layout in aim.layouts
        and (reached := ratio(moves, aim.ours, aim.than, case)) is not None
    ]


def _control(batches: Sequence[Batch]) -> dict[str, float]:
    seconds = [s for batch in batches for s in batch.seconds]
    return {
        "p50Us": round(median(seconds) * 1e6, 1),
        "p99Us": round(_p99(seconds) * 1e6, 1),
        "cpuUs": round(sum(batch.cpu_s for batch in batches) / len(seconds) * 1e6, 1),
    }


def _mode(turn: Turn) -> dict[str, Any]:
    return {
        "ttftP50Ms": round(median(turn.ttft_s) * 1e3, 1),
        "ttftP99Ms": round(_p99(turn.ttft_s) * 1e3, 1),
        "prefillStepMs": round(turn.seconds / turn.steps * 1e3, 1),
        "tokensPerS": round(turn.tokens / turn.seconds, 1),
        "requests": len(turn.ttft_s),
        "recomputed": int(turn.recomputed),
    }


def _p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100, method="inclusive")[-1] if len(values) > 1 else values[0]
