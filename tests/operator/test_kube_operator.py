"""The whole operator, kopf included, against a small API server in memory: what it makes of a
fleet, what faults do to that, and that it writes nothing when there is nothing to write.
"""

from __future__ import annotations

import asyncio
import base64
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.operator.kube_fakes import FakeApi, Fault, pod_of, until
from xpyd_operator.kube import client, decide, feed, main, memory, reconcile, tap, watch, workqueue
from xpyd_operator.kube.cache import Cache
from xpyd_operator.kube.inbox import Listed, Present
from xpyd_operator.kube.kinds import (
    BUDGET,
    CLAIM_TEMPLATE,
    DEPLOYMENT,
    EVENT,
    FLEET,
    LEADER_WORKER_SET,
    NETWORK_POLICY,
    POD,
    POOL,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Obj,
)
from xpyd_operator.kube.main import Operator, OperatorConfig
from xpyd_operator.objects import Settings

pytestmark = pytest.mark.slow

SETTINGS = Settings("xpyd-worker:1", "xpyd-router:1")
ALL = 15
"""Writes that a new 1P1D fleet's objects and its finalizer take."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that a person would not notice become waits that a test does not notice."""
    monkeypatch.setattr(client, "_BACKOFFS_S", (0.01, 0.01, 0.01))
    monkeypatch.setattr(workqueue, "BACKOFF_FIRST_S", 0.05)
    monkeypatch.setattr(decide, "_UNSETTLED_RECHECK_S", 0.3)
    monkeypatch.setattr(decide, "_TAKEN_RECHECK_S", 0.3)
    monkeypatch.setattr(reconcile, "_AGAIN_S", 0.05)


def fleet(name: str = "chat", *, namespace: str = "ns", decode: int = 1, **spec: Any) -> Obj:
    pools = [
        {"name": "prefill", "role": "Prefill", "replicas": 1, "resources": {"gpus": 0}},
        {"name": "decode", "role": "Decode", "replicas": decode, "resources": {"gpus": 0}},
    ]
    return {
        "apiVersion": FLEET.api_version,
        "kind": FLEET.name,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"uri": "file://./demo-model"}, "pools": pools, **spec},
    }


@asynccontextmanager
async def operating(
    api: FakeApi, *, namespaces: tuple[str, ...] = (), resync_s: float = 600.0
) -> AsyncIterator[Operator]:
    """An operator at work, synced; it ends within seconds."""
    config = OperatorConfig(
        SETTINGS, namespaces, http_host="127.0.0.1", http_port=0, resync_s=resync_s
    )
    operator, stop = Operator(config, find_login=api.login), asyncio.Event()
    running = asyncio.create_task(operator.run(stop))
    try:
        await until(lambda: operator.port and not operator.complaints(), what="synced")
        yield operator
    finally:
        stop.set()
        async with asyncio.timeout(10):
            await running


@asynccontextmanager
async def fleet_ready(api: FakeApi, name: str = "chat") -> AsyncIterator[Operator]:
    """An operator that has brought up the fleet."""
    async with operating(api) as operator:
        await ready(api, name)
        yield operator


async def ready(api: FakeApi, name: str = "chat", *, namespace: str = "ns") -> None:
    """Play the controllers until the fleet is ready, and all that follows is written."""

    def is_ready() -> bool:
        api.settle()
        return condition(api, "Ready", name, namespace=namespace).get("status") == "True"

    await until(is_ready, what=f"{name} is ready")
    await still(api)


async def still(api: FakeApi) -> None:
    """Wait until nothing was written for a moment."""
    seen = (-1, 0.0)

    def is_still() -> bool:
        nonlocal seen
        if len(api.writes) != seen[0]:
            seen = (len(api.writes), time.monotonic())
        return time.monotonic() - seen[1] > 0.25

    await until(is_still, what="no more writes")


