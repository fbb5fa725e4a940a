"""Log lines that others can cause: one in a while, with the number left out. Pure."""

from __future__ import annotations

_MAX_KEYS = 256


class RateLimit:
    """One per `interval_s`."""

    def __init__(self, interval_s: float = 5.0) -> None:
        self._interval_s = interval_s
        self._next = float("-inf")
        self._left_out = 0

    def take(self, now: float) -> int | None:
        """How many were left out since the last one, or None: leave this one out too."""
        if now < self._next:
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        self._next = now + self._interval_s
        return left_out


class RateLimits:
    """One per `interval_s` for each key; of more than 256 keys the oldest is forgotten."""

    def __init__(self, interval_s: float = 60.0) -> None:
        self._interval_s = interval_s
        self._limits: dict[object, RateLimit] = {}

    def take(self, key: object, now: float) -> int | None:
        """As RateLimit's, for `key`."""
        limit = self._limits.pop(key, None) or RateLimit(self._interval_s)
        while len(self._limits) >= _MAX_KEYS:
            del self._limits[next(iter(self._limits))]
        self._limits[key] = limit  # The last used is the youngest.
        return limit.take(now)
