"""A Channel between the scheduler's process and a rank's, and turns for the threads that use it.

It is a Unix socket of one machine. The rank listens under an abstract name, which leaves no file
when the process is killed; the name is random, and only processes of the same user are accepted.
The scheduler's side connects when vLLM passes the name on, after the caches are registered. See
xpyd_kv.ranks.engine.Channel.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable

from xpyd_kv.transport.api import Endpoint

_log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_CONNECT_S = 10.0
# The longest that a step waits for the I/O thread's turn, which takes a tenth of it.
_TURN_S = 0.002
_CHANNEL_S = 0.0001
# Between such turns while no KV moves: far under the deadlines of OFFERs and PINGs.
_IDLE_TURN_S = 0.1


class Turns:
    """Lets the I/O thread and the channel's have a turn in vLLM's steps.

    vLLM's thread waits for the next step, or for its output, in a loop of sched_yield, and has the
    GIL again before another thread has woken up for it: for seconds nothing moves, and no PING is
    answered.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._last_s = 0.0
        endpoint.call(_leave_core)

    def give(self, *, is_moving: bool) -> None:
        """Once in each step. Waits where KV moves, or where the last turn is a while ago."""
        now = time.monotonic()
        if not is_moving and now < self._last_s + _IDLE_TURN_S:
            return
        self._last_s = now
        had_turn = threading.Event()
        self._endpoint.call(had_turn.set)
        had_turn.wait(_TURN_S)
        # The channel's thread waits for the GIL, too, and this one would have it first.
        time.sleep(_CHANNEL_S)


def _leave_core() -> None:
    """A thread inherits the one core that vLLM on a CPU gives to a worker's first thread: there it
    would wait for the model, and for those of other instances. The parent has all that is ours."""
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))


class RankChannel:
    """The rank's end. What is posted before the other side connects waits."""

    def __init__(self) -> None:
        self.name = f"xpyd-kv-{secrets.token_hex(16)}"
        """The name by which the scheduler's side connects."""
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(f"\0{self.name}")
        self._server.listen(1)
        self._lock = threading.Lock()
        self._early: list[bytes] = []
        self._socket: socket.socket | None = None

    def post(self, message: bytes) -> None:
        """See Channel."""
        with self._lock:
            if self._socket is None:
                self._early.append(message)
            else:
                _send(self._socket, message)

    def listen(self, handle: Callable[[bytes], None]) -> None:
        """See Channel."""
        threading.Thread(
            target=self._run, args=(handle,), name="xpyd-kv-channel", daemon=True
        ).start()

    def close(self) -> None:
        """Close both sockets; the thread ends."""
        shut(self._server)
        with self._lock:
            if self._socket is not None:
                shut(self._socket)

    def _run(self, handle: Callable[[bytes], None]) -> None:
        _leave_core()
        connection = self._accept()
        if connection is None:
            return
        with self._lock:
            self._socket = connection
            for message in self._early:
                _send(connection, message)
            self._early.clear()
        _receive(connection, handle)

    def _accept(self) -> socket.socket | None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return None
            if is_same_user(connection):
                return connection
            _log.warning("a process of another user asked for the rank's KV channel: refused")
            connection.close()


class SchedulerChannel:
    """The scheduler's end, connected to the rank's `name`. OSError when there is no such rank on
    this machine."""

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_CONNECT_S)
        self._socket.connect(f"\0{name}")
        self._socket.settimeout(None)

    def post(self, message: bytes) -> None:
        """See Channel."""
        with self._lock:
            _send(self._socket, message)

    def listen(self, handle: Callable[[bytes], None]) -> None:
        """See Channel."""
        threading.Thread(
            target=_receive, args=(self._socket, handle), name="xpyd-kv-channel", daemon=True
        ).start()

    def close(self) -> None:
        """Close the socket; the thread ends."""
        shut(self._socket)


def _send(connection: socket.socket, message: bytes) -> None:
    try:
        connection.sendall(_LENGTH.pack(len(message)) + message)
    except OSError:
        # The other process has ended, and vLLM ends this one.
        _log.debug("a message to the other process of this engine is dropped")


def _receive(connection: socket.socket, handle: Callable[[bytes], None]) -> None:
    with connection.makefile("rb") as stream:
        while len(head := _read(stream.read, _LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            message = _read(stream.read, length)
            if len(message) < length:
                return
            handle(message)


def _read(read: Callable[[int], bytes], length: int) -> bytes:
    try:
        return read(length)
    except OSError:
        return b""


def is_same_user(connection: socket.socket) -> bool:
    """Whether the other end of a Unix socket is a process of our user."""
    _, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return user == os.getuid()


def shut(connection: socket.socket) -> None:
    """Close a socket on which another thread may wait."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        # It was not connected, or the other side was faster.
        _log.debug("the channel's socket was closed before")
    connection.close()
