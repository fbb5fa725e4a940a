"""The seam between a connection and what moves DATA outside its socket. Documented here and only
here.

P says once, in REGION, what it lends. A SHARED frame then says where a DATA frame's bytes lie
(Runs); D fetches them from there and says COPIED. Until then P's views are lent: P may not write
there. `sharing` keeps account of that for each connection; a data path knows no frames, only its
memory. Everything here runs on the I/O thread.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import starmap
from operator import add
from typing import NamedTuple, Protocol, runtime_checkable

from xpyd_core.errors import ProtocolError, XpydError
from xpyd_kv.memory.device import View
from xpyd_kv.spans import Span
from xpyd_kv.wire.messages import Hello

_RUN = struct.Struct("<QI")


class Runs(NamedTuple):
    """Many Spans of a memory that is lent: a Span for each would cost a step of Python."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def each(self) -> list[Span]:
        """Return the runs one by one, where speed does not matter."""
        return [Span(*run) for run in zip(*self, strict=True)]


def pack(runs: Iterable[Span]) -> bytes:
    """Runs in the encoding of the wire: u64 offset, u32 length, little-endian."""
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


Rights = Sequence[tuple[int, int, bytes]]
"""Ancillary data of one sendmsg."""


class CorruptError(Exception):
    """Out of Fetch.poll: the bytes are there, and are not what P sent. The frame is sent again."""


class Lent(NamedTuple):
    """The contents of REGION: how much memory, bytes by which D finds it, and what travels beside
    them. `body` has at most MAX_REGION_BODY_BYTES of xpyd_kv.wire.frames; `rights` go over Unix
    sockets only."""

    size_bytes: int
    body: bytes = b""
    rights: Rights = ()


class Lender(Protocol):
    """P's side of one connection. With defaults for memory that is D's to read and that outlives
    the connection."""

    @property
    def has_news(self) -> bool:
        """Whether what REGION said is no longer so: `lent` is asked for again before the next
        SHARED."""
        return False

    def lent(self) -> Lent:
        """Asked for before the first SHARED."""
        ...

    def places(self, views: Sequence[View], *, at_most: int) -> bytes | None:
        """SHARED's body for these views, as at most `at_most` runs; None for views that are
        elsewhere: then they go through the socket."""
        ...

    def sent(self) -> None:
        """The SHARED frame with what `places` said last goes out: what P itself has to do for
        these bytes begins. A frame that was dropped meanwhile is not sent."""

    def close(self) -> None:
        """The connection is closed. When this returns no view is read any more by us."""


class Fetch(Protocol):
    """The bytes of one SHARED frame on their way."""

    def poll(self) -> bool:
        """Whether they are where they belong and nothing of them is read any more. OSError or
        ProtocolError when they will not come (ConnectionError: this time), CorruptError when they
        have come wrong."""
        ...


class Through(Fetch):
    """A fetch that was complete when it began."""

    def poll(self) -> bool:
        return True


class Borrower(Protocol):
    """D's side of one connection, from the peer's AUTH on."""

    takes_descriptors: bool = False
    """Whether REGION brings one descriptor, over a Unix socket."""
    reopens: bool = False
    """Whether REGION may come again."""

    def open(self, size_bytes: int, body: bytes, descriptors: Sequence[int]) -> None:
        """REGION has come. ProtocolError when it is not right, OSError when the system or the
        device does not give it: then the pair takes another way. The descriptors stay the
        caller's."""
        ...

    def prepare(self, body: bytes, length: int) -> Callable[[Sequence[View] | None], Fetch]:
        """SHARED has come, for `length` bytes: the function that begins to fetch them into views of
        that length (None: they are not wanted). ProtocolError for a body that lies; nothing is
        fetched before it is checked."""
        ...

    def close(self) -> None:
        """The connection is closed. When this returns nothing lands in any view any more, also of
        fetches that were not through."""
        ...


@runtime_checkable
class Linked(Protocol):
    """A Lender or Borrower that moves bytes over further connections. Its Fetches raise by
    themselves where nothing comes."""

    def attach(self, number: int, sock: socket.socket) -> None:
        """Take over a further connection, which is authenticated and blocks with a timeout; both
        sides know it by `number`, from 1. ProtocolError for a number that has no place."""
        ...


class DataPath(Protocol):
    """A transport that moves DATA outside the sockets, for all connections of an endpoint."""

    name: str
    """The name of the transport, as in HELLO's `transports`."""

    @property
    def lends(self) -> bool:
        """Whether we have memory to lend: without that a P does not offer this path."""
        return True

    def can_use(self, theirs: Hello) -> bool:
        """D's side: whether DATA of this P could come so. Asked before our HELLO, which names no
        transport that cannot be used with that P, leaves."""
        return True

    def lender(self) -> Lender: ...

    def borrower(self) -> Borrower: ...


class UnusedPath(DataPath):
    """The data path of an engine whose ranks move the KV: it moves nothing on the engine's own
    connections. `name`: the transport."""

    def __init__(self, name: str) -> None:
        self.name = name

    def lender(self) -> Lender:
        """Only connections that DATA moves on have one."""
        raise XpydError(f"an engine whose ranks move KV lends nothing over {self.name}")

    def borrower(self) -> UnusedBorrower:
        return UnusedBorrower()


class UnusedBorrower(Borrower):
    """A borrower that opens nothing: it exists from AUTH on, before LAYOUT shows that it is not
    used."""

    def open(self, size_bytes: int, body: bytes, descriptors: Sequence[int]) -> None:
        raise ProtocolError("REGION to an engine whose ranks take DATA")

    def prepare(self, body: bytes, length: int) -> Callable[[Sequence[View] | None], Fetch]:
        raise ProtocolError("SHARED to an engine whose ranks take DATA")

    def close(self) -> None:
        """Do nothing: no memory was opened."""
