"""How often requests met their objectives, beside what was expected when they were placed. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from xpyd_router.figures.exposition import Exposition

Objective = Literal["ttft", "itl"]
Word = Literal["met", "missed", "unknown"]


def word(time_s: float | None, objective_s: float) -> Word:
    """What `time_s` is to the objective; None: not known."""
    if time_s is None:
        return "unknown"
    return "met" if time_s <= objective_s else "missed"


class ObjectiveTable:
    """Owner of these counts."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[Objective, Word, Word]] = Counter()
        """By objective, what was expected, and the result."""

    def count(self, objective: Objective, *, predicted: Word, result: Word) -> None:
        """A request ended."""
        self.counts[objective, predicted, result] += 1

    def write(self, out: Exposition) -> None:
        """All of them as one metric."""
        out.numbers(
            "xpyd_router_objectives_total",
            "counter",
            "Streams with an objective",
            [
                (f'objective="{objective}",predicted="{predicted}",result="{result}"', count)
                for (objective, predicted, result), count in sorted(self.counts.items())
            ],
        )
