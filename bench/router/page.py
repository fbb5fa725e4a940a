"""The measured part of docs/benchmarks/router.md, as tables. Pure."""

from __future__ import annotations

from typing import Any

from bench.report import not_measured, put_measured, where_measured
from bench.router.shape import OWN

BEGIN = "<!-- measured: `make bench-router` writes it -->\n"


def with_measured(page: str, made: dict[str, Any]) -> str:
    """The page with the tables of this report in place of those that it has."""
    return put_measured(page, BEGIN, "\n" + tables(made))


def tables(made: dict[str, Any]) -> str:
    """All of them, as the page has them and as a terminal shows them."""
    closed = {name: rows for name, rows in made["cases"].items() if name.startswith("c")}
    streams = {name: rows for name, rows in made["cases"].items() if name.startswith("s")}
    tables_ = (_ratios(made), shares_of(made), _closed(closed), _streams(streams), _memory(made))
    parts = [[_where(made)], *tables_]
    return "".join("\n".join(part) + "\n\n" for part in parts if part)


def _where(made: dict[str, Any]) -> str:
    failed = "".join(
        f"\n**{one['row']} failed in {one['case']}**: {one['why']}." for one in made["failed"]
    )
    turns = f"Rounds: {made['rounds']}, duels: {made['duels']}."
    return where_measured(made) + turns + not_measured(made) + failed


def _ratios(made: dict[str, Any]) -> list[str]:
    if not made["ratios"]:
        return []
    lines = [
        "| ours to a peer's | case | peer | wanted | reached | (least to most) | |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in made["ratios"]:
        aim = f"at most {one['aim']:.2f}" if one["aim"] is not None else ""
        word = {True: "yes", False: "missed", None: ""}[one["holds"]]
        lines.append(
            f"| {one['name']} | {one['case']} | {one['peer']} | {aim} | {one['reached']:.2f} "
            f"| {_spread(one['measured'])} | {word} |"
        )
    return lines


def shares_of(made: dict[str, Any]) -> list[str]:
    """The table of two keys; empty where they were not measured."""
    lines = ["| two keys | processes | wanted | reached | |", "|---|---|---|---|---|"]
    word = {True: "yes", False: "missed"}
    for found in made.get("shares") or ():
        lines += [
            f"| TTFT p99 beside a flood / alone | {found['processes']} | at most 1.50 "
            f"| {found['ttftRatio']:.2f} "
            f"({found['ttftP99BesideMs']:.0f} / {found['ttftP99AloneMs']:.0f} ms) "
            f"| {word[found['ttftHolds']]} |",
            f"| tokens by weight, apart by | {found['processes']} | at most 10 % "
            f"| {found['apart'] * 100:.1f} % | {word[found['shareHolds']]} |",
        ]
    return lines if lines[2:] else []


def _spread(measured: list[float]) -> str:
    return f"{min(measured):.2f} to {max(measured):.2f}" if len(measured) > 1 else ""


def _closed(cases: dict[str, Any]) -> list[str]:
    if not cases:
        return []
    lines = [
        "| concurrency | | requests/s | p50 / p90 / p99 ms | added p50 / p99 ms | CPU us/request "
        "| cores |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in cases.items():
        for row, found in rows.items():
            spread = " / ".join(_ms(found[key]) for key in ("p50Us", "p90Us", "p99Us"))
            lines.append(
                f"| {name} | {_shown(row)} | {found['requestsPerS']:.0f} | {spread} "
                f"| {_added(found, 'p50Us', 'p99Us')} | {_cpu(found, 'cpuUsPerRequest')} |"
            )
    return lines


def _streams(cases: dict[str, Any]) -> list[str]:
    if not cases:
        return []
    lines = [
        "| streams | | tokens/s | TTFT p50 / p99 ms | relay p50 / p99 ms | added p50 / p99 ms "
        "| CPU us/token | cores |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in cases.items():
        for row, found in rows.items():
            lines.append(
                f"| {name} | {_shown(row)} | {found['tokensPerS']:.0f} "
                f"| {_ms(found['ttftP50Us'])} / {_ms(found['ttftP99Us'])} "
                f"| {_ms(found['relayP50Us'])} / {_ms(found['relayP99Us'])} "
                f"| {_added(found, 'relayP50Us', 'relayP99Us')} "
                f"| {_cpu(found, 'cpuUsPerToken')} |"
            )
    return lines


def _memory(made: dict[str, Any]) -> list[str]:
    if not made["memoryMib"]:
        return []
    return [
        "| memory (RSS), MiB | idle | 10 s after all loads |",
        "|---|---|---|",
        *(
            f"| {_shown(row)} | {one['idle']:.0f} | {one['after']:.0f} |"
            for row, one in made["memoryMib"].items()
        ),
    ]


def _shown(row: str) -> str:
    return f"**{row}**" if row.startswith(OWN) else row


def _ms(us: float | None) -> str:
    return "-" if us is None else f"{us / 1e3:.2f}"


def _added(found: dict[str, Any], *keys: str) -> str:
    return " / ".join(_ms(found["added"][key]) for key in keys) if "added" in found else ""


def _cpu(found: dict[str, Any], key: str) -> str:
    if not found["cores"]:
        return " | "
    cost = "-" if found[key] is None else f"{found[key]:.1f}"
    return f"{cost} | {found['cores']:.2f}"
