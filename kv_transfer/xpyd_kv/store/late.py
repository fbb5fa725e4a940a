"""What is given back when a device is through with it: memory and blocks that it still copies.

Owned by the store; engine thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from xpyd_kv.device.api import DeviceError, Event


class _Late(NamedTuple):
    event: Event
    give_back: Callable[[], None]


class Late:
    """In the order of the copies."""

    def __init__(self) -> None:
        self._waiting: deque[_Late] = deque()

    def give_back_after(self, event: Event, give_back: Callable[[], None]) -> None:
        """`give_back`, in a `poll` after `event`."""
        self._waiting.append(_Late(event, give_back))

    def poll(self) -> None:
        """Give back what is no longer copied. What stands behind an event that fails stays taken:
        that device is lost."""
        while self._waiting:
            try:
                if not self._waiting[0].event.is_done():
                    return
            except DeviceError:
                self._waiting.popleft()
                continue
            self._waiting.popleft().give_back()
