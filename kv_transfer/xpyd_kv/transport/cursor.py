"""A place in a sequence of views: what is still to be sent from them, or to be read into them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

# IOV_MAX of Linux and macOS: more views in one sendmsg or recvmsg_into are an error.
MAX_VIEWS_PER_CALL = 1024


class Cursor:
    """Walks through flat byte views once, without copying or joining them. Hot path: no Python step
    for a view, only for a call."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        # Where each view ends, from the first one's begin.
        self._ends = list(accumulate(map(len, views)))
        self._size = self._ends[-1] if views else 0
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes from here to the end."""
        return self._size - self._at

    def window(self, most_bytes: int) -> list[memoryview]:
        """The next views, up to `most_bytes` in all; the first and the last may be parts."""
        ends, at = self._ends, self._at
        stop = min(self._size, at + most_bytes)
        first = bisect_right(ends, at)
        end = min(bisect_left(ends, stop) + 1, first + MAX_VIEWS_PER_CALL, len(ends))
        views = list(self._views[first:end])
        if not views:
            return views
        over = ends[end - 1] - stop
        if over > 0:
            views[-1] = views[-1][:-over]
        begun = at - ends[first] + len(self._views[first])
        if begun:
            views[0] = views[0][begun:]
        return views

    def advance(self, count: int) -> None:
        """`count` bytes have been sent or read."""
        self._at += count

    def write(self, data: memoryview) -> None:
        """Copy `data` (at most `left` bytes) to this place and step over it."""
        while len(data):
            for view in self.window(len(data)):
                length = len(view)
                view[:] = data[:length]
                data = data[length:]
                self._at += length
