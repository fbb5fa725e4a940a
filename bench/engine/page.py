"""The measured part of docs/benchmarks/engine-cpu.md, as tables. Pure."""

from __future__ import annotations

from typing import Any

from bench.engine.rounds import OWN, OWN_TTFT, PEER
from bench.engine.shape import CASES
from bench.engine.speculation import SUBJECTS
from bench.report import not_measured, put_measured, where_measured

BEGIN = "<!-- measured: `make bench-engine` writes it -->\n"
_AIMS = {
    "itlP50Ms": "ITL p50 to vLLM's",
    "tokensPerS": "tokens/s to vLLM's",
    "ttftP50Ms": "TTFT p50 to vLLM's",
    "ttftP50MsOfOther": "TTFT p50 with `--latency-goal ttft` to vLLM's",
    "itlSpread": "ITL p99 to p50, both ours",
    "bandwidth": "share of the bandwidth limit",
    "start": "start to vLLM's warm one",
    "pss": "memory to vLLM's",
}
_DRAFTED = {case.name: case for subject in SUBJECTS for case in subject.cases}


def with_measured(page: str, made: dict[str, Any]) -> str:
    """The page with the tables of this report in place of those that it has."""
    return put_measured(page, BEGIN, _measured(made))


def _measured(made: dict[str, Any]) -> str:
    parts = [[_where(made)], _aims(made)]
    for name, model in made["models"].items():
        parts += [[_about(name, model)], _cases(name, model), _ratios(name, model)]
    if later := made.get("draftsOf"):
        parts.append([f"Drafts, {where_measured(later)}rounds: {later['rounds']}."])
    for name, cases in made.get("speculation", {}).items():
        parts.append(_drafts(name, cases))
    return "\n" + "".join("\n".join(part) + "\n\n" for part in parts if part)


def _where(made: dict[str, Any]) -> str:
    how = f"{made['dtype']}, {made['threads']} threads on the cores {made['cores']}"
    return where_measured(made) + f"{how}, rounds: {made['rounds']}." + not_measured(made)


def _aims(made: dict[str, Any]) -> list[str]:
    if not made["aims"]:
        return []
    lines = [f"| aim on {made['aimedAt']} | wanted | reached | |", "|---|---|---|---|"]
    for aim in made["aims"]:
        what = _AIMS[aim["figure"]] + (f", {_shape(aim['case'])}" if aim["case"] else "")
        bound = f"{'at least' if aim['at_least'] else 'at most'} {aim['bound']:.2f}"
        word = "yes" if aim["holds"] else "missed"
        lines.append(f"| {what} | {bound} | {aim['reached']:.2f} | {word} |")
    return lines


def _shape(case: str) -> str:
    one = CASES[case]
    shown = f"{one.input_tokens}/{one.output_tokens} at {one.concurrency}"
    return f"{shown}, one by one" if one.stream_of else shown


def _about(name: str, model: dict[str, Any]) -> str:
    starts = ", ".join(f"{who} {value:.1f} s" for who, value in model["startS"].items())
    memory = ", ".join(f"{who} {value:.2f} GiB" for who, value in model["pssGib"].items())
    text = (
        f"**{name}**: {model['parameters'] / 1e6:.1f} M parameters. Start to `/health`: {starts}. "
        f"Memory (PSS) after the load: {memory}."
    )
    ratios = model["ratios"]
    if ratios:
        text += f" Ours to vLLM's: start {ratios['start']:.2f}, memory {ratios['pss']:.2f}."
    limit = model["bandwidth"]
    if limit:
        text += (
            f" A decode step reads {model['stepBytes'] / 1e6:.0f} MB, at {limit['gbPerS']:.1f} "
            f"GB/s in {limit['limitMs']:.1f} ms at best; ours reaches {limit['share']:.0%} of that "
            f"(best round {limit['bestShare']:.0%})."
        )
    return text


def _cases(name: str, model: dict[str, Any]) -> list[str]:
    lines = [
        f"| {name}: in/out at concurrency | | TTFT p50 / p99 ms | ITL p50 / p99 ms "
        "| TPOT p50 / p99 ms | tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for case, found in model["cases"].items():
        known = [who for who in (OWN, OWN_TTFT, PEER) if who in found["rows"]]
        for who in dict.fromkeys([*known, *found["rows"]]):
            row = found["rows"][who]
            shown = f"**{who}**" if who == OWN else who
            lines.append(
                f"| {_shape(case)} | {shown} | {row['ttftP50Ms']:.0f} / {row['ttftP99Ms']:.0f} "
                f"| {row['itlP50Ms']:.1f} / {row['itlP99Ms']:.1f} "
                f"| {row['tpotP50Ms']:.1f} / {row['tpotP99Ms']:.1f} | {row['tokensPerS']:.1f} |"
            )
    return lines


def _ratios(name: str, model: dict[str, Any]) -> list[str]:
    found = {case: one["ratios"] for case, one in model["cases"].items() if "ratios" in one}
    if not found:
        return []
    return [
        f"| {name}: ours to vLLM's, median (best) | TTFT p50 | ITL p50 | TPOT p50 | tokens/s |",
        "|---|---|---|---|---|",
        *(
            f"| {_shape(case)} | "
            + " | ".join(
                f"{ratios[name]['median']:.2f} ({ratios[name]['best']:.2f})"
                for name in ("ttftP50Ms", "itlP50Ms", "tpotP50Ms", "tokensPerS")
            )
            + " |"
            for case, ratios in found.items()
        ),
    ]


def _drafts(name: str, cases: dict[str, Any]) -> list[str]:
    lines = [
        f"| drafts on {name}: in/out at concurrency | | TPOT p50 ms | tokens/s "
        "| to without, median (best) | wanted | draft tokens | accepted | up to each place |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, found in cases.items():
        for who, row in found["rows"].items():
            shown = f"| {row['tpotP50Ms']:.1f} | {row['tokensPerS']:.1f} "
            drafting = found.get("drafting", {}).get(who)
            lines.append(f"| {_drafted_shape(case)} | {who} {shown}{_drafting(drafting)}")
    return lines


def _drafted_shape(case: str) -> str:
    one = _DRAFTED[case]
    return f"{case}, {one.input_tokens}/{one.output_tokens} at {one.concurrency}"


def _drafting(found: dict[str, Any] | None) -> str:
    if found is None:
        return "| | | | | |"
    ratio = found["toWithout"]
    wanted = ""
    if "wanted" in found:
        wanted = f"at least {found['wanted']:.2f}: {'yes' if found['holds'] else 'missed'}"
    places = " / ".join(f"{share:.0%}" for share in found["byPlace"])
    return (
        f"| {ratio['median']:.2f} ({ratio['best']:.2f}) | {wanted} | {found['draftTokens']} "
        f"| {found['accepted']:.0%} | {places} |"
    )
