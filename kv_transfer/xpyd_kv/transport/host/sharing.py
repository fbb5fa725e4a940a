"""The books of DATA that moves beside the socket: what one connection lends (P) or borrows (D).

Between the Stream, which has the frames, and a data path, which has the memory (`data_path`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from xpyd_core.errors import ProtocolError
from xpyd_kv.memory.device import View
from xpyd_kv.transport.api import Done
from xpyd_kv.transport.host.data_path import Borrower, CorruptError, Fetch, Lender, Linked
from xpyd_kv.wire import messages as wire
from xpyd_kv.wire.messages import CHECKSUM_BYTES

NO_CHECKSUM = bytes(CHECKSUM_BYTES)
"""Stands for that of bytes that did not go through the socket."""
WINDOW_BYTES = 16 * 2**20
"""P lends the next frame while less than this is lent, or less than WINDOW_FRAMES: a few frames of
the usual size, so that CANCEL waits for a millisecond or two (of the longest: for ten)."""
WINDOW_FRAMES = 2
"""However long they are: D has the next one when it is through with one."""
_INT_BYTES = struct.calcsize("@i")


class FetchTimeoutError(TimeoutError):
    """Bytes that P lends have not come in time."""


class PathError(OSError):
    """The system does not give what the data path needs, or not any more."""


class Lending:
    """P's side of one connection."""

    def __init__(self, lender: Lender) -> None:
        self.lender = lender
        self._frames: deque[tuple[int, Done]] = deque()
        self._bytes = 0

    def attach(self, number: int, sock: socket.socket) -> None:
        """A further connection of this peer."""
        assert isinstance(self.lender, Linked)
        self.lender.attach(number, sock)

    @property
    def is_lending(self) -> bool:
        return bool(self._frames)

    @property
    def has_room(self) -> bool:
        """Whether another frame may be lent."""
        return self._bytes < WINDOW_BYTES or len(self._frames) < WINDOW_FRAMES

    def lend(self, length: int, done: Done) -> None:
        """A SHARED frame has left."""
        self.lender.sent()
        self._frames.append((length, done))
        self._bytes += length

    def copied(self, frames: int) -> list[Done]:
        """D is through with the oldest `frames`: their `done`. ProtocolError when it has fewer."""
        if frames > len(self._frames):
            raise ProtocolError("COPIED for frames that were not sent")
        ended = [self._frames.popleft() for _ in range(frames)]
        self._bytes -= sum(length for length, _ in ended)
        return [done for _, done in ended]

    def close(self) -> list[Done]:
        """The connection is closed: what D makes of these bytes now will never be committed."""
        self.lender.close()
        return self.copied(len(self._frames))


class Fetched(NamedTuple):
    """A frame that is through. `views`: where its bytes went; None: nowhere. `intact`: they are
    what P sent."""

    header: wire.Data | wire.Probe
    length: int
    views: Sequence[View] | None
    intact: bool


class _Fetching(NamedTuple):
    header: wire.Data | wire.Probe
    length: int
    views: Sequence[View] | None
    fetch: Fetch
    since_s: float


