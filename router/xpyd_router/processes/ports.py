"""The HTTP port that several processes share: the owner reserves it, each worker listens on it."""

from __future__ import annotations

import contextlib
import socket

from xpyd_core.errors import UserError
from xpyd_core.listen import listen, loopback_beside


def reserve(host: str, port: int) -> list[socket.socket]:
    """Sockets that keep `port` (0: a free one) on `host`, and on the loopback beside it, without
    listening. UserError where another program has it.
    """
    try:
        if port:
            # A socket that shares would not notice another router that shares as well.
            with _bound(host, port, reuse_port=False):
                pass
        first = _bound(host, port, reuse_port=True)
    except OSError as error:
        raise UserError(f"HTTP on {host}:{port}: {error.strerror or error}") from error
    reserved = [first]
    beside = loopback_beside(host)
    if beside is not None:
        with contextlib.suppress(OSError):  # the workers say so when they listen
            reserved.append(_bound(beside, first.getsockname()[1], reuse_port=True))
    return reserved


def join(host: str, port: int, backlog: int) -> list[socket.socket]:
    """This worker's listeners on a port that the owner reserved. OSError where it cannot."""
    return listen(host, port, backlog=backlog, reuse_port=True)


def _bound(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # Connections of a router that just ended do not hold its port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock
