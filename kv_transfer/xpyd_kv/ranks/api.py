"""The seams of a transfer that several ranks carry out. Documented here only.

The engine's process has the block manager and speaks with the other engine; the bytes go from rank
to rank. What one tells the other goes through a Channel, whatever carries it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


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
