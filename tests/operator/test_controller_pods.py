"""What the operator writes into pods: readiness gates and deletion costs; and cut drains.

As decisions of a turn, and by a whole operator against the API server in memory, with routers that
are real HTTP servers.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.operator.kube_fakes import FakeApi, Fault, until
from tests.operator.kube_objects import pod_of
from tests.operator.kube_operating import (
    condition,
    fleet,
    fleet_ready,
    of_pool,
    operating,
    ready,
    run,
    still,
)
from tests.operator.test_controller_turn import Children, document, look, settled, writes
from xpyd_operator.controller.decision.decide import decide
from xpyd_operator.controller.decision.kinds import (
    BUDGET,
    DEPLOYMENT,
    EVENT,
    FLEET,
    NODE,
    POD,
    POOL,
    Obj,
)
from xpyd_operator.controller.decision.report import report
from xpyd_operator.controller.decision.state import FleetState
from xpyd_operator.controller.decision.writes import Apply, SetCost, SetGate
from xpyd_operator.manifests.names import (
    ANNOTATION_COST,
    ANNOTATION_REPLICAS,
    ROUTABLE,
)
from xpyd_operator.status.drains import CutDrain, DrainWatch, InstanceLoad
from xpyd_operator.status.routable import NO_PAIR, Gate

ADMITTED = Gate(True, "Admitted", "every ready router sends it requests")
LOST = Gate(False, "NotAdmitted", "router r-0 sends it no requests")


def decodes(count: int, *, gate: bool | None = True) -> Children:
    """A settled fleet with so many ready D."""
    children = settled()
    children[POOL]["chat-decode"]["spec"]["replicas"] = count
    for write in writes(decide(look(children))):
        assert isinstance(write, Apply)
        kept = children[BUDGET if write.obj["kind"] == "PodDisruptionBudget" else DEPLOYMENT]
        held = kept[write.obj["metadata"]["name"]]
        kept[write.obj["metadata"]["name"]] = {**write.obj, "metadata": held["metadata"]} | {
            "metadata": {**held["metadata"], **write.obj["metadata"]}
        }
    (made,) = [d for name, d in children[DEPLOYMENT].items() if "decode" in name]
    children[POD] = {}
    for number in range(count):
        pod = pod_of(made, f"d-{number}")
        pod["metadata"] |= {"uid": f"u-{number}", "resourceVersion": "1"}
        pod["spec"] = {"nodeName": f"node-{number}"}
        kinds = {"Ready": True, "ContainersReady": True} | (
            {} if gate is None else {ROUTABLE: gate}
        )
        pod["status"] = {
            "phase": "Running",
            "conditions": [{"type": kind, "status": str(holds)} for kind, holds in kinds.items()],
        }
        children[POD][f"d-{number}"] = pod
    return children


def test_a_gate_is_written_only_where_it_is_not_as_it_should_be() -> None:
    children = decodes(2, gate=None)
    gates = dict.fromkeys(("u-0", "u-1"), ADMITTED)
    assert [w for w in writes(decide(look(children, gates=gates))) if isinstance(w, SetGate)] == [
        SetGate("d-0", "u-0", ADMITTED),
        SetGate("d-1", "u-1", ADMITTED),
    ]
    children = decodes(2)
    assert writes(decide(look(children, gates=gates))) == []
    assert writes(decide(look(children))) == [], "a new process knows nothing and writes nothing"
    assert writes(decide(look(children, gates={"u-1": LOST}))) == [SetGate("d-1", "u-1", LOST)]


def test_the_gate_of_a_pod_whose_containers_are_not_ready_is_shut_whatever_was_said() -> None:
    """At once: a container that is back before anybody asks the routers needs a new admission, and
    what they said of a pod is of no other one by its name."""
    children = decodes(2)
    for number, is_up in ((0, "False"), (1, "True")):
        conditions = children[POD][f"d-{number}"]["status"]["conditions"]
        next(one for one in conditions if one["type"] == "ContainersReady")["status"] = is_up
    gates = dict.fromkeys(("u-0", "u-1"), ADMITTED)
    shut = Gate(False, "ContainersNotReady", "its containers are not ready")
    for said in (gates, {}):
        assert writes(decide(look(children, gates=said))) == [SetGate("d-0", "u-0", shut)]
    children = decodes(1, gate=False)
    children[POD]["d-0"]["metadata"]["uid"] = "u-9"
    found = writes(decide(look(children, gates=gates)))
    assert not [one for one in found if isinstance(one, SetGate)]


def test_why_a_new_pod_is_in_no_pair_is_written_into_it_once() -> None:
    """Its gate was never open: only the words are new."""

    def written(children: Children, gate: Gate) -> list[SetGate]:
        found = writes(decide(look(children, gates={"u-0": gate})))
        return [one for one in found if isinstance(one, SetGate)]

    children = decodes(1, gate=None)
    apart = Gate(False, NO_PAIR, "router r-0 sends it no requests: no pair with p-0: kv_dtype")
    assert written(children, LOST) == [], "it starts"
    assert written(children, apart) == [SetGate("d-0", "u-0", apart)]
    said = {"type": ROUTABLE, "status": "False", "reason": NO_PAIR, "message": apart.message}
    children[POD]["d-0"]["status"]["conditions"].append(said)
    assert written(children, apart) == []
    other = apart._replace(message="router r-0 sends it no requests: no pair with p-1: kv_dtype")
    assert written(children, other) == [SetGate("d-0", "u-0", other)]
    assert written(children, LOST) == [SetGate("d-0", "u-0", LOST)], "it is NoPair no more"


def test_a_pod_that_leaves_or_has_no_gate_is_let_be() -> None:
    children = decodes(2)
    children[POD]["d-0"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    found = [
        w for w in writes(decide(look(children, gates={"u-0": LOST}))) if isinstance(w, SetGate)
    ]
    assert found == []


def scaled(children: Children, count: int) -> Children:
    children[POOL]["chat-decode"]["spec"]["replicas"] = count
    return children


def costs(children: Children, **more: Any) -> dict[str, int]:
    turn = decide(look(children, **more))
    first = [w for stage in turn.stages[:1] for w in stage]
    found = {w.name: w.cost for w in writes(turn) if isinstance(w, SetCost)}
    assert {w.name: w.cost for w in first if isinstance(w, SetCost)} == found, "before the scale"
    return found


def test_before_a_scale_down_each_pod_costs_what_routers_say_it_has_to_do() -> None:
    children = decodes(3)
    turn = decide(look(scaled(children, 1)))
    assert turn.asks_loads
    busy = {"d-0": InstanceLoad(2, 1), "d-1": InstanceLoad(0, 0), "d-2": InstanceLoad(0, 4)}
    assert not decide(look(children, busy=busy)).asks_loads
    assert costs(children, busy=busy) == {"d-0": 3, "d-2": 4}, "0 is what a pod costs anyway"


def test_costs_of_an_earlier_scale_down_are_put_right_and_equal_ones_not_written_again() -> None:
    children = decodes(3)
    for name, cost in (("d-0", "7"), ("d-1", "2")):
        children[POD][name]["metadata"]["annotations"] = {ANNOTATION_COST: cost}
    busy = {"d-1": InstanceLoad(2, 0)}
    assert costs(scaled(children, 2), busy=busy) == {"d-0": 0}


def test_where_no_router_answers_costs_stay_and_the_scale_down_goes_on() -> None:
    children = decodes(3)
    assert costs(scaled(children, 2), busy={}) == {}
    assert any(isinstance(w, Apply) for w in writes(decide(look(children, busy={}))))


@pytest.mark.parametrize("count", [0, 3, 4])
def test_nobody_is_asked_where_all_pods_go_or_all_stay(count: int) -> None:
    children = decodes(3)
    assert not decide(look(scaled(children, count))).asks_loads


def test_the_pod_on_a_cordoned_node_goes_first_whatever_it_has_to_do() -> None:
    children = decodes(2)
    busy = {"d-0": InstanceLoad(9, 0)}
    cordoned = frozenset({"node-0"})
    assert costs(scaled(children, 1), busy=busy, cordoned=cordoned) == {"d-0": -1}


def budget_of(children: Children, **more: Any) -> list[int]:
    found = [w.obj for w in writes(decide(look(children, **more))) if isinstance(w, Apply)]
    budgets = [one for one in found if one["kind"] == "PodDisruptionBudget"]
    return [one["spec"]["maxUnavailable"] for one in budgets]


def test_no_eviction_takes_a_pools_only_instance_where_the_operator_sees_nodes() -> None:
    children = settled()
    budgets = {name: one["spec"]["maxUnavailable"] for name, one in children[BUDGET].items()}
    assert budgets == {"chat-router": 1, "chat-prefill": 0, "chat-decode": 0}
    assert budget_of(children, cordoned=None) == [1, 1], "else a drain would wait for ever"


def test_a_surge_of_none_lets_the_only_instance_go() -> None:
    found = document()
    found["spec"]["rollout"] = {"maxSurgePercent": 0, "maxUnavailablePercent": 100}
    assert budget_of(settled(), found=found) == [1, 1]


def degraded(state: FleetState) -> tuple[str, str]:
    """Status and message of the condition."""
    status = report(state, (), has_key=True).after
    (one,) = [c for c in status["conditions"] if c["type"] == "Degraded"]
    return one["status"], one["message"]


def test_the_condition_names_only_instances_that_a_drain_takes_whatever_the_right() -> None:
    found = document()
    assert "scale to 2" not in degraded(look(settled(), found=found))[1]
    found["spec"]["rollout"] = {"maxSurgePercent": 0, "maxUnavailablePercent": 100}
    status, message = degraded(look(settled(), found=found))
    assert status == "False"
    assert "of prefill, decode away at once, as rollout.maxSurgePercent is 0: scale to 2" in message
    found = document()
    found["spec"]["pools"][1]["parallelism"] = {"pipeline": 2}
    found["spec"]["pools"][1]["resources"] = {"gpus": 1}
    message = degraded(look(settled(), found=found))[1]
    assert "of decode away at once, as an instance of several pods is not moved" in message
    message = degraded(look(settled(), found=document(decode=2), cordoned=None))[1]
    assert "of prefill away at once, as the operator may not list nodes" in message


# Drains that were cut


def leaving(name: str = "d-0", grace_s: int = 330, pool: str = "decode") -> Obj:
    labels = {"xpyd.dev/pool": pool, "xpyd.dev/revision": "r"}
    return {
        "metadata": {
            "name": name,
            "uid": name,
            "labels": labels,
            "deletionTimestamp": "2026-01-01T00:00:00Z",
            "deletionGracePeriodSeconds": grace_s,
        }
    }


def ended(after_s: float, load: InstanceLoad | None, **made: Any) -> list[CutDrain]:
    watch, pod = DrainWatch(), leaving(**made)
    loads = {} if load is None else {"d-0": load}
    assert watch.look([pod], loads, 10.0, timeout_s=300) == []
    found = watch.look([], {}, 10.0 + after_s, timeout_s=300)
    assert watch.look([], {}, 20.0 + after_s, timeout_s=300) == [], "told once"
    return found


def test_an_instance_that_ends_with_requests_when_its_time_is_over_was_cut() -> None:
    (found,) = ended(301, InstanceLoad(3, 1))
    assert found == CutDrain("decode", "d-0", "it still had 3 requests and 1 KV leases")
    assert ended(301, None) != []
    assert ended(6, InstanceLoad(3, 0), grace_s=5) != [], "kubectl delete --grace-period=5"


def test_an_instance_that_ends_before_or_with_nothing_was_not_cut() -> None:
    assert ended(299, InstanceLoad(3, 1)) == []
    assert ended(301, InstanceLoad(0, 0)) == []
    assert ended(0, None, grace_s=0) == []


def test_a_router_is_cut_when_its_grace_period_is_over_and_not_where_it_ended_by_itself() -> None:
    assert ended(301, None, pool="router") == [], "a router has no timeout of its own"
    assert ended(327, None, pool="router") == []
    (found,) = ended(330, None, pool="router")
    assert (found.pool, found.pod) == ("router", "d-0")
    assert found.message.startswith("the requests that it still relayed ended there")
    (found,) = ended(330, InstanceLoad(3, 0), pool="router")
    assert found.message.startswith("3 requests that it still relayed ended there")
    assert ended(330, InstanceLoad(0, 0), pool="router") == [], "it had none left, and hung"
    assert ended(0, None, grace_s=0, pool="router") == [], "nobody waits for it"
    watch, pod = DrainWatch(), leaving(pool="router")
    watch.look([pod], {}, 10.0, timeout_s=300)
    watch.look([pod | {"status": {"phase": "Succeeded"}}], {}, 339.5, timeout_s=300)
    assert watch.look([], {}, 341.0, timeout_s=300) == []


# A whole operator


def pods_of(api: FakeApi, pool: str) -> list[Obj]:
    return of_pool(api, POD, pool)


def test_a_drain_that_was_cut_is_an_event_and_a_metric() -> None:
    async def scenario(api: FakeApi) -> None:
        api.add(fleet(drain={"timeoutSeconds": 1}))
        async with fleet_ready(api) as operator:
            (pod,) = pods_of(api, "decode")
            name = pod["metadata"]["name"]
            times = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 31}
            api.change(POD, "ns", name, {"metadata": {**times, "finalizers": ["kubelet"]}})

            def leaves() -> bool:
                status = (api.get(FLEET, "ns", "chat") or {})["status"]
                return any(row["drainingReplicas"] for row in status["pools"])

            await until(leaves, what="the operator has seen it")
            await asyncio.sleep(1.1)  # what the drain takes, by the operator's clock
            api.change(POD, "ns", name, {"metadata": {"finalizers": None}})
            await until(lambda: told(api, "DrainTimedOut"), what="the Event")
            (event,) = told(api, "DrainTimedOut")
            assert name in event["message"]
            text = operator.metrics.render(queue_depth=0, fleets=1).decode()
            labels = 'fleet="chat",namespace="ns",pool="decode"'
            assert f"xpyd_operator_drains_cut_total{{{labels}}} 1.0" in text

    run(scenario)


def told(api: FakeApi, reason: str) -> list[Obj]:
    return [event for event in api.all(EVENT) if event["reason"] == reason]


def cordon(api: FakeApi, node: str, *, is_cordoned: bool = True) -> None:
    if api.get(NODE, "", node) is None:
        metadata = {"name": node, "namespace": ""}
        api.add({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}})
    api.change(NODE, "", node, {"spec": {"unschedulable": is_cordoned or None}})


def test_a_cordoned_node_brings_a_second_instance_and_then_the_first_is_let_go() -> None:
    async def scenario(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            (old,) = pods_of(api, "decode")
            place = old["metadata"]["namespace"], old["metadata"]["name"]
            api.change(POD, *place, {"spec": {"nodeName": "leaving"}})
            cordon(api, "leaving")
            made = of_pool(api, DEPLOYMENT, "decode")[0]["metadata"]["name"]

            def asked() -> int:
                found = api.get(DEPLOYMENT, "ns", made)
                return found["spec"]["replicas"] if found else 0

            await until(lambda: asked() == 2, what="a second instance")
            await until(lambda: condition(api, "Progressing")["reason"] == "Moving", what="told")
            assert api.get(POD, *place) is not None
            await until(lambda: told(api, "Moving"), what="the Event")
            api.settle()
            await until(lambda: asked() == 1, what="the first one may go")
            cost = (api.get(POD, *place) or {})["metadata"]["annotations"][ANNOTATION_COST]
            assert cost == "-1", "a ReplicaSet takes the one on the cordoned node"
            bodies = [c.body for c in api.writes if c.path.endswith(f"/deployments/{made}")]
            assert [body["spec"]["replicas"] for body in bodies][-2:] == [2, 1]

    run(scenario)


def test_an_edit_of_replicas_goes_into_the_annotation_of_the_pods_that_are_there() -> None:
    async def scenario(api: FakeApi) -> None:
        found = fleet()
        pool = found["spec"]["pools"][1]
        api.add(pool.update(parallelism={"data": 1, "maxData": 3}) or found)
        async with fleet_ready(api):
            (before,) = pods_of(api, "decode")
            assert before["metadata"]["annotations"][ANNOTATION_REPLICAS] == "1"
            assert not told(api, "ReplicasChanged"), "a new pod changes nothing"
            pools = [found["spec"]["pools"][0], pool | {"parallelism": {"data": 3, "maxData": 3}}]
            api.change(FLEET, "ns", "chat", {"spec": {"pools": pools}})
            await until(lambda: told(api, "ReplicasChanged"), what="the Event")
            await still(api)
            (after,) = pods_of(api, "decode")
            assert after["metadata"]["uid"] == before["metadata"]["uid"]
            assert after["metadata"]["annotations"][ANNOTATION_REPLICAS] == "3"

    run(scenario)


def test_without_the_right_to_list_nodes_the_condition_says_what_to_do() -> None:
    async def scenario(api: FakeApi) -> None:
        api.faults.append(Fault("GET", "/api/v1/nodes$", 403, times=10**6))
        api.add(fleet())
        async with fleet_ready(api):
            said = condition(api, "Degraded")
            assert said["status"] == "False"
            assert "only instance of prefill, decode" in said["message"]
            assert "scale to 2 before you drain" in said["message"]
            for budget in api.all(BUDGET):
                assert budget["spec"]["maxUnavailable"] == 1

    run(scenario)


def test_an_operator_that_may_not_list_nodes_does_not_ask_for_them() -> None:
    async def scenario(api: FakeApi) -> None:
        api.add(fleet())
        async with operating(api, reads_nodes=False):
            await ready(api)
            assert "scale to 2 before you drain" in condition(api, "Degraded")["message"]
        assert [call for call in api.calls if "/nodes" in call.path] == []

    run(scenario)


def test_a_restarted_operator_writes_nothing_into_pods_and_budgets() -> None:
    async def scenario(api: FakeApi) -> None:
        api.add(fleet())
        async with fleet_ready(api):
            pass
        before = len(api.writes)
        async with operating(api):
            await ready(api)
            await still(api)
        assert [call.path for call in api.writes[before:]] == []

    run(scenario)


def test_a_budget_does_not_change_only_because_nodes_were_not_listed_yet() -> None:
    """The first turn of a new process waits for the answer."""

    async def scenario(api: FakeApi) -> None:
        api.faults.append(Fault("GET", "/api/v1/nodes$", 403, times=10**6))
        api.add(fleet())
        async with fleet_ready(api):
            pass
        before = len(api.writes)
        api.faults.insert(0, Fault("GET", "/api/v1/nodes$", 503, times=2))  # a slow answer
        async with operating(api):
            await ready(api)
            await still(api)
        assert [call.path for call in api.writes[before:]] == []

    run(scenario)
