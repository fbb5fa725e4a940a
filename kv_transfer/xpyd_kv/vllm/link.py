"""The way from the API server's process to the connector's half in the scheduler's.

A call is a connection of a Unix socket of this machine: a line of JSON each way. The scheduler's
process listens under an abstract name that both have from the instance's incarnation; each side
takes processes of the same user only.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from xpyd_core.errors import UserError, XpydError
from xpyd_core.kv_outcome import MAX_PEERS, KvPeer
from xpyd_kv.vllm.channel import is_same_user, shut

_log = logging.getLogger(__name__)
_MAX_CALLS = 16
_ASK_S = 2.0
_MAX_BYTES = 1024 * 1024
_Count = Annotated[int, msgspec.Meta(ge=0)]


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler's half says of the engine. `running`: requests of its last step;
    `kv_leases`: see Heartbeat."""

    compatibility: str
    free_blocks: _Count
    total_blocks: _Count
    running: _Count
    is_idle: bool
    kv_leases: _Count = 0
    kv_peers: Annotated[tuple[KvPeer, ...], msgspec.Meta(max_length=MAX_PEERS)] = ()


Call = Callable[[str], object]
"""Takes the call's text, '' where it has none, and returns what is answered as JSON."""


class LinkServer:
    """The scheduler's end. Each call has a thread of its own, at most 16 at once."""

    def __init__(self, incarnation: str, calls: Mapping[str, Call]) -> None:
        """UserError where another process has the name."""
        self._calls = calls
        self._seats = threading.BoundedSemaphore(_MAX_CALLS)
        self._server = socket.socket(socket.AF_UNIX)
        try:
            self._server.bind(_name(incarnation))
        except OSError as error:
            self._server.close()
            raise UserError(
                f"XpydConnector: another process has this instance's name {incarnation}: "
                f"{error.strerror}"
            ) from error
        self._server.listen(_MAX_CALLS)
        threading.Thread(target=self._run, name="xpyd-kv-link", daemon=True).start()

    def close(self) -> None:
        """Take no more calls; the thread ends."""
        shut(self._server)

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            if is_same_user(connection) and self._seats.acquire(blocking=False):
                threading.Thread(
                    target=self._serve, args=(connection,), name="xpyd-kv-call", daemon=True
                ).start()
            else:
                _log.warning("a call of the API server is refused: of another user, or too many")
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_ASK_S)
                name, text = msgspec.json.decode(_line(connection), type=tuple[str, str])
                answer = self._calls[name](text)
                connection.sendall(msgspec.json.encode(answer) + b"\n")
        except (OSError, msgspec.DecodeError, KeyError, XpydError) as error:
            _log.warning("a call of the API server failed: %r", error)
        finally:
            self._seats.release()


def ask(incarnation: str, name: str, text: str = "", *, within_s: float) -> Any:  # noqa: ANN401 - JSON
    """The API server's end: the answer to one call. Blocks. OSError where there is none in time."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(within_s)
        connection.connect(_name(incarnation))
        if not is_same_user(connection):
            raise PermissionError("a process of another user has the name of this instance")
        connection.sendall(msgspec.json.encode((name, text)) + b"\n")
        try:
            return msgspec.json.decode(_line(connection))
        except msgspec.DecodeError as error:
            raise OSError(f"the engine did not answer {name}") from error


def _name(incarnation: str) -> str:
    return f"\0xpyd-vllm-{incarnation}"


def _line(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as stream:
        return stream.readline(_MAX_BYTES)
