"""SessionAffinity: a session's requests go to one instance, whose cache has its conversation. Pure.

Rendezvous hashing: every instance has a rank for every session, and the highest one has it. So all
routers choose alike without talking, and when an instance comes or goes only its own share of the
sessions moves.
"""

from __future__ import annotations

from hashlib import blake2b
from math import inf

from xpyd_router.fleet.instances import InstanceKey
from xpyd_router.policy.base import Candidate, PolicyContext, Side, SidePolicy, Want
from xpyd_router.policy.least_loaded import LeastLoaded

_MASK = 2**64 - 1
_MIX = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
"""Odd multipliers of known mixers (Weyl's golden ratio; Stafford's search)."""
_MOST_OF_LEAST = 2.0
"""An instance with more than this many times the work of the least loaded one is passed over..."""
_SLACK = {"P": 8192.0, "D": 8.0, "A": 8.0}
"""...but not for less than this more: prompt tokens (a second or less of work), or requests."""


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def rank(seed: int, session: int) -> int:
    """The place of an instance in a session's order: 64 bits, evenly distributed."""
    mixed = (seed ^ session) * _MIX[0] & _MASK
    return (mixed ^ mixed >> 32) * _MIX[1] & _MASK


class SessionAffinity(SidePolicy):
    """The session's own instance; the second of its order where the first has too much to do, and
    the least loaded where that one has, too. Without a session the least loaded.
    """

    needs_session = True

    def __init__(self, context: PolicyContext) -> None:
        self._others = LeastLoaded(context)
        self._seeds: dict[tuple[str, int], int] = {}
        """By HTTP address and replica."""

    def choose(self, side: Side, want: Want) -> Candidate:
        """See the class."""
        if not want.session:
            return self._others.choose(side, want)
        session = _digest(want.session)
        is_prefill = side.kind == "P"
        first: Candidate | None = None
        second: Candidate | None = None
        first_rank = second_rank = -1
        least = inf
        for one in side.candidates:
            load = one.load
            place = rank(self._seed(one.instance.place), session)
            # While it comes back after faults it has only so large a part of its sessions, each
            # with all its requests. It takes no others: that it is idle moves no session.
            if load.weight < 1.0 and (place & 0xFFFFFFFF) / 2**32 >= load.weight:
                continue
            cost = load.queued_tokens * load.scale if is_prefill else load.decode_cost
            least = min(cost, least)
            if place > first_rank:
                second, second_rank = first, first_rank
                first, first_rank = one, place
            elif place > second_rank:
                second, second_rank = one, place
        most = _MOST_OF_LEAST * least + _SLACK[side.kind]
        for one in (first, second):
            if one is not None:
                load = one.load
                cost = load.queued_tokens * load.scale if is_prefill else load.decode_cost
                if cost <= most:
                    return one
        return self._others.choose(side, want)

    def forget(self, key: InstanceKey) -> None:
        """Drop its seed."""
        self._seeds.pop((key.http, key.replica), None)

    def _seed(self, key: InstanceKey) -> int:
        """The hash is of the address: an instance that restarts has its sessions again."""
        place = key.http, key.replica
        seed = self._seeds.get(place)
        if seed is None:
            name = f"{key.http}/{key.replica}" if key.replica else key.http
            seed = self._seeds[place] = _digest(name)
        return seed
