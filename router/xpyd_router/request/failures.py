"""What follows from a failed attempt: which instance it counts against, what the next one avoids.

`flow` calls it after each failure. An instance answers for its own faults only (`fleet.health`
counts them); a request answers for the instances that died under it (`fleet.poison` has the rule).
"""

from __future__ import annotations

import logging

from xpyd_core.errors import ApiError
from xpyd_router.app_state import AppState
from xpyd_router.errors import CallFailed, poisoned
from xpyd_router.fleet.poison import KILLS, REFUSED_S
from xpyd_router.policy.pairs import Pair
from xpyd_router.request.attempt import Attempt
from xpyd_router.request.client_request import InferenceRequest
from xpyd_router.request.state import RequestState, gave_up
from xpyd_router.request_metrics import PHASES

logger = logging.getLogger(__name__)
# A refusal (503, 429) costs its engine nothing, so a rolling restart may give several in a row.
_MAX_REFUSALS = 16
_CUTTING = frozenset({"reset", "incomplete", "lost"})
"""Causes of calls that an instance cuts when its drain takes too long. See docs/adr/0108."""


class Failures:
    """One per process of a router."""

    def __init__(self, app_state: AppState) -> None:
        self._config = app_state.config
        self._fleet = app_state.fleet
        self._loads = app_state.loads
        self._metrics = app_state.metrics
        self._clock = app_state.clock
        self.refused = self._fleet.refused
        """While it is empty, `refuse` and `served` need not be called."""

    def refuse(self, request: InferenceRequest) -> None:
        """ApiError for a body that instances died of lately."""
        if refused_s := self._fleet.refused_s(request.raw):
            self._metrics.poisoned_requests.inc()
            raise poisoned(refused_s)

    def served(self, request: InferenceRequest) -> None:
        """A request with this body was served: instances do not die of it."""
        self._fleet.acquit(request.raw)

    def continued(self, state: RequestState) -> None:
        """A request that leaving instances cut was served to its end by others."""
        self._metrics.drain_cuts.labels("continued").inc(state.drain_cuts)
        logger.info(
            "continued elsewhere, after the drain of its instance had cut it",
            extra={"request": state.trace.request, "instance": state.trace.decode},
        )
        state.drain_cuts = 0

    async def after(self, state: RequestState, attempt: Attempt, failure: CallFailed) -> None:
        """Count, log and report it; returns when another try is due, else raises ApiError."""
        is_cut = failure.cause in _CUTTING and self._fleet.is_leaving(attempt.called.key)
        state.drain_cuts += is_cut
        try:
            await self._after(state, attempt, failure, by="; its drain ended" if is_cut else "")
        except ApiError:
            if state.drain_cuts:
                self._metrics.drain_cuts.labels("failed").inc(state.drain_cuts)
                state.drain_cuts = 0
            raise

    async def _after(
        self, state: RequestState, attempt: Attempt, failure: CallFailed, *, by: str
    ) -> None:
        instance, cause = attempt.called, failure.cause
        phase = PHASES[instance.beat.type]
        self._metrics.failed(instance, cause)
        state.trace.failures.append(f"{phase}:{cause}")
        state.last_cause = cause
        if attempt.figures is not None and cause != "refused":
            attempt.figures.failed += 1
        if state.share and state.sent is None:
            state.share = "old"  # what the canary failed is not tried on it again
        extra = {"request": attempt.uuid, "instance": instance.name, "tries": state.trace.tries}
        logger.warning("%s call failed: %s%s", phase, cause, by, extra=extra)
        await self._blame(state, attempt, failure)
        if state.has_decode_begun and state.sent is None:
            raise ApiError(502, "the generating instance failed", code="decode_failed")
        if cause == "refused":
            state.refusals += 1
        else:
            state.failures += 1
        is_late = not state.has_decode_begun and self._clock() >= state.deadline_s
        is_last = state.failures >= self._config.max_tries or state.refusals >= _MAX_REFUSALS
        if is_last or is_late:
            raise gave_up(state)
        self._metrics.retried(instance)

    async def _blame(self, state: RequestState, attempt: Attempt, failure: CallFailed) -> None:
        """Count it against the instance at fault; ApiError for a request that kills instances."""
        request, instance, choice = state.request, attempt.called, attempt.choice
        cause = failure.cause
        if cause == "transfer" and isinstance(choice, Pair):
            # Any other pair will do; best is one that shares no instance with this one.
            # An engine of an older version, and an event of a stream, say no reason.
            why = attempt.pair_outcome(choice, failure.kv)[1] or "other"
            self._metrics.kv.count(attempt.instances, "failed", why)
            state.trace.kv, state.trace.kv_cause = "failed", why
            self._fleet.transfer_failed(choice.prefill, choice.decode, request.raw)
            p, d = choice.prefill.place, choice.decode.place
            state.shunned = (frozenset((p, d)), frozenset((d,)), frozenset((p,)))
            return
        # Another replica of the instance may serve it; where all are gone, health ejects it.
        state.exclude.add(instance.place)
        if cause == "timeout" and not self._had_its_time(attempt):
            return
        if met := self._fleet.failed(instance, cause, request.raw):
            state.met(met)
        if len(state.breaks) >= KILLS and await self._fleet.convicts(state.breaks, request.raw):
            self._metrics.poisoned_requests.inc()
            raise poisoned(REFUSED_S)
        if self.refused:
            self.refuse(request)  # its body's, convicted meanwhile
        # Requests that met the same death keep apart: the next death then shows which one kills.
        state.shunned = (self._loads.suspected(),) if state.breaks else ()

    def _had_its_time(self, attempt: Attempt) -> bool:
        """Whether the instance had at least half of what a call may take. A request that waited
        long for its turn leaves it less; that is not the instance's fault.
        """
        allowed_s = self._config.request_timeout_s
        if attempt.called.beat.type == "P":
            allowed_s = min(allowed_s, self._config.prefill_timeout_s)
        return attempt.call_s is not None and 2 * attempt.call_s >= allowed_s
