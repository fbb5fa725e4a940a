"""How an instance's first pod waits for the others, proves each, and says what it is to run."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from xpyd_core.errors import ProtocolError, UserError
from xpyd_core.keys import fleet_keys
from xpyd_core.pod_env import rendezvous_port
from xpyd_worker.ranks.loss import EXIT_POD_LOST, RankLostError
from xpyd_worker.ranks.pod_agent import JOIN_S
from xpyd_worker.ranks.pod_handshake import greet_pod
from xpyd_worker.ranks.pod_messages import Join

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
        _log.warning("somebody who is no pod of this instance: %s", error)
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
