"""Processes by an identity that a recycled pid cannot have: pid, start time and boot.

Signals go through a pidfd that is checked after it was opened: none ever reaches a stranger.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import msgspec

_START_TIME_FIELD = 22
_STATE_FIELD = 3


class ProcessId(msgspec.Struct, frozen=True):
    """One process of one boot. `start_ticks`: field 22 of /proc/PID/stat."""

    pid: int
    start_ticks: int
    boot: str

    def is_alive(self) -> bool:
        """Whether this very process runs; a zombie does not."""
        fields = _stat(self.pid)
        if fields is None or fields[_STATE_FIELD] in ("Z", "X"):
            return False
        return int(fields[_START_TIME_FIELD]) == self.start_ticks and _boot_id() == self.boot

    def signal(self, number: signal.Signals, *, group: bool = False) -> bool:
        """Send a signal to the process, or to its group, which it leads. False: it is gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return False
        try:
            # The pidfd holds on to whoever has the pid now; only then is it compared.
            if not self.is_alive():
                return False
            if group:
                # The leader lives, so its group's number cannot have been given away.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(descriptor)
        return True


def identify(pid: int) -> ProcessId:
    """The identity of a process that certainly exists: one's own, or an unreaped child."""
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(pid)
    return ProcessId(pid, int(fields[_START_TIME_FIELD]), _boot_id())


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat by their number in proc(5), from 3 on; None: no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # Field 2 is the command in parentheses and may hold anything, also parentheses.
    return ["", "", "", *text[text.rindex(")") + 2 :].split()]


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
