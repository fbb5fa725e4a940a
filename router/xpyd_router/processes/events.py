"""The messages between parent and workers, and how they are framed in a stream. Pure.

A frame is its length (u32, little-endian) and one event in msgpack. Both ends are of one version of
this package, started by one another, so nothing is optional and nothing is a stranger's word. Times
are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from xpyd_core.errors import ProtocolError
from xpyd_core.messages import Heartbeat
from xpyd_router.config import RouterConfig
from xpyd_router.errors import FailureCause
from xpyd_router.fleet.breaker import BreakerState
from xpyd_router.fleet.instances import InstanceKey, Standing
from xpyd_router.fleet.poison import Fate

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""The metrics of 4,096 instances are some 20 MB."""
_LENGTH = struct.Struct("<I")


# --- parent to worker


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first event: all that a worker needs to begin. Keys travel here, never in argv."""

    config: bytes
    """Of `encode_config`; `port` is the real one."""
    keys: tuple[bytes, ...]
    admin_keys: tuple[bytes, ...]
    secret: bytes
    """Fingerprints of bodies are made with it."""
    created: int
    log_level: str


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A beat that the parent took. `slot`: the instance's place in the shared counters."""

    beat: Heartbeat
    at_s: float
    is_signed: bool
    slot: int


class Removed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """They missed their beats."""

    keys: tuple[InstanceKey, ...]


class Stood(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The health of one instance, whenever it changed."""

    key: InstanceKey
    standing: Standing = "Good"
    cause: str = ""
    """Why it is ejected."""
    ejected_at_s: float = 0.0
    breaker: BreakerState = "Closed"
    open_until_s: float = 0.0
    is_counted: bool = False
    """It failed lately: the parent wants to hear of calls that are served, too."""


class Weights(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Shares of those that start slowly, where they changed; 1.0: the full one."""

    weights: tuple[tuple[InstanceKey, float], ...]


class Lost(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """They died or froze: calls to them will not end."""

    keys: tuple[InstanceKey, ...]


class Found(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of the lost answered again."""

    key: InstanceKey


class Broke(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Calls to an instance broke off, or it turned out whether it died."""

    key: InstanceKey
    fate: Fate
    at_s: float


class Convicted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Instances die of this body: refuse it."""

    suspect: bytes
    until_s: float


class Acquitted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """They do not, after all."""

    suspect: bytes


class Cordoned(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An operator's cordon was set or lifted."""

    key: InstanceKey
    is_cordoned: bool


class Present(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What came so far is the whole present state: listen now."""


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Begin the drain; a second one ends at once."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered by Pong."""


class GiveText(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered by Text."""

    ask: int


class Metrics(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to AskMetrics."""

    ask: int
    text: bytes


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to Cordon: all workers know."""

    ask: int


# --- worker to parent


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """It listens."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """It lives."""


class Began(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Half-open instances were picked: this is their trial."""

    keys: tuple[InstanceKey, ...]


class Succeeded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A call to an instance that `is_counted` was served."""

    key: InstanceKey


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A call failed."""

    key: InstanceKey
    cause: FailureCause
    suspect: bytes
    """The fingerprint of its request's body, where the breaker asks for it."""


class TransferFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The KV did not come from P to D."""

    prefill: InstanceKey
    decode: InstanceKey
    suspect: bytes


class Convict(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Instances died under a request with this body."""

    suspect: bytes


class Acquit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request with this body, which is refused, was served."""

    suspect: bytes


class Cordon(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The admin API's word. Answered by Done."""

    ask: int
    key: InstanceKey
    is_cordoned: bool


class AskMetrics(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """/metrics is scraped. Answered by Metrics."""

    ask: int


class Text(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """This worker's own metrics."""

    ask: int
    text: bytes


ToWorker = (
    Welcome | Beat | Removed | Stood | Weights | Lost | Found | Broke | Convicted | Acquitted
    | Cordoned | Present | Drain | Ping | GiveText | Metrics | Done
)  # fmt: skip
ToParent = (
    Ready | Pong | Began | Succeeded | Failed | TransferFailed | Convict | Acquit | Cordon
    | AskMetrics | Text
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
to_parent = msgspec.msgpack.Decoder(ToParent)


def frame(event: ToWorker | ToParent) -> bytes:
    """The event as it is framed in the stream."""
    body = _encoder.encode(event)
    return _LENGTH.pack(len(body)) + body


class Splitter:
    """A stream's pieces in, bodies of frames out. ProtocolError for one above the bound."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are whole now."""
        held = self._held
        held += data
        at = 0
        try:
            while len(held) - at >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(held, at)
                if size > MAX_FRAME_BYTES:
                    raise ProtocolError(f"an event of {size} bytes")
                end = at + _LENGTH.size + size
                if len(held) < end:
                    break
                body = bytes(held[at + _LENGTH.size : end])
                at = end
                yield body
        finally:
            del held[:at]


def encode_config(config: RouterConfig) -> bytes:
    """All flags, for Welcome."""
    return msgspec.msgpack.encode(config, enc_hook=str)


def decode_config(data: bytes) -> RouterConfig:
    """What `encode_config` made."""
    return msgspec.msgpack.decode(data, type=RouterConfig, dec_hook=_path)


def _path(kind: type, value: object) -> object:
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(kind)
