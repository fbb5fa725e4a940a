"""What an engine's process and its ranks tell each other of transfers, as msgpack. Pure.

Both are one build and one instance: these change freely. What they mean is the seams' (`api`);
this is their form on a Channel, and in a step's message. Sizes are bounded by what the engine
holds: blocks of its cache, ranks of the two engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict

import msgspec

from xpyd_core.request_id import TransferKey
from xpyd_kv.ranks.api import EndpointFigures, Figures
from xpyd_kv.wire.messages import Mode

Where = Literal["blocks", "buffer", "pool"]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Room that the engine's books name: blocks of the cache by their ids, or extents (unit, units)
    of the buffer or the pool. The same numbers mean a share of each rank's memory."""

    where: Where
    blocks: tuple[int, ...] = ()
    extents: tuple[tuple[int, int], ...] = ()


class Names(TypedDict):
    """Which transfer."""

    uuid: str
    prompt_index: int
    epoch: int


def names_of(key: TransferKey, epoch: int) -> Names:
    """A message's first fields."""
    return {"uuid": key.uuid, "prompt_index": key.prompt_index, "epoch": epoch}


class _Named(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Of one transfer."""

    uuid: str
    prompt_index: int
    epoch: int


# --- from the engine


class Send(_Named, frozen=True, kw_only=True):
    """See Sending."""

    tokens: int
    skip_tokens: int
    mode: Mode
    incarnation: str
    targets: tuple[tuple[int, str, int], ...]
    """Rank, host and port."""
    stash: Place | None = None


class Cancel(_Named, frozen=True, kw_only=True):
    """SendingRank.cancel."""

    reason: str


class Forget(_Named, frozen=True, kw_only=True):
    """SendingRank.forget."""


class Open(_Named, frozen=True, kw_only=True):
    """See Opening."""

    engine_id: str
    incarnation: str
    tokens: int
    skip_tokens: int
    sources: tuple[int, ...]
    place: Place


class Stop(_Named, frozen=True, kw_only=True):
    """ReceivingRank.stop."""

    reason: str


class Copy(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Copy between a place beside the cache and blocks of it; Copied follows, with the number."""

    number: int
    place: Place
    block_ids: tuple[int, ...]
    into_cache: bool


class Probe(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """SendingRank.probe."""

    number: int
    targets: tuple[tuple[int, str, int], ...]
    """As Send's."""


ToRank = Send | Cancel | Forget | Open | Stop | Copy | Probe


# --- from a rank


class Flushed(_Named, frozen=True, kw_only=True):
    """See PairFlushed."""

    destination: int
    areas: int


class Ended(_Named, frozen=True, kw_only=True):
    """See PairEnded."""

    destination: int
    reason: str
    transport: str
    figures: Figures


class Taking(_Named, frozen=True, kw_only=True):
    """See Opened."""


class Landed(_Named, frozen=True, kw_only=True):
    """See PairLanded."""

    source: int
    transport: str
    figures: Figures


class Lost(_Named, frozen=True, kw_only=True):
    """See PairLost."""

    source: int
    reason: str
    figures: Figures


class Quiet(_Named, frozen=True, kw_only=True):
    """See PairQuiet."""

    source: int


class Copied(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The Copy of that number is through. A rank whose device does not copy ends."""

    number: int


class Counted(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """What was counted besides: see Teller."""

    figures: Figures
    endpoint: EndpointFigures


class Probed(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """What came of one target of a Probe: see ProbeResult."""

    number: int
    destination: int
    ok: bool
    transport: str
    num_bytes: int
    seconds: float
    digest_matches: bool
    reason: str


FromRank = Flushed | Ended | Taking | Landed | Lost | Quiet | Copied | Counted | Probed


# --- in a step's message


class StepChunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Blocks `block_ids` of a prompt, from its `first_block`-th on: computed before, or by the
    step. `is_last`: the prompt's last are among them."""

    uuid: str
    prompt_index: int
    epoch: int
    first_block: int
    block_ids: tuple[int, ...]
    is_cached: bool
    is_last: bool


_ENCODER = msgspec.msgpack.Encoder()
_TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_CHUNKS = msgspec.msgpack.Decoder(tuple[StepChunk, ...])


def encode(message: ToRank | FromRank) -> bytes:
    """For the Channel."""
    return _ENCODER.encode(message)


def decode_to_rank(message: bytes) -> ToRank:
    """What the engine says."""
    return _TO_RANK.decode(message)


def decode_from_rank(message: bytes) -> FromRank:
    """What a rank says."""
    return _FROM_RANK.decode(message)


def encode_chunks(chunks: Sequence[StepChunk]) -> bytes:
    """StepInput.kv; b'' for none."""
    return _ENCODER.encode(chunks) if chunks else b""


def decode_chunks(chunks: bytes) -> tuple[StepChunk, ...]:
    """The other way."""
    return _CHUNKS.decode(chunks) if chunks else ()
