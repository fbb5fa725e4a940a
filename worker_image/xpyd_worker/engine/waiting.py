"""The scheduler's queue: sequences that wait for their turn, the best rank first. Pure.

A heap, since with priorities a newcomer may go before others. It must not know why one waits.
"""

from __future__ import annotations

import heapq

from xpyd_worker.engine.sequence import Rank, Sequence


class WaitingQueue:
    """A priority queue of sequences by their rank. A sequence is in it at most once."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, sequence: Sequence) -> None:
        """Put `sequence` where its rank says."""
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def pop(self) -> Sequence | None:
        """Take out the first, None when the queue is empty."""
        return heapq.heappop(self._heap)[1] if self._heap else None

    def sweep(self) -> None:
        """Let go of sequences that have ended."""
        if any(sequence.ended for _rank, sequence in self._heap):
            self._heap = [entry for entry in self._heap if not entry[1].ended]
            heapq.heapify(self._heap)
