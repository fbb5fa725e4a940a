"""The data path `shm`: P's paged cache lives in a memfd that D maps read-only (ADR 0011).

D gets the descriptor over a Unix socket, and copies a frame's runs with one call of C (ADR 0020).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import socket
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from operator import add
from pathlib import Path

import numpy as np

from xpyd_core.errors import ProtocolError, UserError
from xpyd_kv import native
from xpyd_kv.memory.device import View, is_on_host, on_host
from xpyd_kv.spans import Span, join
from xpyd_kv.transport.host.data_path import (
    Borrower,
    DataPath,
    Lender,
    Lent,
    Runs,
    Through,
    check_runs,
    pack,
    unpack,
)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_IPC_NAMESPACE = Path("/proc/self/ns/ipc")
_TOKEN_BYTES = 16


def host_token() -> bytes:
    """Return a token that is the same for all processes of this boot of this machine in this IPC
    namespace, in which the driver passes handles (pods have one each, but for `hostIPC`). Empty
    where the system does not say."""
    try:
        place = f"{_BOOT_ID.read_text().strip()} {os.readlink(_IPC_NAMESPACE)}"
    except OSError:
        return b""
    return hashlib.sha256(b"xpyd-kv-host/1 " + place.encode()).digest()[:_TOKEN_BYTES]


Columns = tuple[Sequence[int], Sequence[int]]
"""Offsets into a memory, and as many lengths: not negative, and below 2^64."""

Copy = Callable[[memoryview, Columns, Sequence[memoryview]], None]
"""The runs of a memory, one after another, into views, one after another; both may be cut as they
like. All are flat bytes, the views writable and elsewhere than the memory. ValueError, and nothing
is copied, for a run outside of the memory, or where runs and views differ in length in all."""

# Also of no bytes: a c_char would want one.
_begin_of = (ctypes.c_char * 0).from_buffer
_REFUSED = "runs that do not fit into their memory, or not into the views"


def copy_with(library: ctypes.CDLL | None) -> Copy:
    """By the library made of native/copy_runs.c, where there is one."""
    # One that was made of an older source may know nothing of it.
    call = getattr(library, "xpyd_copy_runs", None)
    if call is None:
        return copy_in_python
    columns = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, *columns, *columns)
    call.restype = ctypes.c_int

    def copy(source: memoryview, runs: Columns, views: Sequence[memoryview]) -> None:
        """Hot path: no Python step for a run or a view. While the interpreter's lock is away,
        `memory` and `begins` keep all of it from being unmapped or resized."""
        offsets, lengths = array("Q", runs[0]), array("Q", runs[1])
        if len(offsets) != len(lengths):
            raise ValueError(_REFUSED)
        memory = begins = None
        try:
            memory = np.frombuffer(source, np.uint8) if len(source) else np.empty(0, np.uint8)
            begins = list(map(_begin_of, views))
            addresses = array("Q", map(ctypes.addressof, begins))
            rooms = array("Q", map(len, views))
            refused = call(
                memory.__array_interface__["data"][0],
                memory.size,
                offsets.buffer_info()[0],
                lengths.buffer_info()[0],
                len(offsets),
                addresses.buffer_info()[0],
                rooms.buffer_info()[0],
                len(addresses),
            )
        finally:
            # An error keeps this frame: its handler may want to close the memory.
            memory = begins = None
        if refused:
            raise ValueError(_REFUSED)

    return copy


def copy_in_python(source: memoryview, runs: Columns, views: Sequence[memoryview]) -> None:
    """Without a compiler: one Python step for each run or view."""
    offsets, lengths = runs
    rooms = list(map(len, views))
    if (
        len(offsets) != len(lengths)
        or max(map(add, offsets, lengths), default=0) > len(source)
        or sum(lengths) != sum(rooms)
    ):
        raise ValueError(_REFUSED)
    if list(lengths) == rooms:
        # As a rule: blocks of one size on both sides.
        for view, offset, length in zip(views, offsets, lengths, strict=True):
            view[:] = source[offset : offset + length]
        return
    following = zip(offsets, lengths, strict=True)
    offset = left = 0
    for view in views:
        while length := len(view):
            if not left:
                offset, left = next(following)
            elif length <= left:
                view[:] = source[offset : offset + length]
                offset += length
                left -= length
                break
            else:
                view[:left] = source[offset : offset + left]
                view, left = view[left:], 0


MAX_BYTES = 2**40
"""Larger than any cache in ordinary memory; so many of them fit in a process's addresses."""
# Linux 5.1; the fcntl module has no name for it before Python 3.13. Maps that exist stay writable,
# no other can be made, and write() fails: also through /proc/self/fd.
_F_SEAL_FUTURE_WRITE = 0x10
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
# Without these a peer could take bytes away under D's map, which ends D by a signal.
_NEEDED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class SharedMemory:
    """Ours to write. Starts as zeros; pages never touched take no memory. Close it when no peer is
    left; the memory itself lives as long as `buffer` is used."""

    def __init__(self, size_bytes: int) -> None:
        """UserError when the system does not give it."""
        if not 0 < size_bytes <= MAX_BYTES:
            raise UserError(f"{size_bytes} bytes cannot be shared; --kv-transport uds needs no shm")
        try:
            self.fd = os.memfd_create("xpyd-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(self.fd, size_bytes)
                self.buffer = mmap.mmap(self.fd, size_bytes)
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            except BaseException:
                os.close(self.fd)
                raise
        except OSError as error:
            raise UserError(
                f"memory that other processes may read: {error.strerror}; --kv-transport uds needs "
                "none"
            ) from error
        self.size_bytes = size_bytes
        self._start = address_of(self.buffer)

    def runs_of(self, views: Iterable[View], *, at_most: int) -> list[Span] | None:
        """Where these bytes are, neighbours joined; None when some are elsewhere, or in more
        than `at_most` places. Hot path: P does this for every block of every frame."""
        views = [view for view in views if len(view)]
        if not is_on_host(views):
            return None
        try:
            addresses = list(map(ctypes.addressof, map(_begin_of, on_host(views))))
        except TypeError:
            return None  # Read-only, so not ours.
        start = self._start
        offsets = [address - start for address in addresses]
        lengths = list(map(len, views))
        if min(offsets, default=0) < 0 or max(map(add, offsets, lengths), default=0) > (
            self.size_bytes
        ):
            return None
        runs = join(offsets, lengths)
        return runs if len(runs) <= at_most else None

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.fd)


