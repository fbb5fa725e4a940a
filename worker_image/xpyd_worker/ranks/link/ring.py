"""Messages from one process to others, through memory that they share. Linux.

    writer --- a circle of bytes without a name (memfd), which all have mapped --- each reader
           --- `come`, one for each reader: bytes written --->
           <-- `taken`, one for each reader: bytes read -----

A message is written once, however many read it. The two counters of a reader are eventfds: a
waiter sleeps in poll, so ranks that wait take no core from those that compute, and one poll can
wait for a message and for other things. Positions in the circle are each side's own count. What was
stored before a counter was raised is there for a process that has read the counter, on every
processor: the kernel changes and reads it under one lock. Nothing else in the memory is used to
synchronise.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import struct
import time
from contextlib import suppress
from dataclasses import dataclass

from xpyd_core.errors import XpydError

RING_BYTES = 1 << 20
"""Steps take some hundred bytes; of a longer message the rest follows as it is read."""
MAX_MESSAGE_BYTES = 64 << 20
_HEAD = struct.Struct("<II")  # bytes in this part, bytes that follow in later ones
_FLAGS = os.EFD_CLOEXEC | os.EFD_NONBLOCK


class RingError(XpydError):
    """A reader does not read, or the other side breaks the ring's rules. The ring cannot go on."""


@dataclass(frozen=True)
class RingFds:
    """A ring's descriptors: the memory's, and of each reader the two counters'."""

    memory: int
    come: tuple[int, ...]
    taken: tuple[int, ...]

    def of_reader(self, reader: int) -> RingFds:
        """What one reader is given."""
        return RingFds(self.memory, (self.come[reader],), (self.taken[reader],))

    def all(self) -> tuple[int, ...]:
        """The descriptors that a rank inherits, or that are closed."""
        return (self.memory, *self.come, *self.taken)

    def close(self) -> None:
        """Ours of them; the ring lives on in the processes that have opened it."""
        for descriptor in self.all():
            os.close(descriptor)


def make_ring(readers: int, size_bytes: int = RING_BYTES) -> RingFds:
    """A new one. A child inherits it only by `pass_fds`."""
    memory = os.memfd_create("xpyd-ring", os.MFD_CLOEXEC)
    os.ftruncate(memory, size_bytes)
    counters = [os.eventfd(0, _FLAGS) for _ in range(2 * readers)]
    return RingFds(memory, tuple(counters[:readers]), tuple(counters[readers:]))


class RingWriter:
    """The writing end. One thread at a time."""

    def __init__(self, fds: RingFds) -> None:
        self._come, self._taken = fds.come, fds.taken
        self._memory, self._view, self._size = _map(fds.memory)
        self._at = 0
        # By reader: bytes written that it has not read, as far as we know.
        self._unread = [0] * len(fds.come)

    def write(self, message: bytes, *, within_s: float, unless: int | None = None) -> None:
        """Hand `message` to every reader. Waits only where the ring is full of what some reader has
        not read. RingError for too long a message; NotReadError when the wait has taken `within_s`;
        GivenUpError as soon as the descriptor `unless` is readable."""
        left = len(message)
        if left > MAX_MESSAGE_BYTES:
            raise RingError(f"a message of {left} bytes; {MAX_MESSAGE_BYTES} are allowed")
        end_s: float | None = None
        # Half of the ring, so that a reader copies one part while the next is written.
        most = self._size // 2 - _HEAD.size
        rest = memoryview(message)
        while True:
            part, rest = rest[:most], rest[most:]
            record = _HEAD.pack(len(part), len(rest)) + part
            if max(self._unread) + len(record) > self._size:
                end_s = end_s or time.monotonic() + within_s
                self._make_room(len(record), end_s, unless)
            self._put(record)
            if not rest:
                return

    def _make_room(self, size: int, end_s: float, unless: int | None) -> None:
        for reader, counter in enumerate(self._taken):
            while self._unread[reader] + size > self._size:
                taken = _take(counter, end_s - time.monotonic(), unless)
                if not taken:
                    if time.monotonic() < end_s:
                        raise GivenUpError("what was to be written is of no use any more")
                    raise NotReadError(reader)
                self._unread[reader] -= taken
                if self._unread[reader] < 0:
                    raise RingError(f"reader {reader} has read more than was written")

    def _put(self, record: bytes) -> None:
        start = self._at % self._size
        first = min(len(record), self._size - start)
        self._view[start : start + first] = record[:first]
        if first < len(record):
            self._view[: len(record) - first] = record[first:]
        self._at += len(record)
        for reader, counter in enumerate(self._come):
            self._unread[reader] += len(record)
            os.eventfd_write(counter, len(record))

    def close(self) -> None:
        """Unmap the memory; the descriptors belong to their maker."""
        self._view.release()
        self._memory.close()