def condition(api: FakeApi, kind: str, name: str = "chat", *, namespace: str = "ns") -> Obj:
    found = api.get(FLEET, namespace, name) or {}
    conditions = found.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {})


def replicas(api: FakeApi, pool: str) -> list[int]:
    return [
        d["spec"]["replicas"]
        for d in api.all(DEPLOYMENT)
        if d["metadata"]["labels"]["xpyd.dev/pool"] == pool
    ]


def of_pool(api: FakeApi, kind: Kind, pool: str) -> list[Obj]:
    labels = [obj for obj in api.all(kind) if "xpyd.dev/pool" in obj["metadata"]["labels"]]
    return [obj for obj in labels if obj["metadata"]["labels"]["xpyd.dev/pool"] == pool]


def left(api: FakeApi) -> dict[str, int]:
    return {k.name: len(v) for k, v in api.objects.items() if v and k not in (EVENT,)}


def run(test: Callable[[FakeApi], Awaitable[None]], **options: Any) -> None:
    async def go() -> None:
        async with FakeApi(**options) as api:
            await test(api)

    asyncio.run(go())


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
            # Everything, two events, three statuses: room is left for a start that takes longer.
            assert len(api.writes) <= 21
            document = api.get(FLEET, "ns", "chat")
            assert document is not None
            assert document["metadata"]["finalizers"] == ["xpyd.dev/fleet"]
            assert document["status"]["kvKeySecret"] == "chat-kv"
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
            api.change(FLEET, "ns", "chat", {"spec": {"engine": {"args": ["--x=1"]}}})

            def rolled() -> bool:
                api.settle()
                names = {d["metadata"]["name"] for d in api.all(DEPLOYMENT)}
                return len(names) == 3 and len(names & before) == 1

            await until(rolled, what="engines have one new revision each, the router its old one")
            await ready(api)
            assert replicas(api, "decode") == [2]

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
    monkeypatch.setattr(memory, "CONTESTED_WRITES", 3)

    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            for _ in range(8):
                api.change(SERVICE, "ns", "chat-router", {"spec": {"type": "NodePort"}})
                await still_or(api, 0.4)
            applies = sum(c.path.endswith("services/chat-router") for c in api.writes)
            assert applies <= 1 + memory.CONTESTED_WRITES

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


def test_a_deleted_fleet_drains_engines_first_and_leaves_nothing() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet(decode=2))
        async with fleet_ready(api):
            api.drop(FLEET, "ns", "chat")
            await until(lambda: replicas(api, "decode") == [0], what="engines drain")
            # Their pods still end: the router serves on.
            assert replicas(api, "router") == [2]
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
    monkeypatch.setattr(memory, "TAKEN_S", 0.5)

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


@pytest.mark.parametrize("status", [429, 500, 503])
def test_faults_of_the_server_delay_and_change_nothing(status: int) -> None:
    async def test(api: FakeApi) -> None:
        api.faults.append(Fault("PATCH", "/", status, times=10, retry_after="0"))
        api.faults.append(Fault("POST", "/", status, times=3, retry_after="0"))
        api.faults.append(Fault("GET", "/", status, times=2, retry_after="0"))
        api.add(fleet())
        async with fleet_ready(api):
            assert left(api)["Deployment"] == 3
            assert left(api)["Secret"] == 1

    run(test)


def test_a_write_that_is_refused_is_told_and_the_others_are_done() -> None:
    async def test(api: FakeApi) -> None:
        words = "exceeded quota: count, requested: count/services=1, used: 1, limited: 1"
        api.faults.append(Fault("PATCH", "services/chat-router$", 403, times=2, message=words))
        api.add(fleet())
        async with operating(api):
            await until(
                lambda: condition(api, "Degraded").get("reason") == "QuotaExceeded", what="told"
            )
            assert words in condition(api, "Degraded")["message"]
            assert len(api.all(DEPLOYMENT)) == 3
            await ready(api)
            await until(lambda: condition(api, "Degraded")["status"] == "False", what="over")

    run(test)


