"""The processes of a pod's ranks: a fork server, and the children of this process that it forks.

The thread that calls `start` calls the rest, too. The kernel ends the fork server when that thread
ends, and the ranks when this process does, so nothing outlives it, however that goes. Which process
is which rank comes through a pipe, from the fork server and from the rank itself: where one of the
two is killed or stopped, the report of the other is there. ADR 0033.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from xpyd_core.process import subreaper
from xpyd_worker.ranks.loss import RANK_FAILED

_PID_REPORT = struct.Struct("<II")
_READ_BYTES = 4096


def report_pid(descriptor: int, rank: int, pid: int) -> None:
    """Report that rank `rank` is process `pid`: one write, so that no two reports mix."""
    os.write(descriptor, _PID_REPORT.pack(rank, pid))


class PidPipe:
    """The pipe through which the fork server and its ranks report pids; its reading end."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._come = b""
        self.pids: dict[int, int] = {}
        """By rank."""

    def fileno(self) -> int:
        """Readable when there is something to take."""
        return self._reader

    def take(self) -> bool:
        """Read the reports that have come; whether all writers have closed their ends."""
        while True:
            try:
                data = os.read(self._reader, _READ_BYTES)
            except BlockingIOError:
                return False
            if not data:
                return True
            self._come += data
            whole = len(self._come) - len(self._come) % _PID_REPORT.size
            self.pids.update(_PID_REPORT.iter_unpack(self._come[:whole]))
            self._come = self._come[whole:]

    def close_writer(self) -> None:
        """Close this process' writing end; the processes that inherited it have theirs."""
        os.close(self.writer)

    def close(self) -> None:
        """The reading end."""
        os.close(self._reader)


COMMAND = (sys.executable, "-P", "-m", "xpyd_worker.ranks.start.fork_server")
_REAP_S = 5.0


class RankProcesses:
    """The ranks' processes, by the ranks' numbers. `start` once."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self.ends = select.poll()
        """Readable when `take_ended` has something to do; the caller may add to it."""
        self._pid_pipe: PidPipe | None = None
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._ranks: Sequence[int] = ()
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._ended: list[tuple[int, int]] = []

    def start(self, descriptors: Mapping[int, Sequence[int]], *, beats: int) -> None:
        """Start the fork server. `descriptors`: of each rank, what it inherits, its link first;
        `beats` is of all of them. OSError when the system does not let us."""
        subreaper.begin()
        self._ranks = tuple(descriptors)
        pid_pipe = self._pid_pipe = PidPipe()
        self.ends.register(pid_pipe, select.POLLIN)
        own = [f"{rank}:{','.join(map(str, fds))}" for rank, fds in descriptors.items()]
        own_flags = ("--parent", os.getpid(), "--pids", pid_pipe.writer, "--beats", beats)
        flags = [*map(str, own_flags), *(part for text in own for part in ("--rank", text))]
        inherited = {pid_pipe.writer, beats, *(fd for fds in descriptors.values() for fd in fds)}
        try:
            self._fork_server = subprocess.Popen(
                [*self._command, *flags], stdin=subprocess.DEVNULL, pass_fds=tuple(inherited)
            )
        finally:
            pid_pipe.close_writer()

    def pid(self, rank: int) -> int:
        """0 before it is there."""
        return self._pids.get(rank, 0)

    def take_ended(self) -> list[tuple[int, int]]:
        """Ranks that have ended since the last call, with their returncodes as Popen has them. One
        that the fork server did not fork has ended as the fork server has."""
        if self._pid_pipe is not None and self._pid_pipe.take():
            self._adopt()
        for rank in list(self._pidfds):
            self._reap(rank, within_s=0.0)
        ended, self._ended = self._ended, []
        return ended

    def wait(self, within_s: float) -> None:
        """Wait until all ranks have ended, or that time is over."""
        end_s = time.monotonic() + within_s
        if self._pid_pipe is not None:
            self._await_pids(end_s)
        for rank in list(self._pidfds):
            self._reap(rank, within_s=max(0.0, end_s - time.monotonic()))

    def kill(self) -> None:
        """Kill all ranks that are left, and reap them."""
        if self._pid_pipe is not None:
            if self._fork_server is not None:
                self._fork_server.kill()
            self._await_pids(time.monotonic() + _REAP_S)
        for pidfd in self._pidfds.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        # The kernel may take its time to free a process' memory; it is init's to reap then.
        self.wait(_REAP_S)

    def _await_pids(self, end_s: float) -> None:
        pid_pipe = self._pid_pipe
        assert pid_pipe is not None, "asked by the callers"
        come = select.poll()
        come.register(pid_pipe, select.POLLIN)
        while not pid_pipe.take():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                break
            come.poll(left_s * 1000)
        self._adopt()

    def _adopt(self) -> None:
        """The fork server has ended. The ranks whose pids came are children of this process now."""
        pid_pipe, fork_server = self._pid_pipe, self._fork_server
        assert pid_pipe is not None, "asked by the callers"
        self._pid_pipe = None
        self.ends.unregister(pid_pipe)
        pid_pipe.close()
        if fork_server is None:
            subreaper.end()
            return
        # Ranks go on only when it is gone, so it is killed where it does not end.
        try:
            fork_server.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            fork_server.kill()
            fork_server.wait()
        # Its children are ours now; orphans of other programs need not become ours.
        subreaper.end()
        for rank in self._ranks:
            try:
                pidfd = os.pidfd_open(pid_pipe.pids[rank])
            except (KeyError, ProcessLookupError):
                self._ended.append((rank, fork_server.returncode or RANK_FAILED))
                continue
            self._pids[rank] = pid_pipe.pids[rank]
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
        except ChildProcessError:  # other code of this process has reaped it
            returncode = RANK_FAILED
        self.ends.unregister(pidfd)
        os.close(pidfd)
        del self._pidfds[rank]
        self._ended.append((rank, returncode))
