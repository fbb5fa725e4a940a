"""DATA frames of one peer that wait for their turn. Pure; the SendSession owns one for each peer.

The endpoint gets only a little ahead of what it is sending: a frame that it has, it sends or drops
when its turn comes. Were all of them there, a cancelled transfer would be quiet only when
everything queued before it had been sent; over a slow connection that is later than CANCEL's
deadline, and the connection would be closed with all other transfers on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class _Frame(NamedTuple):
    owner: object
    length: int
    send: Callable[[], None]


# With the endpoint however long they are: it begins the next one when it is through with one.
_AT_LEAST = 2


class Outbox:
    """Frames in the order in which they were put, at most `ahead_bytes` of them (but at least two
    frames) with the endpoint."""

    def __init__(self, ahead_bytes: int) -> None:
        self._ahead_bytes = ahead_bytes
        self._given = self._given_bytes = 0
        self._frames: deque[_Frame] = deque()

    def put(self, owner: object, length: int, send: Callable[[], None]) -> None:
        """`send` gives a frame of `length` bytes to the endpoint; it is called when it is its
        turn."""
        self._frames.append(_Frame(owner, length, send))
        self._give()

    def done(self, length: int) -> None:
        """The endpoint is through with a frame."""
        self._given -= 1
        self._given_bytes -= length
        self._give()

    def drop(self, owner: object) -> int:
        """Forget the frames of `owner` that the endpoint has not; how many they were."""
        kept = deque(frame for frame in self._frames if frame.owner is not owner)
        dropped = len(self._frames) - len(kept)
        self._frames = kept
        return dropped

    def _give(self) -> None:
        while self._frames:
            frame = self._frames[0]
            is_full = self._given_bytes + frame.length > self._ahead_bytes
            if is_full and self._given >= _AT_LEAST:
                return
            self._frames.popleft()
            self._given += 1
            self._given_bytes += frame.length
            frame.send()
