"""A rank's counters on their way into its engine's. Pure.

Those of a transfer go with what the rank says of its pairs' ends. What changes without one (who is
connected, who was refused) goes once in TELL_S, where it has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from xpyd_kv.ranks.api import EndpointFigures, Figures
from xpyd_kv.session.metrics import KvMetrics
from xpyd_kv.transport.counters import Counters

TELL_S = 1.0
"""Far under the period in which anybody scrapes."""

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


class EndpointBook:
    """Of one rank's endpoint: what it has not told yet. On its I/O thread."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._numbers: dict[str, int] = {}
        self._named: dict[str, dict[str, int]] = {}

    def take(self) -> EndpointFigures:
        """What has changed since the last call."""
        numbers, named = self._counters.numbers(), self._counters.named()
        found = EndpointFigures(
            numbers=_changes(numbers, self._numbers),
            named={
                name: changes
                for name, counts in named.items()
                if (changes := _changes(counts, self._named.get(name, {})))
            },
        )
        self._numbers, self._named = numbers, named
        return found


class Teller:
    """Calls `tell` with what has changed, at most once in TELL_S. The Handler's tick asks it."""

    def __init__(
        self,
        figures: FigureBook,
        counters: Counters,
        tell: Callable[[Figures, EndpointFigures], None],
    ) -> None:
        self._figures = figures
        self._endpoint = EndpointBook(counters)
        self._tell = tell
        self._next_s = float("-inf")

    def tick(self, now: float) -> float:
        """See Handler."""
        if now >= self._next_s:
            self._next_s = now + TELL_S
            figures, endpoint = self._figures.take(), self._endpoint.take()
            if figures != Figures() or endpoint != EndpointFigures():
                self._tell(figures, endpoint)
        return self._next_s


def _changes(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: change for name, value in now.items() if (change := value - before.get(name, 0))}
