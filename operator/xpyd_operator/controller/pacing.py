"""When a fleet's status may be written, and which events are worth telling. Pure: times are given.

A fleet that starts has its counts changed by every pod; each write costs every watcher of the fleet
something. So statuses are written at growing distances while a fleet is on its way, at once when
what `kubectl wait` waits for has changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, cast

from xpyd_operator.status import EventText

_STEPS_S = (2.0, 6.0, 12.0)
"""Quiet after the first, second ... write; the last one for all that follow."""
_URGENT_S = 0.25
"""Quiet before an urgent write."""
_CALM_S = 30.0
"""Without a write for so long, a fleet begins with the first step again."""
_POOLS_S = 5.0
"""Between two writes of the pools' statuses. An HPA looks every 15 s."""
_POOLS_READY_S = 1.0
"""The same where the fleet is ready: then its pools' statuses should not deny it for long."""
_FIRST_POOLS_S = 30.0
"""A new fleet's pools are told of when it is ready, or after this."""

_URGENT_CONDITIONS = ("Ready", "Available", "Degraded")
_REPEAT_S = 60.0
_MOST_EVENTS = 20
"""Events of one fleet within _REPEAT_S."""


class StatusPace:
    """The pace of one fleet's status writes, its pools' included. `now`: when it was first seen."""

    def __init__(self, now: float) -> None:
        self._last = float("-inf")
        self._writes = 0
        self._first_pools_at = now + _FIRST_POOLS_S
        self._pools_at: float | None = None

    def wait_s(self, now: float, *, urgent: bool) -> float:
        """Seconds until a changed status may be written; 0: now."""
        if self._writes == 0:
            return 0.0
        step = _STEPS_S[min(self._writes, len(_STEPS_S)) - 1]
        return max(0.0, self._last + (_URGENT_S if urgent else step) - now)

    def wait_of_pools_s(self, now: float, *, ready: bool) -> float:
        """As wait_s, of the pools alone. `ready`: the fleet is."""
        if self._pools_at is None:
            return 0.0 if ready else max(0.0, self._first_pools_at - now)
        return max(0.0, self._pools_at + (_POOLS_READY_S if ready else _POOLS_S) - now)

    def wrote(self, now: float) -> None:
        """The fleet's status was written."""
        self._writes = 1 if now - self._last > _CALM_S else self._writes + 1
        self._last = now

    def wrote_pools(self, now: float) -> None:
        """The pools' statuses were written."""
        self._pools_at = now


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


def is_ready(status: Mapping[str, Any]) -> bool:
    """Whether the status says that the fleet is as it should be."""
    return _conditions_of(status).get("Ready", {}).get("status") == "True"
