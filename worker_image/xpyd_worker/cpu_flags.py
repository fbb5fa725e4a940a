"""What this processor can do, as the system lists it. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path


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
