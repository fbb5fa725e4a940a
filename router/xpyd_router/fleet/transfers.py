"""Transfers of KV that failed: is it P's fault or D's? Pure.

D reports a failed transfer, but P may be the one that is gone, or the path between the two. One
pair's failure therefore says nothing about either. Who fails with a second partner within
WINDOW_S is what these failures have in common: for it they count, as any fault of its own does.
"""

from __future__ import annotations

from xpyd_router.fleet.breaker import WINDOW_S
from xpyd_router.fleet.registry import InstanceKey


class Transfers:
    """See the module. `now` is seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._partners: dict[InstanceKey, dict[InstanceKey, float]] = {}
        """Of each instance the last two with which it failed, and when."""

    def failed(self, prefill: InstanceKey, decode: InstanceKey, now: float) -> list[InstanceKey]:
        """A transfer between the two failed; for whom of them it counts."""
        pairs = ((prefill, decode), (decode, prefill))
        return [key for key, partner in pairs if self._has_several(key, partner, now)]

    def forget(self, key: InstanceKey) -> None:
        """The instance left the fleet."""
        self._partners.pop(key, None)

    def _has_several(self, key: InstanceKey, partner: InstanceKey, now: float) -> bool:
        partners = self._partners.setdefault(key, {})
        partners.pop(partner, None)
        partners[partner] = now
        if len(partners) > 2:
            del partners[next(iter(partners))]
        return min(partners.values()) > now - WINDOW_S and len(partners) == 2
