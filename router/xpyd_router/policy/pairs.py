"""The Policy: pairs by compatibility, one instance where no KV should move. Pure.

D is chosen first, among the Ds of all groups: a group with more Ds gets more requests. Then P,
among the Ps of that D's group. Where both sides go by turns, PairRotation lets all pairs meet.
"""

from __future__ import annotations

from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.registry import Instance, InstanceKey, Snapshot
from xpyd_router.policy.base import Alone, Pair, Side, SidePolicy, Want
from xpyd_router.policy.lineup import Lineup, build_lineup
from xpyd_router.policy.round_robin import PairRotation, RoundRobin


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
        self._sides = {"P": prefill, "D": decode, "A": aggregated}
        self.needs_session = any(side.needs_session for side in self._sides.values())
        self.needs_marks = any(side.needs_marks for side in self._sides.values())
        self.needs_paces = any(side.needs_paces for side in self._sides.values())
        self._learns = any(map(_learns, self._sides.values()))
        self._rotation = None
        if isinstance(prefill, RoundRobin) and isinstance(decode, RoundRobin):
            self._rotation = PairRotation(prefill.first_turn)
        self._snapshot: Snapshot | None = None
        self._lineups: dict[str, Lineup] = {}

    def pick(self, snapshot: Snapshot, want: Want) -> Pair | Alone | None:
        """A pair, or one instance where the request runs alone or no pair exists."""
        lineup = self._lineup(snapshot, want)
        if want.alone is not None and (choice := self._alone(lineup, want)):
            return choice
        if lineup.groups:
            return self._pair(lineup, want)
        return _single(self._aggregated, lineup.aggregated, want)

    def placed(self, choice: Pair | Alone, want: Want) -> int:
        """Tell the policies of both; see Policy."""
        if not self._learns:
            return want.prompt_tokens
        first = choice[0]  # who computes the prompt
        cached = self._sides[first.beat.type].cached_tokens(first.key, want)
        for instance in choice:
            self._sides[instance.beat.type].placed(instance, want)
        return max(want.prompt_tokens - cached, 1)

    def forget(self, key: InstanceKey) -> None:
        """The instance left the fleet for good."""
        for side in self._sides.values():
            side.forget(key)
        if self._rotation:
            self._rotation.forget(key)

    def _lineup(self, snapshot: Snapshot, want: Want) -> Lineup:
        if want.exclude or want.continue_at is not None:
            return build_lineup(snapshot.candidates(want.model), self._loads, want)
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._lineups.clear()
        # One entry for all names that no instance gives: clients may ask for any number of them.
        name = want.model if want.model in snapshot.by_model else ""
        lineup = self._lineups.get(name)
        if lineup is None:
            lineup = build_lineup(snapshot.candidates(want.model), self._loads)
            self._lineups[name] = lineup
        return lineup

    def _alone(self, lineup: Lineup, want: Want) -> Alone | None:
        if want.alone == "P":
            return _single(self._prefill, lineup.alone_on_prefill, want)
        return _single(self._decode, lineup.alone_on_decode, want)

    def _pair(self, lineup: Lineup, want: Want) -> Pair | Alone:
        # Short prompts have their own turns: in those of pairs they would shift the long ones'.
        is_short = 0 < want.prompt_tokens < self._local_prefill_tokens
        if self._rotation and not is_short:
            return self._rotation.next(lineup)
        decode = self._decode.choose(lineup.decode, want)
        if self._local_prefill_tokens and self._stays(decode.instance, want):
            return Alone(decode.instance)
        prefill = self._prefill.choose(lineup.of_decode(decode).prefill, want)
        return Pair(prefill.instance, decode.instance)

    def _stays(self, decode: Instance, want: Want) -> bool:
        """Whether D computes the prompt itself. vLLM's cannot parse the id of such a request."""
        if not decode.is_continuing or not want.prompt_tokens:
            return False
        cached = self._decode.cached_tokens(decode.key, want)
        return want.prompt_tokens - cached < self._local_prefill_tokens


def _learns(side: SidePolicy) -> bool:
    """Whether `placed` is anything to it: calls that do nothing are left out."""
    kind = type(side)
    is_deaf = kind.placed is SidePolicy.placed and kind.cached_tokens is SidePolicy.cached_tokens
    return not is_deaf


def _single(policy: SidePolicy, side: Side, want: Want) -> Alone | None:
    return Alone(policy.choose(side, want).instance) if side.candidates else None
