"""How long steps take on this device, and how much of prompts one may have beside decodes. Pure.

    Scheduler -> prompt_tokens (how many) -> the step -> measured -> the next one

A decode waits for the prompts that share its step. What a step of decodes alone takes, and what
each token of a prompt adds, is measured as the engine runs, so the bound is one of time and holds
for any model, device and number of threads (docs/adr/0136).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LatencyGoal = Literal["itl", "ttft"]
"""Which latency matters more: that between tokens, or that of the first one."""
LATENCY_GOALS: tuple[LatencyGoal, ...] = ("itl", "ttft")

STRETCH = 2.5
"""So many times what decodes take alone, those that are coming with them, a step may take with
prompts."""
LEAST_TOKENS = 32
"""Of prompts, whatever they take: they go on, and smaller parts read all weights for little."""
_WEIGHT = 1 / 8
"""Of the newest value in a running mean."""
_ALONE_EVERY, _ALONE_TRIES = 64, 4
"""Steps with prompts, until one without is made to measure what decodes take alone; it measures
nothing where somebody's last prompt token comes into it, so there are a few tries."""


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + _WEIGHT * (value - before)


@dataclass
class _Alone:
    """Steps in which so many sequences decode, and nothing else is done: their seconds; steps with
    prompts since the last one; those without that were asked for since."""

    seconds: float | None = None
    since: int = _ALONE_EVERY
    asked: int = 0


@dataclass
class StepTimes:
    """What the steps of one engine took. `stretch`: see STRETCH; None: prompts have no bound."""

    stretch: float | None = STRETCH
    # By the bits of the number of sequences: steps of 4 to 7 are alike enough.
    _alone: dict[int, _Alone] = field(default_factory=dict[int, _Alone])
    _token_s: float | None = None

    def prompt_tokens(self, decodes: int, coming: int = 0) -> int | None:
        """How many tokens of prompts the next step may have beside so many decodes, when so many
        more are `coming`, behind their prompts; 0: none, so that it shows what these take alone.
        None: as many as there is room for."""
        if self.stretch is None or not decodes:
            return None
        alone = self._of(decodes)
        if alone.since >= _ALONE_EVERY and alone.asked < _ALONE_TRIES:
            alone.asked += 1
            return 0
        if alone.seconds is None or self._token_s is None:
            return None
        will_take_s = self._known_s(decodes, coming)
        if self._of(decodes + coming).seconds is None:
            # One more decode takes about what a token of a prompt does.
            will_take_s = max(will_take_s, alone.seconds + coming * self._token_s)
        spare_s = self.stretch * will_take_s - alone.seconds
        return max(LEAST_TOKENS, int(spare_s / max(self._token_s, 1e-9)))

    def measured(self, seconds: float, *, decodes: int, prompt_tokens: int) -> None:
        """A step of so many decodes and tokens of prompts took so long."""
        if not decodes:
            # Prompts alone: a first guess, before there is a step with both.
            if prompt_tokens >= LEAST_TOKENS and self._token_s is None:
                self._token_s = seconds / prompt_tokens
            return
        alone = self._of(decodes)
        if not prompt_tokens:
            alone.seconds = _mean(alone.seconds, seconds)
            alone.since = alone.asked = 0
            return
        alone.since += 1
        if not alone.since % _ALONE_EVERY:
            alone.asked = 0
        if alone.seconds is not None and prompt_tokens >= LEAST_TOKENS:
            each_s = max(0.0, seconds - alone.seconds) / prompt_tokens
            self._token_s = _mean(self._token_s, each_s)

    def _known_s(self, decodes: int, coming: int) -> float:
        """What decodes take alone, as those will that are coming: a few that wait for many prompts
        wait no longer than all will for one. Of fewer where so many were not measured yet."""
        least, most = decodes.bit_length(), (decodes + coming).bit_length()
        known = [one.seconds for bits, one in self._alone.items() if least <= bits <= most]
        return max(seconds for seconds in known if seconds is not None)

    def _of(self, decodes: int) -> _Alone:
        return self._alone.setdefault(decodes.bit_length(), _Alone())
