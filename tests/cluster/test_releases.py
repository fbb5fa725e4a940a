"""Several operators on a real API server: a leader that is killed, a release that stands by, an
upgrade that changes no object. Pods run on fake nodes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.fleetkit import READY_S, FleetClient, Obj, delete_fleets, fake_fleet
from tests.cluster.harness import Cluster, wait_for
from tests.cluster.operator_process import OperatorProcess, running_operator

NEW = ("--worker-image=registry/worker:2", "--router-image=registry/router:2")


@pytest.fixture
def chat(plane: Cluster, namespace: str) -> Iterator[FleetClient]:
    """A fleet in a namespace of its own, which its operators must let go in the end."""
    yield FleetClient(plane, namespace)
    with running_operator(plane, namespace, flags=flags(namespace, "last")):
        take(FleetClient(plane, namespace), f"{namespace}/last")
        delete_fleets(plane, namespace)


def flags(namespace: str, release: str, *more: str) -> list[str]:
    return [f"--release={namespace}/{release}", "--lease-seconds=5", *more]


def take(chat: FleetClient, release: str) -> None:
    """Give every fleet of the namespace to the release, as docs/operator.md says."""
    mark = f"xpyd.dev/operator={release}"
    chat.kubectl("annotate", "--overwrite", "fleets", "--all", mark)


def images(chat: FleetClient) -> set[str]:
    specs = [d["spec"]["template"]["spec"] for d in chat.find("deployments")]
    return {container["image"] for spec in specs for container in spec["containers"]}


def told(chat: FleetClient, reason: str) -> list[Obj]:
    return [event for event in chat.events() if event["reason"] == reason]


def looked(operator: OperatorProcess) -> None:
    wait_for(lambda: operator.turns() > 0, READY_S, "the operator works", explain=operator.log)


def test_a_standby_goes_on_when_the_leader_is_killed(plane: Cluster, chat: FleetClient) -> None:
    place = chat.namespace
    with running_operator(plane, place, flags=flags(place, "xpyd")) as first:
        chat.apply(fake_fleet())
        chat.wait_ready()
        with running_operator(plane, place, flags=flags(place, "xpyd")) as second:
            assert second.http("/readyz") == 200
            assert second.turns() == 0
            before = chat.identities()
            first.kill()
            looked(second)
            other = FleetClient(plane, place, "code")
            other.apply(fake_fleet("code"))
            other.wait_ready()
            assert chat.identities() == before
            # SIGTERM gives the Lease back: the next one begins though it is not old.
            second.stop()
        with running_operator(plane, place, flags=flags(place, "xpyd")) as third:
            looked(third)


def test_two_releases_and_an_upgrade_change_no_object(plane: Cluster, chat: FleetClient) -> None:
    place = chat.namespace
    with running_operator(plane, place, flags=flags(place, "one")):
        chat.apply(fake_fleet())
        chat.wait_ready()
        before, old = chat.identities(), images(chat)
        with running_operator(plane, place, flags=flags(place, "two", *NEW)) as second:
            wait_for(lambda: told(chat, "StandsBy"), READY_S, "it stands by", explain=second.log)
            assert chat.identities() == before
    with running_operator(plane, place, flags=flags(place, "one", *NEW)) as upgraded:

        def says_older() -> bool:
            return chat.condition("UpToDate").get("reason") == "OlderDefaults"

        wait_for(says_older, READY_S, "the status says older", explain=upgraded.log)
        assert chat.identities() == before
    with running_operator(plane, place, flags=flags(place, "two", *NEW)) as second:
        take(chat, f"{place}/two")
        looked(second)
        wait_for(says_older, READY_S, "it has the fleet", explain=second.log)
        assert chat.identities() == before
        assert images(chat) == old
    asked = flags(place, "two", *NEW, "--upgrade-fleets=1")
    with running_operator(plane, place, flags=asked) as second:

        def is_current() -> bool:
            current = chat.condition("UpToDate").get("reason") == "Current"
            return current and images(chat) == {"registry/worker:2", "registry/router:2"}

        wait_for(is_current, READY_S, "it has the new images", explain=second.log)
