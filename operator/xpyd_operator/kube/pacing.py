"""When a fleet's status may be written, and which events are worth telling. Pure: times are given.

A fleet that starts has its counts changed by every pod; each write costs every watcher of the fleet
something. So statuses are written at growing distances while a fleet is on its way, at once when
what `kubectl wait` waits for has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, cast

from xpyd_operator.observe import EventText

_STEPS_S = (1.0, 1.0, 2.0, 4.0)
"""Quiet after the first, second ... write; the last one for all that follow."""
_URGENT_S = 0.25
"""Quiet before an urgent write."""
_CALM_S = 30.0
"""Without a write for so long, a fleet begins with the first step again."""

_URGENT_CONDITIONS = ("Ready", "Available", "Degraded")
_REPEAT_S = 60.0
_MOST_EVENTS = 20
"""Events of one fleet within _REPEAT_S."""


class StatusPace:
    """The pace of one fleet's status writes."""

    def __init__(self) -> None:
        self._last = float("-inf")
        self._writes = 0

    def wait_s(self, now: float, *, urgent: bool) -> float:
        """Seconds until a changed status may be written; 0: now."""
        if self._writes == 0:
            return 0.0
        step = _STEPS_S[min(self._writes, len(_STEPS_S)) - 1]
        return max(0.0, self._last + (_URGENT_S if urgent else step) - now)

    def wrote(self, now: float) -> None:
        """A status was written."""
        self._writes = 1 if now - self._last > _CALM_S else self._writes + 1
        self._last = now


def is_urgent(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> bool:
    """Whether `after` has news that somebody may wait for: a condition, another generation."""
    if not before or before.get("observedGeneration") != after.get("observedGeneration"):
        return True
    old, new = _conditions_of(before), _conditions_of(after)
    return any(
        old.get(name, {}).get("status") != new.get(name, {}).get("status")
        for name in _URGENT_CONDITIONS
    )


def _conditions_of(status: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """A status' conditions by type."""
    found = cast("list[dict[str, Any]]", (status or {}).get("conditions") or [])
    return {str(condition.get("type")): condition for condition in found}


class RecentEvents:
    """What one fleet was told within the last minute. Bounded."""

    def __init__(self) -> None:
        self._told: deque[tuple[float, EventText]] = deque(maxlen=_MOST_EVENTS)

    def is_new(self, event: EventText, now: float) -> bool:
        """Whether to tell it: not a repetition, and not one too many. Remembers it if so."""
        while self._told and now - self._told[0][0] > _REPEAT_S:
            self._told.popleft()
        if len(self._told) == _MOST_EVENTS or any(told == event for _, told in self._told):
            return False
        self._told.append((now, event))
        return True
