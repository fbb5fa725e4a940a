"""From turns to the numbers that are kept, with what they were measured on. Pure but for versions.

A ratio is ours to a peer's, of turns one behind the other; the figure is the median of the duels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from typing import Any, NamedTuple

from bench.operator.report import machine
from bench.router.rounds import Found, Plan
from bench.router.routers import PEERS
from bench.router.shape import BESIDE_LONG, DIRECT, KEYED, OWN, TLS, TLS_PEER, Case
from bench.router.tls import nginx_version
from bench.router.turns import Turn


def _of(name: str, key: str) -> Callable[[Turn], float | None]:
    def value(turn: Turn) -> float | None:
        samples: dict[str, float] | None = getattr(turn, name)
        return samples[key] if samples else None

    return value


CLOSED: dict[str, Callable[[Turn], float | None]] = {
    "requestsPerS": lambda turn: turn.answered / turn.seconds,
    "p50Us": _of("latency_us", "p50"),
    "p90Us": _of("latency_us", "p90"),
    "p99Us": _of("latency_us", "p99"),
    "cpuUsPerRequest": lambda turn: turn.cpu_us_per_request,
    "cores": lambda turn: turn.cpu_s / turn.seconds,
}
STREAMS: dict[str, Callable[[Turn], float | None]] = {
    "tokensPerS": lambda turn: turn.tokens / turn.seconds,
    "ttftP50Us": _of("ttft_us", "p50"),
    "ttftP99Us": _of("ttft_us", "p99"),
    "relayP50Us": _of("relay_us", "p50"),
    "relayP99Us": _of("relay_us", "p99"),
    "cpuUsPerToken": lambda turn: turn.cpu_us_per_token,
    "cores": lambda turn: turn.cpu_s / turn.seconds,
}
_ADDED = ("p50Us", "p99Us", "relayP50Us", "relayP99Us")


class Ratio(NamedTuple):
    """Ours to a peer's, of `figure` in `case`; against vllm-router it is to be at most `aim`, where
    there is one. Memory is of no case. `to`: also to ours in this case, which is easier."""

    name: str
    figure: str
    case: str
    aim: float | None
    to: str = ""


RATIOS = (
    Ratio("CPU per request", "cpuUsPerRequest", "c64", 0.75),
    Ratio("CPU per token", "cpuUsPerToken", "s512", 0.9),
    Ratio("p99", "p99Us", "c256", 0.6),
    Ratio("p99 beside long bodies", "p99Us", BESIDE_LONG.name, None, "c16"),
    Ratio("memory", "memory", "", 0.5),
)


KEYS = Ratio("CPU per request with keys", "cpuUsPerRequest", "c64", 1.05)
"""Ours with keys of clients to ours without."""
OVER_TLS = (
    Ratio("CPU per request over TLS", "cpuUsPerRequest", "c64", None),
    Ratio("p99 over TLS", "p99Us", "c64", None),
    Ratio("CPU per token over TLS", "cpuUsPerToken", "s512", None),
    Ratio("memory over TLS", "memory", "", None),
)
"""Ours with TLS to vllm-router behind nginx, whose cost is in it, and to ours without."""


def figures_of(case: Case | str) -> dict[str, Callable[[Turn], float | None]]:
    """Those of its kind."""
    name = case if isinstance(case, str) else case.name
    return CLOSED if name.startswith("c") else STREAMS


def report(
    found: Found,
    plan: Plan,
    absent: Mapping[str, str],
    shares: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The JSON that a run ends with. `shares`: of two keys, for each number of processes
    (bench.router.shares)."""
    return {
        "benchmark": "router",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cases": {case.name: _case(found, case.name) for case in plan.cases},
        "memoryMib": {
            name: {"idle": _mib(idle), "after": _mib(found.after_gib[name])}
            for name, idle in found.idle_gib.items()
        },
        "ratios": _ratios(found),
        "failed": [
            {"row": row, "case": case, "why": why} for (row, case), why in found.failed.items()
        ],
        "shares": [dict(one) for one in shares],
        "absent": dict(absent),
        "ownArgs": list(plan.own_args),
        "rounds": plan.rounds,
        "duels": plan.duels,
        "versions": {
            "xpyd": version("xpyd"),
            **PEERS,
            **({"nginx": nginx_version()} if TLS_PEER in found.idle_gib else {}),
            "python": plan.python.version,
        },
        "machine": machine(),
    }


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """`old`, with what the part `new` has measured in the place of the same rows, cases, ratios."""
    cases: dict[str, Any] = {name: dict(rows) for name, rows in old["cases"].items()}
    for name, rows in new["cases"].items():
        cases.setdefault(name, {}).update(rows)
    asked = {(row, case) for case, rows in new["cases"].items() for row in rows}
    asked |= {(one["row"], one["case"]) for one in new["failed"]}
    ratios = {_place(one): one for one in (*old["ratios"], *new["ratios"])}
    return {
        **new,
        "cases": cases,
        "memoryMib": {**old["memoryMib"], **new["memoryMib"]},
        "ratios": list(ratios.values()),
        "failed": [
            *(one for one in old["failed"] if (one["row"], one["case"]) not in asked),
            *new["failed"],
        ],
        "shares": new["shares"] or old.get("shares") or [],
    }


