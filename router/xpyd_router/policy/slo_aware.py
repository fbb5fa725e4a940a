"""SloAware: an instance expected to meet the request's objectives, by its calls so far. Pure.

`Load.pace` gives each candidate's expected time to the first token (P) and between tokens (D); an
aggregated instance has both. Among those that are expected to meet the objectives the request goes
to the one that has used least of its room: the load it has, as a part of the load with which it
would just meet them. So equal instances share evenly, a slow one gets as much as it can bear, and
all keep an equal reserve for a burst. Filling one up to its limit first would keep others free, but
makes every answer as slow as allowed, and a prediction that is a little too good a violation.
"""

from __future__ import annotations

from math import inf

from xpyd_router.fleet.instances import Instance, InstanceKey
from xpyd_router.fleet.loads import Load
from xpyd_router.policy.base import Candidate, PolicyContext, Side, SideKind, SidePolicy, Want
from xpyd_router.policy.least_loaded import LeastLoaded
from xpyd_router.policy.prefix_aware import PrefixAware

_MET, _MISSED, _FULL = range(3)
_LEAST_ROOM = 0.1
"""Free part of the KV cache below which requests may have to wait for blocks, or be preempted:
nothing that was observed before says how long."""
_TRY_AGAIN = 50
"""An idle instance that a side's last 50 requests per instance went past gets the next one: what
made it slow may be over. So at most a fiftieth of all requests is spent on that."""

_Cost = tuple[int, float, float]
"""Compared in this order: _MET, _MISSED or _FULL; the part of the room that is used, or how late it
would be; how long the answer takes."""


class SloAware(SidePolicy):
    """See the module. Where no instance meets the objectives, the one that would be late by the
    least; without objectives, the fastest. An unknown instance gets one request at a time until it
    is known; where all are, the least loaded is taken.
    """

    needs_marks = True
    needs_paces = True

    def __init__(self, context: PolicyContext) -> None:
        self._others = LeastLoaded(context)
        self._prefixes = PrefixAware(context)
        """Used only for what it knows of caches."""
        self._placed = 0
        self._placed_at: dict[InstanceKey, int] = {}
        """How many requests had been placed when the instance got its last one."""
        self._turns = [0, 0]
        """The turns of first and of second tries (see LeastLoaded)."""

    def choose(self, side: Side, want: Want) -> Candidate:
        """See the class."""
        among, kind = side.candidates, side.kind
        again = bool(want.exclude)
        self._turns[again] += 1
        start = self._turns[again] % len(among)
        # A second try has lost time already.
        oldest = -1 if again else self._placed - _TRY_AGAIN * len(among)
        best: Candidate | None = None
        least: _Cost = (_FULL, inf, inf)
        for place in range(start - len(among), start):  # below 0 counts from the end
            one = among[place]
            cost = self._cost(kind, one, want)
            is_idle = one.load.active == 0
            if is_idle and (cost is None or self._placed_at.get(one.instance.place, 0) < oldest):
                return one
            if cost is not None and (best is None or cost < least):
                best, least = one, cost
        return best or self._others.choose(side, want)

    def placed(self, instance: Instance, want: Want) -> None:
        """The instance is tried, and its cache will have the prompt."""
        self._placed += 1
        self._placed_at[instance.place] = self._placed
        self._prefixes.placed(instance, want)

    def cached_tokens(self, key: InstanceKey, want: Want) -> int:
        """See SidePolicy; as in PrefixAware."""
        return self._prefixes.cached_tokens(key, want)

    def forget(self, key: InstanceKey) -> None:
        """Drop what is known of it."""
        self._placed_at.pop(key, None)
        self._prefixes.forget(key)

    def _cost(self, kind: SideKind, one: Candidate, want: Want) -> _Cost | None:
        """None where the instance is unknown."""
        load = one.load
        weight, (ttft_s, itl_s) = load.weight, want.slo
        used = late_s = total_s = 0.0
        if kind != "D":
            first = load.pace.first
            if not first.is_known:
                return None
            tokens = max(want.prompt_tokens - self.cached_tokens(one.instance.place, want), 1)
            # A low weight means a load that the instance is not to have yet.
            total_s = first.at(load.queued_tokens + tokens) / weight
            if ttft_s is not None:
                used = _part(total_s, first.at(1 + tokens), ttft_s)
                late_s = max(total_s - ttft_s, 0.0)
        if kind != "P":
            gap = load.pace.gap
            if not gap.is_known:
                return None
            gap_s, output_tokens = gap.at(load.active + 1) / weight, max(want.output_tokens, 1)
            total_s += gap_s * output_tokens
            if itl_s is not None:
                used = max(used, _part(gap_s, gap.at(1), itl_s))
                late_s += max(gap_s - itl_s, 0.0) * output_tokens
        if _room(load) < _LEAST_ROOM:
            return _FULL, late_s, total_s
        return (_MISSED, late_s, total_s) if late_s > 0.0 else (_MET, used, total_s)


def _part(expected_s: float, idle_s: float, objective_s: float) -> float:
    """The part of the time between idle and the objective that is used up."""
    room_s = objective_s - idle_s
    return (expected_s - idle_s) / room_s if room_s > 0.0 else inf


def _room(load: Load) -> float:
    """The free part of its KV blocks."""
    return 1.0 / (load.scale * load.weight)
