"""What routers count of a canary, and which limits of the document that breaks. Pure.

Routers count each step of a canary anew, by its name, and for both sides: the revision on trial
and the old one. `canary` decides by it how the trial goes on. See docs/adr/0105, docs/adr/0112
and docs/adr/0132.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import NamedTuple

from xpyd_operator.document.rollout import Canary

_METRIC = "xpyd_router_canary"
QUERY = "/metrics?" + "&".join(
    f"name[]={name}"
    for name in (
        _METRIC,
        *(f"{_METRIC}_{what}_total" for what in ("served", "failed", "refused", "recomputed")),
        *(f"{_METRIC}_{what}_seconds" for what in ("ttft", "itl")),
        "xpyd_router_workers",
    )
)
"""What to GET of a router."""
_SAMPLE = re.compile(rf"^{_METRIC}(\w*)\{{([^}}\n]*)\}} (\S+)$", re.M)
_LABEL = re.compile(r'(\w{1,16})="([^"\n]{0,64})"')
_WORKERS = re.compile(r"^xpyd_router_workers (\S+)$", re.M)
_QUANTILE = 0.95
_DEVIATIONS = 3.0
"""Standard deviations by which two parts differ by chance alone in one of 700 comparisons."""


class Key(NamedTuple):
    """What is counted: `what` of a side, at most `bound` for times."""

    side: str
    what: str
    bound: float = inf


@dataclass(frozen=True)
class RouterWord:
    """What a router says: the canary by which all its processes divide requests ("": none, or not
    all), and what it counted of it."""

    name: str = ""
    counts: Mapping[Key, int] = field(default_factory=dict[Key, int])


def read_word(said: str) -> RouterWord:
    """The word of a router, from its metrics."""
    workers = max([1, *map(_number, _WORKERS.findall(said))])
    divides: Counter[str] = Counter()
    counts: dict[str, dict[Key, int]] = {}
    for what, labels, value in _SAMPLE.findall(said):
        by_name = dict(_LABEL.findall(labels))
        name = by_name.get("canary", "")
        if not what:
            divides[name] += _number(value)
        elif what.endswith(("_total", "_bucket")):
            bound = by_name.get("le", "+Inf")
            key = Key(by_name.get("revision", ""), what, inf if bound == "+Inf" else float(bound))
            counts.setdefault(name, {})[key] = _number(value)
    name = max(divides, key=lambda one: divides[one], default="")
    return RouterWord(name if divides[name] >= workers else "", counts.get(name, {}))


def _number(value: str) -> int:
    try:
        return max(0, int(float(value)))
    except (ValueError, OverflowError):
        return 0


class Tally:
    """Sums of what routers counted of one step. A router that counts from 0 again, or is gone,
    keeps what it had counted before."""

    def __init__(self) -> None:
        self.name = ""
        self._last: dict[str, Mapping[Key, int]] = {}
        self._past: Counter[Key] = Counter()

    def take(self, name: str, words: Mapping[str, RouterWord]) -> Mapping[Key, int]:
        """The sums with the words of routers, of the step of this name."""
        if name != self.name:
            self.name, self._last, self._past = name, {}, Counter()
        for router, word in words.items():
            if word.name != name:
                continue
            before = self._last.get(router, {})
            if any(word.counts.get(key, 0) < count for key, count in before.items()):
                self._past.update(before)
            self._last[router] = word.counts
        total = Counter(self._past)
        for counts in self._last.values():
            total.update(counts)
        return total


@dataclass(frozen=True)
class SideFigures:
    """How the requests of one side went; times of 95 %, None: none was measured."""

    requests: int = 0
    failed: int = 0
    ttft_ms: float | None = None
    itl_ms: float | None = None
    refused: int = 0
    """Requests that an engine refused with a 4xx, which are none of `requests`."""
    recomputed: int = 0
    """Those of `requests` that were served although their KV did not come: D computed the prompt
    again."""

    @property
    def error_percent(self) -> float:
        """The part that failed."""
        return 100 * self.failed / self.requests if self.requests else 0.0


def figures_of(counts: Mapping[Key, int], side: str = "new") -> SideFigures:
    """The figures of one side."""
    failed = counts.get(Key(side, "_failed_total"), 0)
    served = counts.get(Key(side, "_served_total"), 0)
    refused = counts.get(Key(side, "_refused_total"), 0)
    recomputed = counts.get(Key(side, "_recomputed_total"), 0)
    ttft, itl = (_quantile(counts, side, f"_{what}_seconds_bucket") for what in ("ttft", "itl"))
    return SideFigures(served + failed, failed, ttft, itl, refused, recomputed)


def _quantile(counts: Mapping[Key, int], side: str, what: str) -> float | None:
    """Milliseconds that 95 % did not exceed, even within a bucket."""
    found = sorted((k.bound, n) for k, n in counts.items() if (k.side, k.what) == (side, what))
    total = found[-1][1] if found else 0
    below, lower = 0, 0.0
    for bound, amount in found:
        if total and amount >= _QUANTILE * total:
            if bound == inf or amount == below:
                return 1000 * lower
            return 1000 * (lower + (bound - lower) * (_QUANTILE * total - below) / (amount - below))
        below, lower = amount, bound
    return None


def broken_limits(rules: Canary, figures: SideFigures) -> list[str]:
    """The limits that the figures break, in words."""
    limits, found = rules.analysis, list[str]()
    if figures.error_percent > limits.error_percent:
        found.append(
            f"{figures.error_percent:.3g} % of its requests failed, the limit is "
            f"{limits.error_percent} %"
        )
    for what, measured, limit in (
        ("TTFT", figures.ttft_ms, limits.ttft_milliseconds),
        ("ITL", figures.itl_ms, limits.itl_milliseconds),
    ):
        if measured is not None and limit is not None and measured > limit:
            found.append(f"its {what} p95 is {measured:.3g} ms, the limit is {limit} ms")
    return found


class Compared(NamedTuple):
    """What both sides' parts say. `is_known`: enough to promote by; `broken`: the limits that they
    break, in words."""

    is_known: bool = True
    broken: tuple[str, ...] = ()


class _Part(NamedTuple):
    """`amount` of `total` requests of one side."""

    amount: int
    total: int

    @property
    def share(self) -> float:
        return self.amount / self.total if self.total else 0.0


def compared(rules: Canary, new: SideFigures, old: SideFigures) -> Compared:
    """Compare the parts of both sides that an engine refuses, and that D computes again. Clients
    and the cluster are the same for both, so what only the new revision does is its own fault. See
    docs/adr/0112 and docs/adr/0132."""

    def refused(side: SideFigures) -> _Part:
        return _Part(side.refused, side.requests + side.refused)

    def recomputed(side: SideFigures) -> _Part:
        return _Part(side.recomputed, side.requests - side.failed)

    again = "were computed again by D (their KV did not come)"
    found = [
        _compared(rules, refused(new), refused(old), "were refused with a 4xx"),
        _compared(rules, recomputed(new), recomputed(old), again),
    ]
    broken = [what for one in found for what in one.broken]
    return Compared(all(one.is_known for one in found), tuple(broken))


def _compared(rules: Canary, new: _Part, old: _Part, what: str) -> Compared:
    limits = rules.analysis
    limit, more = limits.error_percent / 100, new.share - old.share
    if min(new.total, old.total) < limits.min_requests:
        # What is nearly nothing needs no comparison.
        return Compared(is_known=new.share <= limit)
    both = (new.amount + old.amount) / (new.total + old.total)
    chance = _DEVIATIONS * sqrt(both * (1 - both) * (1 / new.total + 1 / old.total))
    if more <= limit + chance:
        return Compared()
    said = f"{100 * new.share:.3g} % of its requests {what}, of the old revision's "
    said += f"{100 * old.share:.3g} %, the limit is {limits.error_percent} % more"
    return Compared(broken=(said,))


def figures_text(rules: Canary, figures: SideFigures) -> str:
    """The figures in words."""
    least = rules.analysis.min_requests
    parts = [f"{figures.requests} of {least} requests", f"{figures.failed} failed"]
    parts += [f"{figures.refused} refused (4xx)"] if figures.refused else []
    parts += [f"{figures.recomputed} computed again by D"] if figures.recomputed else []
    times = (("TTFT", figures.ttft_ms), ("ITL", figures.itl_ms))
    parts += [f"{what} p95 {value:.3g} ms" for what, value in times if value is not None]
    return ", ".join(parts)
