"""What an engine and its ranks tell each other of transfers, and its form on a Channel. Pure.

The engine's process has the block manager and speaks with the other engine; the bytes go from rank
to rank. Both are one build and one instance, so these messages change freely. Sizes are bounded by
what the engine holds: blocks of its cache, ranks of the two engines.

See docs/adr/0030.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

import msgspec

from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.memory.api import Place, Room
from xpyd_kv.metrics import EndpointCounts, RankCounts
from xpyd_kv.session.outgoing import ReadyArea
from xpyd_kv.wire.messages import Mode

# --- P's engine and one of its ranks, on the I/O thread of the engine's process


@dataclass(frozen=True)
class Target:
    """A rank of D that a rank of P sends to."""

    rank: int
    address: Address


@dataclass(frozen=True, kw_only=True)
class Sending:
    """D has room: what a rank of P is told. `incarnation` is D's; `stash`: what is read instead of
    the blocks."""

    key: TransferKey
    epoch: int
    tokens: int
    skip_tokens: int
    mode: Mode
    incarnation: str
    targets: tuple[Target, ...]
    stash: Room | None = None


class SendingRank(Protocol):
    """A rank of P as its engine's session tells it what to do."""

    def send(self, sending: Sending) -> None:
        """Send each target its part. A PairEnded follows for each of them."""
        ...

    def ready(self, key: TransferKey, epoch: int, areas: Sequence[ReadyArea]) -> None:
        """These areas stand in its cache. Nothing where its runner tells it so itself."""
        ...

    def complete(self, key: TransferKey, epoch: int) -> None:
        """No more areas follow. As `ready`."""
        ...

    def cancel(self, key: TransferKey, epoch: int, reason: str) -> None:
        """Stop."""
        ...

    def forget(self, key: TransferKey, epoch: int) -> None:
        """The transfer is over, or never began: what comes of it by other ways is late."""
        ...

    def probe(self, number: int, targets: Sequence[Target]) -> None:
        """Probe the way to each of these, all at once. Probes.pair_probed hears of each."""
        ...


@dataclass(frozen=True)
class PairFlushed:
    """Mode put: of what the rank was handed, the first `areas` areas are sent to this rank of
    D."""

    destination: int
    areas: int


@dataclass(frozen=True)
class PairEnded:
    """Nothing goes to this rank of D any more. `reason` is '' when it has all, by `transport`."""

    destination: int
    reason: str
    transport: str = ""


# --- D's engine and one of its ranks, likewise


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a rank of D is told before GRANT leaves: `engine_id` and `incarnation` are P's,
    `sources` its ranks that will send, `room` is where."""

    key: TransferKey
    epoch: int
    engine_id: str
    incarnation: str
    tokens: int
    skip_tokens: int
    sources: tuple[int, ...]
    room: Room


class ReceivingRank(Protocol):
    """A rank of D as its engine's session tells it what to do."""

    def open(self, opening: Opening) -> None:
        """Take what comes. Opened follows, then for each source a PairLanded, or a PairLost and a
        PairQuiet."""
        ...

    def stop(self, key: TransferKey, epoch: int, reason: str) -> None:
        """Take nothing more. PairQuiet follows for each source that has not landed and was not said
        to be quiet."""
        ...


@dataclass(frozen=True)
class Opened:
    """The rank takes what comes."""


@dataclass(frozen=True)
class PairLanded:
    """All of this rank of P is here, and nothing more of it will be written."""

    source: int
    transport: str


@dataclass(frozen=True)
class PairLost:
    """What this rank of P sends will not come; writes may still land."""

    source: int
    reason: str


@dataclass(frozen=True)
class PairQuiet:
    """Of this rank of P nothing can land any more."""

    source: int


SendReport = PairFlushed | PairEnded
ReceiveReport = Opened | PairLanded | PairLost | PairQuiet


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
    figures: RankCounts


class Taking(_Named, frozen=True, kw_only=True):
    """See Opened."""


class Landed(_Named, frozen=True, kw_only=True):
    """See PairLanded."""

    source: int
    transport: str
    figures: RankCounts


class Lost(_Named, frozen=True, kw_only=True):
    """See PairLost."""

    source: int
    reason: str
    figures: RankCounts


class Quiet(_Named, frozen=True, kw_only=True):
    """See PairQuiet."""

    source: int


class Copied(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """The Copy of that number is through. A rank whose device does not copy ends."""

    number: int


class Counted(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """What was counted besides: see MetricsReporter."""

    figures: RankCounts
    endpoint: EndpointCounts


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
