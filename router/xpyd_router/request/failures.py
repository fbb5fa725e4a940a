"""What follows from a try that failed: whom it is held against, and what the next one does without.

`flow` asks after each failure. Instances answer for their own faults only (`fleet.health` counts
them); a request answers for the instances that died under it (`fleet.poison` has the rule).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from xpyd_core.errors import ApiError
from xpyd_router.config import RouterConfig
from xpyd_router.errors import CallFailed, FailureCause, poisoned
from xpyd_router.fleet.loads import LoadTable
from xpyd_router.fleet.poison import KILLS, REFUSED_S
from xpyd_router.fleet.view import FleetView
from xpyd_router.metrics import RouterMetrics
from xpyd_router.policy.pairs import Pair
from xpyd_router.request.attempt import Attempt
from xpyd_router.request.client_request import Ask
from xpyd_router.request.state import Course, gave_up
from xpyd_router.request_metrics import PHASES

logger = logging.getLogger(__name__)
# A refusal (503) costs its engine nothing, so a rolling restart may give several in a row.
_MAX_REFUSALS = 16


class Failures:
    """One per router. `clock` is monotonic seconds."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        fleet: FleetView,
        loads: LoadTable,
        metrics: RouterMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._loads = loads
        self._metrics = metrics
        self._clock = clock
        self.refused = fleet.refused
        """While it is empty, `refuse` and `served` need not be called."""

    def refuse(self, ask: Ask) -> None:
        """ApiError for a body that instances died of lately."""
        if refused_s := self._fleet.refused_s(ask.raw):
            self._metrics.poisoned_requests.inc()
            raise poisoned(refused_s)

    def served(self, ask: Ask) -> None:
        """A request with this body was served: instances do not die of it."""
        self._fleet.acquit(ask.raw)

    async def after(self, course: Course, attempt: Attempt, failure: CallFailed) -> None:
        """Count, tell and remember it; returns when another try is due, else raises ApiError."""
        instance, cause = attempt.called, failure.cause
        phase = PHASES[instance.beat.type]
        self._metrics.failed(instance, cause)
        course.trace.failures.append(f"{phase}:{cause}")
        course.last_cause = cause
        extra = {"request": attempt.uuid, "instance": instance.name, "tries": course.trace.tries}
        logger.warning("%s call failed: %s", phase, cause, extra=extra)
        await self._blame(course, attempt, cause)
        if course.has_decode_begun and course.sent is None:
            raise ApiError(502, "the generating instance failed", code="decode_failed")
        if cause == "refused":
            course.refusals += 1
        else:
            course.failures += 1
        is_late = not course.has_decode_begun and self._clock() >= course.deadline_s
        is_last = course.failures >= self._config.max_tries or course.refusals >= _MAX_REFUSALS
        if is_last or is_late:
            raise gave_up(course)
        self._metrics.retried(instance)

    async def _blame(self, course: Course, attempt: Attempt, cause: FailureCause) -> None:
        """Hold it against whom it concerns; ApiError for a request that kills instances."""
        ask, instance, choice = course.ask, attempt.called, attempt.choice
        if cause == "transfer" and isinstance(choice, Pair):
            # Any other pair will do; one that shares nobody with this one does best.
            self._fleet.transfer_failed(choice.prefill, choice.decode, ask.raw)
            p, d = choice.prefill.key, choice.decode.key
            course.shunned = (frozenset((p, d)), frozenset((d,)), frozenset((p,)))
            return
        course.exclude.add(instance.key)
        if cause == "timeout" and not self._had_its_time(attempt):
            return
        if met := self._fleet.failed(instance, cause, ask.raw):
            course.met(met)
        if len(course.breaks) >= KILLS and await self._fleet.convicts(course.breaks, ask.raw):
            self._metrics.poisoned_requests.inc()
            raise poisoned(REFUSED_S)
        if self.refused:
            self.refuse(ask)  # its body's, convicted meanwhile
        # Those that met the same death keep apart: then the next one tells them from each other.
        course.shunned = (self._loads.suspected(),) if course.breaks else ()

    def _had_its_time(self, attempt: Attempt) -> bool:
        """Whether the instance had at least half of what a call may take. A request that waited
        long for its turn leaves it less; that is not the instance's fault.
        """
        allowed_s = self._config.request_timeout_s
        if attempt.called.beat.type == "P":
            allowed_s = min(allowed_s, self._config.prefill_timeout_s)
        return attempt.call_s is not None and 2 * attempt.call_s >= allowed_s