def test_events_that_cannot_be_posted_harm_nothing() -> None:
    async def test(api: FakeApi) -> None:
        api.faults.append(Fault("POST", "/events$", 403, times=99))
        api.add(fleet())
        async with fleet_ready(api):
            assert api.all(EVENT) == []

    run(test)


def test_events_tell_of_the_start_once() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            pass
        async with operating(api) as second:
            await until(lambda: second.turns() >= 1, what="looked at")
            await still(api)
        told = [(event["reason"], event["type"]) for event in api.all(EVENT)]
        assert told == [("Created", "Normal"), ("Ready", "Normal")]
        event = api.all(EVENT)[0]
        assert event["involvedObject"]["kind"] == "InferenceFleet"
        assert event["reportingComponent"] == "xpyd-operator"

    run(test)


def test_cut_watches_go_on_and_what_happened_meanwhile_is_seen() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            api.drop_watches()
            api.change(POOL, "ns", "chat-decode", {"spec": {"replicas": 3}})
            await until(lambda: replicas(api, "decode") == [3], what="the scale was seen")

    run(test)


def test_after_a_compaction_what_was_deleted_unseen_is_noticed() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        api.add(fleet("code"))
        async with fleet_ready(api):
            await ready(api, "code")
            api.faults.append(Fault("GET", "watch$", 503, times=30))
            api.drop_watches()
            await until(lambda: not api.watching, what="no watch is open")
            api.drop(SERVICE, "ns", "chat-router")
            for pod in of_pool(api, POD, "decode"):
                api.drop(POD, "ns", pod["metadata"]["name"])
            api.forget_history()
            api.faults.clear()
            await until(lambda: api.get(SERVICE, "ns", "chat-router"), what="the Service is back")
            await ready(api)

    run(test)


def test_an_api_server_that_was_away_is_caught_up_with() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api) as operator:
            await api.go_away()
            api.change(POOL, "ns", "chat-decode", {"spec": {"replicas": 3}})
            api.drop(SERVICE, "ns", "chat-router")
            api.forget_history()
            assert operator.unhealthy() == []
            await api.come_back()
            await until(lambda: replicas(api, "decode") == [3], what="the scale was seen")
            await until(lambda: api.get(SERVICE, "ns", "chat-router"), what="the Service is back")
            await ready(api)

    run(test)


def test_nothing_is_created_before_all_lists_are_in() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            pass
        writes = len(api.writes)
        api.faults.append(Fault("GET", "/deployments$", 503, times=1))
        async with operating(api) as second:
            await until(lambda: second.turns() >= 1, what="looked at")
            await still(api)
        assert len(api.writes) == writes

    run(test)


def test_two_namespaces_are_served_and_a_third_is_not() -> None:
    async def test(api: FakeApi) -> None:
        for namespace in ("one", "two", "three"):
            api.add(fleet(namespace=namespace))
        async with operating(api, namespaces=("one", "two")):
            await ready(api, namespace="one")
            await ready(api, namespace="two")
            assert {d["metadata"]["namespace"] for d in api.all(DEPLOYMENT)} == {"one", "two"}
            assert not any(call.path == DEPLOYMENT.path(None) for call in api.calls)

    run(test)


def groups() -> Obj:
    document = fleet()
    document["spec"]["pools"][1] |= {
        "resources": {"gpus": 4},
        "parallelism": {"tensor": 4, "pipeline": 2},
    }
    return document


