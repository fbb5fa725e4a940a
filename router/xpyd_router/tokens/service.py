"""Tokens of a request: an estimate at once, or the engine's own count and block hashes.

Policies and limits call it; a client never sees an error of it. Its owner runs `run` as a task and
calls `close` at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from xpyd_router.fleet.registry import Candidates
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics
from xpyd_router.requests.bodies import Ask
from xpyd_router.tokens.keeper import Fetch, Keeper
from xpyd_router.tokens.process import ChildLimits, Uncounted
from xpyd_router.tokens.prompts import estimate_tokens


class Prompted(NamedTuple):
    """A request's prompts.

    `tokens`: of all prompts together. `hashes`: of the first prompt's full blocks, as the prefix
    cache of the engine has them that gave the files (and with its block size); at most 2,048, and
    none where there is no exact count or no prefix cache. `block_tokens`: tokens of each of them.
    """

    tokens: int
    hashes: tuple[bytes, ...]
    is_exact: bool
    block_tokens: int = 0


class Tokens:
    """One per router process. `clock` is monotonic seconds."""

    def __init__(
        self,
        *,
        fleet: FleetView,
        fetch: Fetch,
        metrics: RouterMetrics,
        clock: Callable[[], float],
        limits: ChildLimits | None = None,
    ) -> None:
        self._fleet = fleet
        self._keeper = Keeper(
            fleet=fleet,
            fetch=fetch,
            metrics=metrics,
            limits=limits or ChildLimits(),
            clock=clock,
        )
        results = ("exact", "unknown", "long", "busy", "late", "refused", "failed")
        self._counted = {name: metrics.token_counts.labels(name) for name in results}

    async def run(self) -> None:
        """Follow the fleet for ever."""
        await self._keeper.run()

    async def close(self) -> None:
        """End what `run` started."""
        await self._keeper.close()

    @staticmethod
    def estimate(ask: Ask) -> int:
        """About so many tokens: a quarter of the prompts' bytes, at least 1."""
        return estimate_tokens(ask.fields, is_chat=ask.is_chat)

    async def count(self, ask: Ask) -> Prompted:
        """The exact count, in bounded time; where there is none, the estimate. Never raises."""
        try:
            for key in _keys(self._fleet.snapshot.candidates(ask.model)):
                child = self._keeper.child_with(key)
                if child is not None:
                    tokens, hashes = await child.count(key, ask.raw, is_chat=ask.is_chat)
                    self._counted["exact"].inc()
                    return Prompted(tokens, hashes, True, child.block_tokens[key])
            self._counted["unknown"].inc()
        except Uncounted as uncounted:
            self._counted[uncounted.reason].inc()
        return Prompted(self.estimate(ask), (), False)


def _keys(candidates: Candidates) -> Iterator[str]:
    """Compatibility keys of those who may serve the request."""
    for group in candidates.groups:
        yield group.compatibility
    for instance in candidates.aggregated:
        yield instance.beat.compatibility
