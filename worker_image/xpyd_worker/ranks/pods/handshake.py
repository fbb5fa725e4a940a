"""How the pods of an instance meet: the first one waits for the others, and each proves its key.

The leader says to each what it is to run (Join). See docs/parallel.md.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from xpyd_core import __version__
from xpyd_core.errors import ProtocolError, UserError
from xpyd_core.keys import fleet_keys
from xpyd_core.pod_env import rendezvous_port
from xpyd_worker.ranks.link.frames import HEAD, MAX_FRAME_BYTES, Frame, Kind, encode_frame
from xpyd_worker.ranks.loss import EXIT_POD_LOST, RankLostError
from xpyd_worker.ranks.pods.messages import (
    MAX_HELLO_BYTES,
    NONCE_BYTES,
    Auth,
    Hello,
    Join,
    PodMessage,
    decode_pod,
    encode_pod,
    is_pod_mac,
    pod_mac,
)

HANDSHAKE_S = 5.0
JOIN_S = 600.0
"""The time for the other pods to join: a node may have to be made and the image pulled."""
_T = TypeVar("_T", Hello, Auth, Join)


class _Talk:
    """Messages over a socket until a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._end_s = time.monotonic() + HANDSHAKE_S
        self.most_bytes = MAX_HELLO_BYTES

    def say(self, message: PodMessage) -> None:
        self._sock.settimeout(self._left_s())
        self._sock.sendall(encode_frame(Frame(Kind.POD, 0, encode_pod(message))))

    def hear(self, kind: type[_T]) -> _T:
        # Not a byte more: what follows the greeting is for others to read.
        length, known, _ = HEAD.unpack(self._exactly(HEAD.size))
        if length > self.most_bytes:
            raise ProtocolError(f"a frame of {length} bytes; {self.most_bytes} are allowed")
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


def _hello(pod: int) -> Hello:
    return Hello(pod, __version__, os.urandom(NONCE_BYTES))


def join_leader(sock: socket.socket, pod: int, keys: Sequence[bytes]) -> Join:
    """Pod `pod`'s side. UserError where the leader has another key or version, ProtocolError or
    OSError for what may be better the next time."""
    talk, ours = _Talk(sock), _hello(pod)
    talk.say(ours)
    theirs = talk.hear(Hello)
    if theirs.version != ours.version:
        raise UserError(
            f"this pod runs xpyd {ours.version}, its leader {theirs.version}; give all pods of an "
            "instance one image"
        )
    if theirs.pod != 0:
        raise UserError("LWS_LEADER_ADDRESS: what answers there is no leader")
    talk.say(Auth(pod_mac(keys[0], who=ours, to=theirs)))
    if not is_pod_mac(keys, talk.hear(Auth).mac, who=theirs, to=ours):
        raise UserError("--kv-key-file: the instance's leader has another key")
    talk.most_bytes = MAX_FRAME_BYTES
    return talk.hear(Join)


def greet_pod(sock: socket.socket, join: Join, keys: Sequence[bytes]) -> int:
    """The leader's side: the pod's number. ProtocolError or OSError where it is not one of ours."""
    talk, ours = _Talk(sock), _hello(0)
    theirs = talk.hear(Hello)
    talk.say(ours)
    if theirs.version != ours.version:
        raise ProtocolError(f"it runs xpyd {theirs.version}, this is {ours.version}")
    if not is_pod_mac(keys, talk.hear(Auth).mac, who=theirs, to=ours):
        raise ProtocolError("it has another key")
    talk.say(Auth(pod_mac(keys[0], who=ours, to=theirs)))
    talk.say(join)
    return theirs.pod


_log = logging.getLogger(__name__)
_POLL_S = 0.5


def gather(join: Join, is_over: Callable[[], bool]) -> Mapping[int, socket.socket]:
    """A connection with each other pod, by its number. UserError when the port is taken,
    RankLostError when a pod does not come; None is waited for any more when `is_over`."""
    config = join.config
    keys = fleet_keys(config.kv_key_file, insecure=config.kv_insecure)
    port = rendezvous_port(config.kv_port)
    found: dict[int, socket.socket] = {}
    end_s = time.monotonic() + JOIN_S
    try:
        with listen(config.host, port, "--kv-port") as listener:
            listener.settimeout(_POLL_S)
            while len(found) < config.pods - 1:
                missing = sorted(set(range(1, config.pods)) - set(found))
                if is_over() or time.monotonic() >= end_s:
                    raise RankLostError(
                        f"pods {missing} did not come within {JOIN_S:g} s", status=EXIT_POD_LOST
                    )
                try:
                    sock, _ = listener.accept()
                except TimeoutError:
                    continue
                _greet(sock, join, keys, found)
    except BaseException:
        for sock in found.values():
            sock.close()
        raise
    return found


def _greet(
    sock: socket.socket, join: Join, keys: Sequence[bytes], found: dict[int, socket.socket]
) -> None:
    try:
        pod = greet_pod(sock, join, keys)
        if not 0 < pod < join.config.pods or pod in found:
            raise ProtocolError(f"it calls itself pod {pod} of {join.config.pods}")
    except (OSError, ProtocolError) as error:
        sock.close()
        _log.warning("a connection that is no pod of this instance: %s", error)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    found[pod] = sock


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
