"""The operator when the API server, its watches or its kinds are not as they should be."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests.operator.kube_fakes import FakeApi, Fault, until
from tests.operator.kube_objects import pod_of
from tests.operator.kube_operating import (
    SETTINGS,
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
from xpyd_operator.controller import main, watch
from xpyd_operator.controller.decision.cache import Cache, Feed, Listed, Present
from xpyd_operator.controller.decision.kinds import (
    CLAIM_TEMPLATE,
    DEPLOYMENT,
    EVENT,
    FLEET,
    HTTP_ROUTE,
    LEADER_WORKER_SET,
    POD,
    POOL,
    SECRET,
    SERVICE,
    WATCHED,
    Kind,
    Obj,
)
from xpyd_operator.controller.main import Operator, OperatorBroken, OperatorConfig
from xpyd_operator.status import problems

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick")]


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


def test_without_the_gateway_api_a_fleet_serves_and_says_what_is_missing() -> None:
    async def test(api: FakeApi) -> None:
        asked = fleet()
        asked["spec"]["router"] = {"httpRoute": {"parentRefs": [{"name": "web"}]}}
        api.add(asked)
        async with operating(api):
            await until(
                lambda: condition(api, "Degraded").get("reason") == "HTTPRouteMissing",
                what="said so",
            )
            await until(lambda: len(api.all(DEPLOYMENT)) == 3, what="the fleet is made")
            assert "Gateway API" in condition(api, "Degraded")["message"]

    run(test, missing=[HTTP_ROUTE])


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
            api.change(FLEET, "ns", "chat", {"spec": {"engine": {"args": ["--seed=1"]}}})
            await until(lambda: len(api.all(CLAIM_TEMPLATE)) == 2, what="one for each revision")

            def only_the_new() -> bool:
                api.settle()
                names = [obj["metadata"]["name"] for obj in api.all(CLAIM_TEMPLATE)]
                return len(names) == 1 and names != [first["metadata"]["name"]]

            await until(only_the_new, what="the old one is gone")

    run(test, missing=())


def test_a_key_that_was_deleted_is_made_again_when_pods_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A wait is long at once.
    monkeypatch.setattr(problems, "SLOW_VOLUMES_S", -1.0)

    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            pass
        (key,) = [secret["metadata"]["name"] for secret in api.all(SECRET)]
        api.drop(SECRET, "ns", key)
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
            await until(lambda: api.get(SECRET, "ns", key), what="there is a key again")

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
            assert "xpyd_operator_lost_roles{" not in text, "all of them are there"
            assert 'xpyd_operator_reconciles_total{result="done"}' in text
            assert 'verb="apply"' in text
            assert (await asyncio.to_thread(get, "/"))[0] == 404

    run(test)


@pytest.mark.parametrize("kind", [FLEET, POOL, POD], ids=lambda kind: kind.plural)
def test_a_kind_that_is_removed_and_comes_back_is_watched_again(kind: Kind) -> None:
    """kopf ends all its streams at a 404, and never begins again."""

    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api) as operator:
            api.remove_kind(kind)
            await until(lambda: kind.plural in "".join(operator.complaints()), what="says so")
            api.kinds.add(kind)
            if kind == FLEET:
                api.add(fleet())
            await until(lambda: not operator.complaints(), what="lists it again")
            served = sorted(each.plural for each in WATCHED if each in api.kinds)
            await until(lambda: sorted(api.watching) == served, what="all")
            await until(lambda: api.get(POOL, "ns", "chat-decode"), what="the pool")
            await ready(api)
            api.change(POOL, "ns", "chat-decode", {"spec": {"replicas": 2}})
            await until(lambda: replicas(api, "decode") == [2], what="the scale was seen")
            assert operator.unhealthy() == []

    run(test)


@pytest.mark.parametrize("status", [400, 404, 410, 422])
def test_a_watch_or_a_list_that_is_refused_is_tried_again(status: int) -> None:
    async def test(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api) as operator:
            api.faults.append(Fault("GET", "/services", status, times=3))
            api.drop_watches()
            await until(lambda: not api.faults[0].times, what="refused three times")
            api.drop(SERVICE, "ns", "chat-router")
            await until(lambda: api.get(SERVICE, "ns", "chat-router"), what="the Service is back")
            await until(lambda: not operator.complaints(), what="ready")

    run(test)


async def ends(api: FakeApi, fault: Callable[[], None], complaint: str) -> None:
    """The operator ends by itself, and says why until then."""
    config = OperatorConfig(SETTINGS, http_host="127.0.0.1", http_port=0)
    operator = Operator(config, find_login=api.login)
    running = asyncio.create_task(operator.run(asyncio.Event()))
    await until(lambda: len(api.watching) >= 8 and not operator.complaints(), what="all are open")
    fault()
    await until(lambda: complaint in operator.unhealthy(), what="says what")
    assert complaint in operator.complaints()
    with pytest.raises(OperatorBroken, match=complaint):
        await asyncio.wait_for(running, 20)


def test_streams_that_nothing_opens_again_end_the_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "STREAM_GRACE_S", 0.2)
    monkeypatch.setattr(watch, "_LONGEST_WAIT_S", 30.0)

    async def test(api: FakeApi) -> None:
        def refuse() -> None:
            api.faults.append(Fault("GET", "/pods", 503, times=999))
            api.drop_watches()

        await ends(api, refuse, "watches that do nothing: pods")

    run(test)


@pytest.mark.parametrize("name", ["worker", "events", "resync", "kinds"])
def test_a_task_that_ends_ends_the_operator_within_seconds(name: str) -> None:
    async def test(api: FakeApi) -> None:
        def end() -> None:
            next(t for t in asyncio.all_tasks() if t.get_name() == name).cancel()

        await ends(api, end, f"tasks that ended: {name}")

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
    found = Feed(Cache(), lambda key, urgent: woken.append((key.name, urgent)))
    found.expect((FLEET, POD), (None,))
    document = fleet()
    document["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    found.receive(Listed(FLEET, None, [document], 5, first=True, last=True))
    found.receive(Present(FLEET, document))
    assert woken == []
    assert found.missing() == ["pods"]
    found.receive(Listed(POD, None, [], 5, first=True, last=False))
    assert not found.is_synced
    found.receive(Listed(POD, None, [], 5, first=False, last=True))
    assert found.is_synced
    assert woken == [("chat", False)]
    assert found.listed == {FLEET, POD}


def test_a_whole_list_does_not_spoil_one_that_comes_in_parts() -> None:
    cache = Cache()
    found = Feed(cache, lambda key, urgent: None)
    found.expect((FLEET,), (None,))
    documents = [fleet(name) for name in ("a", "b")]
    for number, document in enumerate(documents):
        document["metadata"] |= {"uid": f"u{number}", "resourceVersion": "1"}
    found.receive(Listed(FLEET, None, documents[:1], 5, first=True, last=False))
    found.receive(Listed(FLEET, None, documents, 6, first=True, last=True))
    found.receive(Listed(FLEET, None, documents[1:], 5, first=False, last=True))
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
