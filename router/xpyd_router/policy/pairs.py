"""PairPolicy: pairs by group, or one instance where no KV should move. Pure.

From a snapshot it builds the sides that policies choose on, once per snapshot and model; a second
attempt, which excludes instances, builds its own. D is chosen first, among the Ds of all groups: a
group with more Ds gets more requests. Then P, among the Ps of that D's group. Where both sides go
by turns, PairRotation lets all pairs meet. `build_policy` finds policies by name, ours and those of
other packages, in the entry-point group `xpyd.router.policies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import NamedTuple

from xpyd_core.errors import UserError
from xpyd_router.fleet.instances import (
    Instance,
    InstanceKey,
    ModelInstances,
    Snapshot,
    each_once,
)
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.policy.base import (
    Candidate,
    PairGroup,
    PolicyContext,
    Side,
    SideFactory,
    SideKind,
    SidePolicy,
    Sides,
    Want,
)
from xpyd_router.policy.canary import OTHER, Canary, Share, Shares
from xpyd_router.policy.round_robin import PairRotation, RoundRobin


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


def _side(
    kind: SideKind, candidates: Iterable[Candidate], attempt: str = "", group: str | None = None
) -> Side:
    members = tuple(candidates)
    keys = [group] if group is not None else sorted({one.instance.pairing for one in members})
    return Side(kind, members, (kind, attempt, *keys))


def build_sides(
    found: ModelInstances, loads: LoadTable, want: Want | None = None, share: Share = ""
) -> Sides:
    """The sides of `found`; with `want`, without the instances that it excludes, and without old
    those that cannot go on where tokens must be continued. `share` has turns of its own.
    """
    exclude: frozenset[InstanceKey] = want.exclude if want else frozenset()
    continue_at = want.continue_at if want else None
    # Second tries have their own turns: in the common ones they would shift them so that with two
    # instances every first try met the same, failing one.
    attempt = f"{share} again" if exclude else share

    def seats(
        instances: Iterable[Instance], keep: Callable[[Instance], bool] = lambda _: True
    ) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(one, loads.of(one.place))
            for one in instances
            if one.place not in exclude and keep(one)
        )

    def may_go_on(one: Instance) -> bool:
        return continue_at is None or one.goes_on_as == continue_at

    def may_go_on_alone(one: Instance) -> bool:
        return one.serves_alone and (continue_at is None or (one.is_continuing and may_go_on(one)))

    groups: list[PairGroup] = []
    for group in found.groups:
        ps, ds = seats(group.prefill, may_go_on), seats(group.decode, may_go_on)
        if ps and ds:
            sides = (_side("P", ps, attempt, group.name), _side("D", ds, attempt, group.name))
            groups.append(PairGroup(group.name, *sides))
    all_ps = each_once(one for g in found.groups for one in g.prefill)
    ps = seats(all_ps, may_go_on_alone)
    ds = seats((one for g in found.groups for one in g.decode), may_go_on_alone)
    by_decode: dict[InstanceKey, PairGroup] = {}
    if len(groups) > 1:
        by_decode = {d.instance.place: g for g in groups for d in g.decode.candidates}
    return Sides(
        groups=tuple(groups),
        by_decode=by_decode,
        decode=_side("D", (one for g in groups for one in g.decode.candidates), attempt),
        alone_on_prefill=_side("P", ps, f"{attempt} alone"),
        alone_on_decode=_side("D", ds, f"{attempt} alone"),
        aggregated=_side("A", seats(found.aggregated, may_go_on), attempt),
    )


class PairPolicy:
    """See the module. `aggregated` chooses among instances that are neither P nor D. Prompts of
    which D would have to compute fewer than `local_prefill_tokens` run on D alone.
    """

    def __init__(
        self,
        *,
        prefill: SidePolicy,
        decode: SidePolicy,
        aggregated: SidePolicy,
        local_prefill_tokens: int = 0,
        loads: LoadTable,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._aggregated = aggregated
        self._local_prefill_tokens = local_prefill_tokens
        self._loads = loads
        self._policies = {"P": prefill, "D": decode, "A": aggregated}
        self.needs_session = any(side.needs_session for side in self._policies.values())
        self.needs_marks = any(side.needs_marks for side in self._policies.values())
        self.needs_paces = any(side.needs_paces for side in self._policies.values())
        self._learns = any(map(_learns, self._policies.values()))
        self._rotation = None
        if isinstance(prefill, RoundRobin) and isinstance(decode, RoundRobin):
            self._rotation = PairRotation(prefill.first_turn)
        self._snapshot: Snapshot | None = None
        self._sides_by_model: dict[tuple[str, Share], Sides] = {}
        self._canary: Canary | None = None
        self._shares = Shares()

    @property
    def canary(self) -> Canary | None:
        """A revision on trial, which gets a share of the new requests."""
        return self._canary

    @canary.setter
    def canary(self, canary: Canary | None) -> None:
        self._canary = canary
        self._snapshot = None

    def share_of(self, choice: Pair | Alone) -> Share:
        """The side that serves a request which has this choice."""
        canary = self._canary
        if canary is None:
            return ""
        return "new" if any(map(canary.is_new, choice)) else "old"

    def pick(self, snapshot: Snapshot, want: Want) -> Pair | Alone | None:
        """A pair, or one instance where the request runs alone or no pair exists."""
        if self._canary is None:
            return self._pick(snapshot, want, "")
        first = want.share or self._draw(self._canary, snapshot, want)
        # At last any pair: it may be one of both, where the pairing allows that.
        for share in (first, OTHER[first], ""):
            if choice := self._pick(snapshot, want, share):
                return choice
        return None

    def _draw(self, canary: Canary, snapshot: Snapshot, want: Want) -> Share:
        """The side of a request that has none yet. What a session has is on the old one; a side
        that could not serve it takes no turn."""
        if want.session and self.needs_session:
            return "old"
        new = self._sides_of(snapshot, want, "new")
        return self._shares.draw(canary) if new.groups or new.aggregated.candidates else "old"

    def _pick(self, snapshot: Snapshot, want: Want, share: Share) -> Pair | Alone | None:
        sides = self._sides_of(snapshot, want, share)
        if want.alone is not None and (choice := self._alone(sides, want)):
            return choice
        if sides.groups:
            return self._pair(sides, want)
        return _single(self._aggregated, sides.aggregated, want)

    def placed(self, choice: Pair | Alone, want: Want) -> int:
        """The request goes there. Returns about how many tokens of its prompt are to be computed:
        those that the instance's cache is not known to have.
        """
        if not self._learns:
            return want.prompt_tokens
        first = choice[0]  # the one that computes the prompt
        cached = self._policies[first.beat.type].cached_tokens(first.place, want)
        for instance in choice:
            self._policies[instance.beat.type].placed(instance, want)
        return max(want.prompt_tokens - cached, 1)

    def forget(self, key: InstanceKey) -> None:
        """The instance left the fleet for good."""
        for side in self._policies.values():
            side.forget(key)
        if self._rotation:
            self._rotation.forget(key)

    def _sides_of(self, snapshot: Snapshot, want: Want, share: Share) -> Sides:
        if want.exclude or want.continue_at is not None:
            found = self._found(snapshot, want, share)
            return build_sides(found, self._loads, want, share)
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._sides_by_model.clear()
        # One entry for all names that no instance gives: clients may ask for any number of them.
        name = want.model if want.model in snapshot.by_model else ""
        sides = self._sides_by_model.get((name, share))
        if sides is None:
            found = self._found(snapshot, want, share)
            sides = build_sides(found, self._loads, share=share)
            self._sides_by_model[name, share] = sides
        return sides

    def _found(self, snapshot: Snapshot, want: Want, share: Share) -> ModelInstances:
        found = snapshot.of_model(want.model)
        return found if self._canary is None else self._canary.side(found, share)

    def _alone(self, sides: Sides, want: Want) -> Alone | None:
        if want.alone == "P":
            return _single(self._prefill, sides.alone_on_prefill, want)
        return _single(self._decode, sides.alone_on_decode, want)

    def _pair(self, sides: Sides, want: Want) -> Pair | Alone:
        # Short prompts have their own turns: in those of pairs they would shift the long ones'.
        is_short = 0 < want.prompt_tokens < self._local_prefill_tokens
        if self._rotation and not is_short:
            prefill, decode = self._rotation.next(sides)
            return Pair(prefill.instance, decode.instance)
        decode = self._decode.choose(sides.decode, want)
        if self._local_prefill_tokens and self._stays(decode.instance, want):
            return Alone(decode.instance)
        prefill = self._prefill.choose(_group_of(decode, sides).prefill, want)
        return Pair(prefill.instance, decode.instance)

    def _stays(self, decode: Instance, want: Want) -> bool:
        """Whether D computes the prompt itself. vLLM's cannot parse the id of such a request."""
        if not decode.serves_alone or not want.prompt_tokens:
            return False
        cached = self._decode.cached_tokens(decode.place, want)
        return want.prompt_tokens - cached < self._local_prefill_tokens


