"""A rank's eye on the process that watches the ranks.

Where that process ends the kernel ends them all. Where it only stands still, nobody else would see
that nothing is answered any more, and the ranks' memory would stay taken: so the ranks end it. Not
where it is somebody else's program (LLM), which may let no other thread run for as long as it
likes.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress

from xpyd_worker.ranks.beats import BEAT_S, Maker

_log = logging.getLogger(__name__)
SILENT_LOOKS = 32
"""8 s. More than a rank has: it serves HTTP, and some of what it calls lets no other thread run."""


def kill(pid: int) -> None:
    """End it, if it is there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class MainWatch:
    """`look` at each beat; the thread that beats."""

    def __init__(
        self, maker: Callable[[], Maker], place: int, end: Callable[[int], None] = kill
    ) -> None:
        """`place`: the rank's number in its pod, so that one speaks before the others."""
        self._maker = maker
        self._end = end
        self._most = SILENT_LOOKS + place
        self._looks = 0
        self._silent = 0

    def look(self, *, is_serving: bool) -> None:
        """End the maker if it has shown nothing new for too long. Not `is_serving`: the instance
        starts or ends, which may take its time."""
        found = self._maker()
        is_silent = is_serving and found.pid > 0 and found.looks == self._looks
        self._looks = found.looks
        self._silent = self._silent + 1 if is_silent else 0
        if self._silent < self._most:
            return
        self._silent = 0
        _log.critical(
            "the instance ends: its main process (pid %d) has given no sign of life for %g s: it "
            "is stopped, or gets no processor",
            found.pid,
            self._most * BEAT_S,
        )
        self._end(found.pid)
