"""Those who wait, in order: strictly by priority, first come first served within one. Pure.

Strict and without ageing: engines that schedule by priority do the same (vLLM), so a request keeps
one meaning on its whole way; and nobody waits for ever, because everyone has a deadline.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from xpyd_router.admission.values import Cost


@dataclass(eq=False)
class Entry:
    """One request that waits. `priority`: lower is earlier."""

    cost: Cost
    priority: int


E = TypeVar("E", bound=Entry)


class Line(Generic[E]):
    """Add, first, last and remove in O(log n), but for one memmove of the distinct priorities."""

    def __init__(self) -> None:
        self._by_priority: dict[int, OrderedDict[E, None]] = {}
        self._priorities: list[int] = []
        self._entries = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._entries

    @property
    def held_bytes(self) -> int:
        """Bodies of all who wait."""
        return self._bytes

    @property
    def first(self) -> E:
        """Whose turn it is. The line must not be empty."""
        return next(iter(self._by_priority[self._priorities[0]]))

    @property
    def last(self) -> E:
        """The newest of the lowest priority. The line must not be empty."""
        return next(reversed(self._by_priority[self._priorities[-1]]))

    def add(self, entry: E) -> None:
        """At the end of its priority."""
        same = self._by_priority.get(entry.priority)
        if same is None:
            same = self._by_priority[entry.priority] = OrderedDict()
            insort(self._priorities, entry.priority)
        same[entry] = None
        self._entries += 1
        self._bytes += entry.cost.body_bytes

    def remove(self, entry: E) -> bool:
        """Whether it stood in line."""
        same = self._by_priority.get(entry.priority)
        if same is None or entry not in same:
            return False
        del same[entry]
        if not same:
            del self._by_priority[entry.priority]
            del self._priorities[bisect_left(self._priorities, entry.priority)]
        self._entries -= 1
        self._bytes -= entry.cost.body_bytes
        return True
