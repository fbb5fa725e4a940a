"""What this machine can give: available memory and CPU cores, cgroup limits included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """Figures of one moment."""

    available_bytes: int
    cores: int


def read_machine() -> Machine:
    """Memory that can be taken without swapping, and the cores that we may run on."""
    available = min([_mem_available(), *_cgroup_rooms()])
    return Machine(max(0, available), len(os.sched_getaffinity(0)))


def _mem_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_rooms() -> Iterator[int]:
    """Room below each memory limit above us: limit - used, page cache not counted as used."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used, cache = _CGROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit = _CGROUPS / "memory", "memory.limit_in_bytes"
            used, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            room = _room(folder, limit, used, cache)
            if room is not None:
                yield room
            if folder == root:
                break


def _room(folder: Path, limit: str, used: str, cache: str) -> int | None:
    try:
        most = (folder / limit).read_text().strip()
        now = int((folder / used).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if most == "max" else int(most) - now + int(stat.get(cache, 0))