def test_without_leader_worker_sets_the_other_pools_go_on_and_an_install_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(main, "_OPTIONAL_POLL_S", 0.2)

    async def test(api: FakeApi) -> None:
        api.add(groups())
        async with operating(api):
            await until(
                lambda: condition(api, "Degraded").get("reason") == "LeaderWorkerSetMissing",
                what="said so",
            )
            await until(lambda: len(api.all(DEPLOYMENT)) == 2, what="prefill and router")
            api.kinds.add(LEADER_WORKER_SET)
            await until(lambda: len(api.all(LEADER_WORKER_SET)) == 1, what="it is made now")
            await until(
                lambda: condition(api, "Degraded").get("reason") != "LeaderWorkerSetMissing",
                what="and told",
            )
            # It is removed again; the other watches live on.
            api.objects.pop(LEADER_WORKER_SET)
            api.kinds.discard(LEADER_WORKER_SET)
            api.drop_watches()
            await until(
                lambda: condition(api, "Degraded").get("reason") == "LeaderWorkerSetMissing",
                what="said so again",
            )
            api.change(POOL, "ns", "chat-prefill", {"spec": {"replicas": 2}})
            await until(lambda: replicas(api, "prefill") == [2], what="pools are still heard")

    run(test)


def test_claim_templates_are_made_before_and_go_after_their_workload() -> None:
    async def test(api: FakeApi) -> None:
        document = fleet()
        document["spec"]["pools"][1]["resources"] = {"gpus": 1, "deviceClassName": "gpu.example"}
        api.add(document)
        async with fleet_ready(api):
            (first,) = api.all(CLAIM_TEMPLATE)
            api.change(FLEET, "ns", "chat", {"spec": {"engine": {"args": ["--x=1"]}}})
            await until(lambda: len(api.all(CLAIM_TEMPLATE)) == 2, what="one for each revision")

            def only_the_new() -> bool:
                api.settle()
                names = [obj["metadata"]["name"] for obj in api.all(CLAIM_TEMPLATE)]
                return len(names) == 1 and names != [first["metadata"]["name"]]

            await until(only_the_new, what="the old one is gone")

    run(test, missing=())


def test_a_key_that_was_deleted_is_made_again_when_pods_wait_for_it() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            pass
        api.drop(SECRET, "ns", "chat-kv")
        deployment = of_pool(api, DEPLOYMENT, "decode")[0]
        pod = pod_of(deployment, "stuck")
        scheduled = {
            "type": "PodScheduled",
            "status": "True",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        pod["status"]["conditions"] = [scheduled]
        for old in of_pool(api, POD, "decode"):
            api.drop(POD, "ns", old["metadata"]["name"])
        api.add(pod)
        async with operating(api):
            await until(lambda: api.get(SECRET, "ns", "chat-kv"), what="there is a key again")

    run(test)


def test_it_waits_for_its_kinds_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_CRD_POLL_S", 0.05)

    async def test(api: FakeApi) -> None:
        config = OperatorConfig(SETTINGS, http_host="127.0.0.1", http_port=0)
        operator, stop = Operator(config, find_login=api.login), asyncio.Event()
        running = asyncio.create_task(operator.run(stop))
        await until(lambda: "crds/" in "".join(operator.complaints()), what="says what it misses")
        api.kinds.add(FLEET)
        await until(lambda: not operator.complaints(), what="goes on")
        stop.set()
        await running

    run(test, missing=(FLEET, LEADER_WORKER_SET, CLAIM_TEMPLATE))


def test_kinds_that_kopf_did_not_find_are_looked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "_ALL_TRIED_S", 0.3)
    monkeypatch.setattr(watch, "RESTART_FIRST_S", 0.05)

    async def test(api: FakeApi) -> None:
        api.hidden_groups.add("xpyd.dev")
        config = OperatorConfig(SETTINGS, http_host="127.0.0.1", http_port=0)
        operator, stop = Operator(config, find_login=api.login), asyncio.Event()
        running = asyncio.create_task(operator.run(stop))
        await until(lambda: api.watching, what="the others are watched")
        api.hidden_groups.clear()
        await until(lambda: not operator.complaints(), what="ours are, too")
        stop.set()
        await running

    run(test)


