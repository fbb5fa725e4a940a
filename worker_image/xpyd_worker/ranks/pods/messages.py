"""What the pods of one instance tell each other besides what ranks say: frames of kind POD. Pure.

    pod                        leader (LWS_WORKER_INDEX 0)
      Hello  ------------------->
             <------------------- Hello
      Auth   ------------------->          verified, before anything else leaves
             <------------------- Auth, Join
      Beats, Ended ------------->
             <------------------- Beats (none: it lives), End

Both prove that they have a key of the fleet's, over both nonces. Nothing is encrypted, as little as
KV is.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import msgspec

from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.config import WorkerConfig
from xpyd_worker.ranks.start.messages import Logs, decode_path, decoded
from xpyd_worker.ranks.watch.beats import Beat

NONCE_BYTES = 32
MAX_HELLO_BYTES = 1024
"""The longest frame from a peer that has proved nothing."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Who speaks: its pod's number, 0 the leader's; the version of xpyd."""

    pod: int
    version: str
    nonce: bytes


class Auth(msgspec.Struct, frozen=True, tag=True):
    """Proof of a key."""

    mac: bytes


class Join(msgspec.Struct, frozen=True, tag=True):
    """What the pod is to run: the leader's own configuration, and where rank 0's store listens."""

    config: WorkerConfig
    sizes: Sizes
    rendezvous: tuple[str, int]
    logs: Logs
    incarnation: str
    """The engine's, to peers."""


class Beats(msgspec.Struct, frozen=True, tag=True):
    """The sender lives, and so its ranks show themselves, in order."""

    beats: tuple[Beat, ...] = ()


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A rank's process is over, as Popen tells it."""

    rank: int
    returncode: int


class PodEnd(msgspec.Struct, frozen=True, tag="End"):
    """The pod is to end: `in_order`, or at once, and why."""

    in_order: bool
    reason: str


PodMessage = Hello | Auth | Join | Beats | Ended | PodEnd


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
