"""One /metrics out of those of several processes. Pure.

Counters, histograms and most gauges are shares of a whole: they are summed. What all processes know
alike is taken once, from the owner. When a process ends, what it had counted stays in the sums:
a scraper takes a counter that falls for one that began anew, and counts it twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

OWNERS_ALONE = frozenset({"xpyd_router_instances", "xpyd_router_workers"})
"""Gauges of which every process has the whole."""
_LASTING = frozenset({"counter", "histogram"})
_CREATED = "_created"
MAX_PAST_SERIES = 200_000
"""Kept of processes that ended; more are forgotten, and counters begin anew."""


@dataclass
class Family:
    """One metric: its lines of explanation, its kind, its samples by name and labels."""

    head: list[str] = field(default_factory=list[str])
    kind: str = "untyped"
    samples: dict[str, float] = field(default_factory=dict[str, float])


Families = dict[str, Family]


def parse(text: bytes) -> Families:
    """The text exposition of one process."""
    families: Families = {}
    family = Family()
    for line in text.decode().splitlines():
        if line.startswith("# "):
            _, word, name, *rest = line.split(" ", 3)
            family = families.setdefault(name, Family())
            family.head.append(line)
            if word == "TYPE":
                family.kind = rest[0]
        elif line:
            name, _, value = line.rpartition(" ")
            family.samples[name] = float(value)
    return families


def merge(owners: Families, workers: Iterable[Families], past: Families | None = None) -> bytes:
    """The whole router's text. `past` is of those that ended."""
    whole: Families = {}
    _add(whole, owners)
    for families in workers:
        _add(whole, {name: f for name, f in families.items() if name not in OWNERS_ALONE})
    if past:
        _add(whole, past)
    return _text(whole)


def retire(past: Families, ended: Families) -> Families:
    """`past` with that of a process that ended and had counted `ended`; what was given stays as it
    is, since another thread may be merging it.
    """
    kept: Families = {}
    if sum(len(family.samples) for family in past.values()) <= MAX_PAST_SERIES:
        _add(kept, past)
    _add(
        kept,
        {n: f for n, f in ended.items() if f.kind in _LASTING and n not in OWNERS_ALONE},
    )
    return kept


def _add(whole: Families, part: Families) -> None:
    for name, family in part.items():
        into = whole.get(name)
        if into is None:
            into = whole[name] = Family(family.head, family.kind)
        samples = into.samples
        if name.endswith(_CREATED):
            for sample, value in family.samples.items():
                samples[sample] = min(value, samples.get(sample, value))
        else:
            for sample, value in family.samples.items():
                samples[sample] = samples.get(sample, 0) + value


def _text(families: Families) -> bytes:
    lines: list[str] = []
    for family in families.values():
        lines += family.head
        lines += [f"{name} {_number(value)}" for name, value in family.samples.items()]
    return "\n".join([*lines, ""]).encode()


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
