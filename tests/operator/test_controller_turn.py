"""One turn as pure functions: what is written, at what pace it is told, what is remembered."""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, cast

import pytest

from tests.operator import fleets
from tests.operator.fleets import prefill_and_decode
from xpyd_operator.controller.decision.decide import Turn, decide
from xpyd_operator.controller.decision.errors import Forbidden, Invalid
from xpyd_operator.controller.decision.kinds import (
    ALWAYS,
    BUDGET,
    DEPLOYMENT,
    POD,
    POOL,
    SERVICE,
    Kind,
    Obj,
    kind_of,
    merge_patch,
)
from xpyd_operator.controller.decision.report import problem_of, report
from xpyd_operator.controller.decision.state import FleetState, applied_version_of, read
from xpyd_operator.controller.decision.writes import (
    Apply,
    CreateKey,
    DeleteObject,
    Scale,
    SetFinalizers,
    Write,
    effect_of,
)
from xpyd_operator.manifests.names import Settings

SETTINGS = Settings("xpyd-worker:1", "xpyd-router:1")
NOW = "2026-01-01T00:00:00Z"
Children = dict[Kind, dict[str, Obj]]


def document(*, decode: int = 1, **metadata: Any) -> Obj:
    own = {
        "namespace": "ns",
        "uid": "fleet",
        "resourceVersion": "5",
        "generation": 1,
        "finalizers": ["xpyd.dev/fleet"],
        **metadata,
    }
    pools = prefill_and_decode(decode=decode)
    made = fleets.document("chat", model={"uri": "file://./m"}, pools=pools)
    return {**made, "metadata": made["metadata"] | own}


def look(children: Children | None = None, found: Obj | None = None, **more: Any) -> FleetState:
    found = found or document()
    served, settings = more.pop("served", frozenset(ALWAYS)), more.pop("settings", SETTINGS)
    return FleetState(found, read(found, settings), children or {}, settings, served, NOW, **more)


def writes(turn: Turn) -> list[Write]:
    return [write for stage in turn.stages for write in stage]


def stored(obj: Obj, *, version: int = 10, generation: int = 1) -> Obj:
    """The object as an API server gives it back."""
    found = deepcopy(obj)
    found["metadata"] |= {
        "uid": f"uid-{found['metadata']['name']}",
        "resourceVersion": str(version),
    }
    if found["kind"] not in ("Service", "ServiceAccount"):
        found["metadata"]["generation"] = generation
    return found


def settled(settings: Settings = SETTINGS) -> Children:
    """All objects of the fleet as they are after the first turn."""
    children: Children = {}
    for write in writes(decide(look(settings=settings))):
        if isinstance(write, Apply):
            obj = stored(write.obj)
            children.setdefault(kind_of(obj), {})[obj["metadata"]["name"]] = obj
    return children


def test_first_comes_the_finalizer_and_nothing_beside_it() -> None:
    turn = decide(look(found=document(finalizers=["other"])))
    assert writes(turn) == [SetFinalizers(("other", "xpyd.dev/fleet"), "5")]
    assert turn.again


def test_a_new_fleet_is_created_in_stages_and_workloads_come_last() -> None:
    turn = decide(look(wants_key=True))
    keys, first, second = turn.stages
    assert keys == (CreateKey(),)
    assert {w.obj["kind"] for w in first if isinstance(w, Apply)} == {
        "ServiceAccount",
        "Service",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "ConfigMap",
        "ControllerRevision",
        "InferenceFleetPool",
    }
    assert [w.obj["kind"] for w in second if isinstance(w, Apply)] == ["Deployment"] * 3
    assert all(w.create for w in writes(turn) if isinstance(w, Apply))


def test_a_fleet_that_is_there_needs_nothing() -> None:
    turn = decide(look(settled()))
    assert writes(turn) == []
    # Each was compared, and need not be again.
    assert len(turn.compared) == 15


