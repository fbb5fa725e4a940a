"""The operator when others meddle with its objects, or the API server says odd things for long."""

from __future__ import annotations

from base64 import b64decode
from copy import deepcopy
from typing import Any

import pytest

from tests.operator.kube_fakes import FakeApi, Fault, until
from tests.operator.kube_operating import (
    condition,
    fleet,
    fleet_ready,
    of_pool,
    operating,
    replicas,
    run,
    still,
)
from xpyd_core.keys import key_ids
from xpyd_operator.controller import main, watch
from xpyd_operator.controller.decision.kinds import (
    CLAIM_TEMPLATE,
    CONFIG_MAP,
    DEPLOYMENT,
    FLEET,
    LEADER_WORKER_SET,
    POD,
    POOL,
    SECRET,
)
from xpyd_operator.manifests.names import (
    ANNOTATION_KEY_ID,
    ANNOTATION_ROTATE,
    KEY_SLOTS,
    kv_secret_name,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]


@pytest.mark.parametrize("label", [None, "another"])
def test_a_pool_that_loses_its_label_keeps_its_replicas(label: str | None) -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            api.change(POOL, "ns", "chat-decode", {"spec": {"replicas": 8}})

            def is_scaled() -> bool:
                api.settle()
                return "decode 8/8" in condition(api, "Ready").get("message", "")

            await until(is_scaled, what="the pool is scaled")
            labels = {"xpyd.dev/fleet": label}
            api.change(POOL, "ns", "chat-decode", {"metadata": {"labels": labels}})

            def has_label() -> bool:
                pool = api.get(POOL, "ns", "chat-decode")
                return (
                    pool is not None and pool["metadata"]["labels"].get("xpyd.dev/fleet") == "chat"
                )

            await until(has_label, what="the label is back")
            await still(api)
            assert replicas(api, "decode") == [8]
            pool = api.get(POOL, "ns", "chat-decode")
            assert pool is not None
            assert pool["spec"]["replicas"] == 8

    run(test)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"keySecretRef": {"name": "mine"}}, {"keySecretRef": None}),
        ({"insecure": True}, {"insecure": None}),
    ],
)
def test_a_fleet_that_gives_up_its_own_key_or_to_have_none_gets_one(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet(kvTransfer=before))
        async with fleet_ready(api):
            assert not api.all(SECRET)
            api.change(FLEET, "ns", "chat", {"spec": {"kvTransfer": after}})
            await until(lambda: api.all(SECRET), what="there is a Secret")
            document = api.get(FLEET, "ns", "chat")
            assert document is not None
            name = kv_secret_name("chat", document["metadata"]["uid"])
            assert [secret["metadata"]["name"] for secret in api.all(SECRET)] == [name]

    run(test)


def test_a_wish_for_another_key_makes_a_second_secret_whatever_an_earlier_operator_left() -> None:
    """No router answers here, so the rotation waits: what follows, tests/cluster shows."""

    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            document = api.get(FLEET, "ns", "chat")
            assert document is not None
            uid = document["metadata"]["uid"]
            name = kv_secret_name("chat", uid, KEY_SLOTS[1])
            (first,) = api.all(SECRET)
            left = deepcopy(first)
            left["metadata"] = {"name": name, "namespace": "ns"}
            api.add(left)
            wish = {"metadata": {"annotations": {ANNOTATION_ROTATE: "now"}}}
            api.change(FLEET, "ns", "chat", wish)

            def is_adding() -> bool:
                found = condition(api, "KeyRotated")
                waits = "pods accept the new key; waits for" in found.get("message", "")
                return waits and found["reason"] == "Adding"

            await until(is_adding, what="the key is being added")
            order = api.get(CONFIG_MAP, "ns", kv_secret_name("chat", uid))
            made = api.get(SECRET, "ns", name)
            assert made is not None
            assert order is not None
            assert order["data"] == {"key.order": "key\nkey-b\n"}
            assert made["data"] != left["data"]
            key = b64decode(made["data"]["key"])
            assert order["metadata"]["annotations"][ANNOTATION_KEY_ID] == key_ids([key])[0]
            api.drop(CONFIG_MAP, "ns", kv_secret_name("chat", uid))

            def is_back() -> bool:
                found = api.get(CONFIG_MAP, "ns", kv_secret_name("chat", uid))
                return found is not None and found["data"] == {"key.order": "key\n"}

            await until(is_back, what="the lost ConfigMap is there, with the key that signs")
            document = api.get(FLEET, "ns", "chat")
            assert document is not None
            assert document["status"]["kvKeySecret"] == first["metadata"]["name"]

    run(test)


def test_a_conflict_that_made_no_key_is_not_taken_for_a_key_that_exists() -> None:
    """As when another client changes the namespace's quota at that moment."""

    async def test(api: FakeApi) -> None:
        words = "Operation cannot be fulfilled on resourcequotas: the object has been modified"
        api.faults.append(Fault("POST", "/secrets$", 409, times=2, message=words))
        api.add(fleet())
        async with fleet_ready(api):
            await until(lambda: api.all(SECRET), what="the next turn makes it")

    run(test)


