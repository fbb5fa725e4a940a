"""Listening sockets of the programs' HTTP ports.

A pod listens on its own address, never on 0.0.0.0: the address that heartbeats name is the one that
is served. `kubectl port-forward` and a person in the pod dial the loopback address, so a program on
another address listens there too.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket

_log = logging.getLogger(__name__)


def other_loopback(host: str) -> str | None:
    """The loopback address to listen on besides `host`; None where `host` already covers it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if address.is_loopback or address.is_unspecified:
        return None
    return "127.0.0.1" if address.version == 4 else "::1"


def listen(host: str, port: int, *, backlog: int, reuse_port: bool = False) -> list[socket.socket]:
    """Non-blocking listeners on `host` (first) and on the loopback address, on one port.

    `reuse_port`: other processes of the same user may listen there, too; the kernel spreads
    connections over them. Raises OSError when `host` cannot be had; the loopback is done without
    where it is taken.
    """
    sockets = [_server(host, port, backlog, reuse_port)]
    loopback = other_loopback(host)
    if loopback is not None:
        real_port: int = sockets[0].getsockname()[1]
        try:
            sockets.append(_server(loopback, real_port, backlog, reuse_port))
        except OSError as error:
            _log.warning("not listening on %s:%d too: %s", loopback, real_port, error.strerror)
    return sockets


def inherited(descriptor: int) -> socket.socket:
    """The listening TCP socket that this process was started with, non-blocking, for itself alone.

    Who started the process has it open, too: clients wait there while no process accepts. Raises
    OSError for a descriptor that is no such socket.
    """
    sock = socket.socket(fileno=os.dup(descriptor))
    is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
    if not is_tcp or not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.close()
        raise OSError(errno.EINVAL, "not a listening TCP socket")
    os.close(descriptor)
    sock.setblocking(False)
    return sock


def _server(host: str, port: int, backlog: int, reuse_port: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=backlog, reuse_port=reuse_port)
    sock.setblocking(False)
    return sock
