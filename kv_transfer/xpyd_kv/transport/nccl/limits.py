"""What NCCL may take: how many communicators, how much memory, how long. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from xpyd_core.errors import UserError
from xpyd_kv.figures import Names

MAX_CHANNELS = 32
# What a communicator of two ranks takes on each GPU: 100 MB with 16 channels, 52 MB with 8, so 6 MB
# for each channel and 4 MB besides.
_BYTES_PER_CHANNEL = 6_000_000
_BYTES_BESIDES = 4_000_000


def communicator_bytes(channels: int) -> int:
    """Memory that one communicator takes on each of its two GPUs, about."""
    return _BYTES_BESIDES + channels * _BYTES_PER_CHANNEL


@dataclass(frozen=True)
class NcclLimits:
    """UserError for a number of channels that NCCL does not take."""

    channels: int = 8
    """Of one communicator; more are faster and take more memory and more of the GPU."""
    max_communicators: int = 64
    """At once on one GPU. Pairs beyond that move KV through their sockets."""
    make_s: float = 10.0
    """Until both ranks must have met."""
    frame_s: float = 10.0
    """Until the messages of a frame must be through."""
    abort_s: float = 5.0
    """Until an aborted communicator must have let go of the GPU."""
    idle_s: float = 60.0
    """After so long P ends a communicator that nothing went through, and D after twice that."""

    def __post_init__(self) -> None:
        if not 1 <= self.channels <= MAX_CHANNELS:
            raise UserError(f"NCCL channels: {self.channels}; expected 1 to {MAX_CHANNELS}")

    @property
    def most_bytes(self) -> int:
        """Memory of all communicators that may be there at once."""
        return self.max_communicators * communicator_bytes(self.channels)


@dataclass
class NcclFigures:
    """For metrics; the driver writes, anyone reads."""

    communicators: int = 0
    """That are there now, or being made."""
    memory_bytes: int = 0
    """What they take, about, with the memory that receives what has no place of its own."""
    made: int = 0
    ended: Names = field(default_factory=Names)
    """By reason: idle, closed (with its connection), failed, hung."""
