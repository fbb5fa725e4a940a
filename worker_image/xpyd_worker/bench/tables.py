"""Figures as tables that a person reads. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xpyd_worker.bench.figures import Spread, Summary

_TIMES = (
    ("time to first token (TTFT)", "ttft_ms"),
    ("between tokens (ITL)", "itl_ms"),
    ("per output token (TPOT)", "tpot_ms"),
    ("whole request (E2E)", "e2e_ms"),
)


def table(rows: Iterable[Sequence[str]]) -> str:
    """Columns side by side: the first to the left, the others to the right."""
    lines = [list(row) for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in _rest(line, widths))]) + "\n"
        for line in lines
    )


def _rest(line: Sequence[str], widths: Sequence[int]) -> Iterable[tuple[str, int]]:
    return zip(line[1:], widths[1:], strict=True)


def of_serve(summary: Summary) -> str:
    """A run of `xpyd bench serve`."""
    counts = [
        ("requests", f"{summary.requests}"),
        ("failed", f"{summary.failed}"),
        ("seconds", f"{summary.seconds:.2f}"),
        ("input tokens", f"{summary.input_tokens}"),
        ("output tokens", f"{summary.output_tokens}"),
        ("requests/s", f"{summary.requests_per_s:.2f}"),
        ("output tokens/s", f"{summary.output_tokens_per_s:.1f}"),
        ("input and output tokens/s", f"{summary.tokens_per_s:.1f}"),
    ]
    if summary.goodput is not None:
        counts.append(("goodput, requests/s", f"{summary.goodput:.2f}"))
    return table(counts) + "\n" + of_times([(n, getattr(summary, name)) for n, name in _TIMES])


def of_times(times: Iterable[tuple[str, Spread]]) -> str:
    """Mean, median and 99th percentile in milliseconds."""
    head = ("milliseconds", "mean", "p50", "p99")
    return table([head, *((n, f"{s.mean:.2f}", f"{s.p50:.2f}", f"{s.p99:.2f}") for n, s in times)])
