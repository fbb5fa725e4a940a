"""Says loudly, and not for each request, that prompts are computed on D whose KV was to come.

Answers stay right while that goes on, so nobody would notice that P's work is thrown away. Each
request has a line of its own at INFO. Owned by the engine's core; reads no clock.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)

EVERY_S = 30.0
# No fault of the transfer: the scores of a prompt need its forward; blocks ran out later.
_USUAL = frozenset({"prompt_logprobs", "preempted"})


class RecomputeLog:
    """At most one warning in EVERY_S, with all that came since the last one."""

    def __init__(self) -> None:
        self._said: dict[str, int] = {}
        self._quiet_until = float("-inf")

    def look(self, requests: Mapping[str, int], tokens: Mapping[str, int], now: float) -> None:
        """The counters of recomputed requests and their tokens, by reason, as of now."""
        if now < self._quiet_until or requests == self._said:
            return
        new = {
            reason: count - self._said.get(reason, 0)
            for reason, count in requests.items()
            if reason not in _USUAL and count > self._said.get(reason, 0)
        }
        self._said = dict(requests)
        if not new:
            return
        self._quiet_until = now + EVERY_S
        logger.warning(
            "%d prompts are computed here whose KV was to come (%s); %d tokens since the start",
            sum(new.values()),
            ", ".join(f"{reason} {count}" for reason, count in sorted(new.items())),
            sum(count for reason, count in tokens.items() if reason not in _USUAL),
        )
