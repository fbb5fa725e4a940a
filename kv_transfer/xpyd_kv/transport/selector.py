"""The I/O thread's waiting place: sockets, and calls from other threads that wake it."""

from __future__ import annotations

import selectors
import socket
from collections import deque
from collections.abc import Callable

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
Ready = Callable[[int, float], None]
"""What a socket does when it is ready: (mask of READ and WRITE, now)."""


class WakeableSelector:
    """epoll (or what the system has) plus a queue of calls. All but `call` on the I/O thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_out, READ, None)
        self._calls: deque[Callable[[], None]] = deque()
        self._woken = False

    def call(self, function: Callable[[], None]) -> None:
        """From any thread: keep `function` for `take_calls`, and end a `select` under way."""
        self._calls.append(function)
        # Many calls between two turns cost one wake. The flag is lowered before the queue is read,
        # so a call is either seen there or wakes the next select.
        if not self._woken:
            self._woken = True
            try:
                self._wake_in.send(b"\0")
            except OSError:
                # Full: a wake is pending. Closed: nobody is left to be woken.
                return

    def take_calls(self) -> list[Callable[[], None]]:
        """The calls waiting now, in order."""
        return [self._calls.popleft() for _ in range(len(self._calls))]

    def set(self, sock: socket.socket, mask: int, ready: Ready) -> None:
        """Watch `sock` for `mask` from now on; 0 = not at all."""
        watched = sock.fileno() in self._selector.get_map()
        if not mask:
            if watched:
                self._selector.unregister(sock)
        elif watched:
            self._selector.modify(sock, mask, ready)
        else:
            self._selector.register(sock, mask, ready)

    def select(self, timeout_s: float | None) -> list[tuple[Ready, int]]:
        """Wait until a socket is ready, a call has come, or the timeout has passed."""
        ready: list[tuple[Ready, int]] = []
        for key, mask in self._selector.select(timeout_s):
            if key.data is None:
                self._wake_out.recv(4096)
            else:
                ready.append((key.data, mask))
        self._woken = False
        return ready

    def close(self) -> None:
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()