def test_what_was_compared_is_not_compared_again_until_it_changes() -> None:
    children = settled()
    first = decide(look(children))
    again = decide(look(children, settled=first.compared))
    assert again.compared == {}
    children[SERVICE]["chat-router"] = stored(children[SERVICE]["chat-router"], version=11)
    assert list(decide(look(children, settled=first.compared)).compared) == [
        (SERVICE, "chat-router")
    ]


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        (SERVICE, "chat-router", {"spec": {"type": "NodePort"}}),
        (BUDGET, "chat-decode", {"spec": {"maxUnavailable": 2}}),
        (SERVICE, "chat-discovery", {"metadata": {"annotations": {"xpyd.dev/applied": "old"}}}),
        (POOL, "chat-decode", {"spec": {"role": "Decode", "maxReplicas": 3, "fleetName": "x"}}),
    ],
)
def test_what_differs_is_applied(kind: Kind, name: str, change: dict[str, Any]) -> None:
    children = settled()
    for part, fields in change.items():
        children[kind][name][part] |= fields
    (write,) = writes(decide(look(children)))
    assert isinstance(write, Apply)
    assert (write.obj["metadata"]["name"], write.create) == (name, False)
    # A pool is never written over a version that was not looked at: a scale may be in it.
    assert write.resource_version == ("10" if kind == POOL else "")


def test_fields_that_are_nobodys_of_ours_are_no_difference() -> None:
    children = settled()
    children[SERVICE]["chat-router"]["metadata"]["labels"]["a"] = "b"
    children[SERVICE]["chat-router"]["spec"]["clusterIP"] = "10.0.0.1"
    assert writes(decide(look(children))) == []


def test_a_scale_of_a_pool_changes_its_deployment_and_not_the_pool() -> None:
    children = settled()
    children[POOL]["chat-decode"]["spec"]["replicas"] = 3
    budget, write = writes(decide(look(children)))
    assert isinstance(write, Apply)
    assert write.obj["kind"] == "Deployment"
    assert write.obj["spec"]["replicas"] == 3
    # Of three a node drain may take one.
    assert isinstance(budget, Apply)
    assert budget.obj["spec"]["maxUnavailable"] == 1


def test_a_new_declaration_is_written_with_the_replicas_in_one_apply() -> None:
    turn = decide(look(settled(), document(decode=4)))
    pool = next(w for w in writes(turn) if isinstance(w, Apply) and w.obj["kind"] == POOL.name)
    assert pool.obj["spec"]["replicas"] == pool.obj["spec"]["declaredReplicas"] == 4


def test_what_the_server_makes_of_an_apply_is_not_applied_for_ever() -> None:
    children = settled()
    (name,) = [n for n in children[DEPLOYMENT] if "decode" in n]
    children[DEPLOYMENT][name]["spec"]["minReadySeconds"] = 7
    (write,) = writes(decide(look(children)))
    assert isinstance(write, Apply)
    place = (DEPLOYMENT, name)
    applied = {place: applied_version_of(children[DEPLOYMENT][name], write.hash)}
    # It stays as it was although it was applied; its status goes on changing.
    children[DEPLOYMENT][name] = stored(children[DEPLOYMENT][name], version=99)
    assert writes(decide(look(children, settled=applied))) == []
    # A change of its spec by someone is another matter.
    children[DEPLOYMENT][name] = stored(children[DEPLOYMENT][name], version=100, generation=2)
    assert len(writes(decide(look(children, settled=applied)))) == 1


def test_a_label_that_someone_changed_is_put_right_though_the_generation_stays() -> None:
    children = settled()
    compared = decide(look(children)).compared
    (name,) = [n for n in children[DEPLOYMENT] if "decode" in n]
    changed = stored(children[DEPLOYMENT][name], version=11)
    changed["metadata"]["labels"]["xpyd.dev/pool"] = "decode"
    changed["metadata"]["labels"]["app.kubernetes.io/managed-by"] = "someone"
    children[DEPLOYMENT][name] = changed
    (write,) = writes(decide(look(children, settled=compared)))
    assert isinstance(write, Apply)


