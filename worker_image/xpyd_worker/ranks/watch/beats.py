"""Signs of life between the ranks of a pod and the process that watches them, in shared memory.

A thread of the rank's own counts. So a process that is stopped, or that lets none of its threads
run, is seen, and one that computes for long is not taken for dead. Each count is one aligned word
that only grows, so that it is read while it changes.

The ranks watch that process in turn (MainWatch). Where it ends the kernel ends them all. Where it
only stops, nothing is answered any more and the ranks' memory stays taken: so the ranks end it. Not
where it is another program (LLM), which may let no other thread run for as long as it likes.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

BEAT_S = 0.25
_WORDS = 8  # a cache line for each rank


class Beat(NamedTuple):
    """One look at a rank: how often it has beaten, how often it has begun and ended to work on
    steps, what its threads have computed, in ns of a processor, and how many steps it has
    launched."""

    beats: int = 0
    begun: int = 0
    ended: int = 0
    processor_ns: int = 0
    steps: int = 0

    @property
    def is_working(self) -> bool:
        """Whether the rank is in a step, be it that it waits there for other ranks."""
        return self.begun > self.ended


class Maker(NamedTuple):
    """One look at the process that made the page, which watches the ranks: how often it has looked
    at them, and its number, 0 where ranks do not watch it."""

    looks: int = 0
    pid: int = 0


class BeatPage:
    """The words of all ranks of one pod; behind them those of the process that watches them."""

    def __init__(self, ranks: int, descriptor: int | None = None) -> None:
        """Make the memory, or map what `descriptor` names."""
        self._makers = ranks * _WORDS
        size = (ranks + 1) * _WORDS * 8
        if descriptor is None:
            descriptor = os.memfd_create("xpyd-beats", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, size)
        self._words = memoryview(self._memory).cast("Q")

    def watch_maker(self) -> None:
        """Let a rank end this process from now on when it sees no sign of its life."""
        self._words[self._makers + 1] = os.getpid()

    def live(self) -> None:
        """Show the ranks that the page's maker lives. The thread that watches them."""
        self._words[self._makers] += 1

    def maker(self) -> Maker:
        """What the page's maker shows now."""
        return Maker(*self._words[self._makers : self._makers + len(Maker._fields)])

    def look(self, index: int) -> Beat:
        """What the rank shows now."""
        return Beat(*self._words[index * _WORDS : index * _WORDS + len(Beat._fields)])

    def slot(self, index: int) -> Slot:
        """The rank's own side of it."""
        start = index * _WORDS
        return Slot(self._words[start : start + len(Beat._fields)])

    def close(self) -> None:
        """Unmap and close."""
        self._words.release()
        self._memory.close()
        os.close(self.descriptor)


class Slot:
    """Where one rank writes. `begin`, `launched` and `end`: the thread that runs its steps."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def begin(self) -> None:
        """Work on a step begins."""
        self._words[1] += 1

    def end(self) -> None:
        """Write that the work ends."""
        self._words[2] += 1

    def launched(self) -> None:
        """A step has been; work on it may go on in several turns."""
        self._words[4] += 1

    def beat(self) -> None:
        """The beating thread's turn."""
        self._words[3] = time.process_time_ns()
        self.live()

    def live(self) -> None:
        """A sign of life, also of a rank that has computed nothing yet."""
        self._words[0] += 1


def beat_forever(slot: Slot, look: Callable[[], None]) -> None:
    """Start the thread that beats until the process ends, and has a `look` at each beat."""

    def run() -> None:
        while True:
            slot.beat()
            look()
            time.sleep(BEAT_S)

    threading.Thread(target=run, name="beats", daemon=True).start()


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
