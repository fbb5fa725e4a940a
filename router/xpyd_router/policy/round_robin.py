"""RoundRobin: each instance in turn. Pure.

An instance with a weight below 1 lets its turn pass, but for that share of them.
"""

from __future__ import annotations

from math import gcd, lcm

from xpyd_router.fleet.instances import InstanceKey
from xpyd_router.fleet.loads import Load
from xpyd_router.policy.base import (
    Candidate,
    PairGroup,
    PolicyContext,
    Side,
    SidePolicy,
    Sides,
    Want,
)

_MAX_ROTAS = 256
_MOST_PASSES = 64
"""Turns that may pass in one pick, where all weights are low."""


class _Turns:
    """Counts turns: a counter for each competition, and what light instances have saved up."""

    def __init__(self, first_turn: int) -> None:
        self._first_turn = first_turn
        self._turns: dict[tuple[str, ...], int] = {}
        self._credits: dict[InstanceKey, float] = {}

    def next(self, rota: tuple[str, ...]) -> int:
        turn = self._turns.pop(rota, self._first_turn)
        self._turns[rota] = turn + 1  # the order of the dict is the order of use
        if len(self._turns) > _MAX_ROTAS:
            del self._turns[next(iter(self._turns))]
        return turn

    def takes(self, load: Load) -> bool:
        """Whether this turn is one that `load` takes."""
        if load.weight >= 1.0:
            return True
        saved = self._credits.get(load.key, 0.0) + load.weight
        takes = saved >= 1.0
        self._credits[load.key] = saved - 1.0 if takes else saved
        return takes

    def forget(self, key: InstanceKey) -> None:
        self._credits.pop(key, None)


class RoundRobin(SidePolicy):
    """Turns over the candidates of one side."""

    def __init__(self, context: PolicyContext) -> None:
        self.first_turn = context.first_turn
        self._turns = _Turns(context.first_turn)

    def choose(self, side: Side, want: Want) -> Candidate:
        """The next in turn."""
        among = side.candidates
        one = among[self._turns.next(side.rota) % len(among)]
        for _ in range(_MOST_PASSES):
            if self._turns.takes(one.load):
                break
            one = among[self._turns.next(side.rota) % len(among)]
        return one

    def forget(self, key: InstanceKey) -> None:
        """Drop what it saved up."""
        self._turns.forget(key)


class PairRotation:
    """Turns over all pairs, for two sides that both go by turns."""

    def __init__(self, first_turn: int = 0) -> None:
        self._turns = _Turns(first_turn)

    def next(self, sides: Sides) -> tuple[Candidate, Candidate]:
        """The next P and D; `sides` has at least one group."""
        prefill, decode = self._at(sides)
        for _ in range(_MOST_PASSES):
            if self._turns.takes(decode.load) and self._turns.takes(prefill.load):
                break
            prefill, decode = self._at(sides)
        return prefill, decode

    def forget(self, key: InstanceKey) -> None:
        """Drop what it saved up."""
        self._turns.forget(key)

    def _at(self, sides: Sides) -> tuple[Candidate, Candidate]:
        """Turns go to groups in proportion to their Ds; within a group its own are counted."""
        turn = self._turns.next(sides.decode.rota)
        lap, rest = divmod(turn, len(sides.decode.candidates))
        for group in sides.groups:
            ds = len(group.decode.candidates)
            if rest < ds:
                return nth_pair(group, lap * ds + rest)
            rest -= ds
        raise AssertionError("rest is below the sum of the groups' Ds")


def nth_pair(group: PairGroup, turn: int) -> tuple[Candidate, Candidate]:
    """The pair of `group` at `turn`: Ps and Ds each rotate evenly, and all combinations come.

    Going round both at once meets only lcm(x, y) of the x * y pairs; so D is shifted by one after
    each such round, until gcd(x, y) rounds have met all. Where the first meets all, nothing shifts:
    1P3D goes 0, 1, 2, 0, 1, 2.
    """
    prefill, decode = group.prefill.candidates, group.decode.candidates
    ps, ds = len(prefill), len(decode)
    shift = turn // lcm(ps, ds) % gcd(ps, ds)
    return prefill[turn % ps], decode[(turn + shift) % ds]