def test_contested_objects_rest() -> None:
    children = settled()
    children[SERVICE]["chat-router"]["spec"]["type"] = "NodePort"
    (write,) = writes(decide(look(children)))
    effect = effect_of(write)
    assert effect is not None
    turn = decide(look(children, contested=frozenset({effect})))
    assert writes(turn) == []
    assert turn.recheck_after is not None
    (problem,) = turn.problems
    assert (problem.kind, problem.reason) == ("Degraded", "Contested")
    assert problem.message.startswith("apply Service chat-router: another client undoes it")
    # Another document, another apply.
    new = document()
    new["spec"]["router"] = {"service": {"port": 80}}
    again = writes(decide(look(children, new, contested=frozenset({effect}))))
    assert "chat-router" in {w.obj["metadata"]["name"] for w in again if isinstance(w, Apply)}


@pytest.mark.parametrize("kind", [DEPLOYMENT, POOL])
def test_a_workload_on_its_way_out_is_not_deleted_again(kind: Kind) -> None:
    children = settled()
    going = document(deletionTimestamp=NOW)
    for obj in children[kind].values():
        obj["metadata"]["deletionTimestamp"] = NOW
    for obj in children[DEPLOYMENT].values():
        obj["spec"]["replicas"] = 0
    removed = [w for w in writes(decide(look(children, going))) if isinstance(w, DeleteObject)]
    assert len(removed) == (0 if kind == DEPLOYMENT else 3)


def test_an_object_on_its_way_out_is_waited_for() -> None:
    children = settled()
    children[SERVICE]["chat-router"]["metadata"]["deletionTimestamp"] = NOW
    children[SERVICE]["chat-router"]["spec"]["type"] = "NodePort"
    assert writes(decide(look(children))) == []


def test_objects_of_another_owner_are_neither_counted_nor_touched() -> None:
    children = settled()
    for objects in children.values():
        for obj in objects.values():
            obj["metadata"]["ownerReferences"][0] |= {"uid": "before", "name": "old"}
    turn = decide(look(children))
    assert writes(turn) == []
    assert len(turn.problems) == 15
    assert {p.reason for p in turn.problems} == {"NameConflict"}
    assert "InferenceFleet old" in turn.problems[0].message
    assert look(children).seen.workloads == ()
    assert look(children).seen.pools == ()


@pytest.mark.parametrize("change", [{"ownerReferences": []}, {"deletionTimestamp": NOW}])
def test_leftovers_are_removed_once_and_only_those_of_the_fleet(change: dict[str, Any]) -> None:
    children = settled()
    left = deepcopy(children[POOL]["chat-decode"])
    left["metadata"] |= {"name": "chat-old", "uid": "uid-chat-old"}
    left["spec"]["poolName"] = "old"
    children[POOL]["chat-old"] = left
    assert writes(decide(look(children))) == [DeleteObject(POOL, "chat-old", "uid-chat-old")]
    left["metadata"] |= change
    assert writes(decide(look(children))) == []


def test_orphans_with_our_label_are_taken_in() -> None:
    children = settled()
    del children[SERVICE]["chat-router"]["metadata"]["ownerReferences"]
    (write,) = writes(decide(look(children)))
    assert isinstance(write, Apply)
    assert write.obj["metadata"]["ownerReferences"][0]["uid"] == "fleet"


def test_a_taken_name_is_told_and_tried_again_soon() -> None:
    turn = decide(look(taken={(SERVICE, "chat-router"): "Ingress x"}))
    assert (SERVICE, "chat-router") not in {
        (kind_of(w.obj), w.obj["metadata"]["name"]) for w in writes(turn) if isinstance(w, Apply)
    }
    (problem,) = turn.problems
    assert "Ingress x" in problem.message
    assert turn.recheck_after is not None


def test_old_revisions_are_scaled_with_the_version_that_was_seen_and_then_deleted() -> None:
    children = settled()
    new = document()
    new["spec"]["engine"] = {"args": ["--seed=1"]}
    (old,) = [n for n in children[DEPLOYMENT] if "decode" in n]
    other = next(n for n in children[DEPLOYMENT] if "prefill" in n)
    for name in (old, other):
        add_pods(children, children[DEPLOYMENT][name])
    turn = decide(look(children, new))
    assert [w for w in writes(turn) if isinstance(w, Scale | DeleteObject)] == []
    for w in writes(turn):
        if isinstance(w, Apply):
            obj = stored(w.obj)
            children[kind_of(obj)][obj["metadata"]["name"]] = obj
    for name, obj in children[DEPLOYMENT].items():
        if name not in (old, other):
            add_pods(children, obj)
    scaled = [w for w in writes(decide(look(children, new))) if isinstance(w, Scale)]
    assert Scale(DEPLOYMENT, old, 0, "10") in scaled
    children[POD] = {}
    for name in (old, other):
        children[DEPLOYMENT][name]["spec"]["replicas"] = 0
    removed = [w for w in writes(decide(look(children, new))) if isinstance(w, DeleteObject)]
    assert DeleteObject(DEPLOYMENT, old, f"uid-{old}", "10") in removed


