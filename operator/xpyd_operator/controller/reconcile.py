"""One turn of one fleet: read the state, decide, write, report. The shell around `decide`.

The Reconciler owns the memories of all fleets and waits for nothing but the API's answers, and for
routers' before a scale-down. The WriteExecutor does a turn's writes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from math import inf

from xpyd_operator.controller.client import Api
from xpyd_operator.controller.decision.cache import Cache, FleetKey
from xpyd_operator.controller.decision.decide import Turn, contest_problems, decide
from xpyd_operator.controller.decision.election import operator_of
from xpyd_operator.controller.decision.errors import Conflict, KubeError
from xpyd_operator.controller.decision.history import FleetHistory, is_ready, is_urgent
from xpyd_operator.controller.decision.kinds import (
    FLEET,
    POD,
    POOL,
    Kind,
    Obj,
    merge_patch,
    trim,
)
from xpyd_operator.controller.decision.report import Report, problem_of, report, status_of
from xpyd_operator.controller.decision.standby import OTHER_RELEASE, STANDS_BY, words
from xpyd_operator.controller.decision.state import FleetState, own_children, signing_secret
from xpyd_operator.controller.decision.writes import (
    CreateKey,
    DeleteKey,
    RemoveFields,
    SetFinalizers,
    SetReplicas,
    Write,
    describe,
)
from xpyd_operator.controller.events import EventPoster
from xpyd_operator.controller.executor import Outcome, WriteExecutor
from xpyd_operator.controller.leader import LOOK_S, Releases
from xpyd_operator.manifests.names import FINALIZER, Settings
from xpyd_operator.status.canary import CanaryReport
from xpyd_operator.status.children import is_leaving
from xpyd_operator.status.drains import CUT, InstanceLoad
from xpyd_operator.status.events import EventText, events
from xpyd_operator.status.instances import ReplicaCount
from xpyd_operator.status.models import DownloadProgress
from xpyd_operator.status.problems import Problem
from xpyd_operator.status.rotation import RouterKeys
from xpyd_operator.status.routable import Gate
from xpyd_operator.status.upgrades import (
    is_older,
    kept_revisions,
    takes_turn,
    upgrade,
    with_revisions,
)
from xpyd_operator.status.verified import NOT_LOOKED, KvVerdict

logger = logging.getLogger(__name__)

_ROUNDS = 3
"""Rounds within one turn, where the next step waits only for the answer of a write."""
_QUEUED_S = 10.0
"""How often a fleet looks whether it is its turn to take new defaults."""
_AGAIN_S = 0.5
"""After this time the watch has delivered what the turn did not see."""


class TurnFailed(Exception):
    """The turn failed; the next one comes after `retry_after_s` at the earliest."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


def _event_of(write: Write) -> EventText | None:
    """What people hear of a write that was done, where no status says it."""
    match write:
        case RemoveFields():
            return EventText("Warning", "DriftRemoved", describe(write))
        case SetReplicas(before=int()):
            return EventText("Normal", "ReplicasChanged", f"pool {write.pool}: {describe(write)}")
        case _:
            return None


async def _no_loads(_: FleetKey) -> Mapping[str, InstanceLoad]:
    return {}


