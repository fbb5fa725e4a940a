"""Whole operators behind an API server on a bad day: a third of the calls are refused or cut, half
of these with their work done, the others are late, and watches lose, repeat and swap events.

Operators are killed meanwhile, too. However it goes, the objects in the end are those of a fine
day, and the writes that got through are not many more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from tests.operator.kube_fakes import FakeApi, until
from tests.operator.kube_objects import differing
from tests.operator.kube_operating import SETTINGS, condition, fleet, replicas, run
from tests.operator.kube_proxy import FaultProxy, Weather
from tests.operator.test_controller_crashes import (
    KEY,
    NEWER,
    OLDER,
    PAUSE,
    RELEASE,
    RESUME,
    picture_of,
    pods_of,
    scale,
    uids_of,
)
from xpyd_operator.controller import leader, main, watch, workqueue
from xpyd_operator.controller.decision import history
from xpyd_operator.controller.decision.kinds import FLEET, LEASE, POOL, Obj
from xpyd_operator.controller.main import Operator, OperatorBroken, OperatorConfig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]

FINE = Weather()
BAD = Weather(calls=1 / 3, late_s=0.02, events=1 / 3)
RESYNC_S = 1.0
LEASE_S = 6.0
PATIENCE_S = 150.0
LIVES_S = 10.0
EDITS = (scale, NEWER, PAUSE, OLDER, RESUME)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad day in seconds."""
    monkeypatch.setattr(workqueue, "BACKOFF_MOST_S", 0.5, raising=False)
    monkeypatch.setattr(main, "_CRD_POLL_S", 0.1)
    monkeypatch.setattr(watch, "RESTART_FIRST_S", 0.1)
    monkeypatch.setattr(leader, "_ASK_S", 0.2)
    # Shorter than what `calm` takes for rest.
    monkeypatch.setattr(history, "_STEPS_S", (0.1, 0.3))
    monkeypatch.setattr(history, "_POOLS_S", 0.3)
    monkeypatch.setattr(history, "_POOLS_READY_S", 0.2)


@asynccontextmanager
async def at_work(
    api: FakeApi, weather: Weather, seed: int, release: str
) -> AsyncGenerator[FaultProxy]:
    """An operator behind a proxy; leaving kills it, without a word to the API server."""
    async with FaultProxy(await api.login(), weather=weather, seed=seed) as proxy:
        config = OperatorConfig(
            SETTINGS,
            http_host="127.0.0.1",
            http_port=0,
            resync_s=RESYNC_S,
            release=release,
            lease_s=LEASE_S,
        )
        stop = asyncio.Event()
        running = asyncio.create_task(keep(config, proxy, stop))
        try:
            yield proxy
        finally:
            proxy.crashed.set()
            stop.set()
            await asyncio.wait((running,), timeout=15)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def keep(config: OperatorConfig, proxy: FaultProxy, stop: asyncio.Event) -> None:
    """Start it again where it ends by itself, as a kubelet does: it may have lost its Lease."""
    while not stop.is_set():
        with contextlib.suppress(OperatorBroken):
            await Operator(config, find_login=proxy.login).run(stop)


Picture = dict[tuple[str, str], Obj]


@dataclass
class Played:
    """What was there at the end of each edit, and how many writes it took."""

    pictures: list[Picture]
    pods: list[int]
    writes: int


async def fine_day(release: str) -> Played:
    """A fleet is made and edited five times, each at rest."""
    async with FakeApi() as api, at_work(api, FINE, 0, release) as proxy:
        api.add(fleet())
        pictures: list[Picture] = []
        for make in (*EDITS, None):
            await calm(api)
            pictures.append(picture_of(api))
            if make is not None:
                make(api)
        return Played(pictures, sorted(pods_of(api).values()), proxy.writes)


async def bad_day(seed: int, fine: Played) -> Played:
    """The same, and each edit comes to what it came to on a fine day."""
    async with FakeApi() as api, at_work(api, BAD, seed, RELEASE) as proxy:
        api.add(fleet())
        for make, picture in zip((*EDITS, None), fine.pictures, strict=True):
            await reach(api, picture, with_records=True)
            if make is not None:
                make(api)
        return Played([picture_of(api)], sorted(pods_of(api).values()), proxy.writes)


