"""A fake GPU that does what is enqueued as late as it may: when somebody waits for it, or when a
look at a mark is told at random that it is reached."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from xpyd_worker.kernels.post_update import Fields, post_update
from xpyd_worker.parallel.api import Sampled
from xpyd_worker.ranks.step.device_states import DeviceStates

MOST_TOKENS = 512


class LateDevice:
    """See Device; computes on the CPU."""

    torch_device = torch.device("cpu")
    depth = 2
    is_lost_by_an_error = True

    def __init__(self, seed: int, most_looks: int = 4) -> None:
        self.enqueued = self.done = self.looks = 0
        self._work: deque[Callable[[], None]] = deque()
        self._rng = random.Random(seed)
        self._most_looks = most_looks

    def use(self) -> AbstractContextManager[object]:
        return nullcontext()

    def enqueue(self, work: Callable[[], None]) -> None:
        self.enqueued += 1
        self._work.append(work)

    def run_to(self, place: int) -> None:
        while self.done < place:
            self._work.popleft()()
            self.done += 1

    def mark(self) -> LateMark:
        return LateMark(self, self.enqueued)

    def look(self, place: int) -> bool:
        """A host that looks again and again waits: it is let through in the end."""
        self.looks += 1
        if self._rng.randrange(self._most_looks) == 0:
            self.run_to(place)
        return self.done >= place


@dataclass(frozen=True)
class LateMark:
    """Behind so much of what was enqueued."""

    device: LateDevice
    place: int

    def is_reached(self) -> bool:
        return self.device.look(self.place)


def make_late_states(slots: int, device: LateDevice) -> DeviceStates:
    """States that such a device updates."""

    def update(fields: Fields, slots: Tensor, query_lens: Tensor, sampled: Sampled) -> None:
        device.enqueue(lambda: post_update(fields, slots, query_lens, sampled))

    return DeviceStates(slots, MOST_TOKENS, device=device, update=update)
