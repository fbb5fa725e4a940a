"""When a router that starts is ready: beside others not before it has heard all engines, which are
its share of the fleet's capacity; alone with its first pair (docs/adr/0121)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.router.beats import beat
from tests.router.fakes import Fleet, fleet
from tests.router.test_processes_views import World
from xpyd_router.app_state import FOUND_AFTER_S, unready
from xpyd_router.fleet.instances import Arrival
from xpyd_router.fleet.registry import Registry
from xpyd_router.fleet.view import FleetView

PERIOD_S = 3.0
NOW_S = 100.0
HEARD = {"first_s": NOW_S - 1.0, "period_s": PERIOD_S}
CASES: tuple[tuple[dict[str, Any], dict[str, Any], str | None], ...] = (
    ({}, {}, "starting"),
    # The only router, or one of engines that do not say to how many they beat.
    ({"had_pair": True}, HEARD, None),
    # Beside others it waits for who has not beaten yet.
    ({"had_pair": True}, {**HEARD, "has_other_routers": True}, "starting"),
    ({"had_pair": True}, {"first_s": 96.5, "period_s": 3.0, "has_other_routers": True}, "starting"),
    ({"had_pair": True}, {"first_s": 96.2, "period_s": 3.0, "has_other_routers": True}, None),
    ({"had_pair": True}, {"first_s": 96.2, "period_s": 9.0, "has_other_routers": True}, "starting"),
    # Without a pair, whoever else is there.
    ({}, {"first_s": 96.2, "period_s": 3.0}, "starting"),
    ({}, {"first_s": 94.0, "period_s": 3.0}, None),
    ({"started_s": NOW_S - 29.0}, {}, "starting"),
    ({"started_s": NOW_S - FOUND_AFTER_S}, {}, None),
    ({"started_s": NOW_S - FOUND_AFTER_S}, {"first_s": 99.0, "period_s": 60.0}, None),
    ({"had_pair": True, "is_draining": True}, HEARD, "draining"),
    ({"had_pair": True, "is_current": False}, HEARD, "no word of the instances"),
)


@pytest.mark.parametrize(("facts", "arrival", "reason"), CASES)
def test_a_starting_router_waits_for_engines_to_find_it_and_not_for_ever(
    facts: dict[str, Any], arrival: dict[str, Any], reason: str | None
) -> None:
    unknown: dict[str, Any] = {"had_pair": False, "started_s": NOW_S - 10.0, "now_s": NOW_S}
    usual: dict[str, Any] = {
        "is_draining": False,
        "is_current": True,
        "arrival": Arrival(**arrival),
    }
    assert unready(**{**usual, **unknown, **facts}) == reason


@pytest.mark.parametrize("seed", range(4))
def test_a_router_beside_others_is_ready_when_it_has_heard_all_that_were_there(seed: int) -> None:
    """Engines look for routers once in a period, each at its own time. One that starts meanwhile
    looks at once, so that it may be heard before those that have served for long: the first pair
    of a rollout that is undone is of such."""
    draw = random.Random(seed)
    for _ in range(50):
        found_s = draw.uniform(0.0, 20.0)  # from then on the name of the routers has this one
        old = {host: found_s + draw.uniform(0.0, 1.1 * PERIOD_S) for host in range(1, 7)}
        fresh = {host: found_s + draw.uniform(0.0, 2 * PERIOD_S) for host in (7, 8)}
        ready_s, heard = first_ready(old | fresh)
        assert heard >= old.keys(), (seed, old, fresh)
        assert ready_s < found_s + 2.5 * PERIOD_S


def first_ready(beats_s: dict[int, float]) -> tuple[float, set[int]]:
    """When a router that started at 0 is ready, and which hosts it knows then, of those that beat
    first at these times."""
    now_s = 0.0
    view = FleetView(Registry(period_s=PERIOD_S, missed_beats=3), lambda: now_s)
    to_come = sorted((at_s, host) for host, at_s in beats_s.items())
    heard: set[int] = set()
    while unready(
        is_draining=False,
        is_current=True,
        had_pair=view.had_pair,
        arrival=view.arrival,
        started_s=0.0,
        now_s=now_s,
    ):
        now_s += 0.05
        while to_come and to_come[0][0] <= now_s:
            host = to_come.pop(0)[1]
            kind = "P" if host % 2 else "D"
            view.apply(beat(kind, host, incarnation="i", period_ms=3000, routers=3))
            heard.add(host)
    return now_s, heard


def test_workers_wait_by_the_same_beats_as_their_parent() -> None:
    world = World()
    early = world.worker()
    for later_s in (0.0, 20.0):
        world.now_s = 7.0 + later_s
        world.parent.apply(beat("P", 1, incarnation="i", period_ms=2000, routers=2))
        world.now_s = 8.0 + later_s
        world.parent.apply(beat("D", 2, incarnation="i", period_ms=4000, routers=1))
    expected = Arrival(first_s=7.0, period_s=4.0, has_other_routers=True)
    # A worker that takes the place of another is given their last beats.
    assert world.parent.arrival == early.arrival == world.worker().arrival == expected


async def readiness(made: Fleet) -> tuple[int, str]:
    async with made.http.get(f"{made.base}/readiness") as response:
        return response.status, (await response.json())["status"]


async def test_a_router_beside_others_is_not_ready_with_its_first_pair_but_soon() -> None:
    async with fleet() as made:
        for kind in ("P", "D"):
            await made.engine(kind, routers=2, period_ms=60_000)
        assert await readiness(made) == (503, "starting")
        # It waits for the rest and takes requests all the same, should one come.
        await made.json()
        made.router.state.started_s -= 20.0
        assert await readiness(made) == (503, "starting")
        made.router.state.started_s -= 10.0
        assert await readiness(made) == (200, "ready")


async def test_engines_that_do_not_say_their_routers_hold_no_router_up() -> None:
    async with fleet() as made:
        for kind in ("P", "D"):
            await made.engine(kind, period_ms=60_000)
        assert await readiness(made) == (200, "ready")
