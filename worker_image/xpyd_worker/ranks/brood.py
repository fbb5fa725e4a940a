"""The processes of a pod's ranks: a nursery, and what it forks, which are this process' children.

The thread that calls `start` calls the rest, too. The kernel ends the nursery when that thread
ends, and the ranks when this process does, so nothing outlives it, however that goes.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from xpyd_worker.ranks.births import Births
from xpyd_worker.ranks.loss import RANK_FAILED
from xpyd_worker.ranks.own_process import adoption

COMMAND = (sys.executable, "-P", "-m", "xpyd_worker.ranks.nursery")
_REAP_S = 5.0


class Brood:
    """The ranks' processes, by the ranks' numbers. `start` it once."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self.ends = select.poll()
        """Readable when `take_ended` has something to do; the caller may add to it."""
        self._births: Births | None = None
        self._nursery: subprocess.Popen[bytes] | None = None
        self._ranks: Sequence[int] = ()
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._ended: list[tuple[int, int]] = []

    def start(self, descriptors: Mapping[int, Sequence[int]], *, beats: int) -> None:
        """Start the nursery. `descriptors`: of each rank, what it inherits, its link first; `beats`
        is of all of them. OSError when the system does not let us."""
        adoption.begin()
        self._ranks = tuple(descriptors)
        births = self._births = Births()
        self.ends.register(births, select.POLLIN)
        own = [f"{rank}:{','.join(map(str, fds))}" for rank, fds in descriptors.items()]
        told = ("--parent", os.getpid(), "--born", births.writer, "--beats", beats)
        flags = [*map(str, told), *(part for text in own for part in ("--rank", text))]
        inherited = {births.writer, beats, *(fd for fds in descriptors.values() for fd in fds)}
        try:
            self._nursery = subprocess.Popen(
                [*self._command, *flags], stdin=subprocess.DEVNULL, pass_fds=tuple(inherited)
            )
        finally:
            births.close_writer()

    def pid(self, rank: int) -> int:
        """0 before it is there."""
        return self._pids.get(rank, 0)

    def take_ended(self) -> list[tuple[int, int]]:
        """Ranks that have ended since the last call, with their returncodes as Popen has them. One
        that the nursery left unborn has ended as the nursery has."""
        if self._births is not None and self._births.take():
            self._adopt()
        for rank in list(self._pidfds):
            self._reap(rank, within_s=0.0)
        ended, self._ended = self._ended, []
        return ended

    def wait(self, within_s: float) -> None:
        """Until all have ended, or that time is over."""
        end_s = time.monotonic() + within_s
        if self._births is not None:
            self._await_births(end_s)
        for rank in list(self._pidfds):
            self._reap(rank, within_s=max(0.0, end_s - time.monotonic()))

    def kill(self) -> None:
        """All that are left, and reap them."""
        if self._births is not None:
            if self._nursery is not None:
                self._nursery.kill()
            self._await_births(time.monotonic() + _REAP_S)
        for pidfd in self._pidfds.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        # The kernel may take its time to free a process' memory; it is init's to reap then.
        self.wait(_REAP_S)

    def _await_births(self, end_s: float) -> None:
        births = self._births
        assert births is not None, "asked by the callers"
        come = select.poll()
        come.register(births, select.POLLIN)
        while not births.take():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            come.poll(left_s * 1000)
        self._adopt()

    def _adopt(self) -> None:
        """The nursery is over, and has left us its children: those that have told of themselves."""
        births, nursery = self._births, self._nursery
        assert births is not None, "asked by the callers"
        self._births = None
        self.ends.unregister(births)
        births.close()
        if nursery is None:
            adoption.end()
            return
        # Ranks go on when it is gone, so it is ended where it does not end.
        try:
            nursery.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            nursery.kill()
            nursery.wait()
        # Its children are ours by now, and orphans of other programs need not be.
        adoption.end()
        for rank in self._ranks:
            try:
                pidfd = os.pidfd_open(births.pids[rank])
            except (KeyError, ProcessLookupError):
                self._ended.append((rank, nursery.returncode or RANK_FAILED))
                continue
            self._pids[rank] = births.pids[rank]
            self._pidfds[rank] = pidfd
            self.ends.register(pidfd, select.POLLIN)

    def _reap(self, rank: int, *, within_s: float) -> None:
        pidfd, pid = self._pidfds[rank], self._pids[rank]
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        if not ended.poll(within_s * 1000):
            return
        try:
            _, status = os.waitpid(pid, 0)
            returncode = os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # somebody else in this process has reaped it
            returncode = RANK_FAILED
        self.ends.unregister(pidfd)
        os.close(pidfd)
        del self._pidfds[rank]
        self._ended.append((rank, returncode))