def add_pods(children: Children, deployment: Obj) -> None:
    for number in range(deployment["spec"]["replicas"]):
        name = f"{deployment['metadata']['name']}-{number}"
        owner = {"kind": "ReplicaSet", "name": f"{deployment['metadata']['name']}-5d9c7b8f4d"}
        children.setdefault(POD, {})[name] = {
            "metadata": {
                "name": name,
                "labels": deployment["metadata"]["labels"],
                "ownerReferences": [{**owner, "controller": True}],
            },
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
        }


def test_a_pool_object_of_another_role_is_made_anew() -> None:
    children = settled()
    children[POOL]["chat-decode"]["spec"]["role"] = "Prefill"
    assert writes(decide(look(children))) == [DeleteObject(POOL, "chat-decode", "uid-chat-decode")]


def scaled(children: Children, found: Obj, **more: Any) -> set[tuple[str, int]]:
    done = writes(decide(look(children, found, **more)))
    return {(w.name.split("-")[1], w.replicas) for w in done if isinstance(w, Scale)}


def drop_pods(children: Children, pool: str) -> None:
    for name, pod in list(children[POD].items()):
        if pod["metadata"]["labels"]["xpyd.dev/pool"] == pool:
            del children[POD][name]


def test_engines_do_not_wait_for_a_router_on_a_lost_node() -> None:
    children, going = settled(), document(deletionTimestamp=NOW)
    for deployment in children[DEPLOYMENT].values():
        add_pods(children, deployment)
    for pod in children[POD].values():
        if pod["metadata"]["labels"]["xpyd.dev/pool"] == "router":
            more = {"deletionTimestamp": NOW, "deletionGracePeriodSeconds": 330, "uid": "lost"}
            pod["metadata"] |= more
    assert ("decode", 0) not in scaled(children, going, ages={"lost": 300.0})
    assert ("decode", 0) in scaled(children, going, ages={"lost": 400.0})


def test_deletion_takes_workloads_down_and_lets_go_when_all_are_gone() -> None:
    children = settled()
    for deployment in children[DEPLOYMENT].values():
        add_pods(children, deployment)
    going = document(deletionTimestamp=NOW, finalizers=["xpyd.dev/fleet", "other"])
    assert scaled(children, going) == {("router", 0)}
    drop_pods(children, "router")
    assert scaled(children, going) == {("router", 0), ("decode", 0), ("prefill", 0)}
    del children[DEPLOYMENT], children[POD]
    assert writes(decide(look(children, going))) == [SetFinalizers(("other",), "5")]
    going["metadata"]["finalizers"] = ["other"]
    assert writes(decide(look(children, going))) == []


def test_deletion_needs_no_valid_document() -> None:
    going = document(deletionTimestamp=NOW)
    going["spec"] = {"nonsense": True}
    assert any(isinstance(w, Scale) for w in writes(decide(look(settled(), going))))
    assert writes(decide(look({}, going))) == [SetFinalizers((), "5")]


def test_an_invalid_document_writes_nothing_and_each_mistake_is_a_complaint() -> None:
    wrong = document()
    wrong["spec"] |= {"nonsense": True, "model": {"uri": "x"}}
    found = look(settled(), wrong)
    assert writes(decide(found)) == []
    uri, field = found.parsed.mistakes
    assert uri.startswith("spec.model.uri: ")
    assert '"spec.nonsense"' in field


def test_the_report_keeps_what_runs_when_a_document_is_invalid() -> None:
    wrong = document()
    wrong["spec"] = {}
    wrong["status"] = {"endpoint": "http://x", "conditions": []}
    found = report(look({}, wrong), [], has_key=True)
    assert found.after["endpoint"] == "http://x"
    assert found.pools == {}


