"""How long this process has been there, its interpreter's start and imports included."""

from __future__ import annotations

import os
import time
from pathlib import Path

# Of what follows the command in /proc/PID/stat, proc(5)'s field 22.
_START_TICKS = 19


def process_age_s(stat: Path = Path("/proc/self/stat")) -> float | None:
    """Seconds since the system made the process, to a tick (usually 10 ms); None where it does not
    say."""
    try:
        # The command, in parentheses, may hold spaces and parentheses itself.
        fields = stat.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    started_s = int(fields[_START_TICKS]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
