"""The compiled collectives of ranks on one host (collectives.cpp), and what crosses over to them.

The installation builds a library for each level of the instruction set (hatch_build.py), where it
finds a compiler; without one ranks talk over Gloo.
"""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

from xpyd_worker.kernels.cpu.library import levels

_log = logging.getLogger(__name__)

DONE, MISSING, ENDED, CLOSED, ELSEWHERE = range(5)
"""meeting.h's Outcome."""
HEAD_BYTES, MOST_RANKS = 4096, 32
"""meeting.h's; the memory has two places for each rank behind its head."""

_FUNCTIONS = (
    *("xpyd_member_bytes", "xpyd_head_bytes", "xpyd_most_ranks"),
    *("xpyd_all_reduce", "xpyd_all_gather", "xpyd_all_to_all", "xpyd_leave"),
)


class Member(ctypes.Structure):
    """meeting.h's Member."""

    _fields_ = (
        ("shared", ctypes.c_void_p),
        ("processes", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rank", "ranks", "piece_bytes")),
        *((name, ctypes.c_int64) for name in ("most_spin_ns", "within_ns", "spin_ns")),
        ("blamed", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("step", "pieces")),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The collectives for this processor; None where none were built or none fits. Its functions
    run without the interpreter's lock."""
    for level in levels():
        found = load(level)
        if found is not None:
            return found
    return None


def load(level: str) -> ctypes.CDLL | None:
    """One level's library; None where it was not built or does not load."""
    path = Path(__file__).with_name(f"collectives.{level}.so")
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        _log.debug("no compiled collectives: %s", error)
        return None
    if not _is_of_these_sources(found):
        _log.warning("%s is of other sources: run the installation again", path)
        return None
    member, pointer, size = ctypes.POINTER(Member), ctypes.c_void_p, ctypes.c_int64
    found.xpyd_all_reduce.argtypes = (member, ctypes.c_int, pointer, size, size)
    found.xpyd_all_gather.argtypes = (member, pointer, pointer, size, size)
    counts = ctypes.POINTER(size)
    found.xpyd_all_to_all.argtypes = (member, pointer, pointer, counts, counts, size)
    found.xpyd_leave.argtypes = (member,)
    found.xpyd_leave.restype = None
    return found


def _is_of_these_sources(found: ctypes.CDLL) -> bool:
    if not all(hasattr(found, name) for name in _FUNCTIONS):
        return False
    known = found.xpyd_member_bytes(), found.xpyd_head_bytes(), found.xpyd_most_ranks()
    return known == (ctypes.sizeof(Member), HEAD_BYTES, MOST_RANKS)
