"""From what a run found to rows, ratios, complaints and the table of docs/benchmarks/change.md."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from typing import Any

from bench.change.run import HUNG, WRONG, Found, Look, Window
from bench.operator.report import machine
from bench.report import put_measured, where_measured

BEGIN = "<!-- measured: `make bench-change` writes it -->\n"
_COUNTS = ("requests", "failed", "hung", "wrong", "mixedPairs")


def report(found: Found, *, rate: float, kubernetes: str) -> dict[str, Any]:
    """The JSON that a run ends with."""
    total = {
        **_counted([kind for _, _, kind in found.requests]),
        "mixedPairs": found.looks[-1].mixed_pairs if found.looks else 0,
        "pairs": found.looks[-1].pairs if found.looks else 0,
    }
    return {
        "benchmark": "change",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "ratios": {
            "failed to requests": _share(total["failed"], total["requests"]),
            "hung to requests": _share(total["hung"], total["requests"]),
            "wrong to requests": _share(total["wrong"], total["requests"]),
            "mixed pairs to pairs": _share(total["mixedPairs"], total["pairs"]),
        },
        "total": total,
        "rows": [_row(name, found) for name in dict.fromkeys(w.name for w in found.windows)],
        "requestsPerSecond": rate,
        "complaints": _complaints(found),
        "versions": {
            "xpyd": version("xpyd"),
            "kubernetes": kubernetes,
            "python": platform.python_version(),
        },
        "machine": machine(),
    }


def broken(made: dict[str, Any]) -> list[str]:
    """What must hold on every machine and does not."""
    counts = {name: made["total"][name] for name in _COUNTS[1:]}
    said = [f"{name}: {count} of {made['total']}" for name, count in counts.items() if count]
    if not made["total"]["pairs"]:
        said.append("no router said of what revisions its pairs are")
    return [*said, *made["complaints"]]


def with_measured(page: str, made: dict[str, Any]) -> str:
    """The page with the table of this report."""
    return put_measured(
        page, BEGIN, "\n".join(["", where_measured(made), "", *_table(made), "", ""])
    )


def _row(name: str, found: Found) -> dict[str, Any]:
    windows = [window for window in found.windows if window.name == name]
    during = [
        kind
        for began_s, ended_s, kind in found.requests
        if any(w.began_s <= ended_s and began_s <= w.ended_s for w in windows)
    ]
    looks = [_looks(found.looks, window) for window in windows]
    lowest = min(looks, key=lambda one: min((k.prefill + k.decode for k in one), default=0))
    seconds = [window.ended_s - window.began_s for window in windows]
    return {
        "change": name,
        "times": len(windows),
        **_counted(during),
        "mixedPairs": sum(one[-1].mixed_pairs - one[0].mixed_pairs for one in looks if one),
        "seconds": {"median": round(median(seconds), 1), "max": round(max(seconds), 1)},
        "lowest": {
            "prefill": min((look.prefill for one in looks for look in one), default=0),
            "decode": min((look.decode for one in looks for look in one), default=0),
        },
        "routable": _steps(lowest),
    }


def _looks(looks: Iterable[Look], window: Window) -> list[Look]:
    return [look for look in looks if window.began_s <= look.at_s <= window.ended_s]


def _steps(looks: list[Look]) -> list[list[float]]:
    """Seconds since the first look, P and D, each time that these changed; of the worst time."""
    found: list[list[float]] = []
    for look in looks:
        if not found or found[-1][1:] != [look.prefill, look.decode]:
            found.append([round(look.at_s - looks[0].at_s, 1), look.prefill, look.decode])
    return found


def _counted(kinds: list[str]) -> dict[str, int]:
    hung, wrong = kinds.count(HUNG), kinds.count(WRONG)
    answered = kinds.count("")
    return {
        "requests": len(kinds),
        "failed": len(kinds) - answered - hung - wrong,
        "hung": hung,
        "wrong": wrong,
    }


def _complaints(found: Found) -> list[str]:
    failed = [f"{w.name}: {w.complaint[:2000]}" for w in found.windows if w.complaint]
    return [*failed, *found.failures]


def _share(part: int, whole: int) -> float:
    return round(part / whole, 6) if whole else 0.0


def _table(made: dict[str, Any]) -> list[str]:
    total = made["total"]
    lines = [
        "| change | times | requests during it | failed | hung | wrong | mixed pairs "
        "| took, s: median (longest) | lowest routable P, D |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in made["rows"]:
        took, lowest = row["seconds"], row["lowest"]
        counts = " | ".join(f"{row[name]:,}" for name in ("times", *_COUNTS))
        lines.append(
            f"| {row['change']} | {counts} | {took['median']} ({took['max']}) "
            f"| {lowest['prefill']}, {lowest['decode']} |"
        )
    times = sum(row["times"] for row in made["rows"])
    counts = " | ".join(f"**{total[name]:,}**" for name in _COUNTS)
    lines.append(f"| **all** | **{times}** | {counts} | | |")
    said = f"{total['pairs']:,} pairs; {made['requestsPerSecond']} requests a second."
    return [*lines, "", said]
