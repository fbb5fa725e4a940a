"""Whole lines to one pipe from several processes: none is cut by another's. Pure."""

from __future__ import annotations

from collections.abc import Iterator

MOST_BYTES = 4096
"""Linux' PIPE_BUF: a write of so much to a pipe comes out in one piece."""


def pieces(data: bytes) -> Iterator[bytes]:
    """`data`, which ends with a line's end, in whole lines of at most MOST_BYTES together. A longer
    line is a piece of its own.
    """
    begin = 0
    while begin < len(data):
        end = data.rfind(b"\n", begin, begin + MOST_BYTES) + 1
        if not end:
            end = data.find(b"\n", begin) + 1 or len(data)
        yield data[begin:end]
        begin = end
