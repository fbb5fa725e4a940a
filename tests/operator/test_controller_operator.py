"""The whole operator, kopf included, against a small API server in memory: what it makes of a
fleet, what faults do to that, and that it writes nothing when there is nothing to write.
"""

from __future__ import annotations

import base64
import time

import pytest

from tests.operator.kube_fakes import FakeApi, Fault, until
from tests.operator.kube_operating import (
    condition,
    fleet,
    fleet_ready,
    left,
    of_pool,
    operating,
    ready,
    replicas,
    run,
    still,
)
from xpyd_operator.controller.decision import history
from xpyd_operator.controller.decision.kinds import (
    BUDGET,
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    FLEET,
    HTTP_ROUTE,
    INGRESS,
    NETWORK_POLICY,
    POD,
    POOL,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
)
from xpyd_operator.manifests.names import kv_secret_name

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]


def test_a_new_fleet_gets_its_objects_in_few_calls() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            made = {k.name: len(api.all(k)) for k in (DEPLOYMENT, POOL, SERVICE, BUDGET, SECRET)}
            assert made == {
                "Deployment": 3,
                "InferenceFleetPool": 2,
                "Service": 2,
                "PodDisruptionBudget": 3,
                "Secret": 1,
            }
            assert len(api.all(NETWORK_POLICY)) == 2
            assert len(api.all(SERVICE_ACCOUNT)) == 1
            assert len(api.all(CONFIG_MAP)) == 1
            # Everything, two events, three statuses: room is left for a start that takes longer.
            assert len(api.writes) <= 23
            document = api.get(FLEET, "ns", "chat")
            assert document is not None
            assert document["metadata"]["finalizers"] == ["xpyd.dev/fleet"]
            assert document["status"]["kvKeySecret"] == kv_secret_name(
                "chat", document["metadata"]["uid"]
            )
            for kind, objects in api.objects.items():
                for obj in objects.values():
                    if kind not in (FLEET, EVENT, POD):
                        owner = obj["metadata"]["ownerReferences"][0]
                        assert owner["uid"] == document["metadata"]["uid"]
                    assert "kopf" not in str(obj)

    run(test)


def test_the_key_is_random_and_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test(api: FakeApi) -> None:
        caplog.set_level("DEBUG")
        api.add(fleet())
        api.add(fleet("code"))
        async with fleet_ready(api):
            await ready(api, "code")
        keys = [base64.b64decode(s["data"]["key"]).decode() for s in api.all(SECRET)]
        assert len(set(keys)) == 2
        assert all(len(key) == 64 and int(key, 16) for key in keys)
        assert not any(key in caplog.text for key in keys)

    run(test)


def test_a_second_operator_writes_nothing() -> None:
    async def test(api: FakeApi) -> None:
        for name in ("a", "b", "c"):
            api.add(fleet(name, decode=2))
        async with fleet_ready(api, "a"):
            await ready(api, "b")
            await ready(api, "c")
        before = len(api.writes), api.version
        async with operating(api) as second:
            await until(lambda: second.turns() >= 3, what="all fleets were looked at")
            await still(api)
        assert (len(api.writes), api.version) == before

    run(test)


def test_a_resync_lists_everything_and_writes_nothing() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with operating(api, resync_s=0.5) as operator:
            await ready(api)
            writes, lists = len(api.writes), len(api.calls)
            turns = operator.turns()
            await until(lambda: operator.turns() >= turns + 2, what="two resyncs")
            await until(lambda: len(api.calls) >= lists + 16, what="all kinds were listed twice")
            assert len(api.writes) == writes

    run(test)


def test_a_scale_reaches_the_deployment_and_the_same_document_does_not_undo_it() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            api.change(POOL, "ns", "chat-decode", {"spec": {"replicas": 4}})
            await until(lambda: replicas(api, "decode") == [4], what="scaled")

            def says_four() -> bool:
                api.settle()
                return "decode 4/4" in condition(api, "Ready")["message"]

            await until(says_four, what="four are ready")
            api.change(FLEET, "ns", "chat", {"metadata": {"labels": {"a": "b"}}})
            await still(api)
            assert replicas(api, "decode") == [4]
            pools = [dict(p, replicas=2) for p in fleet()["spec"]["pools"]]
            api.change(FLEET, "ns", "chat", {"spec": {"pools": [pools[0], pools[1]]}})
            await until(lambda: replicas(api, "decode") == [2], what="a new declaration wins")
            pool = api.get(POOL, "ns", "chat-decode")
            assert pool is not None
            assert pool["spec"]["declaredReplicas"] == 2

    run(test)


