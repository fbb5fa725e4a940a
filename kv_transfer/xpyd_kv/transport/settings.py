"""The settings of an Endpoint: its identity, deadlines and bounds. Frozen; defaults reasoned."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from xpyd_core.errors import UserError
from xpyd_kv.wire.connection import MISSED_PINGS, PING_S
from xpyd_kv.wire.handshake import OVER_TCP, OVER_UNIX
from xpyd_kv.wire.messages import MAJOR, MINOR, Hello

_BY_THE_WAY = {"striped": "tcp"}
"""A transport that is used where another one is allowed: tcp over more than one connection."""
_ALL = tuple(dict.fromkeys((*OVER_UNIX, *OVER_TCP)))
TRANSPORTS = tuple(name for name in _ALL if name not in _BY_THE_WAY)
"""The transports that can be chosen to move DATA, best first."""
_NEEDS = {
    "uds": "--kv-socket-dir",
    "shm": "memory that can be shared",
    "cuda_ipc": "a KV cache on a GPU",
    "nccl": "a KV cache on a GPU",
    "nixl": "memory that NIXL has registered",
}
MAX_LINKS = 4
"""The most tcp connections that carry the KV of two peers."""
KIB = 1024
MIB = 1024 * KIB


def offered(
    transports: tuple[str, ...], *, has_folder: bool, lent: Collection[str]
) -> tuple[str, ...]:
    """Return the names of `transports` that this side can use, best first. UserError for an unknown
    one, and when none is left. `lent`: what beside the sockets it has what it needs for."""
    unknown = sorted(set(transports) - set(TRANSPORTS))
    if unknown:
        raise UserError(f"KV transport {unknown[0]}: expected one of {', '.join(TRANSPORTS)}")
    moved = {"tcp", "uds", *lent}
    reached = {*OVER_TCP, *(OVER_UNIX if has_folder else ())}
    names = tuple(
        name
        for name in _ALL
        if _BY_THE_WAY.get(name, name) in transports and name in moved & reached
    )
    if not names:
        alone = transports[0] if len(transports) == 1 else ""
        lack = _NEEDS.get(alone, "") if has_folder or alone in OVER_TCP else ""
        lack = lack or _NEEDS["shm" if has_folder else "uds"]
        raise UserError(f"KV transport {', '.join(transports)}: needs {lack}")
    return names


def check_encrypted(transports: tuple[str, ...], *, connections: int, insecure: bool) -> None:
    """UserError unless TLS can hold all KV of an endpoint with these settings."""
    if transports != ("tcp",):
        others = ", ".join(name for name in transports if name != "tcp")
        raise UserError(
            f"KV encryption tls: goes with --kv-transport tcp alone; {others} move KV through "
            "memory of the machine or by the network card, where TLS does not reach"
        )
    if connections > 1:
        raise UserError("KV encryption tls: needs --kv-connections 1, which is encrypted")
    if insecure:
        raise UserError(
            "KV encryption tls: needs the fleet's secret (--kv-key-file), by which the peers know "
            "each other's certificates"
        )


@dataclass(frozen=True)
class Identity:
    """The identity of this process to its peers.

    `engine_id` names the instance, one at a time in the fleet: a connection of the same engine_id
    and rank replaces the older one. `incarnation` is random per process start.
    """

    engine_id: str
    incarnation: str
    role: Literal["P", "D", "A"]
    rank: int = 0
    host: bytes = b""
    """xpyd_kv.transport.host.shared_memory.host_token()."""
    gpu: str = ""
    """The uuid of the GPU that holds the cache."""
    engine: str = ""
    """HELLO's."""

    def hello(
        self, nonce: bytes, transports: tuple[str, ...] = ("tcp",), *, data: bool = False
    ) -> Hello:
        """The HELLO of one connection; `nonce` is 32 random bytes, never used twice.
        `transports`: what this side can move DATA with; `data`: it is a rank's, to another."""
        return Hello(
            major=MAJOR,
            minor=MINOR,
            engine_id=self.engine_id,
            incarnation=self.incarnation,
            engine=self.engine,
            role=self.role,
            nonce=nonce,
            rank=self.rank,
            transports=transports,
            host=self.host,
            gpu=self.gpu,
            data=data,
        )


@dataclass(frozen=True)
class Timeouts:
    """Seconds. A dialled connection must be up after `connect_s` and be open `auth_s` later; an
    accepted one must be open after both, since its dialler may still be connecting (a relay)."""

    connect_s: float = 2.0
    auth_s: float = 2.0
    ping_s: float = PING_S
    missed_pings: int = MISSED_PINGS
    failed_auth_s: float = 30.0
    """An address that failed AUTH, or that holds us in quarantine, is not dialled again for this
    time."""
    mismatch_window_s: float = 600.0
    quarantine_s: float = 60.0
    """D refuses for this time a P of which several frames were broken within
    `mismatch_window_s`."""
    path_retry_s: float = 300.0
    """P does not lend memory for this time after D could not open it."""
    fetch_s: float = 10.0
    """D may take this time for a frame that P lends; then the connection ends."""
    listen_pause_s: float = 0.5
    """No connection is accepted for this time after the process ran out of file descriptors."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of the queues and of one turn of the I/O thread's loop."""

    connections: int = 1024
    """Open ones; over that a new peer is refused (`limit`)."""
    strangers: int = 64
    """Accepted ones without AUTH; over that the oldest is closed, so that the newest, which may be
    a peer, gets its chance (a handshake takes a millisecond)."""
    control_frames: int = 4096
    control_bytes: int = 8 * MIB
    """Queued for one peer; a few OFFERs of the longest context fit."""
    turn_bytes: int = 4 * MIB
    """Read from and written to one connection before the others get their turn: about a
    millisecond. A quarter of it costs a fifth more CPU for each byte."""
    read_bytes: int = MIB
    """The bytes of a DATA body that are read at once: as many as a processor's own cache has room
    for beside what else is in it."""
    wake_bytes: int = 2 * MIB
    """The bytes of a DATA body over TCP that must have arrived before it is read, if so many are
    missing: each waking takes the processor from P's sending. A quarter of it makes TCP a quarter
    slower, twice as much is no better (docs/benchmarks/kv.md); the kernel's default buffer allows 3
    MiB."""
    accepts_per_turn: int = 16
    scratch_bytes: int = 64 * KIB
    """The bytes of one read of control frames; also what a refused DATA body is read into."""
