"""The queue of calls from other threads to the engine's thread, and its wake-up.

Made before the connectors, which call `wake`, and before the engine, which takes the items.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from math import ceil

Item = Callable[[], None]
"""What a caller wants done, on the engine's thread."""


class Inbox:
    """A queue with one reader. No wake-up is lost: what comes after `take` (or `rearm`) ends the
    next `wait`.

    Its length is bounded by the engine: it takes everything before each step and refuses what is
    over its limit of waiting requests; the server bounds what it has open.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[Item] = deque()
        self._awake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not by `close`: connectors may wake an engine that has ended, and numbers are used again.
        weakref.finalize(self, os.close, self._awake)
        self._poll = select.poll()
        self._poll.register(self._awake, select.POLLIN)
        self._closed = False

    def fileno(self) -> int:
        """Readable when `wait` would return at once, for a reader that waits for more than this."""
        return self._awake

    def put(self, item: Item) -> bool:
        """Hand an item to the engine; False when the engine has ended and will not read it."""
        with self._lock:
            if self._closed:
                return False
            self._items.append(item)
        self.wake()
        return True

    def wake(self) -> None:
        """End the reader's `wait`. Any thread; returns at once."""
        os.eventfd_write(self._awake, 1)

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until `put` or `wake` was called since the last `take`, or the time is over."""
        # Rounded up: a reader that wakes just before a deadline finds nothing to do and waits
        # again.
        self._poll.poll(None if timeout_s is None else max(0, ceil(timeout_s * 1000)))

    def rearm(self) -> None:
        """Let the next `wait` end by what comes from now on. What is in it already stays, and the
        reader must take it before it sleeps for longer."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._awake)

    def take(self) -> list[Item]:
        """Remove and return all items, in order."""
        self.rearm()
        with self._lock:
            items = list(self._items)
            self._items.clear()
        return items

    def close(self) -> list[Item]:
        """Accept nothing more; what was still in it."""
        with self._lock:
            self._closed = True
        return self.take()

    @property
    def is_empty(self) -> bool:
        """Whether everything put was taken."""
        return not self._items
