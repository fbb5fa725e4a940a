"""The operating system: the process' age and memory, the processor, what torch reads at import.

Imports nothing heavy: a process calls `prepare_for_torch` before its first import of torch.
"""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress
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


def cpu_flags(cpu_info: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Names of instruction sets (`flags` on x86, `Features` on ARM); empty where the system does
    not say."""
    try:
        text = cpu_info.read_text(errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def prepare_for_torch() -> None:
    """Defaults for a machine that an engine shares with HTTP, KV and other engines; what the
    environment says already stays.

    A thread that waits for the others looks GOMP_SPINCOUNT times before it sleeps, and waking takes
    30 us, many times a step; without end, as is OpenMP's default, it would take the others' cores.
    torch imports numpy, whose BLAS is not used here, and which would start a thread for each core.
    Weights stand in huge pages: reading them all at each step was 1.15 times as fast. Of a lost
    rank torch's store would log C++ stacks, several of them; the error that is raised says it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def resident_bytes(status: Path = Path("/proc/self/status")) -> int | None:
    """The resident memory of this process; None where the system does not say."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("VmRSS:")), None)
    return int(found.split()[1]) * 1024 if found else None


def give_back() -> None:
    """Let the allocator return what loading used and freed, some 70 MB for a checkpoint of 900."""
    # glibc's; other libraries have none, and need none.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
