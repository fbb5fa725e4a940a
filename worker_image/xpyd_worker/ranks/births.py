"""Which process is which rank: told through a pipe by the nursery that forks it, and by itself.

Both tell, so that whoever of them is killed or stopped, the other one's word is there.
"""

from __future__ import annotations

import os
import struct

_BIRTH = struct.Struct("<II")
_READ_BYTES = 4096


def report_birth(descriptor: int, rank: int, pid: int) -> None:
    """Rank `rank` is process `pid`. One write, so that those of several processes do not mix."""
    os.write(descriptor, _BIRTH.pack(rank, pid))


class Births:
    """The reading end."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._come = b""
        self.pids: dict[int, int] = {}
        """By rank."""

    def fileno(self) -> int:
        """Readable when there is something to take."""
        return self._reader

    def take(self) -> bool:
        """Read what has come; whether all who could tell have closed their end."""
        while True:
            try:
                data = os.read(self._reader, _READ_BYTES)
            except BlockingIOError:
                return False
            if not data:
                return True
            self._come += data
            whole = len(self._come) - len(self._come) % _BIRTH.size
            self.pids.update(_BIRTH.iter_unpack(self._come[:whole]))
            self._come = self._come[whole:]

    def close_writer(self) -> None:
        """Ours of the writing end: those who inherited it have theirs."""
        os.close(self.writer)

    def close(self) -> None:
        """The reading end."""
        os.close(self._reader)