def test_a_fleet_that_leaves_says_so_though_its_document_is_invalid() -> None:
    going = document(deletionTimestamp=NOW)
    going["spec"] = {"nonsense": True}
    going["status"] = {"endpoint": "http://x"}
    found = report(look(settled(), going), [], has_key=True)
    assert found.after["endpoint"] == "http://x"
    told = {c["type"]: c["reason"] for c in found.after["conditions"]}
    assert told["Ready"] == told["Progressing"] == "Draining"
    assert "InvalidSpec" not in told.values()
    assert found.pools == {}


def test_a_pool_is_counted_though_the_document_is_invalid() -> None:
    children = settled()
    wrong = document()
    wrong["spec"] = {}
    pool = children[POOL]["chat-decode"]
    pool["status"] = {"replicas": 7, "readyReplicas": 7, "updatedReplicas": 7, "selector": "a=b"}
    found = report(look(children, wrong), [], has_key=True)
    none = {"replicas": 0, "readyReplicas": 0, "updatedReplicas": 0, "drainingReplicas": 0}
    assert found.pools == {"chat-decode": {**none, "observedGeneration": 1}}


def test_statuses_are_patches_of_what_differs() -> None:
    children = settled()
    found = report(look(children), [], has_key=True)
    assert found.after["kvKeySecret"] == "chat-kv-fleet"
    assert sorted(found.pools) == ["chat-decode", "chat-prefill"]
    same = document()
    same["status"] = found.after
    for name, patch in found.pools.items():
        children[POOL][name]["status"] = patch
    again = report(look(children, same), [], has_key=True)
    assert again.after == again.before
    assert again.pools == {}


def test_a_key_of_the_users_own_is_named_in_the_status() -> None:
    own = document()
    own["spec"]["kvTransfer"] = {"keySecretRef": {"name": "mine", "key": "k"}}
    assert report(look({}, own), [], has_key=False).after["kvKeySecret"] == "mine"


def test_a_fleet_without_key_names_none_also_when_it_had_one() -> None:
    own = document()
    own["spec"]["kvTransfer"] = {"insecure": True}
    assert "kvKeySecret" not in report(look({}, own), [], has_key=True).after


@pytest.mark.parametrize("seed", range(50))
def test_a_merge_patch_makes_the_one_of_the_other(seed: int) -> None:
    chance = random.Random(seed)

    def value(depth: int) -> Any:
        kinds = ["text", "list", "number"] + (["map"] * 3 if depth else [])
        match chance.choice(kinds):
            case "map":
                return {k: value(depth - 1) for k in "abcd" if chance.random() < 0.6}
            case "list":
                return [chance.randrange(3) for _ in range(chance.randrange(3))]
            case "number":
                return chance.randrange(3)
            case _:
                return chance.choice("xyz")

    before, after = ({k: value(3) for k in "abc"} for _ in range(2))
    assert merged(before, merge_patch(before, after)) == after
    assert merge_patch(after, after) == {}


def merged(target: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """RFC 7386."""
    result = dict(target)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            below = result.get(key)
            result[key] = merged(below if isinstance(below, dict) else {}, cast("Any", value))
        else:
            result[key] = value
    return result


def test_refusals_are_told_by_their_kind() -> None:
    write = next(w for w in writes(decide(look())) if isinstance(w, Apply))
    quota = Forbidden("exceeded quota: q, requested: services=1", status=403)
    assert problem_of(write, quota).reason == "QuotaExceeded"
    assert problem_of(write, Forbidden("no", status=403)).reason == "Forbidden"
    found = problem_of(write, Invalid("spec.x: wrong", status=422))
    assert (found.kind, found.reason) == ("Degraded", "Refused")
    assert "ServiceAccount chat" in found.message
    scale = Scale(DEPLOYMENT, "chat-decode-1", 0, "1")
    assert "Deployment chat-decode-1" in problem_of(scale, Forbidden("no")).message
    assert "KV key" in problem_of(CreateKey(), Forbidden("no")).message