def _place(ratio: Mapping[str, Any]) -> tuple[str, ...]:
    return ratio["name"], ratio["case"], ratio["peer"]


def _mib(gib: float) -> float:
    return round(gib * 1024, 1)


def _case(found: Found, case: str) -> dict[str, Any]:
    """By row: the median of the rounds, what is added to direct, and each round."""
    rows = {name: turns for (name, of), turns in found.turns.items() if of == case}
    made: dict[str, Any] = {}
    for name, turns in rows.items():
        values = {figure: [of(turn) for turn in turns] for figure, of in figures_of(case).items()}
        made[name] = {figure: _median(many) for figure, many in values.items()}
        if name != DIRECT and DIRECT in rows:
            made[name]["added"] = _added(case, turns, rows[DIRECT])
        made[name]["measured"] = {
            figure: [None if one is None else round(one, 2) for one in many]
            for figure, many in values.items()
        }
    return made


def _added(case: str, turns: list[Turn], direct: list[Turn]) -> dict[str, float | None]:
    of = figures_of(case)
    return {
        figure: _median(
            [_less(of[figure](a), of[figure](b)) for a, b in zip(turns, direct, strict=True)]
        )
        for figure in _ADDED
        if figure in of
    }


def _less(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 2) if known else None


def _ratios(found: Found) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for ratio in RATIOS:
        measured_by = {peer: _measured(found, ratio, peer) for peer in PEERS}
        if ratio.to:
            measured_by[f"{OWN} in {ratio.to}"] = _to_easier(found, ratio)
        for peer, measured in measured_by.items():
            if not measured:
                continue
            reached = round(median(measured), 3)
            aim = ratio.aim if peer == "vllm-router" else None
            made.append(
                {"name": ratio.name, "case": ratio.case, "peer": peer, "aim": aim}
                | {"reached": reached, "holds": None if aim is None else reached <= aim}
                | {"measured": [round(one, 3) for one in measured]}
            )
    for ratio, ours, peer in (
        (KEYS, KEYED, OWN),
        *((ratio, TLS, peer) for ratio in OVER_TLS for peer in (TLS_PEER, OWN)),
    ):
        if measured := _measured(found, ratio, peer, ours=ours):
            reached = round(median(measured), 3)
            shown = f"{OWN} without" if peer == OWN else peer
            made.append(
                {"name": ratio.name, "case": ratio.case, "peer": shown, "aim": ratio.aim}
                | {"reached": reached, "holds": None if ratio.aim is None else reached <= ratio.aim}
                | {"measured": [round(one, 3) for one in measured]}
            )
    return made


def _to_easier(found: Found, ratio: Ratio) -> list[float]:
    """Ours in its case to ours in the easier one, of the same round."""
    of = figures_of(ratio.case)[ratio.figure]
    turns = (found.turns.get((OWN, case), []) for case in (ratio.case, ratio.to))
    known = [(of(a), of(b)) for a, b in zip(*turns, strict=False)]
    return [a / b for a, b in known if a is not None and b]


def _measured(found: Found, ratio: Ratio, peer: str, *, ours: str = OWN) -> list[float]:
    if ratio.figure == "memory":
        if not {ours, peer} <= found.after_gib.keys():
            return []
        return [found.after_gib[ours] / found.after_gib[peer]]
    of = figures_of(ratio.case)[ratio.figure]
    turns = found.duels if (ours, ratio.case) in found.duels else found.turns
    pairs = zip(turns.get((ours, ratio.case), []), turns.get((peer, ratio.case), []), strict=False)
    known = [(of(a), of(b)) for a, b in pairs]
    return [a / b for a, b in known if a is not None and b]
