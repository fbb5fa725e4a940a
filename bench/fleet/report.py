"""The figures of `make bench-fleet`, and the measured part of docs/benchmarks/fleet.md.

Pure but for versions and the machine. A rung's figures are of all its requests, those of all
rounds; a ratio is 1P1D to a fleet of the same engines aggregated, at the same rung.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from bench.engine.models import Model
from bench.fleet.rounds import APART, Layout, Load, Turn
from bench.operator.report import machine
from bench.report import put_measured, where_measured
from xpyd_tools.bench.summary import summarize

BEGIN = "<!-- measured: `make bench-fleet` writes it -->\n"
_PICTURE = (
    "![Time to first token and time between tokens over the rate of requests, for each prompt "
    "length: the tables below have the figures.](fleet.svg)"
)
FIGURES = {
    "ttftP50Ms": "TTFT p50",
    "ttftP99Ms": "TTFT p99",
    "tpotP99Ms": "TPOT p99",
    "itlP99Ms": "ITL p99",
}
"""Member of a row -> its name for people."""
_COMPARED = ("ttftP50Ms", "tpotP99Ms", "itlP99Ms")


def report(model: Model, turns: Sequence[Turn], load: Load, *, cores: int) -> dict[str, Any]:
    """The JSON that a run ends with."""
    rows = _rows(turns)
    return {
        "benchmark": "fleet",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "ratios": _ratios(rows),
        "rows": rows,
        "model": {"name": model.name, "parameters": model.parameters},
        "outputTokens": load.output_tokens,
        "seconds": load.seconds,
        "rounds": load.rounds,
        "cores": cores,
        "absent": {},
        "ownArgs": [],
        "versions": {
            **{name: version(name) for name in ("xpyd", "torch")},
            "python": platform.python_version(),
        },
        "machine": machine(),
    }


def _rows(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """One for each prompt length, rung and fleet; fleets in the order of the first rung."""
    order = list(dict.fromkeys(turn.layout.name for turn in turns))
    found: dict[tuple[int, float, Layout], list[Turn]] = {}
    for turn in turns:
        found.setdefault((turn.prompt_tokens, turn.share, turn.layout), []).append(turn)
    rows: list[dict[str, Any]] = []
    for (tokens, share, layout), same in found.items():
        summary = summarize([sample for turn in same for sample in turn.samples])
        rows.append(
            {
                "promptTokens": tokens,
                "share": share,
                "requestsPerS": round(same[0].rate_per_s, 2),
                "layout": layout.name,
                "requests": summary.requests,
                "ttftP50Ms": round(summary.ttft_ms.p50, 1),
                "ttftP99Ms": round(summary.ttft_ms.p99, 1),
                "tpotP99Ms": round(summary.tpot_ms.p99, 1),
                "itlP99Ms": round(summary.itl_ms.p99, 1),
            }
        )
    return sorted(
        rows, key=lambda row: (row["promptTokens"], row["share"], order.index(row["layout"]))
    )


def _ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By name, below 1 where 1P1D is faster."""
    apart = {
        (row["promptTokens"], row["share"]): row for row in rows if row["layout"] == APART.name
    }
    found: list[dict[str, Any]] = []
    for row in rows:
        own = apart.get((row["promptTokens"], row["share"]))
        if own is None or row is own:
            continue
        where = f"{row['promptTokens']} tokens in, {row['requestsPerS']:g} requests/s"
        found += [
            {
                "name": f"{FIGURES[figure]}, {where}",
                "peer": row["layout"],
                "reached": round(own[figure] / row[figure], 3),
            }
            for figure in _COMPARED
            if row[figure]
        ]
    return found


def with_measured(page: str, made: dict[str, Any]) -> str:
    """The page with the tables of this report in place of those that it has."""
    where = (
        f"{where_measured(made)}`{made['model']['name']}`, "
        f"{made['model']['parameters'] / 1e6:.0f} M parameters, bfloat16; {made['outputTokens']} "
        f"tokens out; {made['seconds']:g} s a rung, rounds: {made['rounds']}."
    )
    lengths = dict.fromkeys(row["promptTokens"] for row in made["rows"])
    tables = (_table([row for row in made["rows"] if row["promptTokens"] == n]) for n in lengths)
    return put_measured(page, BEGIN, "\n" + "\n\n".join([where, _PICTURE, *tables]) + "\n\n")


def _table(rows: Sequence[dict[str, Any]]) -> str:
    names = " | ".join(f"{name}, ms" for name in FIGURES.values())
    return "\n".join(
        [
            f"| {rows[0]['promptTokens']} tokens in: requests/s | fleet | requests | {names} |",
            f"|{'---|' * (3 + len(FIGURES))}",
            *(
                f"| {row['requestsPerS']:g} | {row['layout']} | {row['requests']} | "
                + " | ".join(f"{row[figure]:,.0f}" for figure in FIGURES)
                + " |"
                for row in rows
            ),
        ]
    )
