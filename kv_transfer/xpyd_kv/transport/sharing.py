"""DATA through shared memory: what one connection lends (P) and what it borrows (D).

P passes its memory once, behind its LAYOUT; a SHARED frame then says where the bytes stand, D
copies them from there and says COPIED. Until then P's views are lent: nobody may write there.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from xpyd_core.errors import ProtocolError
from xpyd_kv.transport.shared_memory import (
    PeerMemory,
    Run,
    SharedMemory,
    close_all,
    unpack,
)
from xpyd_kv.wire.messages import Data, Shared

NO_CHECKSUM = bytes(8)
"""Of bytes that went through nothing but memory."""
WINDOW_BYTES = 16 * 2**20
"""P lends the next frame while less than this is lent: four frames of the usual size, so that D
has the next one when it is through with one, and CANCEL waits for a millisecond at most."""
Rights = Sequence[tuple[int, int, bytes]]
"""Ancillary data of one sendmsg."""
_INT_BYTES = struct.calcsize("@i")


class Lender:
    """P's side of one connection."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self._lent: deque[tuple[int, Callable[[bool], None]]] = deque()
        self._lent_bytes = 0

    @property
    def is_lending(self) -> bool:
        return bool(self._lent)

    @property
    def has_room(self) -> bool:
        """Whether another frame may be lent."""
        return self._lent_bytes < WINDOW_BYTES

    def rights(self) -> Rights:
        """What goes with REGION's first byte."""
        return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("@i", self.memory.fd))]

    def lend(self, length: int, done: Callable[[bool], None]) -> None:
        """A SHARED frame has left."""
        self._lent.append((length, done))
        self._lent_bytes += length

    def copied(self, frames: int) -> list[Callable[[bool], None]]:
        """D is through with the oldest `frames`: their `done`. ProtocolError when it has fewer."""
        if frames > len(self._lent):
            raise ProtocolError("COPIED for frames that were not sent")
        ended = [self._lent.popleft() for _ in range(frames)]
        self._lent_bytes -= sum(length for length, _ in ended)
        return [done for _, done in ended]

    def abandon(self) -> list[Callable[[bool], None]]:
        """The connection is closed: what D makes of these bytes now will never be committed."""
        return self.copied(len(self._lent))


class Borrower:
    """D's side of one connection, from the peer's AUTH on."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._memory: PeerMemory | None = None
        self._window_bytes = 0

    def receive(self, sock: socket.socket, room: memoryview) -> int:
        """Read into `room`, and take the descriptor that may come with the bytes."""
        self._window_bytes = 0
        if self._memory is not None:
            return sock.recv_into(room)  # The kernel drops what nobody asks for.
        space = socket.CMSG_SPACE(_INT_BYTES)
        count, came, flags, _ = sock.recvmsg_into([room], space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in came:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(data) // _INT_BYTES
                self._descriptors += struct.unpack(f"@{whole}i", data[: whole * _INT_BYTES])
        if len(self._descriptors) > 1 or flags & socket.MSG_CTRUNC:
            raise ProtocolError("more than one descriptor")
        return count

    def open(self, size_bytes: int) -> None:
        """REGION: map what came with it. ProtocolError when nothing did, or it is not right."""
        if self._memory is not None or not self._descriptors:
            raise ProtocolError("REGION again, or without its descriptor")
        self._memory = PeerMemory(self._descriptors[0], size_bytes)
        self._forget_descriptors()

    def runs(self, body: bytes, length: int) -> list[Run]:
        """A SHARED frame's, for `length` bytes of DATA. ProtocolError for those that lie."""
        if self._memory is None:
            raise ProtocolError("SHARED before REGION")
        if self._window_bytes >= WINDOW_BYTES:
            raise ProtocolError("SHARED frames over the window")
        self._window_bytes += length
        runs = unpack(body)
        self._memory.check(runs, length)
        return runs

    def copy(self, runs: Sequence[Run], views: Sequence[memoryview]) -> None:
        """The bytes of checked runs."""
        assert self._memory is not None
        self._memory.copy(runs, views)

    def close(self) -> None:
        """Unmap and close."""
        self._forget_descriptors()
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _forget_descriptors(self) -> None:
        descriptors, self._descriptors = self._descriptors, []
        close_all(descriptors)


def shared_of(header: Data) -> Shared:
    """The SHARED header that stands for a DATA header."""
    fields = msgspec.structs.asdict(header)
    del fields["checksum"]
    return Shared(**fields)


def data_of(header: Shared) -> Data:
    """And back: what the session sees."""
    return Data(**msgspec.structs.asdict(header), checksum=NO_CHECKSUM)