def test_probes_and_metrics_are_served() -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api) as operator:

            def get(path: str) -> tuple[int, str]:
                url = f"http://127.0.0.1:{operator.port}{path}"
                try:
                    with urllib.request.urlopen(url, timeout=5) as answer:
                        return answer.status, answer.read().decode()
                except urllib.error.HTTPError as error:
                    return error.code, error.read().decode()

            assert await asyncio.to_thread(get, "/healthz") == (200, "ok\n")
            assert await asyncio.to_thread(get, "/readyz") == (200, "ok\n")
            status, text = await asyncio.to_thread(get, "/metrics")
            assert status == 200
            assert "xpyd_operator_fleets 1.0" in text
            assert 'xpyd_operator_reconciles_total{result="done"}' in text
            assert 'verb="apply"' in text
            assert (await asyncio.to_thread(get, "/"))[0] == 404

    run(test)


def test_dead_streams_make_it_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tap, "STREAM_GRACE_S", -1.0)

    async def test(api: FakeApi) -> None:
        async with operating(api) as operator:
            await until(lambda: len(api.watching) >= 8, what="all are open")
            await until(lambda: not operator.unhealthy(), what="healthy")
            api.faults.append(Fault("GET", "/pods", 503, times=999))
            api.drop_watches()
            await until(lambda: "pods" in "".join(operator.unhealthy()), what="says which")

    run(test)


def test_a_fault_in_one_fleets_turn_is_that_fleets_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    turn = main.Reconciler.turn

    async def broken(self: Any, key: Any, served: Any) -> Any:
        if key.name == "bad":
            raise ZeroDivisionError("a bug")
        return await turn(self, key, served)

    monkeypatch.setattr(main.Reconciler, "turn", broken)

    async def test(api: FakeApi) -> None:
        api.add(fleet("bad"))
        api.add(fleet())
        async with fleet_ready(api) as operator:
            assert operator.unhealthy() == []
        assert "ns/bad: the turn broke" in caplog.text

    run(test)


def test_the_feed_wakes_nobody_before_it_is_synced() -> None:
    woken: list[Any] = []
    found = feed.Feed(Cache(), lambda key, urgent: woken.append((key.name, urgent)))
    found.expect((FLEET, POD), (None,))
    document = fleet()
    document["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    found.hear(Listed(FLEET, None, [document], 5, first=True, last=True))
    found.hear(Present(FLEET, document))
    assert woken == []
    assert found.missing() == ["pods"]
    found.hear(Listed(POD, None, [], 5, first=True, last=False))
    assert not found.is_synced
    found.hear(Listed(POD, None, [], 5, first=False, last=True))
    assert found.is_synced
    assert woken == [("chat", False)]
    assert found.listed == {FLEET, POD}


def test_a_whole_list_does_not_spoil_one_that_comes_in_parts() -> None:
    cache = Cache()
    found = feed.Feed(cache, lambda key, urgent: None)
    found.expect((FLEET,), (None,))
    documents = [fleet(name) for name in ("a", "b")]
    for number, document in enumerate(documents):
        document["metadata"] |= {"uid": f"u{number}", "resourceVersion": "1"}
    found.hear(Listed(FLEET, None, documents[:1], 5, first=True, last=False))
    found.hear(Listed(FLEET, None, documents, 6, first=True, last=True))
    found.hear(Listed(FLEET, None, documents[1:], 5, first=False, last=True))
    assert sorted(key.name for key in cache.documents()) == ["a", "b"]


def test_an_optional_kind_that_may_not_be_listed_holds_nobody_up() -> None:
    async def test(api: FakeApi) -> None:
        api.faults.append(Fault("GET", "/resourceclaimtemplates", 403, times=2))
        api.add(fleet())
        async with operating(api):
            await until(lambda: len(api.all(DEPLOYMENT)) == 3, what="the fleet is made")
            # Once it may be listed, it is.
            watched = "resourceclaimtemplates"
            await until(lambda: watched in api.watching, what="watched in the end")

    run(test, missing=(LEADER_WORKER_SET,))
