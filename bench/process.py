"""What benchmarks share of processes: a program with all that it started, measured and ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_END_S = 30.0


class Processes:
    """A process and its descendants."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    def pss_gib(self) -> float:
        """Of all of them; what processes share, others too, counts in parts."""
        return self._memory_gib("Pss")

    def rss_gib(self) -> float:
        """Of all of them; what several processes share counts in each."""
        return self._memory_gib("Rss")

    def cpu_s(self) -> float:
        """Processor time of all of them, their ended threads included."""
        return sum(map(_cpu_s, tree(self.process.pid)))

    def main_cpu_s(self) -> float:
        """Processor time of the first of them."""
        return _cpu_s(self.process.pid)

    def stop(self) -> None:
        """SIGSTOP to all."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT to all."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """SIGTERM to the first; SIGKILL to what is left of all after a while."""
        self.go_on()
        pids = tree(self.process.pid)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        for pid in pids:
            # Nobody but they may have these ids: their parent lives or has not waited for them.
            if _is_of_session(pid, self.process.pid):
                _kill(pid, signal.SIGKILL)
        self.process.wait(_END_S)

    def complaint(self) -> str:
        """The end of what it said."""
        return self._log.read_text(errors="replace")[-2000:]

    def _memory_gib(self, figure: str) -> float:
        return sum(_memory_bytes(pid, figure) for pid in tree(self.process.pid)) / 2**30

    def _signal(self, number: int) -> None:
        for pid in tree(self.process.pid):
            _kill(pid, number)


_given: set[int] = set()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on, and that was not given here before: whom it
    was given to may not listen yet.
    """
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port


def end_at_sigterm() -> None:
    """Let SIGTERM end this process as an exception does: its servers have sessions of their own,
    and would be left."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def tree(pid: int) -> list[int]:
    """The process and its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def _stat(pid: int) -> list[str]:
    """State, parent, group, session, ... of a process; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_of_session(pid: int, session: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and int(fields[3]) == session and fields[0] != "Z"


def _memory_bytes(pid: int, figure: str) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{figure}:\s+(\d+) kB", text, re.M)
    return int(found[1]) * 1024 if found else 0


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _cpu_s(pid: int) -> float:
    # The clock of a whole process, in ns, where /proc/PID/stat counts in 10 ms: CPUCLOCK_SCHED of
    # clock_getcpuclockid(3), which Python has for threads only.
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0
