"""One pod's process through its restarts: the only owner of its Popen, record and address."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from xpyd_operator.plan import InstanceSeen
from xpyd_operator.up.pods import Pod
from xpyd_operator.up.processes import ProcessId, identify

_log = logging.getLogger("xpyd.up")
_CANNOT_START = 127


class PodProcess:
    """A pod and its current process, if one runs. Times are the supervisor's clock."""

    def __init__(self, pod: Pod, ordinal: int, log: Path) -> None:
        self.pod = pod
        self.ordinal = ordinal
        self.log = log
        self.restarts = -1
        self.last_exit: int | None = None
        self.is_healthy = False
        """/health answered 200 since this process started."""
        self.is_ready = False
        """Requests can reach it."""
        self.was_ready = False
        """It was ready once since this process started."""
        self.seen = InstanceSeen(ordinal, 0.0)
        self.identity: ProcessId | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether a process runs."""
        return self._process is not None

    def start(
        self,
        argv: Sequence[str],
        environ: dict[str, str],
        now: float,
        *,
        failures: int,
        inherit: Sequence[int],
    ) -> None:
        """Start a process in a session of its own: Ctrl-C reaches the supervisor only."""
        assert self._process is None
        self.restarts += 1
        self.is_healthy = self.is_ready = self.was_ready = False
        self.seen = InstanceSeen(self.ordinal, now, failures)
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    argv,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=inherit,
                )
        except OSError as error:
            _log.error("pod %s cannot start: %s", self.pod.name, error)
            self.last_exit = _CANNOT_START
            self.seen = replace(self.seen, exited_at=now)
        else:
            self.identity = identify(self._process.pid)

    def reap(self, now: float) -> bool:
        """Notice the process's end. True: it ended now."""
        if self._process is None:
            return False
        pid = self._process.pid
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        # Unreaped it still owns its number: what is left of its group can be ended safely.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        self.last_exit = self._process.wait()
        self._process = None
        self.identity = None
        self.is_healthy = self.is_ready = False
        self.seen = replace(self.seen, exited_at=now)
        return True

    def drain(self, now: float) -> None:
        """Ask it to finish and exit."""
        self.seen = replace(self.seen, draining_since=now)
        self.is_ready = False
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it and its whole group now."""
        self.seen = replace(self.seen, killed=True)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def exit_text(self) -> str:
        """How the last process ended, for people."""
        if self.last_exit is None:
            return ""
        if self.last_exit >= 0:
            return f"exit status {self.last_exit}"
        return f"killed by signal {-self.last_exit} ({signal.strsignal(-self.last_exit)})"

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            # Not reaped yet, so the pid is its own.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)