class Reconciler:
    """Runs the turns of all fleets. The queue ensures that a fleet has at most one turn at a time.

    `clock`: steady seconds; `now`: the time of day, which is only written down.
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
        verdict: Callable[[FleetKey], KvVerdict] = lambda _: NOT_LOOKED,
        has_pair: Callable[[FleetKey], bool | None] = lambda _: None,
        progress: Callable[[FleetKey], DownloadProgress | None] = lambda _: None,
        keys: Callable[[FleetKey], Mapping[str, RouterKeys]] = lambda _: {},
        loads: Callable[[FleetKey], Mapping[str, InstanceLoad]] = lambda _: {},
        canary: Callable[[FleetKey], CanaryReport] = lambda _: CanaryReport(),
        gates: Callable[[FleetKey], Mapping[str, Gate]] = lambda _: {},
        replicas: Callable[[FleetKey], Mapping[str, ReplicaCount]] = lambda _: {},
        ask_loads: Callable[[FleetKey], Awaitable[Mapping[str, InstanceLoad]]] = _no_loads,
        cordoned: Callable[[], frozenset[str] | None] = frozenset,
        count_cut: Callable[[FleetKey, str], None] = lambda _key, _pool: None,
        releases: Releases | None = None,
        upgrade_fleets: int = 0,
    ) -> None:
        """`verdict`: what the routers' counts say of a fleet's KV; `has_pair`: whether a router has
        instances that can serve a request, None where none has said; `progress`: how far the
        download of its model is; `keys`, `loads`, `canary`: what they say of keys, who leaves, one;
        `gates`: what readiness gates of pods should be; `replicas`: those of engines that come and
        go; `ask_loads`: what every instance has now;
        `cordoned`: nodes that take no new pods; `count_cut`: an instance of a pool was cut;
        `releases`: who reconciles which fleet, None: this operator all of them; `upgrade_fleets`:
        how many fleets at a time take the operator's defaults without being asked."""
        self._releases = releases
        self._upgrade_fleets = upgrade_fleets
        self._upgrading: set[FleetKey] = set()
        self._keys = keys
        self._loads, self._canary = loads, canary
        self._gates, self._replicas = gates, replicas
        self._ask_loads = ask_loads
        self._cordoned = cordoned
        self._count_cut = count_cut
        self._progress = progress
        self._verdict = verdict
        self._has_pair = has_pair
        self._api = api
        self._cache = cache
        self._poster = poster
        self._executor = WriteExecutor(api, cache)
        self._settings = settings
        self._clock = clock
        self._now = now
        self._histories: dict[FleetKey, FleetHistory] = {}

    async def turn(self, key: FleetKey, served: frozenset[Kind]) -> float | None:
        """One turn of a fleet; seconds until its next turn, None: at a change.

        `served`: kinds that the API server has. Raises TurnFailed.
        """
        rounds = _ROUNDS
        while True:
            history = self._histories.setdefault(key, FleetHistory(self._clock()))
            if (wait_s := await self._holds_back(key, history, served)) is not None:
                return wait_s
            document = self._cache.document(key)
            if document is None:
                self._histories.pop(key, None)
                return None
            state = self._see(key, document, history, served)
            turn = decide(state)
            if turn.asks_loads:
                busy = await self._ask_loads(key)
                state = replace(self._see(key, document, history, served), busy=busy)
                turn = decide(state)
            outcome = await self._executor.execute(key, state, turn.stages)
            self._remember(history, turn, outcome)
            self._tell_removals(document, history, outcome)
            self._tell_cuts(key, state, history)
            rounds -= 1
            if not turn.again or outcome.moved or outcome.refused or not rounds:
                break
        if _has_released(outcome):
            return None
        refused = [*outcome.refused]
        if history.is_stuck(moved=bool(outcome.moved)):
            refused += outcome.moved
        problems = [*turn.problems, *(problem_of(write, error) for write, error in refused)]
        contests = history.contests(self._clock()).values()
        problems += [found for write, _ in contests for found in contest_problems(write)]
        if turn.stages:
            # The writes took time, and their answers changed the state.
            document = self._cache.document(key)
            if document is None:
                return _AGAIN_S
            state = self._see(key, document, history, served)
        status_wait = await self._report(key, state, history, problems)
        if refused:
            raise TurnFailed(f"{len(refused)} writes were refused")
        soon = _AGAIN_S if outcome.moved or turn.again else None
        if outcome.done and soon is None:
            # The watch brings nothing new about our own writes: check at once whether more is due.
            soon = 0.0
        queued = (
            _QUEUED_S if self._upgrade_fleets and state.upgrade and state.upgrade.older else None
        )
        waits = (turn.recheck_after, status_wait, soon, queued, *(left_s for _, left_s in contests))
        return min((wait for wait in waits if wait is not None), default=None)

    async def _holds_back(
        self, key: FleetKey, history: FleetHistory, served: frozenset[Kind]
    ) -> float | None:
        """Seconds until another look at a fleet that is not this operator's to change yet."""
        document = self._cache.document(key)
        if document is None:
            return None
        wait_s = await self._stands_by(document, history)
        if wait_s is not None or not is_older(status_of(document), self._settings):
            return wait_s
        state = self._see(key, document, history, served)
        if state.upgrade is None or not state.upgrade.taken:
            return None
        # The status says it before any pod has the newer defaults: whoever follows an operator that
        # was killed between the two counts the fleet's place.
        found, _ = self._found(state, history, [])
        try:
            return await self._report_fleet(key, state, history, found)
        except KubeError as error:
            raise TurnFailed(f"the upgrade was not written: {error}") from error

    async def _stands_by(self, document: Obj, history: FleetHistory) -> float | None:
        """Seconds until another look at a fleet of another release; None: it is ours."""
        owner = operator_of(document)
        if self._releases is None or await self._releases.may_reconcile(owner):
            return None
        said = words(owner, self._releases.own, document["metadata"]["name"])
        if history.stood_by_for != owner:
            history.stood_by_for = owner
            self._poster.post(document, EventText("Warning", STANDS_BY, said))
        if not is_leaving(document):
            await self._say_standby(document, history, self._releases.own, said)
        return LOOK_S

    async def _say_standby(self, document: Obj, history: FleetHistory, own: str, said: str) -> None:
        """Write the condition of a fleet that another release reconciles, where it is due."""
        patch = history.standby.patch(document, own, said, self._clock(), self._wall)
        if patch is None:
            return
        namespace, name = document["metadata"]["namespace"], document["metadata"]["name"]
        try:
            after = await self._api.patch(FLEET, namespace, name, patch, sub="status")
        except Conflict:
            history.standby.crossed()
        except KubeError as error:
            # There is a next time, and the Event has said it.
            logger.debug("%s/%s: %s was not written: %s", namespace, name, OTHER_RELEASE, error)
        else:
            self._cache.put(FLEET, trim(FLEET, after))

    @property
    def _wall(self) -> str:
        return self._now().strftime("%Y-%m-%dT%H:%M:%SZ")

    def _takes_turn(self, key: FleetKey) -> bool:
        """Whether the fleet may take the operator's defaults without being asked."""
        if not self._upgrade_fleets:
            return False
        documents = ((one, self._cache.document(one) or {}) for one in self._cache.documents())
        # Another release has places of its own.
        ours = ("", self._releases.own if self._releases else "")
        statuses = {one: status_of(found) for one, found in documents if operator_of(found) in ours}
        # A claim holds until the fleet's status says it, too.
        claims = [one for one in self._upgrading if one in statuses]
        self._upgrading = {one for one in claims if is_older(statuses[one], self._settings)}
        return takes_turn(key, statuses.items(), self._upgrading, self._upgrade_fleets)

    def _see(
        self, key: FleetKey, document: Obj, history: FleetHistory, served: frozenset[Kind]
    ) -> FleetState:
        children, time = self._cache.children(key), self._clock()
        own, turn = own_children(document["metadata"]["uid"], children), self._takes_turn(key)
        upgraded = upgrade(document, own, self._settings, turn=turn)
        if upgraded.taken:
            self._upgrading.add(key)
        settings = upgraded.defaults.within(self._settings)
        parsed = history.read(document, settings)
        state = FleetState(
            document,
            parsed,
            children,
            settings,
            served,
            self._wall,
            taken=history.taken(time),
            settled=history.settled,
            contested=history.contested(time),
            wants_key=history.wants_key(
                parsed, signing_secret(document, children), status_of(document), time
            ),
            ages=history.ages(children.get(POD, {}).values(), time),
            kv=self._verdict(key),
            has_pair=self._has_pair(key),
            progress=self._progress(key),
            keys=self._keys(key),
            loads=self._loads(key),
            routers_canary=self._canary(key),
            gates=self._gates(key),
            replicas=self._replicas(key),
            cordoned=self._cordoned(),
            made_keys=history.made_keys,
            deleted_key=history.deleted_key,
            operator=self._releases.own if self._releases else "",
            upgrade=upgraded,
        )
        return keeping(state, self._settings.version)

    def _remember(self, history: FleetHistory, turn: Turn, outcome: Outcome) -> None:
        time = self._clock()
        history.settled.update(turn.compared)
        history.settled.update(outcome.applied)
        for write in outcome.done:
            history.wrote(write, time)
            if isinstance(write, CreateKey | DeleteKey):
                history.changed_key(write, time, outcome.made_keys)
        for place, holder in outcome.taken.items():
            history.found_taken(place, holder, time)
        if outcome.failed is not None:
            quiet_s = float(getattr(outcome.failed, "retry_after_s", 0.0))
            raise TurnFailed(str(outcome.failed), retry_after_s=quiet_s)

    def _tell_removals(self, document: Obj, history: FleetHistory, outcome: Outcome) -> None:
        for write in outcome.done:
            event = _event_of(write)
            if event is not None and history.posted.is_new(event, self._clock()):
                self._poster.post(document, event)

    def _tell_cuts(self, key: FleetKey, state: FleetState, history: FleetHistory) -> None:
        """Instances whose drain took as long as it may, and that were ended with what they had."""
        if state.parsed.fleet is None:
            return
        timeout_s = state.parsed.fleet.spec.drain.timeout_seconds
        pods, now_s = self._cache.children(key).get(POD, {}).values(), self._clock()
        for cut in history.drains.look(pods, self._loads(key), now_s, timeout_s=timeout_s):
            self._count_cut(key, cut.pool)
            message = f"pool {cut.pool}: {cut.pod} was cut when its drain was over: {cut.message}"
            event = EventText("Warning", CUT, message)
            if history.posted.is_new(event, now_s):
                self._poster.post(state.document, event)

    def _found(
        self, state: FleetState, history: FleetHistory, problems: list[Problem]
    ) -> tuple[Report, float | None]:
        """The statuses; seconds until what they say of another release is over."""
        own = signing_secret(state.document, state.children)
        has_key = history.has_key(status_of(state.document), own)
        own_release = self._releases.own if self._releases else ""
        standby, left_s = history.standby.kept(state.document, own_release, self._clock())
        return report(state, problems, has_key=has_key, standby=standby), left_s

    async def _report(
        self, key: FleetKey, state: FleetState, history: FleetHistory, problems: list[Problem]
    ) -> float | None:
        """Write the statuses that changed; seconds until a write that has to wait."""
        present = {(kind, name) for kind, names in state.children.items() for name in names}
        history.forget_old(frozenset(present), self._clock())
        found, left_s = self._found(state, history, problems)
        try:
            waits = (
                await self._report_fleet(key, state, history, found),
                await self._report_pools(key, history, found),
            )
        except KubeError as error:
            # NotFound, too: where the fleet was deleted meanwhile, the watch will deliver that; but
            # the answer may be wrong, and nothing else would bring this status.
            raise TurnFailed(f"the status was not written: {error}") from error
        known = [wait for wait in (*waits, left_s) if wait is not None and wait < inf]
        return min(known, default=None)

    async def _report_fleet(
        self, key: FleetKey, state: FleetState, history: FleetHistory, found: Report
    ) -> float | None:
        if found.after == found.before:
            return None
        time = self._clock()
        wait_s = history.pace.wait_s(time, urgent=is_urgent(found.before, found.after))
        if wait_s > 0:
            return wait_s
        history.pace.wrote(time)
        due = events(found.before, found.after)
        for decision in (one for one in due if one.is_decision):
            if history.posted.is_new(decision, time):
                await self._poster.post_now(state.document, decision)
        # With the uid: another fleet may have the name by now.
        patch = {"metadata": {"uid": state.uid}, "status": merge_patch(found.before, found.after)}
        after = await self._api.patch(FLEET, key.namespace, key.name, patch, sub="status")
        after = trim(FLEET, after)
        self._cache.put(FLEET, after)
        for event in (one for one in due if not one.is_decision):
            if history.posted.is_new(event, time):
                self._poster.post(after, event)
        return None

    async def _report_pools(
        self, key: FleetKey, history: FleetHistory, found: Report
    ) -> float | None:
        if not found.pools:
            return None
        time = self._clock()
        wait_s = history.pace.wait_of_pools_s(time, ready=is_ready(found.after))
        if wait_s > 0:
            return wait_s
        history.pace.wrote_pools(time)
        for name, changes in found.pools.items():
            patch = {"status": changes}
            after = await self._api.patch(POOL, key.namespace, name, patch, sub="status")
            self._cache.put(POOL, trim(POOL, after))
        return None


def _has_released(outcome: Outcome) -> bool:
    """Whether the fleet's finalizer was removed: nothing is left to report."""
    lists = (write.finalizers for write in outcome.done if isinstance(write, SetFinalizers))
    return any(FINALIZER not in finalizers for finalizers in lists)


def keeping(state: FleetState, version: str) -> FleetState:
    """The same, its pools with the revisions that they keep from another version's operator."""
    fleet = state.parsed.fleet
    if fleet is None or state.upgrade is None or state.upgrade.defaults.version == version:
        return state
    kept = kept_revisions(fleet, state.seen, status_of(state.document))
    parsed = replace(state.parsed, want=with_revisions(state.parsed.want, kept))
    return replace(state, parsed=parsed, kept=frozenset(kept.items()))