def _group_of(decode: Candidate, sides: Sides) -> PairGroup:
    """The group of the chosen D."""
    if len(sides.groups) == 1:
        return sides.groups[0]
    return sides.by_decode[decode.instance.place]


def _learns(side: SidePolicy) -> bool:
    """Whether `placed` is anything to it: calls that do nothing are left out."""
    kind = type(side)
    is_deaf = kind.placed is SidePolicy.placed and kind.cached_tokens is SidePolicy.cached_tokens
    return not is_deaf


def _single(policy: SidePolicy, side: Side, want: Want) -> Alone | None:
    return Alone(policy.choose(side, want).instance) if side.candidates else None


GROUP = "xpyd.router.policies"


@cache
def installed() -> Mapping[str, EntryPoint]:
    """The policies of all installed packages by name. Looked up once for a process: the metadata
    of every package is read for it."""
    return MappingProxyType({entry.name: entry for entry in entry_points(group=GROUP)})


def build_policy(
    policy: str,
    *,
    prefill_policy: str | None = None,
    decode_policy: str | None = None,
    loads: LoadTable,
    random: Callable[[], float],
    local_prefill_tokens: int = 0,
    first_turn: int = 0,
    known: Mapping[str, EntryPoint] | None = None,
) -> PairPolicy:
    """The policy of these names in the group; a side without one is as `policy`. UserError for a
    name that no package has."""
    entries = installed() if known is None else known

    def make(kind: SideKind, flag: str, name: str) -> SidePolicy:
        if name not in entries:
            raise UserError(f"{flag}: no policy {name!r}; there are {', '.join(sorted(entries))}")
        factory: SideFactory = entries[name].load()
        return factory(PolicyContext(kind, loads, random, first_turn))

    aggregated = make("A", "--policy", policy)
    return PairPolicy(
        prefill=make("P", "--prefill-policy", prefill_policy or policy),
        decode=make("D", "--decode-policy", decode_policy or policy),
        aggregated=aggregated,
        local_prefill_tokens=local_prefill_tokens,
        loads=loads,
    )
