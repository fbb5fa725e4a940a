"""Places in a memory that is lent: runs of bytes, as SHARED says them. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import starmap
from operator import add
from typing import NamedTuple

from xpyd_core.errors import ProtocolError

_RUN = struct.Struct("<QI")


class Run(NamedTuple):
    """Bytes [offset, offset + length) of the memory."""

    offset: int
    length: int


class Runs(NamedTuple):
    """The same, many of them: what many places cost is a step of Python for each."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def each(self) -> list[Run]:
        """One by one, where a step of Python costs nothing."""
        return [Run(*run) for run in zip(*self, strict=True)]


def join_runs(offsets: Iterable[int], lengths: Iterable[int]) -> list[Run]:
    """Runs at these places in this order, neighbours as one, without empty ones. Hot path."""
    runs: list[Run] = []
    begin = end = 0
    for offset, length in zip(offsets, lengths, strict=True):
        if offset != end and length:
            if end != begin:
                runs.append(Run(begin, end - begin))
            begin = end = offset
        end += length
    if end != begin:
        runs.append(Run(begin, end - begin))
    return runs


def pack(runs: Iterable[Run]) -> bytes:
    """Runs as they stand on the wire: u64 offset, u32 length, little-endian."""
    return b"".join(starmap(_RUN.pack, runs))


def unpack(body: bytes) -> Runs:
    """Their opposite; the length is a multiple of 12."""
    return Runs(*zip(*_RUN.iter_unpack(body), strict=True)) if body else Runs((), ())


def check_runs(runs: Runs, size_bytes: int, length: int) -> None:
    """ProtocolError unless all runs lie in `size_bytes` and have `length` bytes together."""
    ends = map(add, *runs)
    if not min(runs.lengths, default=1) or max(ends, default=0) > size_bytes:
        raise ProtocolError("a run outside of the memory that is lent")
    total = sum(runs.lengths)
    if total != length:
        raise ProtocolError(f"runs of {total} bytes for {length}")
