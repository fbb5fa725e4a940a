"""The messages between parent and workers, and how they are framed in a stream. Pure.

A frame is its length (u32, little-endian) and one event in msgpack. Both ends are of one version of
this package, and the parent starts the workers, so no field is optional and messages are trusted.
Times are of the monotonic clock, which all processes of a machine share.
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
from xpyd_router.fleet.instances import Arrival, InstanceKey, Standing
from xpyd_router.fleet.introductions import PairFound, Verdict
from xpyd_router.fleet.poison import Fate

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""The bound on a frame: the metrics of 4,096 instances are some 20 MB."""
_LENGTH = struct.Struct("<I")


# --- parent to worker


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first event: all that a worker needs to begin. Keys travel here, never in argv."""

    config: bytes
    """The flags, as `encode_config` writes them; `port` is the real one."""
    keys: tuple[bytes, ...]
    """The fleet's; the worker follows their file by itself, and that of the admin keys."""
    admin_keys: tuple[bytes, ...]
    secret: bytes
    """Fingerprints of bodies are made with it."""
    created: int
    started_s: float
    """When the parent started, on the monotonic clock, which is one for all processes."""
    log_level: str


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A beat that the parent took. `slots`: the numbers of the instance's places in the shared
    counters, one for each of its replicas."""

    beat: Heartbeat
    at_s: float
    is_signed: bool
    slots: tuple[int, ...]


class Removed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """These instances missed their beats and leave the fleet."""

    keys: tuple[InstanceKey, ...]


class HealthChanged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The health of one instance, whenever it changed."""

    key: InstanceKey
    standing: Standing = "Good"
    cause: str = ""
    """Why it is ejected."""
    ejected_at_s: float = 0.0
    breaker: BreakerState = "Closed"
    open_until_s: float = 0.0
    is_counted: bool = False
    """The instance failed lately: the worker reports served calls, too."""


class Weights(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Changed shares of the instances in slow start; 1.0: the full share."""

    weights: tuple[tuple[InstanceKey, float], ...]


class Lost(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """These instances died or froze: calls to them will not end."""

    keys: tuple[InstanceKey, ...]


class Found(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A lost instance answered again."""

    key: InstanceKey


class FateChanged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Calls to an instance broke off, or a probe showed whether the instance died."""

    key: InstanceKey
    fate: Fate
    at_s: float


class BodyRefused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Instances die of this body: workers refuse it until `until_s`."""

    suspect: bytes
    until_s: float


class BodyAllowed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """This body is served after all: workers refuse it no more."""

    suspect: bytes


class Cordoned(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An operator's cordon was set or lifted."""

    key: InstanceKey
    is_cordoned: bool


class Introduced(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """D has compared the KV of a P of another engine with its own."""

    prefill: InstanceKey
    decode: InstanceKey
    verdict: Verdict


class PairProbed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A probe of a pair has ended."""

    prefill: InstanceKey
    decode: InstanceKey
    found: PairFound


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How the router's instances came, to a worker that comes later: the beats that it is given are
    their last ones (ADR 0121)."""

    arrival: Arrival


class Present(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The events so far are the whole present state: the worker listens now."""


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker begins its drain; a second Drain ends it at once."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The parent asks whether the worker lives; the worker answers Pong, behind all that came
    before."""

    number: int


class GiveText(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The parent asks for the worker's own metrics; the worker answers Text."""

    ask: int


class Metrics(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to AskMetrics: the metrics of all workers."""

    ask: int
    text: bytes


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to Cordon: all workers have got it."""

    ask: int


# --- worker to parent


class WorkerReady(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker listens."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker lives, and has taken all that the parent sent before that Ping."""

    number: int


class Began(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The worker picked half-open instances: the request is their trial."""

    keys: tuple[InstanceKey, ...]


class Succeeded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A call to an instance that `is_counted` was served."""

    key: InstanceKey


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A call to an instance failed."""

    key: InstanceKey
    cause: FailureCause
    suspect: bytes
    """The fingerprint of its request's body, where the breaker asks for it."""


class TransferFailed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The KV of a request did not come from P to D."""

    prefill: InstanceKey
    decode: InstanceKey
    suspect: bytes


class PoisonFound(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Instances died under a request with this body."""

    suspect: bytes


class PoisonCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request with this body, which is refused, was served."""

    suspect: bytes


class Cordon(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The admin API sets or lifts a cordon; the parent answers Done."""

    ask: int
    key: InstanceKey
    is_cordoned: bool


class AskMetrics(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """/metrics of this worker is scraped; the parent answers Metrics."""

    ask: int


class Text(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to GiveText: this worker's own metrics."""

    ask: int
    text: bytes


ToWorker = (
    Welcome | Beat | Removed | HealthChanged | Weights | Lost | Found | FateChanged | BodyRefused
    | BodyAllowed | Cordoned | Introduced | PairProbed | Arrived | Present | Drain | Ping | GiveText
    | Metrics | Done
)  # fmt: skip
ToParent = (
    WorkerReady | Pong | Began | Succeeded | Failed | TransferFailed | PoisonFound | PoisonCleared
    | Cordon | AskMetrics | Text
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
to_parent = msgspec.msgpack.Decoder(ToParent)


def frame(event: ToWorker | ToParent) -> bytes:
    """The frame of `event`: its length and its body."""
    body = _encoder.encode(event)
    return _LENGTH.pack(len(body)) + body


class Splitter:
    """Cuts a stream into the bodies of its frames. ProtocolError for one above the bound."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are whole with `data`."""
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
    """The flags as bytes, for Welcome."""
    return msgspec.msgpack.encode(config, enc_hook=str)


def decode_config(data: bytes) -> RouterConfig:
    """The flags that `encode_config` wrote."""
    return msgspec.msgpack.decode(data, type=RouterConfig, dec_hook=_path)


def _path(kind: type, value: object) -> object:
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(kind)
