"""The measured part of docs/benchmarks/kv.md, as tables."""

from __future__ import annotations

from typing import Any

from bench.kv.report import CONTROL_AIM_US
from bench.report import put_measured

BEGIN = "<!-- measured: `make bench-kv` writes it -->\n"
_WORDS = {
    "memcpy": "memcpy, one thread",
    "shm": "**shm**",
    "uds": "**uds**",
    "tcp": "**tcp**",
    "tcp-2": "**tcp**, `--kv-connections 2`",
    "tcp-no-key": "**tcp**, without a key",
    "tls": "**tcp**, encrypted",
    "plain-tcp": "plain TCP, 1 connection",
    "plain-tcp-2": "plain TCP, 2 connections",
    "gloo": "torch gloo",
    "nixl": "nixl (UCX)",
    "mooncake": "mooncake (tcp)",
}


def with_measured(page: str, made: dict[str, Any]) -> str:
    """The page with the tables of this report in place of those that it has."""
    return put_measured(page, BEGIN, _measured(made))


def _measured(made: dict[str, Any]) -> str:
    parts = [[_where(made)], *_move_tables(made), _aims(made), _control(made), _modes(made)]
    return "\n" + "".join("\n".join(part) + "\n\n" for part in parts if part)


def _where(made: dict[str, Any]) -> str:
    machine = made["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    left_out = "".join(f"\nNot measured: {name} ({why})." for name, why in made["absent"].items())
    return (
        f"{made['date']}: {machine['cores']} cores ({machine['processor']}), "
        f"{machine['memoryGiB']} GiB, Linux {machine['linux']}; {versions}.{left_out}"
    )


def _move_tables(made: dict[str, Any]) -> list[list[str]]:
    prompts = sorted({(row["tokens"], row["layout"] == "paged") for row in made["moves"]})
    return [
        _move_table([r for r in made["moves"] if (r["tokens"], r["layout"] == "paged") == prompt])
        for prompt in prompts
    ]


def _move_table(rows: list[dict[str, Any]]) -> list[str]:
    one = rows[0]
    blocks = "paged blocks" if one["layout"] == "paged" else "whole groups"
    return [
        f"| {one['tokens']:,} tokens, {blocks} | GB/s | x memcpy | p50 / p99 ms | CPU s/GB |",
        "|---|---|---|---|---|",
        *(
            f"| {_WORDS[row['contender']]} | {row['gbPerS']:.1f} | {_number(row['toMemcpy'])} "
            f"| {row['p50Ms']:.1f} / {row['p99Ms']:.1f} | {row['cpuSecondsPerGb']:.2f} |"
            for row in sorted(rows, key=lambda row: -row["gbPerS"])
        ),
    ]


def _aims(made: dict[str, Any]) -> list[str]:
    lines = ["| aim | at least | reached, by prompt |", "|---|---|---|"]
    groups: dict[tuple[Any, ...], list[str]] = {}
    for aim in made["aims"]:
        key = (aim["ours"], aim["than"], aim["layout"], aim["factor"])
        groups.setdefault(key, []).append(f"{aim['tokens']:,}: {aim['reached']:.2f}")
    for (ours, than, layout, factor), reached in groups.items():
        lines.append(f"| {ours} / {than}, {layout} | {factor:.2f} | {', '.join(reached)} |")
    return lines


def _control(made: dict[str, Any]) -> list[str]:
    if not made["control"]:
        return []
    return [
        f"| control of one transfer, aim {CONTROL_AIM_US:.0f} | p50 / p99 us | CPU us, both |",
        "|---|---|---|",
        *(
            f"| {name} | {one['p50Us']:.0f} / {one['p99Us']:.0f} | {one['cpuUs']:.0f} |"
            for name, one in made["control"].items()
        ),
    ]


def _modes(made: dict[str, Any]) -> list[str]:
    if not made["modes"]:
        return []
    return [
        "| 1P1D under load | TTFT p50 / p99 ms | P's step, ms | tokens/s | requests, recomputed |",
        "|---|---|---|---|---|",
        *(
            f"| {mode} | {one['ttftP50Ms']:.0f} / {one['ttftP99Ms']:.0f} "
            f"| {one['prefillStepMs']:.1f} | {one['tokensPerS']:.0f} "
            f"| {one['requests']}, {one['recomputed']} |"
            for mode, one in made["modes"].items()
        ),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