class Borrowing:
    """D's side of one connection, from the peer's AUTH on. A frame must be through `fetch_s` after
    it was begun (over further connections: something of it must come for so long); frames end in
    the order in which they came."""

    def __init__(self, borrower: Borrower, *, fetch_s: float) -> None:
        self._borrower = borrower
        self._fetch_s = fetch_s
        self._descriptors: list[int] = []
        self._is_open = False
        self._fetching: deque[_Fetching] = deque()
        # Of frames that no COPIED has named; and of those, what is through.
        self._bytes = self._through_bytes = self._through_frames = 0

    @property
    def fetching_since(self) -> float | None:
        """When the oldest frame that is not through was begun."""
        return self._fetching[0].since_s if self._fetching else None

    def attach(self, number: int, sock: socket.socket) -> None:
        """A further connection of this peer. ProtocolError where it has no place."""
        if not isinstance(self._borrower, Linked):
            raise ProtocolError("a further connection where none is used")
        self._borrower.attach(number, sock)

    def receive(self, sock: socket.socket, room: memoryview) -> int:
        """Read into `room`, and take the descriptor that may come with the bytes."""
        if self._is_open or not self._borrower.takes_descriptors:
            return sock.recv_into(room)  # The kernel drops descriptors that are not asked for.
        space = socket.CMSG_SPACE(_INT_BYTES)
        count, came, flags, _ = sock.recvmsg_into([room], space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in came:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(data) // _INT_BYTES
                self._descriptors += struct.unpack(f"@{whole}i", data[: whole * _INT_BYTES])
        if len(self._descriptors) > 1 or flags & socket.MSG_CTRUNC:
            raise ProtocolError("more than one descriptor")
        return count

    def open(self, region: wire.Region, body: bytes) -> None:
        """REGION: open what it lends. ProtocolError when it comes again, or is not right;
        PathError."""
        if self._is_open and not self._borrower.reopens:
            raise ProtocolError("REGION again")
        try:
            self._borrower.open(region.size_bytes, body, self._descriptors)
        except OSError as error:
            raise PathError(str(error)) from error
        self._is_open = True
        self._forget_descriptors()

    def prepare(self, body: bytes, length: int) -> Callable[[Sequence[View] | None], Fetch]:
        """A SHARED frame's places (or a PROBE's), for `length` bytes. ProtocolError for those that
        lie."""
        if not self._is_open:
            raise ProtocolError("SHARED before REGION")
        frames = len(self._fetching) + self._through_frames
        if self._bytes >= WINDOW_BYTES and frames >= WINDOW_FRAMES:
            raise ProtocolError("SHARED frames over the window")
        return self._borrower.prepare(body, length)

    def begin(
        self,
        header: wire.Data | wire.Probe,
        length: int,
        views: Sequence[View] | None,
        start: Callable[[Sequence[View] | None], Fetch],
        now: float,
    ) -> None:
        """Fetch a prepared frame's bytes."""
        self._fetching.append(_Fetching(header, length, views, start(views), now))
        self._bytes += length

    def ended(self, now: float) -> Iterator[Fetched]:
        """Frames that are through. FetchTimeoutError, PathError, and ProtocolError and
        ConnectionError of a Fetch."""
        while self._fetching:
            oldest = self._fetching[0]
            intact = True
            try:
                is_through = oldest.fetch.poll()
            except CorruptError:
                is_through, intact = True, False
            except ConnectionError:
                raise  # It has worked, and may again.
            except OSError as error:
                raise PathError(str(error)) from error
            if not is_through:
                # A slow network is no dead one: the sockets have deadlines of their own.
                is_bounded = isinstance(self._borrower, Linked)
                if now >= oldest.since_s + self._fetch_s and not is_bounded:
                    raise FetchTimeoutError("bytes that the peer lends did not come in time")
                return
            self._fetching.popleft()
            self._through_frames += 1
            self._through_bytes += oldest.length
            yield Fetched(oldest.header, oldest.length, oldest.views, intact)

    def take_copied(self) -> int:
        """Return the number of frames that the next COPIED names."""
        frames = self._through_frames
        self._bytes -= self._through_bytes
        self._through_frames = self._through_bytes = 0
        return frames

    def close(self) -> None:
        """Let go of the peer's memory."""
        self._forget_descriptors()
        self._borrower.close()
        self._fetching.clear()

    def _forget_descriptors(self) -> None:
        descriptors, self._descriptors = self._descriptors, []
        for fd in descriptors:
            with contextlib.suppress(OSError):
                os.close(fd)


def shared_of(header: wire.Data | wire.Probe) -> wire.Shared | wire.Probe:
    """Return the header that is sent instead of this one where the bytes are lent."""
    if isinstance(header, wire.Probe):
        return msgspec.structs.replace(header, shared=True, checksum=NO_CHECKSUM)
    return wire.Shared(**msgspec.structs.asdict(header))


def data_of(header: wire.Shared) -> wire.Data:
    """And back: what the session sees."""
    return wire.Data(**msgspec.structs.asdict(header))
