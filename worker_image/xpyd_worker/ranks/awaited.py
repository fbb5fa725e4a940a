"""Draws that a rank's host has yet to learn of: those of the last stage on their way to the others,
and those of a last stage whose device updates the states itself.

RankWork keeps them in the order of their steps, and settles the oldest first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from xpyd_worker.engine.executor import Running, StepOutput
from xpyd_worker.parallel.api import IncomingSampled
from xpyd_worker.ranks.device_states import DeviceStates, UnderWay
from xpyd_worker.ranks.request_states import RequestStates
from xpyd_worker.runner.device import reach

# As of a step: what it waits for is enqueued right behind one.
_UPDATE_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Share:
    """Slots of a step's sequences and how many tokens each had."""

    slots: list[int]
    query_lens: list[int]


class Awaited(Protocol):
    """Draws that the host has yet to learn of."""

    def has_slot_of(self, slots: set[int]) -> bool:
        """Whether they are for one of these."""
        ...

    def is_known(self) -> bool:
        """Whether `settle` would not wait."""
        ...

    def settle(self) -> None:
        """Wait, and write them to the states. The oldest first."""
        ...


@dataclass(frozen=True, eq=False)
class Coming:
    """Drawn on the last stage, on their way here."""

    states: RequestStates
    share: Share
    incoming: IncomingSampled

    def has_slot_of(self, slots: set[int]) -> bool:
        return not slots.isdisjoint(self.share.slots)

    def is_known(self) -> bool:
        return False

    def settle(self) -> None:
        self.states.post_update(self.share.slots, self.share.query_lens, self.incoming.get())


@dataclass(frozen=True, eq=False)
class OnDevice:
    """Drawn here, by a device that updates the states itself. `tell`: what was drawn, to others."""

    states: DeviceStates
    update: UnderWay
    running: Running
    step: int
    tell: Callable[[StepOutput], None]

    def has_slot_of(self, slots: set[int]) -> bool:
        return not slots.isdisjoint(self.update.ends)

    def is_known(self) -> bool:
        return self.update.mark.is_reached()

    def settle(self) -> None:
        what = f"the update behind step {self.step}"
        reach(self.update.mark, within_s=_UPDATE_DEADLINE_S, what=what)
        self.tell(self.running.wait())
        self.states.settle(self.update)


@dataclass(frozen=True)
class Settling:
    """A step whose `wait` makes the host learn of its draws, and of those before."""

    running: Running
    settle: Callable[[], None]

    def wait(self) -> StepOutput:
        self.settle()
        return self.running.wait()
