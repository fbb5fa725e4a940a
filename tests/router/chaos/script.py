"""Which faults come, in which order, and when one may begin. Pure.

Why a right router never fails under it. A request may fail at two engines and be tried a third
time: that is the least that any budget of tries allows. The poisoned-request rule (a request with
which engines die is stopped after the second) makes it one engine that goes away under it. So a
request lives through at most one *deadly* fault (the connection goes: killed, frozen, cut) and at
most one *soft* one (an engine says that it failed). `Exposure` counts what each open request lives
through; a fault waits until nobody who is open, or will come while it lasts, would meet a second of
its kind. An instance fails a request once at most, since a router tries it elsewhere next. *Mild*
ones (refusals, slowness) cost no try. And `Fitness` keeps, of each role, one instance that is known
to serve, so that there is always somewhere else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Cost = Literal["deadly", "soft", "mild"]
Role = Literal["P", "D"]

KINDS: dict[str, Cost] = {
    "kill": "deadly",  # and come back later
    "restart": "deadly",  # at once: the router may see the new one before it misses the old
    "freeze_kill": "deadly",
    "freeze": "deadly",  # longer than its beats are waited for
    "pause": "deadly",  # shorter: nothing needs to fail
    "cut": "deadly",
    "early_end": "deadly",
    "error500": "soft",
    "error_event": "soft",
    "busy": "mild",
    "slow": "mild",
    "drain": "mild",
}


@dataclass(frozen=True)
class Fault:
    """One line of the script. `rank` chooses among those who may be hit; times are seconds."""

    number: int
    kind: str
    role: Role
    rank: int
    pause_s: float
    """After the fault before it was begun, at least."""
    lasts_s: float
    away_s: float
    """Who is dead comes back after that."""
    moves: bool
    """It comes back elsewhere."""

    @property
    def cost(self) -> Cost:
        return KINDS[self.kind]


def faults(seed: int) -> Iterator[Fault]:
    """The script of a seed, without end: every kind in each dozen, and in the next on the other
    side."""
    rng = random.Random(seed)
    number = 0
    sides: tuple[Role, Role] = ("P", "D")
    while True:
        first: list[tuple[str, Role]] = [(kind, rng.choice(sides)) for kind in KINDS]
        second: list[tuple[str, Role]] = [(k, "D" if role == "P" else "P") for k, role in first]
        rng.shuffle(first)
        rng.shuffle(second)
        for kind, role in (*first, *second):
            yield Fault(
                number=number,
                kind=kind,
                role=role,
                rank=rng.randrange(1000),
                pause_s=round(rng.uniform(0, 0.3), 3),
                lasts_s=round(rng.uniform(0.3, 1.2), 3),
                away_s=round(rng.uniform(0, 2.0), 3),
                moves=rng.random() < 0.4,
            )
            number += 1


class Exposure:
    """What the open requests live through."""

    def __init__(self) -> None:
        self.active: dict[Cost, int] = {"deadly": 0, "soft": 0, "mild": 0}
        self._lived: dict[int, dict[Cost, int]] = {}

    @property
    def open(self) -> int:
        return len(self._lived)

    def begin_request(self, number: int) -> None:
        """It may meet all that goes on."""
        self._lived[number] = dict(self.active)

    def end_request(self, number: int) -> None:
        del self._lived[number]

    def may_begin(self, cost: Cost) -> bool:
        """Whether no request would meet a second one of its kind."""
        if cost == "mild":
            return self.active[cost] == 0
        return not self.active[cost] and all(lived[cost] == 0 for lived in self._lived.values())

    def begin_fault(self, cost: Cost) -> None:
        """Everyone who is open may meet it, and who comes until `end_fault`."""
        self.active[cost] += 1
        for lived in self._lived.values():
            lived[cost] += 1

    def end_fault(self, cost: Cost) -> None:
        self.active[cost] -= 1


@dataclass
class Fitness:
    """Of one instance: whether it is known to serve. `well_s`: since when nothing was done to it;
    None while something is.
    """

    name: str
    role: Role
    is_well: bool = True
    answered_before: int = 0
    """Its count of answers when it became well."""
    answered: int = 0
    is_ready: bool = False
    """As the router shows it."""

    @property
    def is_fit(self) -> bool:
        """Whether it has served since something was last done to it."""
        return self.is_well and self.is_ready and self.answered > self.answered_before


def victims(everyone: Sequence[Fitness], role: Role) -> list[Fitness]:
    """Who may be hit now, by name: those that are fit, if one of the role is left beside."""
    fit = sorted((one for one in everyone if one.role == role and one.is_fit), key=lambda f: f.name)
    return fit if len(fit) > 1 else []


@dataclass
class Timeline:
    """What was done when, in seconds of one clock; a failing test shows it."""

    entries: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])

    def note(self, at_s: float, what: str) -> None:
        self.entries.append((at_s, what))

    def around(self, start_s: float, end_s: float, margin_s: float = 3.0) -> str:
        """The entries from before `start_s` to behind `end_s`."""
        low, high = start_s - margin_s, end_s + margin_s
        return "\n".join(f"  {t:.3f} {what}" for t, what in self.entries if low <= t <= high)