class NotReadError(RingError):
    """`reader` has not read for too long."""

    def __init__(self, reader: int) -> None:
        super().__init__(f"reader {reader} does not read")
        self.reader = reader


class GivenUpError(RingError):
    """The writer was asked to stop waiting."""


class RingReader:
    """The end that one rank reads. One thread uses it at a time."""

    def __init__(self, fds: RingFds) -> None:
        """`fds`: of_reader."""
        (self._come,), (self._taken,) = fds.come, fds.taken
        self._memory, self._view, self._size = _map(fds.memory)
        self._at = 0
        self._here = 0
        self._parts: list[bytes] = []
        self._follow = 0

    def fileno(self) -> int:
        """Readable when something has come since `read` last said that there is nothing more."""
        return self._come

    def read(self, within_s: float | None) -> bytes | None:
        """The next message; None when none has come whole after `within_s` (None: no limit).
        RingError for what no writer writes."""
        end_s = None if within_s is None else time.monotonic() + within_s
        while True:
            if not self._here:
                left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
                self._here = _take(self._come, left_s)
                if not self._here:
                    return None
            part, follow = self._next()
            if not self._parts and not follow:
                return part
            self._parts.append(part)
            self._follow = follow
            if not follow:
                whole, self._parts = b"".join(self._parts), []
                return whole

    def _next(self) -> tuple[bytes, int]:
        length, follow = _HEAD.unpack(self._get(_HEAD.size))
        size = _HEAD.size + length
        is_next = not self._parts or length + follow == self._follow
        if size > self._here or length + follow > MAX_MESSAGE_BYTES or not is_next:
            raise RingError(f"a record of {length} bytes, {follow} to follow, where none can be")
        part = self._get(length)
        self._here -= size
        os.eventfd_write(self._taken, size)
        return part, follow

    def _get(self, size: int) -> bytes:
        start = self._at % self._size
        first = bytes(self._view[start : start + size])
        self._at += size
        if len(first) == size:
            return first
        return first + bytes(self._view[: size - len(first)])

    def close(self) -> None:
        """Unmap the memory; the descriptors belong to their maker."""
        self._view.release()
        self._memory.close()


def _map(descriptor: int) -> tuple[mmap.mmap, memoryview, int]:
    memory = mmap.mmap(descriptor, 0)
    return memory, memoryview(memory), len(memory)


def _take(counter: int, within_s: float | None, unless: int | None = None) -> int:
    """What the counter has; 0 where it has nothing in time, or before `unless` is readable."""
    with suppress(BlockingIOError):
        return os.eventfd_read(counter)
    if within_s is not None and within_s <= 0:
        return 0
    poll = select.poll()
    poll.register(counter, select.POLLIN)
    if unless is not None:
        poll.register(unless, select.POLLIN)
    # Up, so that a wait does not end just before its time and find nothing.
    poll.poll(None if within_s is None else within_s * 1000 + 1)
    try:
        return os.eventfd_read(counter)
    except OSError as error:
        if error.errno != errno.EAGAIN:
            raise
        return 0
