"""No clock that is wrong, the operator's or another machine's, makes a Degraded or takes one away.

A reconciler works against the API server in memory. Its clocks are the test's, and it has a turn
when a test tells of an event and when the turn before asked for one.
"""

from __future__ import annotations

from copy import deepcopy
from datetime import UTC, datetime, timedelta

import pytest

from tests.operator.kube_fakes import FakeApi
from tests.operator.kube_objects import pod_of
from tests.operator.kube_operating import SETTINGS, condition, fleet, of_pool, run
from xpyd_operator.controller.client import Api
from xpyd_operator.controller.decision.cache import Cache, FleetKey
from xpyd_operator.controller.decision.kinds import DEPLOYMENT, POD, WATCHED, Obj, trim
from xpyd_operator.controller.events import EventPoster
from xpyd_operator.controller.leader import Releases
from xpyd_operator.controller.reconcile import Reconciler
from xpyd_operator.manifests.names import Settings

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
GRACE_S = 90
HOUR_S = 3600.0
MOST_TURNS = 300


def clock(seconds: float) -> str:
    """The right time of day, so many seconds after the first turn."""
    return (BEGIN + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


class OperatorProcess:
    """`at_s`: the steady clock. `ahead_s`: by how much its time of day is wrong."""

    def __init__(
        self,
        api: FakeApi,
        *,
        at_s: float = 0.0,
        ahead_s: float = 0.0,
        release: str = "",
        settings: Settings = SETTINGS,
        upgrade_fleets: int = 0,
    ) -> None:
        self.at_s = at_s
        self.ahead_s = ahead_s
        self._api = api
        self._client = Api(api.login)
        self._cache = Cache()
        self._next_at: float | None = at_s
        self._reconciler = Reconciler(
            self._client,
            self._cache,
            EventPoster(self._client, dropped=lambda: None),
            settings=settings,
            clock=lambda: self.at_s,
            now=lambda: BEGIN + timedelta(seconds=self.at_s + self.ahead_s),
            releases=Releases(self._client, release, clock=lambda: self.at_s) if release else None,
            upgrade_fleets=upgrade_fleets,
        )

    def event(self) -> None:
        """A watch has told of a change."""
        self._next_at = self.at_s

    async def work(self, seconds: float) -> None:
        """The turns of so many seconds."""
        end = self.at_s + seconds
        for _ in range(MOST_TURNS):
            if self._next_at is None or self._next_at > end:
                self.at_s = end
                return
            self.at_s = self._next_at
            wait_s = await self._turn()
            self._next_at = None if wait_s is None else self.at_s + wait_s
        raise AssertionError(f"more than {MOST_TURNS} turns within {seconds:g} s")

    async def _turn(self) -> float | None:
        for kind in WATCHED:
            found = deepcopy(self._api.all(kind))
            uids = frozenset(obj["metadata"]["uid"] for obj in found)
            for obj in found:
                self._cache.put(kind, trim(kind, obj))
            self._cache.keep_only(kind, None, uids, self._api.version)
        return await self._reconciler.turn(FleetKey("ns", "chat"), frozenset(self._api.kinds))

    async def bring_up(self) -> None:
        self._api.add(fleet(decode=2))
        self.event()
        await self.work(1)
        self._api.settle()
        self.event()
        await self.work(60)
        assert condition(self._api, "Ready")["status"] == "True"

    async def __aenter__(self) -> OperatorProcess:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()


def put(api: FakeApi, pod: Obj, patch: Obj) -> None:
    api.change(POD, "ns", pod["metadata"]["name"], patch)


def is_bound(api: FakeApi, pod: Obj, *, at_s: float) -> None:
    """It has a node and waits there for its volumes."""
    bound = {"type": "PodScheduled", "status": "True", "lastTransitionTime": clock(at_s)}
    put(api, pod, {"status": {"phase": "Pending", "conditions": [bound]}})


def leaves(api: FakeApi, pod: Obj, *, at_s: float) -> None:
    """It was asked to leave, and something holds it."""
    marks = {
        "finalizers": ["example.com/hold"],
        "deletionTimestamp": clock(at_s + GRACE_S),
        "deletionGracePeriodSeconds": GRACE_S,
    }
    put(api, pod, {"metadata": marks})


def are_evicted(api: FakeApi, name: str, *, at_s: float) -> None:
    """Three pods of the pool decode ended for good; the pool has an instance too few."""
    (deployment,) = of_pool(api, DEPLOYMENT, "decode")
    no_room = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    put(api, of_pool(api, POD, "decode")[0], {"status": {"conditions": [no_room]}})
    ended = {"type": "Ready", "status": "False", "lastTransitionTime": clock(at_s)}
    for number in range(3):
        pod = pod_of(deployment, f"{name}-{number}")
        pod["metadata"]["creationTimestamp"] = clock(at_s - 60)
        pod["status"] = {"phase": "Failed", "reason": "Evicted", "conditions": [ended]}
        api.add(pod)


def degraded(api: FakeApi) -> str:
    return condition(api, "Degraded")["status"]


CLOCKS = pytest.mark.parametrize(
    ("own_s", "other_s"),
    [(0.0, 0.0), (HOUR_S, 0.0), (-HOUR_S, 0.0), (0.0, HOUR_S), (0.0, -HOUR_S)],
    ids=["right", "own-ahead", "own-behind", "other-ahead", "other-behind"],
)
"""By how much the operator's clock jumps, and that of who writes the pods' times is wrong."""


@CLOCKS
def test_a_pod_that_is_not_created_is_told_after_its_deadline_by_any_clock(
    own_s: float, other_s: float
) -> None:
    async def test(api: FakeApi) -> None:
        async with OperatorProcess(api) as operator:
            await operator.bring_up()
            operator.ahead_s = own_s
            is_bound(api, of_pool(api, POD, "decode")[0], at_s=operator.at_s + other_s)
            operator.event()
            await operator.work(145)
            assert degraded(api) == "False"
            await operator.work(20)
            assert condition(api, "Degraded")["reason"] == "VolumesNotMounted"

    run(test)


@CLOCKS
def test_a_pod_that_does_not_leave_is_told_after_its_deadline_by_any_clock(
    own_s: float, other_s: float
) -> None:
    async def test(api: FakeApi) -> None:
        async with OperatorProcess(api) as operator:
            await operator.bring_up()
            operator.ahead_s = own_s
            leaves(api, of_pool(api, POD, "decode")[0], at_s=operator.at_s + other_s)
            operator.event()
            await operator.work(GRACE_S + 55)
            assert degraded(api) == "False"
            await operator.work(20)
            assert condition(api, "Degraded")["reason"] == "StuckTerminating"

    run(test)


@CLOCKS
def test_pods_that_fail_are_told_for_ten_minutes_by_any_clock(own_s: float, other_s: float) -> None:
    async def test(api: FakeApi) -> None:
        async with OperatorProcess(api) as operator:
            await operator.bring_up()
            operator.ahead_s = own_s
            are_evicted(api, "new", at_s=operator.at_s + other_s)
            operator.event()
            await operator.work(595)
            assert condition(api, "Degraded")["reason"] == "Evicted"
            await operator.work(20)
            assert degraded(api) == "False"

    run(test)


@CLOCKS
def test_pods_that_failed_before_the_operators_start_are_history_by_any_clock(
    own_s: float, other_s: float
) -> None:
    async def test(api: FakeApi) -> None:
        async with OperatorProcess(api) as first:
            await first.bring_up()
        now_s = first.at_s + HOUR_S
        are_evicted(api, "old", at_s=now_s - HOUR_S / 2 + other_s)
        async with OperatorProcess(api, at_s=now_s, ahead_s=own_s) as operator:
            await operator.work(60)
            assert condition(api, "Ready")["reason"] == "Unschedulable"
            assert degraded(api) == "False"
            are_evicted(api, "new", at_s=operator.at_s + other_s)
            operator.event()
            await operator.work(1)
            assert "(3 pods, new-0)" in condition(api, "Degraded")["message"]

    run(test)


def test_a_new_process_tells_of_a_pod_that_does_not_leave_one_deadline_after_its_start() -> None:
    async def test(api: FakeApi) -> None:
        async with OperatorProcess(api) as first:
            await first.bring_up()
            leaves(api, of_pool(api, POD, "decode")[0], at_s=first.at_s)
            first.event()
            await first.work(600)
            assert degraded(api) == "True"
        async with OperatorProcess(api, at_s=first.at_s) as operator:
            await operator.work(GRACE_S + 55)
            assert degraded(api) == "False"
            await operator.work(20)
            assert condition(api, "Degraded")["reason"] == "StuckTerminating"

    run(test)
