"""Several operators on a real API server: a leader that is killed, a release that stands by, an
upgrade that changes no object, CRDs that are newer. Pods run on fake nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

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
    return [f"--release={namespace}/{release}", "--lease-seconds=10", *more]


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


@pytest.mark.long
def test_two_releases_and_an_upgrade_change_no_object_until_asked_and_an_undo_takes_it_back(
    plane: Cluster, chat: FleetClient
) -> None:
    place = chat.namespace
    with running_operator(plane, place, flags=flags(place, "one")):
        chat.apply(fake_fleet())
        chat.wait_ready()
        before, old = chat.identities(), images(chat)
        with running_operator(plane, place, flags=flags(place, "two", *NEW)) as second:
            wait_for(lambda: told(chat, "StandsBy"), READY_S, "it stands by", explain=second.log)
            said = f"{place}/one reconciles this fleet; {place}/two stands by"

            def is_said() -> bool:
                return said in chat.condition("OtherRelease").get("message", "")

            wait_for(is_said, READY_S, "a condition says so", explain=second.log)
            assert "StandsBy" in chat.kubectl("get", "fleet", "chat", "-o", "wide")
            assert chat.identities() == before
            # The owner's next status leaves it.
            chat.scale("decode", 2)
            chat.wait_pool("decode", 2)
            chat.wait_ready()
            assert is_said()
            chat.scale("decode", 1)
            chat.wait_pool("decode", 1)
            chat.wait_ready()
            before = chat.identities()
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
        assert "registry/worker:2" in chat.rollout("history", "chat")
        # The operator that has a place for it in its turns does not take them again.
        chat.rollout("undo", "chat")
        chat.rollout("status", "chat", "--wait", f"--timeout={READY_S:.0f}")
        assert images(chat) == old
        assert chat.condition("UpToDate")["reason"] == "Undone"


_SPEC = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties"
_NEW_FIELDS = {
    f"{_SPEC}/rollout/properties/fadePercent": {"type": "integer", "default": 5},
    f"{_SPEC}/pools/items/properties/placement": {"type": "string", "maxLength": 9},
}


@contextmanager
def newer_crds(plane: Cluster) -> Iterator[None]:
    """The CRD of fleets with two more fields, one of which has a default."""

    def patch(op: str) -> None:
        rows = [{"op": op, "path": path, "value": one} for path, one in _NEW_FIELDS.items()]
        plane.kubectl(
            "patch", "crd", "inferencefleets.xpyd.dev", "--type=json", "--patch", json.dumps(rows)
        )

    patch("add")
    try:
        yield
    finally:
        patch("remove")


@pytest.mark.long
def test_an_operator_goes_on_with_newer_crds_and_says_what_it_does_not_know(
    plane: Cluster, chat: FleetClient
) -> None:
    place = chat.namespace
    document = fake_fleet()
    with running_operator(plane, place, flags=flags(place, "xpyd")):
        chat.apply(document)
        chat.wait_ready()
        before = chat.identities()
    with newer_crds(plane):

        def has_default() -> bool:
            return chat.document()["spec"]["rollout"].get("fadePercent") == 5

        wait_for(has_default, READY_S, "the API server fills the default in")
        with running_operator(plane, place, flags=flags(place, "xpyd")) as operator:

            def names(*fields: str) -> bool:
                message = chat.condition("FieldsIgnored").get("message", "")
                return message.startswith(f"{', '.join(fields)}: the CRDs have them")

            new = "spec.rollout.fadePercent"
            wait_for(lambda: names(new), READY_S, "it says so", explain=operator.log)
            wait_for(lambda: told(chat, "FieldsIgnored"), READY_S, "an Event", explain=operator.log)
            assert chat.identities() == before
            assert chat.condition("Ready")["status"] == "True"
            assert chat.condition("Degraded")["reason"] == "AsExpected"

            document["spec"]["pools"][1] |= {"placement": "Packed", "replicas": 2}
            chat.apply(document)
            chat.wait_pool("decode", 2)
            theirs = "spec.pools[1].placement"
            wait_for(lambda: names(theirs, new), READY_S, "both are named", explain=operator.log)
            uids = {name: uid for name, (uid, _) in before.items()}
            assert uids.items() <= {n: uid for n, (uid, _) in chat.identities().items()}.items()