def test_a_kind_that_is_said_to_be_there_and_is_not_stops_no_fleet() -> None:
    """Its list says 404, perhaps after all others came in."""

    async def test(api: FakeApi) -> None:
        api.add(fleet())
        api.faults.append(Fault("GET", "leaderworkersets", 404, times=1))
        async with operating(api):
            await until(lambda: api.writes, what="the fleet is looked at")

    run(test, missing=(CLAIM_TEMPLATE,))


@pytest.mark.parametrize("status", [400, 403, 405, 409, 410, 429, 500, 503])
def test_a_kind_that_cannot_be_listed_stops_no_fleet_that_does_not_need_it(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "_OPTIONAL_POLL_S", 0.3)

    async def test(api: FakeApi) -> None:
        api.add(fleet("one"))
        async with fleet_ready(api, "one"):
            api.faults.append(Fault("GET", "/leaderworkersets", status, times=10**6))
            api.kinds = (*api.kinds, LEADER_WORKER_SET)

            def is_asked() -> bool:
                return any(c.status == status for c in api.calls if "leaderworker" in c.path)

            await until(is_asked, what="the kind is asked for")
            api.add(fleet("two"))
            api.change(POOL, "ns", "one-decode", {"spec": {"replicas": 5}})
            await until(lambda: 5 in replicas(api, "decode"), what="the pool is scaled")
            await until(lambda: condition(api, "Ready", "two"), what="the new fleet has a status")

    run(test, missing=(LEADER_WORKER_SET, CLAIM_TEMPLATE))


@pytest.mark.parametrize("status", [409, 503])
def test_a_kind_of_a_group_that_cannot_be_read_stops_no_fleet_that_does_not_need_it(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_ALL_TRIED_S", 0.5)
    monkeypatch.setattr(watch, "RESTART_FIRST_S", 0.05)

    async def test(api: FakeApi) -> None:
        fault = Fault("GET", "/apis/leaderworkerset.x-k8s.io/v1$", status, times=10**6)
        api.faults.append(fault)
        api.add(fleet())
        async with operating(api):
            await until(lambda: len(api.all(DEPLOYMENT)) == 3, what="the fleet is made")
            fault.times = 0
            await until(lambda: "leaderworkersets" in api.watching, what="watched in the end")

    run(test, missing=(CLAIM_TEMPLATE,))


@pytest.mark.parametrize("status", [404, 409, 410])
def test_a_webhook_that_says_conflict_for_ever_is_told_and_not_asked_in_a_loop(status: int) -> None:
    async def test(api: FakeApi) -> None:
        words = "the webhook says no"
        fault = Fault("PATCH", "/services/chat-router", status, times=10**6, message=words)
        api.faults.append(fault)
        api.add(fleet())
        async with operating(api):
            degraded = "Degraded"
            await until(
                lambda: words in condition(api, degraded).get("message", ""), what="it is told"
            )
            assert condition(api, degraded)["reason"] == "Refused"
            assert len([c for c in api.calls if "services/chat-router" in c.path]) < 40

    run(test)


def test_a_copy_of_a_deployment_does_not_keep_a_deleted_fleet() -> None:
    """Its pods have the fleet's labels: somebody took the template with them."""

    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            pod = deepcopy(of_pool(api, POD, "decode")[0])
            owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "mine-1", "uid": "x"}
            pod["metadata"] = {
                "name": "mine-1-1",
                "namespace": "ns",
                "labels": pod["metadata"]["labels"],
                "ownerReferences": [{**owner, "controller": True}],
            }
            api.add(pod)
            await still(api)
            api.drop(FLEET, "ns", "chat")

            def is_gone() -> bool:
                api.settle()
                return api.get(FLEET, "ns", "chat") is None

            await until(is_gone, what="the fleet is gone")
            assert api.get(POD, "ns", "mine-1-1") is not None
            assert not api.all(DEPLOYMENT)

    run(test)


@pytest.mark.parametrize("status", [404, 410])
def test_a_deletion_that_is_answered_as_if_nothing_was_there_is_asked_for_again(
    status: int,
) -> None:
    """It was taken for success, and the object stayed for ever."""

    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            api.faults.append(Fault("DELETE", "/deployments/chat-decode-", status))
            api.change(FLEET, "ns", "chat", {"spec": {"engine": {"args": ["--seed=1"]}}})

            def is_rolled() -> bool:
                api.settle()
                return not api.faults[0].times and replicas(api, "decode") == [1]

            await until(is_rolled, what="the old revision is deleted")

    run(test)


def test_a_status_that_is_answered_with_not_found_is_written_again() -> None:
    """Nothing else would bring it: the fleet stayed at its last status until something changed."""

    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            api.faults.append(Fault("PATCH", "inferencefleets/chat/status", 404))
            api.change(FLEET, "ns", "chat", {"spec": {"rollout": {"historyLimit": 3}}})

            def is_told() -> bool:
                found = api.get(FLEET, "ns", "chat")
                assert found is not None
                return found["status"]["observedGeneration"] == found["metadata"]["generation"]

            await until(is_told, what="the status is of the new document")
            assert [fault.times for fault in api.faults] == [0]

    run(test)
