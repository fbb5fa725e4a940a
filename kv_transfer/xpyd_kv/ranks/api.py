"""The seams of a transfer that several ranks carry out. Documented here only.

The engine's process has the block manager and speaks with the other engine; the bytes go from rank
to rank. What one tells the other goes through a Channel, whatever carries it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from xpyd_core.request_id import Address, TransferKey
from xpyd_kv.session.source import ReadyArea
from xpyd_kv.store.api import Room
from xpyd_kv.wire.messages import Mode


class Channel(Protocol):
    """Ordered messages between the engine's process and one rank, lost only when one of the two has
    ended: then so does the instance."""

    def post(self, message: bytes) -> None:
        """From any thread; does not wait."""
        ...

    def listen(self, handle: Callable[[bytes], None]) -> None:
        """Call `handle` with each message of the other side, in order, on the channel's thread;
        once, before any `post` of the other side that matters. It must not block."""
        ...


class RankSender(Protocol):
    """A rank's part of sending, as its runner sees it. On the runner's thread."""

    def begin_step(self, chunks: bytes) -> None:
        """Before the forward: what the engine's producer said of this step (StepInput.kv)."""
        ...

    def layer_done(self, layer: int) -> None:
        """Layer `layer` (index among the rank's) of all chunks stands in the cache. Hot path."""
        ...

    def step_done(self, *, failed: bool) -> None:
        """After the forward."""
        ...


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


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a rank has counted since it last said so: see KvMetrics."""

    sent_bytes: int = 0
    sent_frames: int = 0
    overlapped_bytes: int = 0
    received_bytes: int = 0
    received_frames: int = 0
    checksum_mismatches: int = 0
    refused_data: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, kw_only=True)
class EndpointFigures:
    """What a rank's endpoint has counted since the rank last said so, by the fields of Counters:
    only what has changed."""

    numbers: dict[str, int] = field(default_factory=dict[str, int])
    named: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
