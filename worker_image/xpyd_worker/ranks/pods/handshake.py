"""How two pods of an instance greet each other: each proves its key, and both must have been told
the same numbers. See docs/parallel.md.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import TypeVar

from xpyd_core import __version__
from xpyd_core.errors import ProtocolError, UserError
from xpyd_worker.ranks.link.frames import HEAD, Frame, Kind, encode_frame
from xpyd_worker.ranks.pods.messages import (
    MAX_HELLO_BYTES,
    NONCE_BYTES,
    Auth,
    Hello,
    Numbers,
    PodMessage,
    decode_pod,
    encode_pod,
    is_pod_mac,
    pod_mac,
)

LOOPBACK = "127.0.0.1"
"""Where ranks of one pod meet, also where the instance's own address is an IPv6 one."""
HANDSHAKE_S = 5.0
JOIN_S = 600.0
"""The time for the other pods to join: a node may have to be made and the image pulled."""
_T = TypeVar("_T", Hello, Auth)


class _Talk:
    """Messages over a socket until a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._end_s = time.monotonic() + HANDSHAKE_S

    def say(self, message: PodMessage) -> None:
        self._sock.settimeout(self._left_s())
        self._sock.sendall(encode_frame(Frame(Kind.POD, 0, encode_pod(message))))

    def hear(self, kind: type[_T]) -> _T:
        # Not a byte more: what follows the greeting is for others to read.
        length, known, _ = HEAD.unpack(self._exactly(HEAD.size))
        if length > MAX_HELLO_BYTES:
            raise ProtocolError(f"a frame of {length} bytes; {MAX_HELLO_BYTES} are allowed")
        body = self._exactly(length)
        message = decode_pod(body) if known == Kind.POD else None
        if not isinstance(message, kind):
            raise ProtocolError(f"it said {message!r} where {kind.__name__} was to come")
        return message

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._sock.settimeout(self._left_s())
            more = self._sock.recv(size - len(data))
            if not more:
                raise ProtocolError("it has closed the connection; has it the same key?")
            data += more
        return data

    def _left_s(self) -> float:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise ProtocolError(f"it did not finish its greeting within {HANDSHAKE_S:g} s")
        return left_s


def _hello(pod: int, numbers: Numbers) -> Hello:
    return Hello(pod, __version__, os.urandom(NONCE_BYTES), numbers)


def join_leader(sock: socket.socket, pod: int, numbers: Numbers, keys: Sequence[bytes]) -> None:
    """Pod `pod`'s side. UserError where the leader has another key, version or numbers,
    ProtocolError or OSError for what may be better the next time."""
    talk, ours = _Talk(sock), _hello(pod, numbers)
    talk.say(ours)
    theirs = talk.hear(Hello)
    if theirs.version != ours.version:
        raise UserError(
            f"this pod runs xpyd {ours.version}, its leader {theirs.version}; give all pods of an "
            "instance one image"
        )
    if theirs.pod != 0:
        raise UserError("LWS_LEADER_ADDRESS: what answers there is no leader")
    if wrong := numbers.differences(theirs.numbers):
        raise UserError(f"{wrong}: give all pods of an instance the same")
    talk.say(Auth(pod_mac(keys[0], who=ours, to=theirs)))
    if not is_pod_mac(keys, talk.hear(Auth).mac, who=theirs, to=ours):
        raise UserError("--kv-key-file: the instance's leader has another key")


def greet_pod(sock: socket.socket, numbers: Numbers, keys: Sequence[bytes]) -> int:
    """The leader's side: the pod's number. ProtocolError or OSError where it is not one of ours."""
    talk, ours = _Talk(sock), _hello(0, numbers)
    theirs = talk.hear(Hello)
    talk.say(ours)
    if theirs.version != ours.version:
        raise ProtocolError(f"it runs xpyd {theirs.version}, this is {ours.version}")
    if wrong := theirs.numbers.differences(numbers):
        raise ProtocolError(f"pod {theirs.pod} has {wrong}")
    if not is_pod_mac(keys, talk.hear(Auth).mac, who=theirs, to=ours):
        raise ProtocolError("it has another key")
    talk.say(Auth(pod_mac(keys[0], who=ours, to=theirs)))
    return theirs.pod


def listen(host: str, port: int, flag: str) -> socket.socket:
    """A listening socket. UserError, naming `flag`, where the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise UserError(f"{flag}: cannot listen on {host}:{port}: {error.strerror}") from error
    return sock