class PeerMemory:
    """A peer's memory, to be read. Owns a map; `fd` stays the caller's."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        """ProtocolError when it is not what a peer may share; OSError when it cannot be mapped."""
        if not 0 < size_bytes <= MAX_BYTES:
            raise ProtocolError(f"shared memory of {size_bytes} bytes")
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as error:
            raise ProtocolError("a descriptor that is no shared memory") from error
        if seals & _NEEDED != _NEEDED:
            raise ProtocolError("shared memory that may still shrink")
        if os.fstat(fd).st_size != size_bytes:
            raise ProtocolError("shared memory of another size than announced")
        self._size_bytes = size_bytes
        self._map = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
        self._bytes = memoryview(self._map)
        self._copy = copy_with(native.library("copy_runs"))

    def check(self, runs: Runs, length: int) -> None:
        """ProtocolError unless all runs lie inside and have `length` bytes together."""
        check_runs(runs, self._size_bytes, length)

    def copy(self, runs: Runs, views: Sequence[memoryview]) -> None:
        """The runs' bytes, checked before, into `views`, which have room for exactly them: nothing
        else is read or written, ValueError where that is not so. Hot path. Other threads run
        meanwhile; the views' owners stay away from them until it returns."""
        self._copy(self._bytes, runs, views)

    def close(self) -> None:
        """Unmap it."""
        self._bytes.release()
        self._map.close()


class SharedMemoryPath(DataPath):
    """`memory` is what a P lends; the caller closes it when no peer is left."""

    name = "shm"

    def __init__(self, memory: SharedMemory | None = None) -> None:
        self._memory = memory

    @property
    def lends(self) -> bool:
        return self._memory is not None

    def lender(self) -> SharedMemoryLender:
        assert self._memory is not None
        return SharedMemoryLender(self._memory)

    def borrower(self) -> SharedMemoryBorrower:
        return SharedMemoryBorrower()


class SharedMemoryLender(Lender):
    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    def lent(self) -> Lent:
        descriptor = struct.pack("@i", self._memory.fd)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)]
        return Lent(self._memory.size_bytes, rights=rights)

    def places(self, views: Sequence[View], *, at_most: int) -> bytes | None:
        runs = self._memory.runs_of(views, at_most=at_most)
        return None if runs is None else pack(runs)


class SharedMemoryBorrower(Borrower):
    """Copies at once, so that every Fetch is through when it is begun."""

    takes_descriptors = True

    def __init__(self) -> None:
        self._memory: PeerMemory | None = None

    def open(self, size_bytes: int, body: bytes, descriptors: Sequence[int]) -> None:
        if body or not descriptors:
            raise ProtocolError("REGION without its descriptor, or with a body")
        self._memory = PeerMemory(descriptors[0], size_bytes)

    def prepare(self, body: bytes, length: int) -> Callable[[Sequence[View] | None], Through]:
        memory = self._memory
        assert memory is not None
        runs = unpack(body)
        memory.check(runs, length)

        def start(views: Sequence[View] | None) -> Through:
            if views is not None:
                memory.copy(runs, on_host(views))
            return Through()

        return start

    def close(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


def address_of(buffer: mmap.mmap | memoryview) -> int:
    """Where its bytes begin. TypeError for read-only ones. Exported for this moment only."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