async def bad_day_with_kills(seed: int, fine: Played) -> Played:
    """Each edit has an operator of its own, which dies behind a few writes; only the last one lives
    on."""
    rng, writes = random.Random(seed), 0
    async with FakeApi() as api:
        api.add(fleet())
        for make in EDITS:
            async with at_work(api, BAD, rng.randrange(2**32), "") as proxy:
                # The first is of the pool's object.
                pool = lambda: api.get(POOL, "ns", "chat-decode")  # noqa: E731
                await until(pool, what="the pool", timeout_s=PATIENCE_S)
                make(api)
                proxy.crash_after = proxy.writes + rng.randint(1, 8)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LIVES_S):
                        await proxy.crashed.wait()
                writes += proxy.writes
        async with at_work(api, BAD, seed, "") as proxy:
            await reach(api, fine.pictures[-1], with_records=False)
            writes += proxy.writes
        return Played([picture_of(api)], sorted(pods_of(api).values()), writes)


async def reach(api: FakeApi, wanted: Picture, *, with_records: bool) -> None:
    """Play the controllers until the objects are these. Without `with_records`: where no operator
    lived between two edits, the first is in no record, and no status tells of it."""

    def shown(picture: Picture) -> Picture:
        return {
            name: obj if with_records else {key: obj[key] for key in obj if key != "status"}
            for name, obj in picture.items()
            if with_records or name[0] != "ControllerRevision"
        }

    def is_there() -> bool:
        api.settle()
        return shown(picture_of(api)) == shown(wanted)

    try:
        await until(is_there, what="the objects of a fine day", timeout_s=PATIENCE_S)
    except AssertionError as error:
        differences = [*differing("", shown(picture_of(api)), shown(wanted))]
        raise AssertionError("\n".join(differences)) from error


async def calm(api: FakeApi) -> None:
    """Play the controllers until the fleet is ready and nothing but Leases and Events was stored
    for so long that a resync would have shown more."""
    seen: list[object] = []

    def is_calm() -> bool:
        api.settle()
        stored = {
            (kind.name, name): obj["metadata"]["resourceVersion"]
            for kind, objects in api.objects.items()
            if kind not in (LEASE,) and kind.name != "Event"
            for name, obj in objects.items()
        }
        seen.append(stored)
        progress = condition(api, "Progressing").get("reason")
        is_ready = condition(api, "Ready").get("status") == "True" and progress == "Settled"
        document = api.get(FLEET, *KEY)
        assert document is not None
        is_seen = (
            document.get("status", {}).get("observedGeneration")
            == (document["metadata"]["generation"])
        )
        recent = seen[-150:]
        return (
            is_seen
            and (is_ready or progress == "Paused")
            and len(recent) == 150
            and all(one == stored for one in recent)
        )

    await until(is_calm, what="it comes to rest", timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    "kills",
    [
        # On a real API server in each run: tests/cluster/test_operator_weather.py.
        pytest.param(False, marks=pytest.mark.soak, id="that live"),
        pytest.param(True, id="that die"),
    ],
)
@pytest.mark.long
def test_the_objects_are_those_of_a_fine_day_and_the_writes_not_many_more(*, kills: bool) -> None:
    check(1, kills=kills)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 60))
@pytest.mark.parametrize("kills", [False, True], ids=["that live", "that die"])
def test_fifty_bad_days(seed: int, *, kills: bool) -> None:
    check(seed, kills=kills)


@pytest.mark.parametrize("when", ["when it begins", "when it renews"])
def test_an_operator_that_dies_behind_a_write_of_its_lease_is_followed_by_the_next(
    when: str,
) -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with at_work(api, FINE, 0, RELEASE) as proxy:
            if when == "when it renews":
                await calm(api)
            proxy.crash_behind = "/leases"
            await until(proxy.crashed.is_set, what="it wrote its Lease")
        before = uids_of(api)
        async with at_work(api, FINE, 0, RELEASE):
            if when == "when it renews":
                scale(api)
            wanted = [3 if when == "when it renews" else 1]
            # The dead one's Lease has to end first.
            await until(lambda: replicas(api, "decode") == wanted, what="it works")
            await calm(api)
        assert {name: uids_of(api)[name] for name in before} == before

    run(test)


@functools.cache
def once(release: str) -> Played:
    """A fine day, which is the same for all seeds."""
    return asyncio.run(fine_day(release))


def check(seed: int, *, kills: bool) -> None:
    # A dead leader's Lease would hold up the next operator, so those that are killed have none.
    fine = once("" if kills else RELEASE)
    begun_s = time.monotonic()
    bad = asyncio.run((bad_day_with_kills if kills else bad_day)(seed, fine))
    told = f"seed {seed}: {bad.writes} writes, on a fine day {fine.writes}"
    sys.stdout.write(f"{told}; {time.monotonic() - begun_s:.0f} s\n")
    assert bad.pods == fine.pods, told
    assert bad.writes < 2 * fine.writes, told
