"""Runs of one memory into many views, by the CPU: D's copy of a frame out of a P's shared memory.

In one call of C (native/copy_runs.c), beside which other threads run Python, or in a loop that
keeps them waiting. Both do the same. Knows neither peers nor frames.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from operator import add

import numpy as np

Columns = tuple[Sequence[int], Sequence[int]]
"""Offsets into a memory, and as many lengths: not negative, and below 2^64."""

Copy = Callable[[memoryview, Columns, Sequence[memoryview]], None]
"""The runs of a memory, one after another, into views, one after another; both may be cut as they
like. All are flat bytes, the views writable and elsewhere than the memory. ValueError, and nothing
is copied, for a run outside of the memory, or where runs and views differ in length in all."""

# Also of no bytes: a c_char would want one.
_begin_of = (ctypes.c_char * 0).from_buffer
_REFUSED = "runs that do not fit into their memory, or not into the views"


def copy_with(library: ctypes.CDLL | None) -> Copy:
    """By the library made of native/copy_runs.c, where there is one."""
    # One that was made of an older source may know nothing of it.
    call = getattr(library, "xpyd_copy_runs", None)
    if call is None:
        return copy_in_python
    columns = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, *columns, *columns)
    call.restype = ctypes.c_int

    def copy(source: memoryview, runs: Columns, views: Sequence[memoryview]) -> None:
        """Hot path: no Python step for a run or a view. While the interpreter's lock is away,
        `memory` and `begins` keep all of it from being unmapped or resized."""
        offsets, lengths = array("Q", runs[0]), array("Q", runs[1])
        if len(offsets) != len(lengths):
            raise ValueError(_REFUSED)
        memory = begins = None
        try:
            memory = np.frombuffer(source, np.uint8) if len(source) else np.empty(0, np.uint8)
            begins = list(map(_begin_of, views))
            addresses = array("Q", map(ctypes.addressof, begins))
            rooms = array("Q", map(len, views))
            refused = call(
                memory.__array_interface__["data"][0],
                memory.size,
                offsets.buffer_info()[0],
                lengths.buffer_info()[0],
                len(offsets),
                addresses.buffer_info()[0],
                rooms.buffer_info()[0],
                len(addresses),
            )
        finally:
            # An error keeps this frame: whoever handles it may want to close the memory.
            memory = begins = None
        if refused:
            raise ValueError(_REFUSED)

    return copy


def copy_in_python(source: memoryview, runs: Columns, views: Sequence[memoryview]) -> None:
    """Without a compiler: one Python step for each run or view."""
    offsets, lengths = runs
    rooms = list(map(len, views))
    if (
        len(offsets) != len(lengths)
        or max(map(add, offsets, lengths), default=0) > len(source)
        or sum(lengths) != sum(rooms)
    ):
        raise ValueError(_REFUSED)
    if list(lengths) == rooms:
        # As a rule: blocks of one size on both sides.
        for view, offset, length in zip(views, offsets, lengths, strict=True):
            view[:] = source[offset : offset + length]
        return
    following = zip(offsets, lengths, strict=True)
    offset = left = 0
    for view in views:
        while length := len(view):
            if not left:
                offset, left = next(following)
            elif length <= left:
                view[:] = source[offset : offset + length]
                offset += length
                left -= length
                break
            else:
                view[:left] = source[offset : offset + left]
                view, left = view[left:], 0
