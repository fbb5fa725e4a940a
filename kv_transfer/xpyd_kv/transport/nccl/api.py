"""The seam to NCCL: what of it we use. Documented here and only here.

Communicators are non-blocking: `init` and `group` return while NCCL still works, and until
`is_ready` says so nothing else may be asked of that communicator but `abort`. All calls may raise
NcclError; any thread may call, one at a time for each communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

ID_BYTES = 128
SENDER, RECEIVER = 0, 1
"""Ranks: P and D."""


class NcclError(OSError):
    """NCCL refused or failed; the communicator is of no use any more."""


class Buffer(NamedTuple):
    """`length` bytes of device memory from `address` on: one message."""

    address: int
    length: int


class Nccl(Protocol):
    """The library."""

    @property
    def version(self) -> int:
        """Major, minor and patch as NCCL writes them: 23007 is 2.30.7. Both ranks must have the
        same one."""
        ...

    def new_id(self) -> bytes:
        """ID_BYTES by which both ranks of a new communicator find each other."""
        ...

    def init(self, comm_id: bytes, rank: int, *, channels: int) -> int:
        """Begin to make this rank of a 2-rank communicator with at most `channels` channels, on our
        GPU: its handle."""
        ...

    def is_ready(self, comm: int) -> bool:
        """Whether what was begun has been enqueued (or made). NcclError for an asynchronous error
        of the communicator, whenever it happened."""
        ...

    def group(self, comm: int, buffers: Sequence[Buffer], *, sends: bool, stream: int) -> None:
        """Begin to enqueue one group on `stream` (a driver's handle): a message to, or from, the
        other rank for each buffer, in order."""
        ...

    def abort(self, comm: int) -> None:
        """End the communicator and what it has under way, here alone; the handle is gone. May take
        for ever: only on a thread that nobody waits for without a deadline."""
        ...
