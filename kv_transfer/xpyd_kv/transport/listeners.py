"""What an endpoint listens on: its port, and a Unix socket beside it. Owned by the endpoint."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import Callable
from functools import partial

from xpyd_core.request_id import Address
from xpyd_kv.transport import sockets
from xpyd_kv.transport.selector import READ, WakeableSelector
from xpyd_kv.transport.unix import SocketFolder, UnixListener

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
        """Listen on `address` and, with a folder, beside it; where it listens. UserError when it
        cannot; nothing is left open then."""
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
