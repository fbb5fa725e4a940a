"""Counts by names that a peer may have chosen, with a bound. Pure.

Session and transport fill them, the server shows them. One thread writes each, any may read.
"""

from __future__ import annotations

from collections import Counter

MAX_NAMES = 64
OTHER = "other"


class Names(Counter[str]):
    """Counts by name, where a peer may have chosen the name: over MAX_NAMES it becomes `other`."""

    def add(self, name: str, count: int = 1) -> None:
        """`count` more under `name`."""
        if name not in self and len(self) >= MAX_NAMES:
            name = OTHER
        self[name] += count
