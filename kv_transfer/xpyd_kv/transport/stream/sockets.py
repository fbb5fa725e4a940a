"""Sockets as the I/O thread uses them: dial, listen, options, and the selector that waits."""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from xpyd_core.errors import UserError
from xpyd_core.request_id import Address
from xpyd_kv.wire.handshake import OVER_TCP, OVER_UNIX

_BACKLOG = 256
# With the usual 208 KiB two processes wake each other ten times for each MiB.
_UNIX_BUFFER_BYTES = 2 * 1024 * 1024
# Linux: choose the source port at connect, so that ports are unique per destination only.
_BIND_ADDRESS_NO_PORT = 24
OUT_OF_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_IN_PROGRESS = frozenset((0, errno.EINPROGRESS))


def _family(host: str) -> socket.AddressFamily:
    """ValueError when `host` is not a literal ip: names are never looked up here (it blocks)."""
    version = ipaddress.ip_address(host).version
    return socket.AF_INET6 if version == 6 else socket.AF_INET


def listen(address: Address) -> socket.socket:
    """A listening, non-blocking socket. UserError when the address cannot be bound."""
    try:
        sock = socket.socket(_family(address.host), socket.SOCK_STREAM)
    except ValueError as error:
        raise UserError(f"KV address {address}: the host must be a literal ip") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(tuple(address))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise UserError(f"KV address {address} cannot be bound: {error.strerror}") from error
    return sock


def dial(address: Address, source_host: str) -> socket.socket:
    """A non-blocking socket that connects to `address`. OSError or ValueError when it cannot."""
    sock = socket.socket(_family(address.host), socket.SOCK_STREAM)
    try:
        prepare(sock)
        if source_host:
            with suppress(OSError):  # A convenience of Linux; binding works without it.
                sock.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
            sock.bind((source_host, 0))
        error = sock.connect_ex(tuple(address))
        if error not in _IN_PROGRESS:
            raise OSError(error, "connect")
    except BaseException:
        sock.close()
        raise
    return sock


def prepare(sock: socket.socket) -> None:
    """Non-blocking, and small frames leave at once."""
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        # The kernel takes less where net.core.wmem_max is less. TCP finds its own size.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def wake_at(sock: socket.socket, count: int) -> None:
    """TCP: ready to be read when `count` bytes are there, or the peer can send no more of them (the
    kernel sees to it); sockets begin with 1. Only for what is waited for by polling: a blocking
    read would wait for all of them, window or not."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)


def make_blocking(sock: socket.socket, timeout_s: float) -> None:
    """Whole calls: the kernel comes back when all is done, or `timeout_s` has passed without any
    of it. (Python's own timeout makes a socket that returns early.)"""
    sock.setblocking(True)
    whole, part = divmod(timeout_s, 1.0)
    timeval = struct.pack("@ll", int(whole), int(part * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, timeval)


def usable(sock: socket.socket) -> tuple[str, ...]:
    """The transports that this kind of socket can carry, best first."""
    return OVER_UNIX if sock.family == socket.AF_UNIX else OVER_TCP


def dial_error(sock: socket.socket) -> OSError | None:
    """Return the error with which connecting ended, or None."""
    error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return OSError(error, "connect") if error else None


def bound_address(sock: socket.socket) -> Address:
    """Where a listening socket listens."""
    name = sock.getsockname()
    return Address(str(name[0]), int(name[1]))


READ = select.EPOLLIN
WRITE = select.EPOLLOUT
Ready = Callable[[int, float], None]
"""The call for a socket that is ready: (mask of READ and WRITE, now)."""


class WakeableSelector:
    """epoll plus a queue of calls. All but `call` on the I/O thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, READ)
        # What is watched, by file descriptor: for what, and what is called.
        self._watched: dict[int, tuple[int, Ready]] = {}
        self.calls: deque[Callable[[], None]] = deque()
        """The calls of other threads that wait, in order."""
        # Whether a call has to end a `select` under way, which none has ended yet.
        self._sleeps = False
        # So that no call of another thread writes to a descriptor that is somebody else's by now.
        self._closing = threading.Lock()

    def call(self, function: Callable[[], None]) -> None:
        """From any thread: put `function` into `calls`, and end a `select` under way."""
        self.calls.append(function)
        # Many calls between two turns cost one wake, those within a turn none. `select` raises the
        # flag before it looks at the queue, so a call is either seen there or ends it.
        if self._sleeps:
            with self._closing:
                if self._sleeps:
                    self._sleeps = False
                    os.eventfd_write(self._wake, 1)

    def set(self, sock: socket.socket, mask: int, ready: Ready) -> None:
        """Watch `sock` for `mask` from now on; 0 = not at all."""
        number = sock.fileno()
        if not mask:
            if self._watched.pop(number, None) is not None:
                self._epoll.unregister(number)
            return
        if number in self._watched:
            self._epoll.modify(number, mask)
        else:
            self._epoll.register(number, mask)
        self._watched[number] = (mask, ready)

    def select(self, timeout_s: float | None) -> list[tuple[Ready, int]]:
        """Wait until a socket is ready, a call has come, or the timeout has passed."""
        self._sleeps = True
        found = self._epoll.poll(0.0 if self.calls else timeout_s, len(self._watched) + 1)
        self._sleeps = False
        ready: list[tuple[Ready, int]] = []
        for number, mask in found:
            if number == self._wake:
                os.eventfd_read(number)
            else:
                watched, call = self._watched[number]
                # An error or a hang-up: reading or writing says what it is.
                ready.append((call, mask & watched or watched))
        return ready

    def close(self) -> None:
        with self._closing:
            self._sleeps = False
            self._epoll.close()
            os.close(self._wake)
