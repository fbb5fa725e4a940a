"""What the pods of one instance tell each other besides what ranks say: frames of kind POD. Pure.

    pod                        leader (LWS_WORKER_INDEX 0)
      Hello  ------------------->
             <------------------- Hello    the same numbers, or neither goes on
      Auth   ------------------->          verified, before anything else leaves
             <------------------- Auth
             <------------------- Load     of each replica that has ranks there, and again
      Beats, Ended ------------->          of a replica's ranks
             <------------------- Unload
      Unloaded ----------------->          its ranks are gone, also where none asked for it
             <------------------- Beats (none: it lives), End

Both prove that they have a key of the fleet's, over both nonces. Nothing is encrypted, as little as
KV is. What is about a replica is in a frame of its first rank, counted through all replicas.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import msgspec

from xpyd_core.parallel.checks import DATA, EXPERT, PIPELINE, TENSOR
from xpyd_worker.config import WorkerConfig
from xpyd_worker.ranks.start.messages import Logs, decode_path, decoded
from xpyd_worker.ranks.watch.beats import Beat

NONCE_BYTES = 32
MAX_HELLO_BYTES = 1024
"""The longest frame from a peer that has proved nothing."""


class Numbers(msgspec.Struct, frozen=True):
    """How a pod was told that the instance is divided: all of them must have the same numbers."""

    pods: int
    data: int
    tensor: int
    pipeline: int
    has_whole_experts: bool

    @classmethod
    def of(cls, config: WorkerConfig) -> Numbers:
        """Those of `config`."""
        return cls(
            config.pods,
            config.data_parallel_size,
            config.tensor_parallel_size,
            config.pipeline_parallel_size,
            config.enable_expert_parallel,
        )

    def differences(self, leader: Numbers) -> str:
        """What is not as the `leader` has it; empty where all is."""
        flags = ("pods (LWS_GROUP_SIZE)", DATA, TENSOR, PIPELINE, EXPERT)
        both = zip(
            flags, msgspec.structs.astuple(self), msgspec.structs.astuple(leader), strict=True
        )
        return "; ".join(
            f"{flag} {here}, at the leader {there}" for flag, here, there in both if here != there
        )


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Who speaks: its pod's number, 0 the leader's; the version of xpyd."""

    pod: int
    version: str
    nonce: bytes
    numbers: Numbers


class Auth(msgspec.Struct, frozen=True, tag=True):
    """Proof of a key."""

    mac: bytes


class Load(msgspec.Struct, frozen=True, tag=True):
    """A replica whose ranks the pod is to start: the leader's own configuration of it, and where
    the store of the ranks' world listens; None where the pod has all of them, and makes it."""

    config: WorkerConfig
    rendezvous: tuple[str, int] | None
    logs: Logs
    incarnation: str
    """The engine's, to peers."""
    meeting: int = 0
    place: int = 0
    """See Start, both."""


class Unload(msgspec.Struct, frozen=True, tag=True):
    """A replica's ranks are to end: `in_order`, or at once, and why."""

    in_order: bool
    reason: str


class Unloaded(msgspec.Struct, frozen=True, tag=True):
    """They are gone. `reason`: why, where they were not asked to go."""

    reason: str = ""


class Beats(msgspec.Struct, frozen=True, tag=True):
    """The sender lives, and so a replica's ranks there show themselves, in order."""

    beats: tuple[Beat, ...] = ()


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The process of a replica's rank is over, as Popen tells it."""

    rank: int
    returncode: int


class PodEnd(msgspec.Struct, frozen=True, tag="End"):
    """The pod is to end: `in_order`, or at once, and why."""

    in_order: bool
    reason: str


PodMessage = Hello | Auth | Load | Unload | Unloaded | Beats | Ended | PodEnd


_decoder = msgspec.msgpack.Decoder(PodMessage, dec_hook=decode_path)


def encode_pod(message: PodMessage) -> bytes:
    """The body of a frame of kind POD."""
    return msgspec.msgpack.encode(message, enc_hook=str)


def decode_pod(data: bytes) -> PodMessage:
    """Raises ProtocolError."""
    return decoded(_decoder, data)


def pod_mac(key: bytes, *, who: Hello, to: Hello) -> bytes:
    """What `who` proves itself with to `to`."""
    said = b"".join((b"xpyd-pods", encode_pod(who), encode_pod(to)))
    return hmac.digest(key, said, "sha256")


def is_pod_mac(keys: Sequence[bytes], mac: bytes, *, who: Hello, to: Hello) -> bool:
    """Whether `mac` was made with one of `keys`; in constant time for each."""
    return any(hmac.compare_digest(pod_mac(key, who=who, to=to), mac) for key in keys)
