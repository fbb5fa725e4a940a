"""What processes that are forked set for themselves, most of it by prctl(2). Linux.

For fork servers, what they fork, and the processes that adopt that: `fork_server` here, and the
ranks of an engine (xpyd_worker.ranks.start).
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
# Of what follows the name in /proc/PID/stat, from its field 3 on.
_ARG_START, _ARG_END = 45, 46


def bind_to(parent: int, *, status: int) -> None:
    """End with the process that is to be the parent, also where that is killed or this one
    stopped; at once, with `status`, where it is not the parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(status)


def thread_names() -> list[str]:
    """Names of this process' threads, those that Python does not know included."""
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


class Subreaper:
    """While it is in use, this process is the parent of what its children leave
    behind. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = 0
        self._was = 0

    def begin(self) -> None:
        """Be the parent from now on, until `end`; others may have begun, too."""
        with self._lock:
            if not self._asked:
                was = ctypes.c_int()
                ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was), 0, 0, 0)
                self._was = was.value
                ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            self._asked += 1

    def end(self) -> None:
        """What was adopted stays; what is left behind from now on goes where it went before."""
        with self._lock:
            self._asked -= 1
            if not self._asked:
                ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, self._was, 0, 0, 0)


subreaper = Subreaper()
"""The process' own: the kernel has one such setting for all of its threads."""


def set_name(name: str) -> None:
    """The process' short name, of 15 characters at most."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def set_title(*words: str) -> None:
    """What `ps` shows in place of the command line, as far as that is long enough. It is written
    over the memory where the kernel looks for it; that is not read any more once Python runs."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    room = end - start
    if start <= 0 or room <= 1:  # not every kernel says
        return
    title = b"\0".join(os.fsencode(word) for word in words)
    ctypes.memmove(start, title[: room - 1].ljust(room, b"\0"), room)
