"""LeastLoaded: the instance that would finish its work and this request first. Pure.

On P that is counted in prompt tokens that wait, on D and aggregated instances in requests of the
batch; both count for more where KV blocks run out (`fleet.loads`).
"""

from __future__ import annotations

from xpyd_router.policy.base import Candidate, PolicyContext, Side, SidePolicy, Want


def less_loaded(side: Side, want: Want, one: Candidate, other: Candidate) -> Candidate:
    """The one of less cost, `one` where both are alike."""
    if side.kind == "P":
        tokens, a, b = want.prompt_tokens, one.load, other.load
        is_less = (b.queued_tokens + tokens) * b.scale < (a.queued_tokens + tokens) * a.scale
    else:
        is_less = other.load.decode_cost < one.load.decode_cost
    return other if is_less else one


def least_loaded(side: Side, want: Want, start: int) -> Candidate:
    """The one of the least cost; of equals the first from `start` on, round the end."""
    among = side.candidates
    best = among[start]
    places = range(start + 1 - len(among), start)  # below 0 counts from the end
    if side.kind == "P":
        tokens = want.prompt_tokens
        least = (best.load.queued_tokens + tokens) * best.load.scale
        for place in places:
            load = among[place].load
            cost = (load.queued_tokens + tokens) * load.scale
            if cost < least:
                best, least = among[place], cost
        return best
    least = best.load.decode_cost
    for place in places:
        cost = among[place].load.decode_cost
        if cost < least:
            best, least = among[place], cost
    return best


class LeastLoaded(SidePolicy):
    """The least loaded; equals take turns, so that an idle fleet is used evenly."""

    def __init__(self, context: PolicyContext) -> None:
        # Second tries have their own turns, else of two idle instances every first try would meet
        # the same, failing one.
        self._turns = [context.first_turn, context.first_turn]

    def choose(self, side: Side, want: Want) -> Candidate:
        """The one of the least cost."""
        again = bool(want.exclude)
        self._turns[again] += 1
        return least_loaded(side, want, self._turns[again] % len(side.candidates))
