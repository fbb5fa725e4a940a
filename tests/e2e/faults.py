"""Faults at random moments: a process killed, a process stopped for a while, a network that stands
still for a while. All of it follows from a seed, which a failing test shows.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tests.e2e.harness import Process
from tests.e2e.relay import Relay

KINDS = ("kill", "stop", "stall", "stall_in_data")


class Fault(NamedTuple):
    """`victim` counts the engines, or the relays where the network stands still."""

    at_s: float
    kind: str
    victim: int
    lasts_s: float


def draw(
    seed: int, *, kinds: Sequence[str], engines: int, relays: int, seconds: float
) -> list[Fault]:
    """One fault of each of `kinds` within `seconds`, no process the victim of two."""
    rng = random.Random(seed)
    processes = rng.sample(range(engines), k=sum(not kind.startswith("stall") for kind in kinds))
    return sorted(
        Fault(
            at_s=round(rng.uniform(0, seconds), 2),
            kind=kind,
            victim=rng.randrange(relays) if kind.startswith("stall") else processes.pop(),
            # Up to longer than all of the deadlines of 2 to 6 s that notice a silent peer.
            lasts_s=0.0 if kind == "kill" else round(rng.uniform(0.2, 7.5), 2),
        )
        for kind in kinds
    )


class Faults:
    """Does what was drawn, in a thread: `with Faults(...) as faults: load; faults.join()`."""

    def __init__(
        self, faults: Sequence[Fault], engines: Sequence[Process], relays: Sequence[Relay]
    ) -> None:
        moves: list[tuple[float, Callable[[], None]]] = []
        for fault in faults:
            begin, end = self._moves(fault, engines, relays)
            moves += [(fault.at_s, begin), (fault.at_s + fault.lasts_s, end)]
        self._moves_by_time = sorted(moves, key=lambda move: move[0])
        self._thread = threading.Thread(target=self._run, name="faults")

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        start = time.monotonic()
        for at_s, move in self._moves_by_time:
            time.sleep(max(0.0, start + at_s - time.monotonic()))
            move()

    @staticmethod
    def _moves(
        fault: Fault, engines: Sequence[Process], relays: Sequence[Relay]
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        if fault.kind.startswith("stall"):
            relay = relays[fault.victim]
            return (relay.stall if fault.kind == "stall" else relay.stall_in_data), relay.resume
        engine = engines[fault.victim]
        if fault.kind == "kill":
            return engine.restart, lambda: None
        return (
            lambda: engine.popen.send_signal(signal.SIGSTOP),
            lambda: engine.popen.send_signal(signal.SIGCONT),
        )
