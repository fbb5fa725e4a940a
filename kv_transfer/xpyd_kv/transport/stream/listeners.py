"""What an endpoint listens on: its port, and a Unix socket in a folder that a machine's pods share.

A socket that answers is proof enough that both are on one machine: the file of a D elsewhere (an
address used again, a file system over the network) refuses at once, and P goes to the port. Linux.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import stat
from collections.abc import Callable
from functools import partial
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from xpyd_core.errors import UserError
from xpyd_core.request_id import Address
from xpyd_kv.transport.stream import sockets
from xpyd_kv.transport.stream.sockets import READ, WakeableSelector

_BACKLOG = 256


class SocketFolder:
    """The folder, held open: its path may be longer than a socket's may be."""

    def __init__(self, path: Path) -> None:
        """Makes the folder if it is not there. UserError where it cannot be used safely."""
        self._path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"--kv-socket-dir {path}: {error.strerror}") from error
        # Whoever may write here could take a D's name and keep its P from the KV port.
        if os.fstat(self._fd).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            self.close()
            raise UserError(f"--kv-socket-dir {path}: others may write to it; chmod go-w {path}")

    def listen(self, address: Address) -> UnixListener:
        """A listening, non-blocking socket for the D whose KV port is `address`; a file left there
        by a dead one is replaced. UserError when it cannot be made, or another one answers."""
        name = _name(address)
        if name is None:
            raise UserError(f"KV address {address}: no socket can be named after it")
        other = self.dial(address)
        if other is not None:
            other.close()
            raise UserError(f"--kv-socket-dir {self._path}: another one listens as {name}")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            made = f"{name}.{os.getpid()}"
            sock.bind(self._at(made))
            # No process finds the socket before it listens and only we may open it.
            os.chmod(self._at(made), stat.S_IRUSR | stat.S_IWUSR)
            sock.listen(_BACKLOG)
            sock.setblocking(False)
            os.rename(self._at(made), self._at(name))
            inode = os.stat(self._at(name)).st_ino
        except OSError as error:
            sock.close()
            raise UserError(f"--kv-socket-dir {self._path}: {error.strerror}") from error
        return UnixListener(sock, self._at(name), inode)

    def dial(self, address: Address) -> socket.socket | None:
        """A non-blocking socket connected to the D of `address`; None when it is not here, or has
        no place in its queue."""
        name = _name(address)
        if name is None:
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(self._at(name))
        except OSError:
            sock.close()
            return None
        return sock

    def remove_dead(self, address: Address) -> None:
        """Take away the file of a D whose process was killed; of one that lives it stays."""
        name = _name(address)
        if name is None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                sock.connect(self._at(name))
            except ConnectionRefusedError:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._at(name))
            except OSError:
                pass  # None is there, or it lives and is busy.

    def close(self) -> None:
        """Let go of the folder; what listens in it goes on."""
        os.close(self._fd)

    def _at(self, name: str) -> str:
        return f"/proc/self/fd/{self._fd}/{name}"


class UnixListener:
    """A listening socket and its file."""

    def __init__(self, sock: socket.socket, path: str, inode: int) -> None:
        self.sock = sock
        self._path = path
        self._inode = inode

    def close(self) -> None:
        """Stop listening and take the file away, unless it is another one's by now. Before the
        folder is closed."""
        self.sock.close()
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._path).st_ino == self._inode:
                os.unlink(self._path)


def _name(address: Address) -> str | None:
    """The file's name: canonical, since the address may come from a request. None: not a literal
    ip, or one that means something on one interface only."""
    try:
        ip = ip_address(address.host)
    except ValueError:
        return None
    if isinstance(ip, IPv6Address) and ip.scope_id is not None:
        return None
    return f"{ip}-{address.port}"


_log = logging.getLogger(__name__)


class Listeners:
    """Accepts connections and hands them to `accepted(sock, now, remote)`. After the process ran
    out of descriptors it pauses for `pause_s`."""

    def __init__(
        self,
        selector: WakeableSelector,
        accepted: Callable[[socket.socket, float, str], None],
        *,
        per_turn: int,
        pause_s: float,
    ) -> None:
        self._selector = selector
        self._accepted = accepted
        self._per_turn = per_turn
        self._pause_s = pause_s
        self._socks: list[socket.socket] = []
        self._unix: UnixListener | None = None
        self.due = math.inf
        """When `run_timers` has something to do."""

    def open(self, address: Address, folder: SocketFolder | None) -> Address:
        """Listen on `address` and, with a folder, on a Unix socket in it; return the address.
        UserError when it cannot; nothing is left open then."""
        tcp = sockets.listen(address)
        bound = sockets.bound_address(tcp)
        try:
            self._unix = folder.listen(bound) if folder is not None else None
        except BaseException:
            tcp.close()
            raise
        self._socks = [tcp, self._unix.sock] if self._unix is not None else [tcp]
        self._watch(READ)
        return bound

    def run_timers(self, now: float) -> None:
        """Accept again after a pause."""
        if now >= self.due:
            self.due = math.inf
            self._watch(READ)

    def close(self) -> None:
        """Stop listening."""
        self._watch(0)
        self.due = math.inf
        if self._unix is not None:
            self._unix.close()
        for sock in self._socks:
            sock.close()
        self._socks, self._unix = [], None

    def _watch(self, mask: int) -> None:
        for sock in self._socks:
            self._selector.set(sock, mask, partial(self._accept, sock))

    def _accept(self, listener: socket.socket, _mask: int, now: float) -> None:
        for _ in range(self._per_turn):
            try:
                sock, name = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in sockets.OUT_OF_RESOURCES:
                    continue  # That connection is gone; the next may be good.
                _log.warning("accept: %s; not accepting for a moment", error.strerror)
                self._watch(0)
                self.due = now + self._pause_s
                return
            self._accepted(sock, now, str(name[0]) if name else "this machine")