def test_a_scale_that_comes_between_look_and_write_is_not_undone() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            # The document declares 2 now; before that is written, someone scales to 7.
            api.drop_watches()
            api.faults.append(Fault("GET", "pools\\?watch", 503, times=1))
            api.change(POOL, "ns", "chat-decode", {"spec": {"replicas": 7}})
            pools = fleet()["spec"]["pools"]
            pools[0]["replicas"] = 2
            api.change(FLEET, "ns", "chat", {"spec": {"pools": pools}})
            await until(lambda: replicas(api, "prefill") == [2], what="the document is obeyed")
            await until(lambda: replicas(api, "decode") == [7], what="and the scale, too")
            found = api.get(POOL, "ns", "chat-decode")
            assert found is not None
            assert found["spec"]["replicas"] == 7

    run(test)


def test_an_edit_rolls_and_leaves_no_old_revision() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet(decode=2))
        async with fleet_ready(api):
            before = {d["metadata"]["name"] for d in api.all(DEPLOYMENT)}
            api.change(FLEET, "ns", "chat", {"spec": {"engine": {"args": ["--seed=1"]}}})

            def rolled() -> bool:
                api.settle()
                names = {d["metadata"]["name"] for d in api.all(DEPLOYMENT)}
                return len(names) == 3 and len(names & before) == 1

            await until(rolled, what="engines have one new revision each, the router its old one")
            await ready(api)
            assert replicas(api, "decode") == [2]

    run(test)


def test_a_pool_whose_object_is_deleted_keeps_its_size() -> None:
    """An HPA's six instances fell to one at once."""

    async def test(api: FakeApi) -> None:
        found = fleet()
        del found["spec"]["pools"][1]["replicas"]
        api.add(found)
        async with fleet_ready(api):
            api.change(POOL, "ns", "chat-decode", {"spec": {"replicas": 6}})
            await until(lambda: replicas(api, "decode") == [6], what="scaled")
            await ready(api)
            first = len(api.writes)
            api.drop(POOL, "ns", "chat-decode")
            await until(lambda: api.get(POOL, "ns", "chat-decode"), what="made again")
            await ready(api)
            pool = api.get(POOL, "ns", "chat-decode")
            assert pool is not None
            assert pool["spec"]["replicas"] == 6
            scales = [w for w in api.writes[first:] if "/deployments/" in w.path]
            assert scales == []
            assert replicas(api, "decode") == [6]

    run(test)


def test_a_pool_that_left_is_drained_and_then_its_objects_go() -> None:
    async def test(api: FakeApi) -> None:
        document = fleet()
        spare = {"name": "spare", "role": "Decode", "replicas": 1, "resources": {"gpus": 0}}
        document["spec"]["pools"].append(spare)
        api.add(document)
        async with fleet_ready(api):
            assert len(of_pool(api, POD, "spare")) == 1
            api.change(FLEET, "ns", "chat", {"spec": {"pools": fleet()["spec"]["pools"]}})
            await until(lambda: replicas(api, "spare") == [0], what="drained first")
            assert len(of_pool(api, POOL, "spare")) == 1
            await ready(api)
            await until(
                lambda: not any(of_pool(api, k, "spare") for k in (DEPLOYMENT, POOL, BUDGET)),
                what="nothing of the pool is left",
            )

    run(test)


def test_policies_go_when_the_document_turns_them_off() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            api.change(FLEET, "ns", "chat", {"spec": {"networkPolicy": {"enabled": False}}})
            await until(lambda: not api.all(NETWORK_POLICY), what="no policies")

    run(test)


def test_routes_come_and_go_with_the_documents_fields_and_the_status_names_their_hosts() -> None:
    async def test(api: FakeApi) -> None:
        asked = fleet()
        asked["spec"]["router"] = {
            "ingress": {"host": "a.example.com"},
            "httpRoute": {"parentRefs": [{"name": "web"}], "hostnames": ["b.example.com"]},
        }
        api.add(asked)
        async with fleet_ready(api):
            (status,) = [one["status"] for one in api.all(FLEET)]
            assert status["hosts"] == ["a.example.com", "b.example.com"]
            assert [len(api.all(kind)) for kind in (INGRESS, HTTP_ROUTE)] == [1, 1]
            gone = {"spec": {"router": {"ingress": None, "httpRoute": None}}}
            api.change(FLEET, "ns", "chat", gone)
            await until(lambda: not (api.all(INGRESS) or api.all(HTTP_ROUTE)), what="both are gone")

    run(test)


def test_what_others_made_with_our_label_is_not_deleted() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        foreign = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": "mine",
                "namespace": "ns",
                "labels": {"xpyd.dev/fleet": "chat"},
            },
        }
        api.add(foreign)
        async with fleet_ready(api):
            assert api.get(SERVICE, "ns", "mine") is not None

    run(test)


