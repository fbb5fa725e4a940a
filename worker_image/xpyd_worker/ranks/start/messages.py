"""What the engine's process and a rank send each other while the instance starts. Pure.

main ----Start-----> rank  what to load, and where its ring and the others are
     <---Opened-----       it has opened them, its libraries are loaded: it beats without delay
     ----Meet------>       all have: make the groups, load the weights
     <-WeightsLoaded-      they are there, however long their files took to be read
     ----Measure--->       everywhere: measure the largest step, for which ranks wait as in steps
     <----Fits------       so many blocks of KV fit into what the weights leave
     ----Agreed---->       so many are made on every rank: the least
     <--RankReady---       steps may come
     <--ExpertsChosen-     while steps run, where there are experts: what they were chosen for
     <---Failed-----       any time: why the rank ends
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from xpyd_core.errors import ProtocolError
from xpyd_core.parallel.ranks import Sizes
from xpyd_kv.plan.engine_layout import EngineLayout
from xpyd_worker.config import WorkerConfig
from xpyd_worker.engine.executor import LayerExperts
from xpyd_worker.ranks.link.ring import RingFds
from xpyd_worker.ranks.loss import Failure

_T = TypeVar("_T")


class Logs(msgspec.Struct, frozen=True):
    """How ranks log: the engine's --log-level and --log-format."""

    level: str = "info"
    format: str = "text"


class Start(msgspec.Struct, frozen=True, tag=True):
    """`pod_rank` and `pod_ranks`: the rank's number among those of its pod, and how many these are.
    `rendezvous`: where rank 0's store listens, and `listener` its socket's descriptor, on rank 0.
    `address`: where the rank listens for other ranks of the instance; for peers' KV it does on the
    configuration's host. The others are descriptors, too."""

    config: WorkerConfig
    sizes: Sizes
    rank: int
    pod_rank: int
    pod_ranks: int
    rendezvous: tuple[str, int]
    address: str
    listener: int | None
    ring: RingFds
    responses: RingFds
    beats: int
    logs: Logs
    engine_id: str = ""
    incarnation: str = ""
    """The incarnation, like engine_id, is the engine's, for peers; `config` has the address of the
    rank's own pod."""
    meeting: int = 0
    """Above 0 where replicas come: their ranks meet the others' in the step with that number
    (docs/adr/0128)."""
    place: int = 0
    """The replica's, among those whose ranks meet."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    """See above."""


class Meet(msgspec.Struct, frozen=True, tag=True):
    """See above."""


class WeightsLoaded(msgspec.Struct, frozen=True, tag=True):
    """See above."""


class Measure(msgspec.Struct, frozen=True, tag=True):
    """See above."""


class Fits(msgspec.Struct, frozen=True, tag=True):
    """Blocks of KV that this rank has room for."""

    blocks: int


class Agreed(msgspec.Struct, frozen=True, tag=True):
    """Blocks of KV that every rank makes."""

    blocks: int


class KvReady(msgspec.Struct, frozen=True):
    """What a rank of an instance that moves KV reports: how its cache is divided, where this rank
    of a D listens for it, and the GPU that has the rank's, if one has."""

    engine: EngineLayout
    head_dim: int
    address: tuple[str, int] | None
    gpu: str = ""


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """What the rank has: blocks of KV, as agreed; bytes of its weights and of its KV cache, what is
    resident of its process (None: the system does not say), the dtype's name, and how many steps
    its device takes at once. `on_gpu`: where weights and cache are. `draft_bytes`: of a model that
    drafts."""

    blocks: int
    weight_bytes: int
    cache_bytes: int
    resident_bytes: int | None
    dtype: str
    depth: int
    on_gpu: bool
    kv: KvReady | None = None
    draft_bytes: int = 0


class ExpertsChosen(msgspec.Struct, frozen=True, tag=True):
    """What the rows that this rank routed have chosen, since the start."""

    layers: tuple[LayerExperts, ...]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Why the rank ends."""

    failure: Failure


ToRank = Start | Meet | Measure | Agreed
FromRank = Opened | WeightsLoaded | Fits | RankReady | ExpertsChosen | Failed


def decode_path(kind: type, value: object) -> object:
    """A hook for decoders of messages that hold a WorkerConfig."""
    if kind is Path:
        return Path(str(value))
    raise NotImplementedError(kind)


_to_rank = msgspec.msgpack.Decoder(ToRank, dec_hook=decode_path)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    """The bytes of a frame of kind CONTROL."""
    return msgspec.msgpack.encode(message, enc_hook=str)


def decode_to_rank(data: bytes) -> ToRank:
    """Raises ProtocolError."""
    return decoded(_to_rank, data)


def decode_from_rank(data: bytes) -> FromRank:
    """Raises ProtocolError."""
    return decoded(_from_rank, data)


def decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    """What it reads there. Raises ProtocolError."""
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a message of this version: {error}") from error
