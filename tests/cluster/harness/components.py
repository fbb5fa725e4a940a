"""Starts programs inside a cluster's namespaces and follows them: log files, readiness, deaths.

A component runs in all of the cluster's namespaces and so ends with them; a client runs in the
network namespace only, and sees the machine's files and process numbers as its starter does.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster.harness.runs import Process, children, rss_mib

_POLL_S = 0.1
_TAIL_LINES = 25


class ClusterError(RuntimeError):
    """The cluster, or a program of it, does not do what was asked; the text says why."""


class Components:
    """The programs of one cluster, by name, in the order of their start."""

    def __init__(self, init: Process, folder: Path) -> None:
        self._init = init
        self.logs = folder / "logs"
        self.logs.mkdir(exist_ok=True)
        self._pids = folder / "processes"
        self._pids.mkdir(exist_ok=True)
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def running(self, name: str) -> bool:
        """Whether a program of this name runs, started here or by another process."""
        process = self.processes().get(name)
        return process is not None and process.alive

    def processes(self) -> dict[str, Process]:
        """The programs that were started, by name, as their process ids are seen from here."""
        found: dict[str, Process] = {}
        for path in sorted(self._pids.iterdir()):
            pid, started = path.read_text().split()
            found[path.name] = Process(int(pid), int(started))
        return found

    def inside_argv(self, argv: Sequence[str | Path]) -> list[str]:
        """The command line that runs `argv` in all of the cluster's namespaces."""
        target = f"--target={self._init.pid}"
        return ["nsenter", target, "--net", "--mount", "--pid", "--", *map(str, argv)]

    def start(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        env: dict[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start a program; its output goes to its log file."""
        if self.running(name):
            raise ClusterError(f"{name} was started before")
        with self.log(name).open("ab") as out:
            child = subprocess.Popen(
                self.inside_argv(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                pass_fds=pass_fds,
                # A Ctrl-C in the terminal is for the tests, which then take the cluster down.
                start_new_session=True,
            )
        self._children[name] = child
        try:
            process = Process.of(child.pid)
        except ProcessLookupError:  # it has ended; `check` says how
            process = Process(child.pid, started=0)
        (self._pids / name).write_text(f"{process.pid} {process.started}")

    def forget(self, name: str) -> None:
        """A program that has ended, or is to end now, is none of the cluster's any more."""
        child = self._children.pop(name)
        process = self.processes()[name]
        for pid in children(process.pid):
            Process.of(pid).kill()
        child.kill()
        child.wait()
        (self._pids / name).unlink()

    def memory_mib(self) -> dict[str, int]:
        """Resident memory of each program; 0 when it has ended."""
        # Each is the only child of the nsenter that brought it into the namespaces.
        return {
            name: sum(rss_mib(pid) for pid in children(process.pid))
            for name, process in self.processes().items()
        }

    def wait(self, names: Sequence[str], ready: Callable[[], bool], deadline_s: float) -> None:
        """Wait until `ready`; raises ClusterError with the log's end when it cannot come."""
        end = time.monotonic() + deadline_s
        while not ready():
            self.check()
            if time.monotonic() > end:
                ends = "\n".join(self.tail(name) for name in names)
                raise ClusterError(
                    f"{', '.join(names)} not ready within {deadline_s:.0f} s\n{ends}"
                )
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raises ClusterError if any program has ended."""
        for name, child in self._children.items():
            if child.poll() is not None:
                raise ClusterError(
                    f"{name} ended with status {child.returncode}\n{self.tail(name)}"
                )

    def log(self, name: str) -> Path:
        """The program's log file."""
        return self.logs / f"{name}.log"

    def tail(self, name: str) -> str:
        """The end of the program's log, under a heading."""
        lines = self.log(name).read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([f"--- {self.log(name)}", *lines])

    def reap(self, deadline_s: float) -> None:
        """Collect the programs after the namespaces ended; they have all been killed then."""
        end = time.monotonic() + deadline_s
        for child in self._children.values():
            try:
                child.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
