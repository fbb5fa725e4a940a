"""Several operators at one API server: replicas of a release of which one works, releases that
leave each other's fleets alone, and an upgrade that changes no object.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.operator.kube_fakes import FakeApi, Fault, until
from tests.operator.kube_operating import (
    SETTINGS,
    condition,
    fleet,
    operating,
    run,
)
from tests.operator.test_controller_clocks import OperatorProcess
from xpyd_operator.controller import leader, reconcile
from xpyd_operator.controller.decision import election, standby
from xpyd_operator.controller.decision.kinds import DEPLOYMENT, EVENT, FLEET, LEASE, POD, Obj
from xpyd_operator.controller.decision.standby import OTHER_RELEASE
from xpyd_operator.controller.main import Operator, OperatorBroken, OperatorConfig
from xpyd_operator.manifests.names import Settings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]

LEASE_S = 6.0
FIRST, SECOND = "xpyd-system/xpyd-operator", "other/xpyd-operator"
NEW_IMAGES = ("registry/worker:2", "registry/router:2")
NEW = Settings(*NEW_IMAGES, version="2")
MARK = "xpyd.dev/operator"


@asynccontextmanager
async def replica(
    api: FakeApi, release: str = FIRST, settings: Settings = SETTINGS, upgrade_fleets: int = 0
) -> AsyncIterator[Operator]:
    async with operating(
        api,
        release=release,
        lease_s=LEASE_S,
        settings=settings,
        upgrade_fleets=upgrade_fleets,
    ) as operator:
        yield operator


async def readyz(operator: Operator) -> tuple[int, str]:
    url = f"http://127.0.0.1:{operator.port}/readyz"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text()


def work(api: FakeApi) -> int:
    """Writes but those of a Lease."""
    return sum("/leases" not in call.path for call in api.writes)


def identities(api: FakeApi) -> dict[tuple[str, str], tuple[str, int]]:
    """Uid and generation of every object but Events and Leases."""
    return {
        (kind.name, name): (obj["metadata"]["uid"], obj["metadata"]["generation"])
        for kind, objects in api.objects.items()
        if kind not in (EVENT, LEASE)
        for (_, name), obj in objects.items()
    }


def events(api: FakeApi, reason: str) -> list[Obj]:
    return [event for event in api.all(EVENT) if event["reason"] == reason]


def mark(api: FakeApi, name: str = "chat") -> str:
    found = api.get(FLEET, "ns", name)
    assert found is not None
    return (found["metadata"].get("annotations") or {}).get(MARK, "")


async def calm(api: FakeApi) -> None:
    """Wait until nothing but Leases was written for a moment."""
    seen = (-1, 0)

    def is_still() -> bool:
        nonlocal seen
        seen = (work(api), seen[1] + 1) if work(api) == seen[0] else (work(api), 0)
        return seen[1] > 40

    await until(is_still, what="no more writes")


async def up(api: FakeApi, *names: str) -> None:
    """Play the controllers until the fleets are ready."""

    def is_ready() -> bool:
        api.settle()
        return all(condition(api, "Ready", name).get("status") == "True" for name in names)

    await until(is_ready, what="the fleets are ready")
    await calm(api)


def test_one_replica_works_and_the_other_stands_by_and_is_ready() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with replica(api) as first:
            await up(api, "chat")
            async with replica(api) as second:
                api.add(fleet("code"))
                await up(api, "code")
                assert second.turns() == 0
                assert await readyz(first) == (200, "ok\n")
                status, text = await readyz(second)
                assert status == 200
                assert text.startswith("standby: ")
                assert text.endswith(" leads\n")
        assert mark(api) == mark(api, "code") == FIRST

    run(test)


def test_a_standby_goes_on_when_the_leader_is_asked_to_end() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with replica(api):
            await up(api, "chat")
            standing_by = replica(api)
            second = await standing_by.__aenter__()
        try:
            await until(lambda: second.turns() > 0, what="the standby works", timeout_s=5)
            api.add(fleet("code"))
            await up(api, "code")
        finally:
            await standing_by.__aexit__(None, None, None)

    run(test)


def test_a_leader_that_cannot_renew_stops_writing_and_ends() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        config = OperatorConfig(
            SETTINGS, http_host="127.0.0.1", http_port=0, release=FIRST, lease_s=LEASE_S
        )
        operator = Operator(config, find_login=api.login)
        running = asyncio.create_task(operator.run(asyncio.Event()))
        await until(lambda: operator.port and not operator.complaints(), what="synced")
        await up(api, "chat")
        api.faults.append(Fault("*", "/leases", 503, times=10_000))
        await until(lambda: operator.unhealthy(), what="it says that it lost the Lease")
        api.add(fleet("late"))
        before = work(api)
        with pytest.raises(OperatorBroken, match="Lease"):
            async with asyncio.timeout(10):
                await running
        assert work(api) == before
        api.faults.clear()
        async with replica(api):
            await up(api, "late")

    run(test)


def test_two_releases_do_not_fight_over_a_fleet() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with replica(api):
            await up(api, "chat")
            before = identities(api)
            async with replica(api, SECOND, NEW) as second:
                await until(lambda: second.turns() > 0, what="the second release looked")
                await until(lambda: events(api, "StandsBy"), what="it says so")
                await calm(api)
                assert identities(api) == before
                (event,) = events(api, "StandsBy")
                assert f"{FIRST} reconciles this fleet; {SECOND} stands by" in event["message"]
                # Each makes what nobody has made; the first that marks a fleet has it.
                api.add(fleet("code"))
                await up(api, "code")
                assert mark(api, "code") in (FIRST, SECOND)
                assert (
                    len([p for p in api.all(POD) if p["metadata"]["name"].startswith("code")]) == 4
                )

    run(test)


def test_a_condition_says_who_stands_by_and_the_owners_writes_leave_it() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with replica(api):
            await up(api, "chat")
            async with replica(api, SECOND, NEW):
                await until(lambda: condition(api, OTHER_RELEASE), what="it says so")
                row = condition(api, OTHER_RELEASE)
                assert f"{FIRST} reconciles this fleet; {SECOND} stands by" in row["message"]
                api.change(FLEET, "ns", "chat", {"spec": {"router": {"replicas": 3}}})

                def is_written() -> bool:
                    found = api.get(FLEET, "ns", "chat")
                    assert found is not None
                    metadata, status = found["metadata"], found["status"]
                    return status["observedGeneration"] == metadata["generation"]

                await until(is_written, what="the owner has written another status")
                await up(api, "chat")
                assert condition(api, OTHER_RELEASE) == row
            # The owner's next process carries it, too.
        async with replica(api):
            api.change(FLEET, "ns", "chat", {"spec": {"router": {"replicas": 1}}})
            await until(is_written, what="the next process has written a status")
            await up(api, "chat")
            assert condition(api, OTHER_RELEASE) == row

    run(test)


def test_the_condition_goes_with_the_release_that_stood_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(standby, "GONE_S", 3.0)

    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with replica(api):
            await up(api, "chat")
            async with replica(api, SECOND, NEW):
                await until(lambda: condition(api, OTHER_RELEASE), what="it says so")
            await until(lambda: not condition(api, OTHER_RELEASE), what="it goes", timeout_s=15)
            await calm(api)
            assert condition(api, "Ready")["status"] == "True"

    run(test)


def test_who_takes_a_fleet_over_says_no_more_that_it_stands_by() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with replica(api), replica(api, SECOND, NEW):
            await up(api, "chat")
            await until(lambda: condition(api, OTHER_RELEASE), what="the second stands by")
            api.change(FLEET, "ns", "chat", {"metadata": {"annotations": {MARK: SECOND}}})

            def has_changed() -> bool:
                said = condition(api, OTHER_RELEASE).get("message", "")
                return f"{SECOND} reconciles this fleet; {FIRST} stands by" in said

            await until(has_changed, what="the first stands by")
            await calm(api)
            assert has_changed()

    run(test)


def test_a_fleet_changes_hands_by_its_annotation_and_its_pods_stay() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with replica(api), replica(api, SECOND, NEW):
            await up(api, "chat")
            before = identities(api)
            api.change(FLEET, "ns", "chat", {"metadata": {"annotations": {MARK: SECOND}}})

            def is_theirs() -> bool:
                return condition(api, "UpToDate").get("reason") == "OlderDefaults"

            await until(is_theirs, what="the second release reconciles it")
            await calm(api)
            assert identities(api) == before
            assert mark(api) == SECOND

    run(test)


def test_fleets_of_a_release_that_is_gone_for_long_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(election, "OWNER_GONE_S", 4.0)
    monkeypatch.setattr(leader, "_ASK_S", 0.2)
    monkeypatch.setattr(reconcile, "LOOK_S", 0.3)

    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with replica(api):
            await up(api, "chat")
            async with replica(api, SECOND, NEW):
                await until(lambda: events(api, "StandsBy"), what="the second stands by")
                await asyncio.sleep(5)
                assert mark(api) == FIRST
        before = identities(api)
        async with replica(api, SECOND, NEW):
            await until(lambda: mark(api) == SECOND, what="the second has taken it")
            await calm(api)
        assert identities(api) == before

    run(test)


def test_an_upgrade_of_the_operator_changes_no_object() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with replica(api):
            await up(api, "chat")
        before = identities(api)
        async with replica(api, settings=NEW):

            def is_told() -> bool:
                return condition(api, "UpToDate").get("reason") == "OlderDefaults"

            await until(is_told, what="the status says older")
            await calm(api)
            assert identities(api) == before
            assert events(api, "OlderDefaults")
            # A scale of a pool changes no image.
            api.change(FLEET, "ns", "chat", {"spec": {"router": {"replicas": 3}}})
            await up(api, "chat")
        assert images(api) == {"xpyd-worker:1", "xpyd-router:1"}

    run(test)


def images(api: FakeApi) -> set[str]:
    specs = [deployment["spec"]["template"]["spec"] for deployment in api.all(DEPLOYMENT)]
    return {container["image"] for spec in specs for container in spec["containers"]}


def test_so_many_fleets_at_a_time_take_a_new_image() -> None:
    async def test(api: FakeApi) -> None:
        names = ("a", "b", "c")
        for name in names:
            api.add(fleet(name))
        async with replica(api):
            await up(api, *names)
        most = 0

        def is_done() -> bool:
            nonlocal most
            states = [condition(api, "UpToDate", name).get("reason") for name in names]
            most = max(most, states.count("Upgrading"))
            api.settle()
            return states == ["Current"] * 3 and images(api) == set(NEW_IMAGES)

        async with replica(api, settings=NEW, upgrade_fleets=1):
            await until(is_done, what="all fleets have the new images", timeout_s=90)
        assert most == 1

    run(test)


def test_a_status_that_was_not_written_at_once_still_has_its_event() -> None:
    async def test(api: FakeApi) -> None:
        api.faults.append(Fault("PATCH", "inferencefleets/chat/status$", 409, times=1))
        api.add(fleet())
        async with replica(api):
            await until(lambda: events(api, "Created"), what="the pools are told")

    run(test)


def test_a_fleet_says_that_it_takes_new_images_before_it_has_a_pod_of_them() -> None:
    """An operator that is killed between the two is followed by one that counts the place."""

    async def test(api: FakeApi) -> None:
        async with OperatorProcess(api, release=FIRST) as operator:
            await operator.bring_up()
        async with OperatorProcess(api, release=FIRST, settings=NEW, upgrade_fleets=1) as newer:
            begun = len(api.writes)
            await newer.work(30)
        assert images(api) & set(NEW_IMAGES)
        paths = [call.path for call in api.writes[begun:]]
        first = next(one for one in paths if "/deployments" in one or one.endswith("chat/status"))
        assert first.endswith("inferencefleets/chat/status")
        assert condition(api, "UpToDate")["reason"] == "Upgrading"

    run(test)


def test_a_fleet_of_another_release_that_is_stuck_blocks_no_upgrade() -> None:
    async def test(api: FakeApi) -> None:
        async with OperatorProcess(api, release=FIRST) as operator:
            await operator.bring_up()
        theirs = fleet("theirs")
        theirs["metadata"]["annotations"] = {MARK: SECOND}
        stuck = {"type": "UpToDate", "status": "False", "reason": "Upgrading"}
        api.add({**theirs, "status": {"conditions": [stuck]}})
        async with OperatorProcess(api, release=FIRST, settings=NEW, upgrade_fleets=1) as newer:
            await newer.work(1)
        assert mark(api) == FIRST
        assert condition(api, "UpToDate")["reason"] == "Upgrading"

    run(test)
