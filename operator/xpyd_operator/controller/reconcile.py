"""One turn of one fleet: look, decide, write, report. The thin shell around decide() and report().

It owns the memories of all fleets. It never waits for anything but the API's answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

from xpyd_operator.controller.cache import Cache, FleetKey
from xpyd_operator.controller.client import Api
from xpyd_operator.controller.decide import Turn, decide
from xpyd_operator.controller.errors import KubeError, NotFound
from xpyd_operator.controller.events import EventPoster
from xpyd_operator.controller.kinds import FLEET, POOL, Kind, Obj
from xpyd_operator.controller.look import Look
from xpyd_operator.controller.memory import Memory
from xpyd_operator.controller.pacing import is_ready, is_urgent
from xpyd_operator.controller.perform import Outcome, Performer
from xpyd_operator.controller.report import Report, merge_patch, problem_of, report, status_of
from xpyd_operator.controller.trim import trim
from xpyd_operator.controller.writes import MakeKey, SetFinalizers
from xpyd_operator.manifests import Settings
from xpyd_operator.manifests.names import FINALIZER, kv_secret_name
from xpyd_operator.status import Problem, events

logger = logging.getLogger(__name__)

_ROUNDS = 3
"""Looks within one turn, where a write's answer is all that the next step waits for."""
_AGAIN_S = 0.5
"""Until the watch has told of what was not as it was seen."""


class TurnFailed(Exception):
    """The turn is to be tried again later, after `retry_after_s` at the least."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Reconciler:
    """Turns of all fleets. At most one turn of a fleet runs at a time: the queue sees to it.

    `clock`: steady seconds; `now`: the time of day.
    """

    def __init__(
        self,
        api: Api,
        cache: Cache,
        poster: EventPoster,
        *,
        settings: Settings,
        clock: Callable[[], float],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api = api
        self._cache = cache
        self._poster = poster
        self._performer = Performer(api, cache)
        self._settings = settings
        self._clock = clock
        self._now = now
        self._memories: dict[FleetKey, Memory] = {}

    async def turn(self, key: FleetKey, served: frozenset[Kind]) -> float | None:
        """Look at a fleet once; seconds until it is to be looked at again, None: at a change.

        `served`: kinds that the API server has. Raises TurnFailed.
        """
        rounds = _ROUNDS
        while True:
            document = self._cache.document(key)
            if document is None:
                self._memories.pop(key, None)
                return None
            memory = self._memories.setdefault(key, Memory(self._clock()))
            look = self._look(key, document, memory, served)
            turn = decide(look)
            outcome = await self._performer.perform(key, look, turn.stages)
            self._remember(memory, turn, outcome)
            rounds -= 1
            if not turn.again or outcome.moved or outcome.refused or not rounds:
                break
        if _has_let_go(outcome):
            return None
        refused = [*outcome.refused]
        if memory.is_stuck(moved=bool(outcome.moved)):
            refused += outcome.moved
        problems = [*turn.problems, *(problem_of(write, error) for write, error in refused)]
        if turn.stages:
            # The writes took time, and their answers changed what there is to see.
            document = self._cache.document(key)
            if document is None:
                return _AGAIN_S
            look = self._look(key, document, memory, served)
        status_wait = await self._report(key, look, memory, problems)
        if refused:
            raise TurnFailed(f"{len(refused)} writes were refused")
        soon = _AGAIN_S if outcome.moved or turn.again else None
        if outcome.done and soon is None:
            # The watch tells nothing new of our own writes: look whether that was all.
            soon = 0.0
        waits = (turn.recheck_after, status_wait, soon)
        return min((wait for wait in waits if wait is not None), default=None)

    def _look(self, key: FleetKey, document: Obj, memory: Memory, served: frozenset[Kind]) -> Look:
        reading, time = memory.read(document, self._settings), self._clock()
        return Look(
            document,
            reading,
            self._cache.children(key),
            self._settings,
            served,
            self._now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            taken=memory.taken(time),
            settled=memory.settled,
            contested=memory.contested(time),
            wants_key=memory.wants_key(
                reading, document["metadata"]["uid"], status_of(document), time
            ),
        )

    def _remember(self, memory: Memory, turn: Turn, outcome: Outcome) -> None:
        time = self._clock()
        memory.settled.update(turn.compared)
        memory.settled.update(outcome.applied)
        for write in outcome.done:
            memory.wrote(write, time)
            if isinstance(write, MakeKey):
                memory.tried_key(time)
        for place, holder in outcome.taken.items():
            memory.found_taken(place, holder, time)
        if outcome.failed is not None:
            quiet_s = float(getattr(outcome.failed, "retry_after_s", 0.0))
            raise TurnFailed(str(outcome.failed), retry_after_s=quiet_s)

    async def _report(
        self, key: FleetKey, look: Look, memory: Memory, problems: list[Problem]
    ) -> float | None:
        """Write what changed of the statuses; seconds until a write that has to wait."""
        present = {(kind, name) for kind, names in look.children.items() for name in names}
        memory.forget_old(frozenset(present), self._clock())
        own = kv_secret_name(key.name, look.uid)
        has_key = memory.has_key(status_of(look.document), own)
        found = report(look, problems, has_key=has_key)
        try:
            waits = (
                await self._report_fleet(key, look, memory, found),
                await self._report_pools(key, memory, found),
            )
        except NotFound:
            # It went meanwhile; the watch will say so.
            return None
        except KubeError as error:
            raise TurnFailed(f"the status was not written: {error}") from error
        return min((wait for wait in waits if wait is not None), default=None)

    async def _report_fleet(
        self, key: FleetKey, look: Look, memory: Memory, found: Report
    ) -> float | None:
        if found.after == found.before:
            return None
        time = self._clock()
        wait_s = memory.pace.wait_s(time, urgent=is_urgent(found.before, found.after))
        if wait_s > 0:
            return wait_s
        memory.pace.wrote(time)
        # With the uid: another fleet may have the name by now.
        uid = {"metadata": {"uid": look.uid}}
        patch = {**uid, "status": merge_patch(found.before, found.after)}
        after = await self._api.patch(FLEET, key.namespace, key.name, patch, sub="status")
        after = trim(FLEET, after)
        self._cache.put(FLEET, after)
        for event in events(found.before, found.after):
            if memory.told.is_new(event, time):
                self._poster.tell(after, event)
        return None

    async def _report_pools(self, key: FleetKey, memory: Memory, found: Report) -> float | None:
        if not found.pools:
            return None
        time = self._clock()
        wait_s = memory.pace.wait_of_pools_s(time, ready=is_ready(found.after))
        if wait_s > 0:
            return wait_s
        memory.pace.wrote_pools(time)
        for name, changes in found.pools.items():
            patch = {"status": changes}
            after = await self._api.patch(POOL, key.namespace, name, patch, sub="status")
            self._cache.put(POOL, trim(POOL, after))
        return None


def _has_let_go(outcome: Outcome) -> bool:
    """Whether the fleet's finalizer was taken away: there is nothing to report on any more."""
    return any(
        isinstance(write, SetFinalizers) and FINALIZER not in write.finalizers
        for write in outcome.done
    )
