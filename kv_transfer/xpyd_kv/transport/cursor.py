"""A place in a sequence of views: what is still to be sent from them, or to be read into them."""

from __future__ import annotations

from collections.abc import Sequence

# IOV_MAX of Linux and macOS: more views in one sendmsg or recvmsg_into are an error.
MAX_VIEWS_PER_CALL = 1024


class Cursor:
    """Walks through flat byte views once, without copying or joining them. Hot path: about one
    Python step per view and call."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._index = 0
        self._offset = 0
        self.left = sum(map(len, views))
        """Bytes from here to the end."""

    def window(self, about_bytes: int) -> list[memoryview]:
        """The next views, as many as hold `about_bytes` if they were all equally long."""
        self._pass_empty()
        rest = len(self._views) - self._index
        count = about_bytes * rest // max(1, self.left) + 1
        end = self._index + min(count, MAX_VIEWS_PER_CALL)
        views = list(self._views[self._index : end])
        if self._offset:
            views[0] = views[0][self._offset :]
        return views

    def advance(self, count: int) -> None:
        """`count` bytes have been sent or read."""
        self.left -= count
        count += self._offset
        while self._index < len(self._views) and count >= len(self._views[self._index]):
            count -= len(self._views[self._index])
            self._index += 1
        self._offset = count

    def write(self, data: memoryview) -> None:
        """Copy `data` (at most `left` bytes) to this place and step over it."""
        while len(data):
            self._pass_empty()
            view = self._views[self._index][self._offset :]
            part = data[: len(view)]
            view[: len(part)] = part
            self.advance(len(part))
            data = data[len(part) :]

    def _pass_empty(self) -> None:
        while self.left and not len(self._views[self._index]):
            self._index += 1
