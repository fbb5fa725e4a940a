"""The coordinator of replicas in lock step: starts waves everywhere, and publishes statistics.

    front end --ask(wave)--------> Coordinator --START_DP_WAVE wave--> replicas that do not run it
    replica --Report-------------^          \\--Statistics, each 100 ms--> front ends

It compares what should be with what is reported: while a wave is on, each replica that has not
reported to run it is sent START again with every statistics. So no START, report or question is
needed twice, and none must arrive: a lost one is made up for by the next, and a coordinator that
comes back without a memory learns the wave from the replicas' reports. Who has the sockets and the
clock calls it; an answer lists the replicas to send START to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xpyd_worker.replicas.waves import Report

PUBLISH_S = 0.1
"""Between two statistics, and between two START to a replica that has not reported to run (vLLM's
number)."""


class Counts(NamedTuple):
    """Requests of one replica."""

    waiting: int
    running: int


class Statistics(NamedTuple):
    """What front ends are told. `counts` has None for a replica that is not there."""

    counts: tuple[Counts | None, ...]
    wave: int
    is_running: bool


class Coordinator:
    """The state of all replicas, as their last reports say it.

    `is_running` of a wave is only ever ended by a report of a newer wave. All replicas were in the
    wave then, for each waits in the finish check for all others; so no START that is still on its
    way can start one replica alone.
    """

    def __init__(self, replicas: int) -> None:
        self.wave = 0
        self.is_running = False
        self._replicas: Sequence[int] = range(replicas)
        self._reports: list[Report | None] = [None] * replicas

    def resize(self, replicas: Sequence[int]) -> None:
        """There are these from now on. Those that come have not reported yet."""
        self._replicas = replicas
        have = dict(enumerate(self._reports))
        self._reports = [
            have.get(one) if one in replicas else None for one in range(max(replicas) + 1)
        ]

    def heard(self, replica: int, report: Report) -> Sequence[int]:
        """A replica's report came."""
        self._reports[replica] = report
        was = (self.wave, self.is_running)
        self._learn(report.wave, starts=report.is_running)
        return self.missing() if (self.wave, self.is_running) != was else ()

    def asked(self, wave: int) -> Sequence[int]:
        """A front end sent a request to a replica and knows of no running wave; it knows `wave`.

        Of an older wave it is ignored: its request starts the replica that gets it, which reports.
        """
        was = (self.wave, self.is_running)
        self._learn(wave, starts=True)
        return self.missing() if (self.wave, self.is_running) != was else ()

    def _learn(self, wave: int, *, starts: bool) -> None:
        if wave > self.wave:
            self.wave, self.is_running = wave, starts
        elif wave == self.wave:
            self.is_running = self.is_running or starts

    def missing(self) -> Sequence[int]:
        """Replicas that should run the wave and have not reported so; with every statistics."""
        if not self.is_running:
            return ()
        return [
            replica
            for replica, report in enumerate(self._reports)
            if report is not None and not (report.is_running and report.wave == self.wave)
        ]

    def lost(self, replica: int) -> None:
        """The connection to a replica ended: it has died, or nobody knows better.

        Replicas in lock step fall together. When the last is lost the wave is forgotten, so that
        none of the new ones is started for requests that went with the old ones.
        """
        self._reports[replica] = None
        if not any(self._reports):
            self.wave, self.is_running = 0, False

    def statistics(self) -> Statistics:
        """What front ends get each PUBLISH_S."""
        counts = tuple(r and Counts(r.waiting, r.running) for r in self._reports)
        return Statistics(counts, self.wave, self.is_running)

    def may_end(self) -> bool:
        """Whether replicas may be told to end, once no front end has or takes requests.

        A replica that ends while another runs holds that one up for ever. So all must have reported
        that they are idle, behind the last wave that was started.
        """
        idle = Report(self.wave, is_running=False)
        return not self.is_running and all(self._reports[one] == idle for one in self._replicas)
