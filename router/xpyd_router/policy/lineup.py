"""From a snapshot to the sides that policies choose on: who may work with whom. Pure.

Built once per snapshot and model; only a second try, which excludes somebody, builds its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.registry import Candidates, Instance, InstanceKey
from xpyd_router.policy.base import Candidate, Side, SideKind, Want


class PairGroup(NamedTuple):
    """Any P of it may send KV to any D of it; neither side is empty."""

    compatibility: str
    prefill: Side
    decode: Side


class Lineup(NamedTuple):
    """Who may serve one model."""

    groups: tuple[PairGroup, ...]
    decode: Side
    """The Ds of all groups."""
    alone_on_prefill: Side
    """Ps that can serve a whole request, also those without a D."""
    alone_on_decode: Side
    """Ds that can serve a whole request, also those without a P."""
    aggregated: Side

    def of_decode(self, chosen: Candidate) -> PairGroup:
        """The group that D is in."""
        if len(self.groups) == 1:
            return self.groups[0]
        compatibility = chosen.instance.beat.compatibility
        return next(group for group in self.groups if group.compatibility == compatibility)


def _side(kind: SideKind, candidates: Iterable[Candidate], attempt: str = "") -> Side:
    members = tuple(candidates)
    keys = sorted({one.instance.beat.compatibility for one in members})
    return Side(kind, members, (kind, attempt, *keys))


def build_lineup(found: Candidates, loads: LoadTable, want: Want | None = None) -> Lineup:
    """The sides of `found`; with `want`, without those whom it excludes, and without old engines
    and other compatibility keys where tokens must be continued.
    """
    exclude: frozenset[InstanceKey] = want.exclude if want else frozenset()
    continue_at = want.continue_at if want else None
    # Second tries have their own turns: in the common ones they would shift them so that with two
    # instances every first try met the same, failing one.
    attempt = "again" if exclude else ""

    def seats(
        instances: Iterable[Instance], keep: Callable[[Instance], bool] = lambda _: True
    ) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(one, loads.of(one.key))
            for one in instances
            if one.key not in exclude and keep(one)
        )

    def may_go_on(one: Instance) -> bool:
        if continue_at is None:
            return True
        return one.is_continuing and one.beat.compatibility == continue_at

    groups: list[PairGroup] = []
    for group in found.groups:
        ps, ds = seats(group.prefill, may_go_on), seats(group.decode, may_go_on)
        if ps and ds:
            sides = (_side("P", ps, attempt), _side("D", ds, attempt))
            groups.append(PairGroup(group.compatibility, *sides))
    ps = seats((one for g in found.groups for one in g.prefill), lambda one: one.is_continuing)
    ds = seats(
        (one for g in found.groups for one in g.decode),
        lambda one: one.is_continuing and may_go_on(one),
    )
    return Lineup(
        groups=tuple(groups),
        decode=_side("D", (one for g in groups for one in g.decode.candidates), attempt),
        alone_on_prefill=_side("P", ps, f"{attempt} alone"),
        alone_on_decode=_side("D", ds, f"{attempt} alone"),
        aggregated=_side("A", seats(found.aggregated, may_go_on), attempt),
    )
