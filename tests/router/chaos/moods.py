"""How a mock engine misbehaves: what it is told, and what that means for one call. Pure."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Literal

from tests.router.chaos.wire import Call

Mode = Literal["well", "error500", "error_event", "busy", "cut", "early_end", "slow", "hang"]
MODES: tuple[Mode, ...] = (
    *("well", "error500", "error_event", "busy", "cut", "early_end", "slow", "hang"),
)


@dataclass(frozen=True)
class Mood:
    """What an engine is told. `chance`: which share of its calls it meets."""

    mode: Mode = "well"
    chance: float = 1.0


@dataclass(frozen=True)
class Fate:
    """What happens to one call. Times are seconds, sizes bytes of the answer's body."""

    mode: Mode
    prefill_s: float
    step_s: float
    cut_after_bytes: int | None = None
    is_reset: bool = False
    """Cut by a reset rather than by a close."""
    steps: int = 0
    """After so many steps of the stream the trouble begins."""


def fate_of(call: Call, mood: Mood, rng: random.Random, *, pace: float) -> Fate:
    """RandomPool one call's fate. `pace` stretches the engine's own times; 0 is at once."""
    mode: Mode = mood.mode if rng.random() < mood.chance else "well"
    slow = 20.0 if mode == "slow" else 1.0
    return Fate(
        mode=mode,
        prefill_s=rng.uniform(0, 0.008) * pace * slow,
        step_s=rng.uniform(0.0005, 0.008) * pace * min(slow, 4.0),
        cut_after_bytes=_cut(call, rng) if mode == "cut" else None,
        is_reset=rng.random() < 0.5,
        steps=rng.randrange(8),
    )


_LETHAL = re.compile(r"kills (P|D)(?: at step (\d+))?")


def lethal(role: str, steps: int = 0) -> str:
    """A prompt of which those of `role` die: at once, or after so many steps of their stream."""
    return f"kills {role}" + (f" at step {steps}" if steps else "")


def lethal_step(call: Call) -> int | None:
    """The step of its answer at which the engine dies of this call; 0: before it."""
    found = _LETHAL.fullmatch(str(call.body.get("prompt")))
    return int(found[2] or 0) if found and found[1] == call.part else None


def _cut(call: Call, rng: random.Random) -> int:
    """Anywhere: before the head, in it, within an event, and sometimes behind the end."""
    if rng.random() < 0.15:
        return 0
    return rng.randrange(4000 if call.wanted.stream else 700)
