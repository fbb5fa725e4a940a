"""The messages between an engine and its ranks: what moves between each pair of ranks. Pure.

The engine has the block manager and agrees with the other engine; each rank moves its part of the
bytes to or from ranks of the other engine. These values are the messages: where a rank runs in its
engine's process they are arguments of a call (`Post`), where it is a process of its own
`ranks.remote` encodes them, and a Room goes as its Place. Both are one build and one instance, so
they change freely. Sizes are bounded by what the engine holds: blocks of its cache, ranks of the
two engines.

See docs/adr/0030 and docs/adr/0035.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.memory.api import Deviation, Place, Room
from xpyd_kv.metrics import Counts
from xpyd_kv.session.outgoing import ReadyArea
from xpyd_kv.session.probing import ProbeResult
from xpyd_kv.wire.messages import Mode


class Target(NamedTuple):
    """A rank of D that a rank of P sends to."""

    rank: int
    address: Address


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """A message that belongs to no transfer."""


class _OfTransfer(_Message, frozen=True, kw_only=True):
    """A message of one transfer."""

    key: TransferKey
    epoch: int


# --- to a rank of P


class Send(_OfTransfer, frozen=True, kw_only=True):
    """D has room: send each target its part. An Ended follows for each. `incarnation` is D's;
    `spill`: what is read instead of the blocks."""

    tokens: int
    skip_tokens: int
    mode: Mode
    incarnation: str
    targets: tuple[Target, ...]
    spill: Room | None = None


class Ready(_OfTransfer, frozen=True, kw_only=True):
    """These areas are in the rank's cache. A rank in a process of its own gets this from its
    runner."""

    areas: Sequence[ReadyArea]


class Complete(_OfTransfer, frozen=True, kw_only=True):
    """No more areas follow this transfer's last Ready."""


class Cancel(_OfTransfer, frozen=True, kw_only=True):
    """Stop sending."""

    reason: str


class Forget(_OfTransfer, frozen=True, kw_only=True):
    """The transfer is over, or never began: what the runner still says of it is late."""


class Probe(_Message, frozen=True, kw_only=True):
    """Probe the way to each of these, all at once. A Probed follows for each."""

    number: int
    targets: tuple[Target, ...]


# --- to a rank of D


class Open(_OfTransfer, frozen=True, kw_only=True):
    """Take what comes, before GRANT leaves. Opened follows, then for each source a Landed, or a
    Lost and a Quiet. `engine_id` and `incarnation` are P's, `sources` its ranks that will send,
    `room` is where."""

    engine_id: str
    incarnation: str
    tokens: int
    skip_tokens: int
    sources: tuple[int, ...]
    room: Room


class Stop(_OfTransfer, frozen=True, kw_only=True):
    """Take no more of it. Quiet follows for each source that has not landed and was not reported
    as quiet."""

    reason: str


# --- to either


class Copy(_Message, frozen=True, kw_only=True):
    """Copy between a place outside the cache, from its `first_block` on, and blocks of the cache;
    Copied follows, with the number."""

    number: int
    place: Place
    block_ids: tuple[int, ...]
    into_cache: bool
    first_block: int = 0


class Compare(_Message, frozen=True, kw_only=True):
    """Compare the first `tokens` tokens of a place outside the cache with those of blocks of the
    cache; Compared follows, with the number."""

    number: int
    place: Place
    block_ids: tuple[int, ...]
    tokens: int


ToRank = Send | Ready | Complete | Cancel | Forget | Probe | Open | Stop | Copy | Compare
Post = Callable[[ToRank], None]
"""Gives a message to one rank."""


# --- from a rank of P


class Flushed(_OfTransfer, frozen=True, kw_only=True):
    """Mode put: of what the rank was handed, the first `areas` areas are sent to this rank of
    D."""

    destination: int
    areas: int


class Ended(_OfTransfer, frozen=True, kw_only=True):
    """The rank sends nothing more to this rank of D. `reason` is '' when D's rank has all, moved by
    `transport`."""

    destination: int
    reason: str
    transport: str = ""


class Probed(_Message, frozen=True, kw_only=True):
    """The result of a Probe for one target."""

    number: int
    destination: int
    result: ProbeResult


# --- from a rank of D


class Opened(_OfTransfer, frozen=True, kw_only=True):
    """The rank takes what comes."""


class Landed(_OfTransfer, frozen=True, kw_only=True):
    """All bytes of this rank of P have arrived, and no more will be written."""

    source: int
    transport: str


class Lost(_OfTransfer, frozen=True, kw_only=True):
    """The bytes of this rank of P will not come; writes may still land."""

    source: int
    reason: str


class Quiet(_OfTransfer, frozen=True, kw_only=True):
    """No write of this rank of P can land any more."""

    source: int


# --- from either


class Copied(_Message, frozen=True, kw_only=True):
    """The Copy of that number is through. A rank whose device does not copy ends."""

    number: int


class Compared(_Message, frozen=True, kw_only=True):
    """The result of the Compare of that number."""

    number: int
    worst: Deviation


class Counted(_Message, frozen=True, kw_only=True):
    """The counts of the rank and its endpoint since the last report. It is sent before each message
    that ends a pair, and once a second."""

    counts: Counts
    endpoint: Counts = {}


PairReport = Flushed | Ended | Opened | Landed | Lost | Quiet
FromRank = PairReport | Probed | Copied | Compared | Counted
Report = Callable[[FromRank], None]
"""Gives a rank's message to its engine."""


# --- in a step's message


class StepChunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Blocks `block_ids` of a prompt, from its `first_block`-th on: computed before, or by the
    step. `is_last`: the prompt's last are among them."""

    key: TransferKey
    epoch: int
    first_block: int
    block_ids: tuple[int, ...]
    is_cached: bool
    is_last: bool


_ENCODER = msgspec.msgpack.Encoder()
_CHUNKS = msgspec.msgpack.Decoder(tuple[StepChunk, ...])


def encode_chunks(chunks: Sequence[StepChunk]) -> bytes:
    """StepInput.kv; b'' for none."""
    return _ENCODER.encode(chunks) if chunks else b""


def decode_chunks(chunks: bytes) -> tuple[StepChunk, ...]:
    """Decode StepInput.kv."""
    return _CHUNKS.decode(chunks) if chunks else ()
