"""An operator that dies behind any one of its writes: the next one finishes, with the same objects.

Each scenario is played once without a crash. Then it is played again for writes that it took, each
run for every fourth and the soak for every one, and the operator is gone behind that write, before
it has heard the answer: of a new fleet, a scale, a rollout, a pause, an undo, a restart, a
deletion. What is there in the end is what was there in the first play, nothing that existed was
made anew, and few writes were done twice.

An operator here has no watches: it lists everything before each turn, and its clock jumps. Whole
ones are in test_controller_weather.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.operator.kube_fakes import FakeApi
from tests.operator.kube_objects import plain
from tests.operator.kube_operating import SETTINGS, fleet
from tests.operator.kube_proxy import FaultProxy
from xpyd_operator.controller.client import Api
from xpyd_operator.controller.decision.cache import Cache, Feed, FleetKey
from xpyd_operator.controller.decision.errors import KubeError
from xpyd_operator.controller.decision.kinds import (
    DEPLOYMENT,
    EVENT,
    FLEET,
    LEASE,
    POD,
    POOL,
    SECRET,
    WATCHED,
    Obj,
)
from xpyd_operator.controller.events import EventPoster
from xpyd_operator.controller.leader import Releases
from xpyd_operator.controller.reconcile import Reconciler, TurnFailed
from xpyd_operator.controller.watch import listed
from xpyd_operator.manifests.names import ANNOTATION_PROMOTE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]

RELEASE = "xpyd-system/xpyd-operator"
KEY = FleetKey("ns", "chat")
TURN_S = 20.0
MOST_TURNS = 60
SOME = 4
TWICE = 4
"""Writes that a crash may cost: a status that the dead operator would have written later, too."""


class Process:
    """One operator, from its start to its end."""

    def __init__(self, proxy: FaultProxy, clock: Callable[[], float]) -> None:
        async def no_wait(_: float) -> None: ...

        self._api = Api(proxy.login, sleep=no_wait)
        cache = Cache()
        self._feed = Feed(cache, lambda _key, _urgent: None)
        self._reconciler = Reconciler(
            self._api,
            cache,
            EventPoster(self._api, dropped=lambda: None),
            settings=SETTINGS,
            clock=clock,
            releases=Releases(self._api, RELEASE, clock=clock),
        )

    async def turn(self, api: FakeApi) -> None:
        """List everything, then one turn."""
        served = [kind for kind in WATCHED if kind in api.kinds]
        self._feed.expect(served, (None,))
        for kind in served:
            async for page in self._api.pages(kind, None):
                self._feed.receive(listed(kind, None, page, first=True))
        await self._reconciler.turn(KEY, frozenset(served))

    async def close(self) -> None:
        await self._api.close()


class World:
    """An API server, the controllers, and operators one after the other."""

    def __init__(self, api: FakeApi, proxy: FaultProxy) -> None:
        self.api = api
        self.proxy = proxy
        self.now_s = 0.0
        self.process = Process(proxy, self._clock)

    def _clock(self) -> float:
        return self.now_s

    async def rest(self) -> None:
        """Turns, until three have written nothing. An operator that is gone is replaced."""
        quiet = 0
        for _ in range(MOST_TURNS):
            before = (self.proxy.writes, self.api.version)
            try:
                await self.process.turn(self.api)
            except (KubeError, TurnFailed):
                if not self.proxy.crashed.is_set():
                    raise
                await self.restart()
            self.api.settle()
            self.now_s += TURN_S
            quiet = quiet + 1 if before == (self.proxy.writes, self.api.version) else 0
            if quiet == 3:
                return
        raise AssertionError("it does not come to rest")

    async def restart(self) -> None:
        """The next operator knows nothing of the one before."""
        await self.process.close()
        self.proxy.revive()
        self.process = Process(self.proxy, self._clock)


@dataclass(frozen=True)
class Scenario:
    """Edits, each at rest; a crash comes in what follows the last."""

    name: str
    edits: tuple[Callable[[FakeApi], object], ...]
    late: Callable[[FakeApi], object] | None = None
    """This edit comes one turn behind the one before, in the middle of what that began."""


def apply(api: FakeApi) -> object:
    return api.add(fleet())


def edit(**spec: Any) -> Callable[[FakeApi], object]:
    return lambda api: api.change(FLEET, *KEY, {"spec": spec})


def scale(api: FakeApi) -> object:
    return api.change(POOL, "ns", "chat-decode", {"spec": {"replicas": 3}})


def delete(api: FakeApi) -> object:
    return api.drop(FLEET, *KEY)


NEWER = edit(engine={"args": ["--seed=1"]})
OLDER = edit(engine={"args": None})
PAUSE, RESUME = edit(rollout={"paused": True}), edit(rollout={"paused": None})
CANARY = edit(rollout={"canary": {"weightPercent": 50}})


def promote(api: FakeApi) -> object:
    (found,) = api.all(FLEET)
    asked = {ANNOTATION_PROMOTE: f"{found['status']['canary']['revision']}@2026-01-02T00:00:00Z"}
    return api.change(FLEET, *KEY, {"metadata": {"annotations": asked}})


RESTART = edit(rollout={"restartedAt": "2026-01-02T00:00:00Z"})
SCENARIOS = (
    Scenario("apply", (apply,)),
    Scenario("scale", (apply, scale)),
    Scenario("rollout", (apply, NEWER)),
    Scenario("pause", (apply, NEWER, PAUSE), late=PAUSE),
    Scenario("resume", (apply, PAUSE, NEWER, RESUME)),
    Scenario("resume in the middle", (apply, NEWER, PAUSE, RESUME), late=PAUSE),
    Scenario("undo", (apply, NEWER, OLDER)),
    Scenario("undo in the middle", (apply, NEWER, OLDER), late=OLDER),
    Scenario("restart", (apply, RESTART)),
    Scenario("delete", (apply, delete)),
    Scenario("delete in the middle", (apply, NEWER, delete), late=delete),
)


@dataclass
class Played:
    """What a play left, and the writes behind the last edit."""

    picture: dict[tuple[str, str], Obj]
    pods: Counter[str]
    writes: int
    events: list[str]
    """Their reasons; a process here posts those alone that its turn waits for."""


async def play(
    scenario: Scenario, crash_after: int | None = None, crash_behind: str = ""
) -> Played:
    """`crash_after`: so many writes behind the last edit; `crash_behind`: the first write there
    whose path has this."""
    async with FakeApi() as api, FaultProxy(await api.login()) as proxy:
        world = World(api, proxy)
        begun = 0
        try:
            for number, make in enumerate(scenario.edits, start=1):
                is_last = number == len(scenario.edits)
                if make is scenario.late:
                    await world.process.turn(api)
                elif number > 1:
                    await world.rest()
                begun = proxy.writes
                if is_last and crash_after is not None:
                    proxy.crash_after = begun + crash_after
                if is_last:
                    proxy.crash_behind = crash_behind
                make(api)
            uids = uids_of(api) if scenario.name != "delete" else {}
            await world.rest()
        finally:
            await world.process.close()
        now = uids_of(api)
        assert {name: now[name] for name in uids.keys() & now.keys()} == {
            name: uids[name] for name in uids.keys() & now.keys()
        }, "an object was made anew"
        events = sorted(event["reason"] for event in api.all(EVENT))
        return Played(picture_of(api), pods_of(api), proxy.writes - begun, events)


def uids_of(api: FakeApi) -> dict[tuple[str, str], str]:
    return {
        (kind.name, name): obj["metadata"]["uid"]
        for kind, objects in api.objects.items()
        for (_, name), obj in objects.items()
        if kind not in (EVENT, LEASE, POD)
    }


def pods_of(api: FakeApi) -> Counter[str]:
    return Counter(pod["metadata"]["ownerReferences"][0]["uid"] for pod in api.all(POD))


def picture_of(api: FakeApi) -> dict[tuple[str, str], Obj]:
    """Every object, without what differs from one play to another."""
    return {
        (kind.name, name): plain(obj, is_secret=kind == SECRET)
        for kind, objects in api.objects.items()
        for (_, name), obj in objects.items()
        if kind not in (EVENT, LEASE, POD)
    }


of_scenarios = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)


@of_scenarios
@pytest.mark.long
def test_a_crash_behind_a_write_leaves_the_same_objects(scenario: Scenario) -> None:
    # Scenarios begin with writes of the same kinds: each has others of them.
    check(scenario, first=1 + SCENARIOS.index(scenario) % SOME, step=SOME)


@pytest.mark.soak
@of_scenarios
def test_a_crash_behind_any_write_leaves_the_same_objects(scenario: Scenario) -> None:
    check(scenario, first=1, step=1)


def check(scenario: Scenario, *, first: int, step: int) -> None:
    async def test() -> None:
        whole = await play(scenario)
        assert whole.writes > 0
        for number in range(min(first, whole.writes), whole.writes + 1, step):
            crashed = await play(scenario, crash_after=number)
            where = f"crashed behind write {number} of {whole.writes}"
            assert crashed.picture == whole.picture, where
            assert sorted(crashed.pods.values()) == sorted(whole.pods.values()), where
            assert crashed.writes <= whole.writes + TWICE, where

    asyncio.run(test())


def test_a_rollout_that_was_paused_in_the_middle_ends_as_one_that_was_not() -> None:
    async def deployments(name: str) -> dict[tuple[str, str], Obj]:
        played = await play(next(one for one in SCENARIOS if one.name == name))
        return {n: obj for n, obj in played.picture.items() if n[0] == DEPLOYMENT.name}

    async def test() -> None:
        assert await deployments("resume in the middle") == await deployments("rollout")

    asyncio.run(test())


@pytest.mark.parametrize(
    ("edits", "events"),
    [
        ((apply, CANARY, NEWER), ["CanaryStarted"]),
        ((apply, CANARY, NEWER, promote), ["CanaryPromoted", "CanaryStarted"]),
    ],
)
def test_a_decision_about_a_canary_is_one_event_whenever_the_operator_dies(
    edits: tuple[Callable[[FakeApi], object], ...], events: list[str]
) -> None:
    scenario = Scenario("canary", edits)

    async def test() -> None:
        whole = await play(scenario)
        assert whole.events == events
        for number in range(1, whole.writes + 1):
            where = f"crashed behind write {number} of {whole.writes}"
            assert (await play(scenario, crash_after=number)).events == events, where
        assert (await play(scenario, crash_behind="/events")).events == events

    asyncio.run(test())
