"""A rank's counters on their way into its engine's. Pure."""

from __future__ import annotations

from collections import Counter

from xpyd_kv.ranks.api import Figures
from xpyd_kv.session.metrics import KvMetrics

_NUMBERS = (
    "sent_bytes",
    "sent_frames",
    "overlapped_bytes",
    "received_bytes",
    "received_frames",
    "checksum_mismatches",
)


class FigureBook:
    """Of one rank: what it has not told yet. On its I/O thread."""

    def __init__(self, metrics: KvMetrics) -> None:
        self._metrics = metrics
        self._told = dict.fromkeys(_NUMBERS, 0)
        self._refused: Counter[str] = Counter()

    def take(self) -> Figures:
        """What was counted since the last call."""
        now: dict[str, int] = {name: getattr(self._metrics, name) for name in _NUMBERS}
        more = {name: now[name] - self._told[name] for name in _NUMBERS}
        self._told = now
        refused = Counter(self._metrics.refused_data)
        new = refused - self._refused
        self._refused = refused
        return Figures(**more, refused_data=dict(new))


def add(metrics: KvMetrics, figures: Figures) -> None:
    """Into the engine's, on its I/O thread."""
    for name in _NUMBERS:
        setattr(metrics, name, getattr(metrics, name) + getattr(figures, name))
    metrics.refused_data.update(figures.refused_data)
