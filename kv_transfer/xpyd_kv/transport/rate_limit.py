"""Log lines that strangers can cause: one in a while, with the number left out."""

from __future__ import annotations


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
