"""The body of one DATA frame on its way, summed up while the processor's cache has it: where D puts
it, and what P sends of it."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from xpyd_kv.transport.checksum import Checksum
from xpyd_kv.transport.cursor import Cursor

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
            self._cursor.advance(count)
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

    def advance(self, count: int) -> None:
        """`count` bytes have been sent."""
        self._turn.advance(count)

    def digest(self) -> bytes:
        """The checksum, when all is sent."""
        return self._sum.digest()

    def _next(self, *before: memoryview) -> list[memoryview]:
        """One turn's views, summed up; behind the last one's the checksum, in the same call."""
        views = self._body.window(TURN_BYTES)
        for view in views:
            self._sum.update(view)
        self._body.advance(sum(map(len, views)))
        behind = () if self._body.left else (memoryview(self._sum.digest()),)
        return [*before, *views, *behind]
