"""Where the body of one DATA frame goes, and the checksum of what has come of it."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from xpyd_kv.transport.checksum import Checksum
from xpyd_kv.transport.cursor import Cursor


class Body:
    """Fills views in order. Bytes are summed up soon after they came, while the processor's cache
    has them."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._cursor = Cursor(views)
        self._checksum = Checksum()

    @property
    def left(self) -> int:
        """Bytes that are still to come."""
        return self._cursor.left

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
