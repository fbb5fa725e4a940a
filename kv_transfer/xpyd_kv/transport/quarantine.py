"""D's memory of P's whose DATA comes broken: a few times may be an accident, more is a machine or a
network that will spoil the next prompt, too. Pure; the I/O thread's.
"""

from __future__ import annotations

from collections import deque

MISMATCHES = 3
"""So many frames with a wrong checksum within the window begin a quarantine."""
_MAX_PEERS = 4096


class Quarantine:
    """By engine_id, so that a new connection does not end it; time does."""

    def __init__(self, *, window_s: float, for_s: float) -> None:
        self._window_s = window_s
        self._for_s = for_s
        self._seen: dict[str, deque[float]] = {}
        self._until: dict[str, float] = {}

    def mismatch(self, engine_id: str, now: float) -> bool:
        """One more broken frame of this P; whether its quarantine begins now."""
        times = self._seen.pop(engine_id, None) or deque(maxlen=MISMATCHES)
        times.append(now)
        if len(times) == MISMATCHES and times[0] > now - self._window_s:
            self._until.pop(engine_id, None)
            _make_room(self._until)
            self._until[engine_id] = now + self._for_s
            return True
        _make_room(self._seen)
        self._seen[engine_id] = times
        return False

    def holds(self, engine_id: str, now: float) -> bool:
        """Whether connections of this P are refused."""
        return now < self._until.get(engine_id, now)


def _make_room(peers: dict[str, float] | dict[str, deque[float]]) -> None:
    while len(peers) >= _MAX_PEERS:
        del peers[next(iter(peers))]
