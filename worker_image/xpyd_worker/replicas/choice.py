"""What one front end knows of the replicas: which gets a request, and whether a wave must start.

A request goes to the replica with the smallest 4 x waiting + running. One that waits weighs four
times: it will take a prompt's forward and then its place in the batch. Counts come from outside,
each 100 ms or at each request; in between the front end adds what it sends itself, or a burst would
all go to the replica that was the emptiest before it. Models without shared experts have no waves.
"""

from __future__ import annotations

from collections.abc import Sequence

from xpyd_worker.replicas.coordinator import Counts, Statistics

WAITING_WEIGHT = 4


def score(counts: Counts) -> int:
    """The load of a replica; the smallest gets the next request."""
    return WAITING_WEIGHT * counts.waiting + counts.running


class FrontEnd:
    """One front end of `replicas`; the wave's number goes with each of its requests.

    `number` of `front_ends`: several that have the same counts begin at different replicas, or all
    would send their next request to the same one.
    """

    def __init__(self, replicas: int, *, number: int = 0, front_ends: int = 1) -> None:
        self.wave = 0
        self._is_running = False
        self._counts: list[Counts | None] = [Counts(0, 0)] * replicas
        first = number * replicas // front_ends
        self._order = [*range(first, replicas), *range(first)]
        self._adds = front_ends

    def publish(self, counts: Sequence[Counts | None]) -> None:
        """Newer counts of all replicas; None for one that takes no requests."""
        self._counts = list(counts)

    def take(self, statistics: Statistics) -> None:
        """The coordinator's statistics came."""
        self.publish(statistics.counts)
        self.wave, self._is_running = statistics.wave, statistics.is_running

    def pick(self) -> int | None:
        """The replica for the next request; None where none takes requests."""
        loads = [
            (score(counts), at)
            for at, replica in enumerate(self._order)
            if (counts := self._counts[replica]) is not None
        ]
        return self._order[min(loads)[1]] if loads else None

    def send(self, replica: int) -> bool:
        """A request goes to `replica`, picked or named by its client: it counts as waiting there
        until newer counts come, and each other front end is taken to send as much. Whether to ask
        the coordinator for a start, too, where there are waves."""
        counts = self._counts[replica]
        if counts is not None:
            self._counts[replica] = counts._replace(waiting=counts.waiting + self._adds)
        asks = not self._is_running
        self._is_running = True
        return asks
