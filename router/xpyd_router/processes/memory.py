"""The memory that `rows` live in: a file without a name, which workers get as a descriptor."""

from __future__ import annotations

import mmap
import os

from xpyd_router.processes.rows import Rows, size_bytes


def make_memory(processes: int) -> int:
    """A descriptor of zeros for so many rows; not inherited by itself."""
    descriptor = os.memfd_create("xpyd-router-loads", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes(processes))
    return descriptor


def map_rows(descriptor: int, processes: int) -> Rows:
    """The rows in it, for as long as the process lives."""
    return Rows(memoryview(mmap.mmap(descriptor, size_bytes(processes))), processes)
