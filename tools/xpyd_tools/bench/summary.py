"""Makes the summary of a run from the times of requests, as JSON and as tables. Pure.

TTFT   from sending a request to its first token
ITL    between two pieces of the stream; a piece is a token, where the server sends them singly
TPOT   of one request: (E2E - TTFT) / (output tokens - 1)
E2E    from sending a request to its last token
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, cast

from xpyd_core.errors import UserError

# What an objective may be put on.
OBJECTIVES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Sample:
    """One request. `error`: why it failed; then the times mean nothing."""

    sent_s: float
    ttft_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    e2e_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Spread:
    """Milliseconds."""

    mean: float
    p50: float
    p99: float


@dataclass(frozen=True)
class Summary:
    """One run. Rates are per second of the time from the first sending to the last token.

    `goodput`: requests per second that met all objectives; None where there are none.
    """

    requests: int
    failed: int
    seconds: float
    input_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    tokens_per_s: float
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    goodput: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The summary as a JSON object, rounded to significant digits."""
        return {name: _rounded(value) for name, value in asdict(self).items()}


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        members = cast("dict[str, object]", value)
        return {name: _rounded(one) for name, one in members.items()}
    return round(value, 3) if isinstance(value, float) else value


def percentile(values: Sequence[float], percent: float) -> float:
    """Between the two nearest ranks in proportion (NumPy's default); 0 where there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low, high = math.floor(at), math.ceil(at)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def spread(seconds: Iterable[float]) -> Spread:
    """The summary of these times; zeros where there are none."""
    values = [one * 1e3 for one in seconds]
    mean = math.fsum(values) / len(values) if values else 0.0
    return Spread(mean, percentile(values, 50), percentile(values, 99))


def summarize(samples: Sequence[Sample], objectives: Mapping[str, float] | None = None) -> Summary:
    """The numbers of one run. `objectives`: the most milliseconds, by names of OBJECTIVES."""
    good = [one for one in samples if not one.error]
    start_s = min((one.sent_s for one in samples), default=0.0)
    end_s = max((one.sent_s + one.e2e_s for one in good), default=start_s)
    seconds = end_s - start_s
    per_s = 1 / seconds if seconds > 0 else 0.0
    input_tokens = sum(one.input_tokens for one in good)
    output_tokens = sum(one.output_tokens for one in good)
    met = [one for one in good if _meets(one, objectives or {})]
    return Summary(
        requests=len(good),
        failed=len(samples) - len(good),
        seconds=seconds,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        requests_per_s=len(good) * per_s,
        output_tokens_per_s=output_tokens * per_s,
        tokens_per_s=(input_tokens + output_tokens) * per_s,
        ttft_ms=spread(one.ttft_s for one in good),
        itl_ms=spread(gap for one in good for gap in one.gaps_s),
        tpot_ms=spread(tpot for one in good if (tpot := one.tpot_s) is not None),
        e2e_ms=spread(one.e2e_s for one in good),
        goodput=len(met) * per_s if objectives else None,
    )


def _meets(sample: Sample, objectives: Mapping[str, float]) -> bool:
    times = {"ttft": sample.ttft_s, "tpot": sample.tpot_s or 0.0, "e2e": sample.e2e_s}
    return all(times[name] * 1e3 <= most for name, most in objectives.items())


def token_gaps(arrivals: Sequence[tuple[float, int]]) -> tuple[float, ...]:
    """ITL of one answer in seconds. `arrivals`: times, and how many tokens came at each; those of
    the first have no gap."""
    return tuple(
        (now - before) / tokens
        for (before, _), (now, tokens) in pairwise(arrivals)
        for _ in range(tokens)
    )


def parse_objectives(words: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50` as milliseconds by name. UserError names the word."""
    found: dict[str, float] = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            most = float(value)
        except ValueError:
            most = math.nan
        if name not in OBJECTIVES or not most > 0:
            raise UserError(
                f"--goodput {word}: expected NAME:MILLISECONDS with one of {', '.join(OBJECTIVES)}"
            )
        found[name] = most
    return found


# --- tables

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
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + "\n"
        for line in lines
    )


def serve_table(summary: Summary) -> str:
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
    return table(counts) + "\n" + times_table([(n, getattr(summary, name)) for n, name in _TIMES])


def times_table(times: Iterable[tuple[str, Spread]]) -> str:
    """Mean, median and 99th percentile in milliseconds."""
    head = ("milliseconds", "mean", "p50", "p99")
    return table([head, *((n, f"{s.mean:.2f}", f"{s.p50:.2f}", f"{s.p99:.2f}") for n, s in times)])
