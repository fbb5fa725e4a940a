"""The bytes of one DATA frame on their way, with their checksum: where D puts them, what P sends.

They are summed up while the processor's cache has them. PROBE's bytes take the same way.
"""

from __future__ import annotations

import os
import socket
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import sha256
from itertools import accumulate

from xxhash import xxh3_64

from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.messages import MAX_PROBE_BYTES


class Checksum:
    """xxh3-64 over bytes as they come: 8 bytes, big-endian (xxHash's canonical form)."""

    def __init__(self) -> None:
        self._digest = xxh3_64()
        self.update = self._digest.update
        """Take in one view."""

    def take(self, views: Iterable[memoryview], count: int) -> None:
        """The first `count` bytes of the views. Soon after they were written: what is still in
        the processor's cache costs a third."""
        for view in views:
            if count < len(view):
                self.update(view[:count])
                return
            self.update(view)
            count -= len(view)

    def digest(self) -> bytes:
        return self._digest.digest()


def checksum(views: Iterable[memoryview]) -> bytes:
    """Return the checksum of the bytes of all views, in order."""
    digest = Checksum()
    for view in views:
        digest.update(view)
    return digest.digest()


# IOV_MAX of Linux and macOS: more views in one sendmsg or recvmsg_into are an error.
MAX_VIEWS_PER_CALL = 1024


class Cursor:
    """Walks through flat byte views once, without copying or joining them. Hot path: no Python step
    for a view, only for a call."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        # Where each view ends, from the first one's begin.
        self._ends = list(accumulate(map(len, views)))
        self._size = self.left = self._ends[-1] if views else 0
        """`left`: bytes from here to the end."""

    def window(self, most_bytes: int) -> list[memoryview]:
        """The next views, up to `most_bytes` in all; the first and the last may be parts."""
        ends, at = self._ends, self._size - self.left
        stop = min(self._size, at + most_bytes)
        first = bisect_right(ends, at)
        end = min(bisect_left(ends, stop) + 1, first + MAX_VIEWS_PER_CALL, len(ends))
        views = list(self._views[first:end])
        if not views:
            return views
        over = ends[end - 1] - stop
        if over > 0:
            views[-1] = views[-1][:-over]
        begun = at - ends[first] + len(self._views[first])
        if begun:
            views[0] = views[0][begun:]
        return views

    def advance(self, count: int) -> int:
        """`count` bytes have been sent or read; how many are left."""
        self.left -= count
        return self.left

    def write(self, data: memoryview) -> None:
        """Copy `data` (at most `left` bytes) to this place and step over it."""
        while len(data):
            for view in self.window(len(data)):
                length = len(view)
                view[:] = data[:length]
                data = data[length:]
                self.left -= length


TURN_BYTES = 512 * 1024
"""P sums up so much, sends it, and so on: the kernel then copies it from the processor's own cache
(L2, 1 MiB) and not from memory. Half of it and twice as much were measured to be worse: more calls,
and no room for the kernel's own data beside it."""


class Body:
    """Fills views in order. Bytes are summed up soon after they came, while the processor's cache
    has them."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._cursor = Cursor(views)
        self._checksum = Checksum()

    def write(self, data: memoryview) -> None:
        """The next bytes, which were read elsewhere."""
        self._cursor.write(data)
        self._checksum.update(data)

    def read(self, sock: socket.socket, room: int, part: int) -> int:
        """Read up to `room` bytes, about `part` at once; how many came, 0: the peer has closed.
        BlockingIOError when none are there."""
        got = 0
        while got < room:
            window = self._cursor.window(min(part, room - got))
            try:
                count = sock.recvmsg_into(window)[0]
            except BlockingIOError:
                if got:
                    break
                raise
            self._cursor.left -= count
            self._checksum.take(window, count)
            got += count
            if count < part:
                break
        return got

    def digest(self) -> bytes:
        """The checksum of all."""
        return self._checksum.digest()


class Departure:
    """A DATA frame for the kernel: `prefix` (with the header), the body's views, their checksum.
    Walked through like a Cursor; no byte is summed up twice, however little the kernel takes."""

    def __init__(self, prefix: bytes, views: Sequence[memoryview]) -> None:
        self._body = Cursor(views)
        self._sum = Checksum()
        self._turn = Cursor(self._next(memoryview(prefix)))

    @property
    def left(self) -> int:
        """Bytes from here to the end; without the checksum while views are left."""
        return self._turn.left + self._body.left

    def window(self, most_bytes: int) -> list[memoryview]:
        """The next views, up to `most_bytes` in all and to the turn's end."""
        if not self._turn.left and self._body.left:
            self._turn = Cursor(self._next())
        return self._turn.window(most_bytes)

    def advance(self, count: int) -> int:
        """`count` bytes have been sent; see `left`."""
        self._turn.left -= count
        return self._turn.left + self._body.left

    def digest(self) -> bytes:
        """The checksum, when all is sent."""
        return self._sum.digest()

    def _next(self, *before: memoryview) -> list[memoryview]:
        """Return the views of one turn, summed up; the last turn ends with the checksum."""
        views = self._body.window(TURN_BYTES)
        for view in views:
            self._sum.update(view)
        self._body.left -= sum(map(len, views))
        behind = () if self._body.left else (memoryview(self._sum.digest()),)
        return [*before, *views, *behind]


class ProbeSource:
    """The bytes of P's probes. `room`: memory that it lends and that nothing else uses; at most
    MAX_PROBE_BYTES of it are taken."""

    def __init__(self, room: memoryview | None = None) -> None:
        view = (room or memoryview(bytearray(MAX_PROBE_BYTES)))[:MAX_PROBE_BYTES]
        view[:] = os.urandom(len(view))
        self.views = [view]
        self.digest = sha256(view).digest()
        self._checksum = checksum(self.views)

    def header(self, token: int) -> Callable[[], wire.Probe]:
        """Makes the header when the frame's turn has come."""
        size = len(self.views[0])
        return partial(wire.Probe, token=token, size_bytes=size, checksum=self._checksum)


def answer_of(probe: wire.Probe, views: Iterable[memoryview], transport: str) -> wire.Probed:
    """Return D's answer to a PROBE whose bytes it has read, moved by `transport`."""
    digest = sha256()
    for view in views:
        digest.update(view)
    return wire.Probed(token=probe.token, digest=digest.digest(), transport=transport)
