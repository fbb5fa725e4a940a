"""Random and PowerOfTwo: chance decides, alone or between two that are compared. Pure."""

from __future__ import annotations

from xpyd_router.policy.base import Candidate, PolicyContext, Side, SidePolicy, Want
from xpyd_router.policy.least_loaded import less_loaded

_MOST_DRAWS = 64
"""Draws of one pick, where all weights are low."""


class Random(SidePolicy):
    """Anybody, in proportion to the weights."""

    def __init__(self, context: PolicyContext) -> None:
        self._random = context.random

    def choose(self, side: Side, want: Want) -> Candidate:
        """An instance drawn among all."""
        among = side.candidates
        one = among[int(self._random() * len(among))]
        for _ in range(_MOST_DRAWS):
            if one.load.weight >= 1.0 or self._random() < one.load.weight:
                break
            one = among[int(self._random() * len(among))]
        return one


class PowerOfTwo(SidePolicy):
    """Two drawn among all, of which the less loaded is taken.

    Nearly as even as comparing all, and several routers that see the same beats do not all run to
    the same instance.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._random = context.random

    def choose(self, side: Side, want: Want) -> Candidate:
        """The less loaded of two different ones, the first of them where both are alike."""
        among = side.candidates
        if len(among) == 1:
            return among[0]
        first = int(self._random() * len(among))
        second = int(self._random() * (len(among) - 1))
        one, other = among[first], among[second + (second >= first)]
        return less_loaded(side, want, one, other)
