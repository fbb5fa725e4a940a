"""From the watches' thread to the loop of the reconciler: what was heard, in order.

Messages pile up while the loop is busy and are then taken in one go, so a thousand pod events cost
one wake-up, not a thousand. The bound is the watch itself: kopf keeps no more than it was sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xpyd_operator.controller.kinds import Kind, Obj

_MOST_AT_ONCE = 500
"""Messages taken before other tasks get their turn: about 10 ms."""


@dataclass(frozen=True)
class Listed:
    """A list, or a chunk of one. `last`: all that was not in the chunks so far is not there."""

    kind: Kind
    namespace: str | None
    objects: Sequence[Obj]
    version: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Present:
    """An object was added or changed."""

    kind: Kind
    obj: Obj


@dataclass(frozen=True)
class Gone:
    """An object was deleted, or lost the label that it is watched by."""

    kind: Kind
    obj: Obj


@dataclass(frozen=True)
class Missing:
    """The API server has no such kind any more."""

    kind: Kind


@dataclass(frozen=True)
class Unlisted:
    """The API server did not list the kind: no right to it, or a fault."""

    kind: Kind


Message = Listed | Present | Gone | Missing | Unlisted


class Inbox:
    """Made in the loop that `deliver` runs in; `send` from any thread."""

    def __init__(self, deliver: Callable[[Message], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._messages: deque[Message] = deque()
        self._scheduled = False

    def send(self, message: Message) -> None:
        """Hand over one message; after the loop has ended it is dropped."""
        self._messages.append(message)
        # A race of two threads schedules twice at worst, and the second finds nothing.
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._take)
            except RuntimeError:
                # The loop is closed: the operator is stopping.
                self._messages.clear()

    def _take(self) -> None:
        self._scheduled = False
        for _ in range(_MOST_AT_ONCE):
            if not self._messages:
                return
            self._deliver(self._messages.popleft())
        self._scheduled = True
        self._loop.call_soon(self._take)