def test_deleted_and_changed_children_are_as_they_should_be_again() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            before = left(api)
            api.drop(SERVICE, "ns", "chat-router")
            api.drop(BUDGET, "ns", "chat-decode")
            api.drop(SERVICE_ACCOUNT, "ns", "chat")
            api.drop(DEPLOYMENT, "ns", of_pool(api, DEPLOYMENT, "decode")[0]["metadata"]["name"])
            api.change(NETWORK_POLICY, "ns", "chat-engines", {"spec": {"policyTypes": ["Egress"]}})
            unlabelled = {"metadata": {"labels": {"xpyd.dev/fleet": None}}}
            api.change(SERVICE, "ns", "chat-discovery", unlabelled)

            def all_back() -> bool:
                api.settle()
                services = [s["metadata"]["labels"] for s in api.all(SERVICE)]
                return left(api) == before and all("xpyd.dev/fleet" in s for s in services)

            await until(all_back, what="all are back")
            await still(api)
            policy = api.get(NETWORK_POLICY, "ns", "chat-engines")
            assert policy is not None
            assert policy["spec"]["policyTypes"] == ["Ingress"]
            service = api.get(SERVICE, "ns", "chat-discovery")
            assert service is not None
            assert service["metadata"]["labels"]["xpyd.dev/fleet"] == "chat"

    run(test)


def test_who_changes_an_object_back_each_time_gets_a_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "CONTESTED_WRITES", 3)

    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            for _ in range(8):
                api.change(SERVICE, "ns", "chat-router", {"spec": {"type": "NodePort"}})
                await still_or(api, 0.4)
            applies = sum(c.path.endswith("services/chat-router") for c in api.writes)
            assert applies <= 1 + history.CONTESTED_WRITES

    run(test)


async def still_or(api: FakeApi, most_s: float) -> None:
    """Wait for the Service to be applied, not for long."""
    deadline = time.monotonic() + most_s

    def is_applied() -> bool:
        found = api.get(SERVICE, "ns", "chat-router") or {}
        return found["spec"]["type"] == "ClusterIP" or time.monotonic() > deadline

    await until(is_applied, what="applied or not")


def test_a_document_that_cannot_be_obeyed_changes_the_status_alone() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            writes = len(api.writes)
            api.change(FLEET, "ns", "chat", {"spec": {"model": {"uri": "ftp://x"}}})
            await until(
                lambda: condition(api, "Degraded").get("reason") == "InvalidSpec", what="said so"
            )
            await still(api)
            paths = {c.path.rpartition("/")[2] for c in api.writes[writes:]}
            assert paths <= {"status", "events"}
            assert "spec.model.uri" in condition(api, "Degraded")["message"]
            api.drop(FLEET, "ns", "chat")
            await gone(api)

    run(test)


async def gone(api: FakeApi) -> None:
    """Play the controllers until the fleet is gone."""

    def is_gone() -> bool:
        api.settle()
        return api.get(FLEET, "ns", "chat") is None

    await until(is_gone, what="the fleet is gone")


def test_a_deleted_fleet_drains_routers_first_and_leaves_nothing() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet(decode=2))
        async with fleet_ready(api):
            api.drop(FLEET, "ns", "chat")
            await until(lambda: replicas(api, "router") == [0], what="routers drain")
            # Their pods still end: the engines serve them.
            assert replicas(api, "decode") == [2]
            await gone(api)
            assert left(api) == {}
            ends = [call.body for call in api.writes if "finalizers" in str(call.body)]
            assert [body["metadata"]["finalizers"] for body in ends] == [["xpyd.dev/fleet"], []]

    run(test)


def test_a_fleet_that_was_deleted_while_nobody_watched_is_taken_down() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            pass
        api.drop(FLEET, "ns", "chat")
        async with operating(api):
            await gone(api)
        assert left(api) == {}

    run(test)


def test_a_name_that_another_holds_is_left_alone_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "TAKEN_S", 0.5)

    async def test(api: FakeApi) -> None:
        api.add(fleet())
        metadata = {"name": "chat-router", "namespace": "ns"}
        foreign = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"a": 1}}
        held = api.add(foreign)["metadata"]["resourceVersion"]
        async with operating(api):
            await until(
                lambda: condition(api, "Degraded").get("reason") == "NameConflict", what="said so"
            )
            assert "Service chat-router" in condition(api, "Degraded")["message"]
            found = api.get(SERVICE, "ns", "chat-router")
            assert found is not None
            assert found["metadata"]["resourceVersion"] == held
            assert len(api.all(DEPLOYMENT)) == 3

    run(test)


def test_an_object_of_a_deleted_fleet_of_that_name_is_waited_out() -> None:
    async def test(api: FakeApi) -> None:
        owner = {"uid": "of-before", "controller": True, "kind": "InferenceFleet", "name": "chat"}
        metadata = {
            "name": "chat",
            "namespace": "ns",
            "labels": {"xpyd.dev/fleet": "chat"},
            "ownerReferences": [owner],
        }
        api.add({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
        api.add(fleet())
        async with operating(api):
            await until(
                lambda: condition(api, "Degraded").get("reason") == "NameConflict", what="said so"
            )
            # The garbage collector comes.
            api.drop(SERVICE_ACCOUNT, "ns", "chat")
            await ready(api)
            account = api.get(SERVICE_ACCOUNT, "ns", "chat")
            assert account is not None
            assert account["metadata"]["ownerReferences"][0]["uid"] != "of-before"

    run(test)
