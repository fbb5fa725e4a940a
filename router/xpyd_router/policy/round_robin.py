"""Who serves a request: pure, (snapshot, want) -> choice.

`flow` asks once per try. A policy is a class with `pick`; RoundRobin is the one that is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Literal, NamedTuple, Protocol

from xpyd_router.fleet.registry import Candidates, Group, Instance, InstanceKey, Snapshot

_MAX_TURNS = 256


class Pair(NamedTuple):
    """P prefills and sends its KV to D."""

    prefill: Instance
    decode: Instance

    @property
    def is_continuing(self) -> bool:
        """Whether the first token comes from P.

        Both must declare continuation: P, because only such a P answers with token ids and checks
        client_max_tokens; D, because only such a D goes on behind them. Otherwise nothing is added
        to either body, D samples the first token itself and P's is dropped.
        """
        return self.prefill.is_continuing and self.decode.is_continuing


class Alone(NamedTuple):
    """One instance serves the whole request; no KV moves."""

    instance: Instance


@dataclass(frozen=True)
class Want:
    """What a request needs of its instances."""

    model: str
    alone: Literal["P", "D"] | None = None
    """Where it would run alone; only on engines of ours, vLLM's cannot parse a bare id."""
    exclude: frozenset[InstanceKey] = frozenset()
    """Instances that failed it already."""
    continue_at: str | None = None
    """The client has tokens already: only continuing instances of this compatibility key may go
    on."""


class Policy(Protocol):
    """Picks instances. Must be fair by itself: the caller keeps no state about turns."""

    def pick(self, snapshot: Snapshot, want: Want) -> Pair | Alone | None:
        """A choice among the routable instances, or None where there is none."""
        ...


def nth_pair(group: Group, turn: int) -> Pair:
    """The pair of `group` at `turn`: Ps and Ds each rotate evenly, and all combinations come.

    Going round both at once meets only lcm(x, y) of the x * y pairs; so D is shifted by one after
    each such round, until gcd(x, y) rounds have met all. Where the first meets all, nothing shifts:
    1P3D goes 0, 1, 2, 0, 1, 2.
    """
    ps, ds = len(group.prefill), len(group.decode)
    shift = turn // lcm(ps, ds) % gcd(ps, ds)
    return Pair(group.prefill[turn % ps], group.decode[(turn + shift) % ds])


def _pick_pair(groups: Sequence[Group], turn: int) -> Pair:
    """Turns go to groups in proportion to their Ds; within a group its own turns are counted."""
    lap, rest = divmod(turn, sum(len(group.decode) for group in groups))
    for group in groups:
        if rest < len(group.decode):
            return nth_pair(group, lap * len(group.decode) + rest)
        rest -= len(group.decode)
    raise AssertionError("rest is below the sum of the groups' Ds")


def _without(group: Group, want: Want) -> Group:
    """`group` without the excluded, and without old engines where tokens must be continued."""

    def keep(instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
        must_continue = want.continue_at is not None
        return tuple(
            i
            for i in instances
            if i.key not in want.exclude and (i.is_continuing or not must_continue)
        )

    return Group(group.compatibility, keep(group.prefill), keep(group.decode))


def _eligible(found: Candidates, want: Want) -> list[Group]:
    groups = found.groups
    if want.exclude or want.continue_at is not None:
        groups = tuple(
            _without(group, want)
            for group in groups
            if want.continue_at is None or group.compatibility == want.continue_at
        )
    return [group for group in groups if group.prefill and group.decode]


class RoundRobin:
    """Turns over all pairs. State: one counter per set of compatibility keys that compete."""

    def __init__(self) -> None:
        self._turns: dict[tuple[str, ...], int] = {}

    def pick(self, snapshot: Snapshot, want: Want) -> Pair | Alone | None:
        """A pair, or one instance where the request runs alone or no pair exists."""
        found = snapshot.candidates(want.model)
        if want.alone is not None:
            single = [i for i in _side(found, want.alone) if i.is_continuing]
            if choice := self._pick_one(single, want, want.alone):
                return choice
        if groups := _eligible(found, want):
            turn = self._next_turn("pair", want, [group.compatibility for group in groups])
            return _pick_pair(groups, turn)
        among = found.aggregated
        if want.continue_at is not None:
            among = tuple(
                i for i in among if i.is_continuing and i.beat.compatibility == want.continue_at
            )
        return self._pick_one(among, want, "A")

    def _pick_one(self, among: Sequence[Instance], want: Want, kind: str) -> Alone | None:
        left = [instance for instance in among if instance.key not in want.exclude]
        if not left:
            return None
        keys = sorted({instance.beat.compatibility for instance in left})
        return Alone(left[self._next_turn(kind, want, keys) % len(left)])

    def _next_turn(self, kind: str, want: Want, keys: Sequence[str]) -> int:
        # Second tries have their own turns: in the common ones they would shift them so that with
        # two instances every first try met the same, failing one.
        key = (kind, "again" if want.exclude else "first", *keys)
        turn = self._turns.pop(key, 0)
        self._turns[key] = turn + 1  # the order of the dict is the order of use
        if len(self._turns) > _MAX_TURNS:
            del self._turns[next(iter(self._turns))]
        return turn


def _side(found: Candidates, kind: Literal["P", "D"]) -> list[Instance]:
    return [i for group in found.groups for i in (group.prefill if kind == "P" else group.decode)]
