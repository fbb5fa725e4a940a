"""The measured part of docs/benchmarks/gpu.md, as a table."""

from __future__ import annotations

from typing import Any

BEGIN = "<!-- measured: `make bench-gpu` writes it -->\n"
END = "<!-- end of what is measured -->\n"


def with_measured(page: str, made: dict[str, Any]) -> str:
    """The page with the table of this report in place of what it has."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + _measured(made) + END + after


def _measured(made: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in made["versions"].items())
    rows = [
        f"| {row['kernel']} | {row['size']} | {row['us']:.1f} | {_number(row['torchUs'], 1)} "
        f"| {_number(row['timesTorch'], 2)} | {row['ofCopySpeed']:.2f} |"
        for row in made["cases"]
    ]
    steps = [
        f"| {row['sequences']} x {row['context']:,} | {'yes' if row['graphs'] else 'no'} "
        f"| {row['ms']:.3f} | {row['ofCopySpeed']:.2f} |"
        for row in made["steps"]
    ]
    return "\n".join(
        [
            "",
            f"{made['date']}: {made['device']}, {made['dtype']}, copies at "
            f"{made['copyGbPerS']:.0f} GB/s; {versions}.",
            "",
            "| kernel | size | us | torch, us | times as fast as torch | of the copy's speed |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "| decoding step | graphs | ms | of the copy's speed |",
            "|---|---|---|---|",
            *steps,
            "",
            "",
        ]
    )


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
