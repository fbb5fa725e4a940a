"""Asks the policy, and waits for a fleet that lost its last pair a moment ago.

A restart takes seconds; a request that comes meanwhile waits for it rather than fail, if the same
model was served shortly before. A fleet that never served is answered 503 at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from xpyd_core.errors import ApiError
from xpyd_router.config import RouterConfig
from xpyd_router.fleet.registry import InstanceKey, Snapshot
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics
from xpyd_router.policy.base import Alone, Pair, Policy, Want
from xpyd_router.policy.no_prefill import second_wish

_ASK_AGAIN_S = 0.5
_MAX_REMEMBERED = 256


class Picker:
    """One per router. `clock` is monotonic seconds."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        fleet: FleetView,
        policy: Policy,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._policy = policy
        self._metrics = metrics
        self._clock = clock
        self._waiting = 0
        self._waiting_bytes = 0
        self._served_s: dict[str, float] = {}

    def at_once(self, want: Want) -> Pair | Alone | None:
        """What nearly every request gets: a choice of the policy's, without waiting."""
        if choice := self._policy.pick(self._fleet.snapshot, want):
            self._remember(want.model)
        return choice

    async def pick(
        self,
        want: Want,
        deadline_s: float,
        give_up: Callable[[], ApiError] | None,
        *,
        body_bytes: int = 0,
        shunned: Sequence[frozenset[InstanceKey]] = (),
        may_repeat: bool = False,
    ) -> Pair | Alone:
        """A choice, at latest at `deadline_s`; without the first of `shunned` that leaves one.

        Raises ApiError: 404 for an unknown model, 503 where nobody is ready, `give_up()` where only
        those that failed are left. Without it they are waited for as well: they refused, because
        they are being replaced. With `may_repeat` they are tried again at once.
        """
        for some in shunned:
            fewer = replace(want, exclude=want.exclude | some)
            if choice := self._policy.pick(self._fleet.snapshot, fewer):
                return choice
        while True:
            snapshot = self._fleet.snapshot
            if choice := self._policy.pick(snapshot, want):
                self._remember(want.model)
                return choice
            if choice := self._second_choice(snapshot, want):
                self._metrics.prefill_on_decode.inc()
                self._remember(want.model)
                return choice
            everyone = replace(want, exclude=frozenset())
            only_tried = bool(want.exclude) and self._has_any(snapshot, everyone)
            if only_tried and may_repeat:
                want = everyone
                continue
            if only_tried and give_up:
                raise give_up()
            now_s = self._clock()
            served_s = self._served_s.get(want.model, -math.inf)
            left_s = min(served_s + self._config.pair_wait_s, deadline_s) - now_s
            if left_s <= 0 or not self._may_wait(body_bytes, only_tried):
                raise self._unavailable(want.model)
            # Who refused may be full, not leaving: no beat tells when it has room again.
            await self._wait(min(left_s, _ASK_AGAIN_S) if only_tried else left_s, body_bytes)
            # Whoever is back has come back with a beat: it may be tried again.
            want = everyone

    def _second_choice(self, snapshot: Snapshot, want: Want) -> Pair | Alone | None:
        second = second_wish(want, self._config.on_no_prefill)
        return None if second is None else self._policy.pick(snapshot, second)

    def _has_any(self, snapshot: Snapshot, want: Want) -> bool:
        return bool(self._policy.pick(snapshot, want) or self._second_choice(snapshot, want))

    def _may_wait(self, body_bytes: int, only_tried: bool) -> bool:
        """Who refused is about to leave, which its next beat says: till then they are there."""
        limits = self._config.limits
        if self._config.on_no_prefill == "Reject" and not only_tried:
            return False
        has_room = self._waiting_bytes + body_bytes <= limits.queue_bytes
        return has_room and self._waiting < limits.queue_entries

    async def _wait(self, timeout_s: float, body_bytes: int) -> None:
        self._waiting += 1
        self._waiting_bytes += body_bytes
        self._metrics.waiting.inc()
        try:
            await self._fleet.wait_change(timeout_s)
        finally:
            self._waiting -= 1
            self._waiting_bytes -= body_bytes
            self._metrics.waiting.dec()

    def _unavailable(self, model: str) -> ApiError:
        snapshot = self._fleet.snapshot
        if not snapshot.is_empty and not snapshot.knows(model):
            return ApiError(
                404,
                f"The model `{model}` does not exist.",
                param="model",
                code="model_not_found",
            )
        return ApiError(
            503,
            "no prefill and decode instances are ready for this model",
            code="no_instances",
            retry_after_s=max(1, math.ceil(self._config.heartbeat_interval_s)),
        )

    def _remember(self, model: str) -> None:
        self._served_s.pop(model, None)
        self._served_s[model] = self._clock()
        if len(self._served_s) > _MAX_REMEMBERED:
            del self._served_s[next(iter(self._served_s))]
