"""What other clients add to a fleet's objects: found by managedFields, removed or reported."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.operator.test_controller_turn import Children, look, settled, writes
from xpyd_operator.controller.decision.decide import contest_problems, decide
from xpyd_operator.controller.decision.drift import added_fields, without
from xpyd_operator.controller.decision.history import (
    CONTESTED_S,
    CONTESTED_WRITES,
    REMOVALS,
    REMOVALS_S,
    FleetHistory,
)
from xpyd_operator.controller.decision.kinds import (
    DEPLOYMENT,
    NETWORK_POLICY,
    SERVICE,
    Kind,
    Obj,
    merge_patch,
    trim,
)
from xpyd_operator.controller.decision.report import report
from xpyd_operator.controller.decision.writes import RemoveFields, effect_of
from xpyd_operator.status.problems import in_order


def touched(
    kind: Kind, name: str, spec: Obj, fields: Obj, *, manager: str = "kubectl-patch"
) -> Children:
    """The fleet's objects, one of which a client has patched; `fields`: what it set."""
    children = settled()
    found = children[kind][name]
    found["spec"] = spec
    found["metadata"]["managedFields"] = [
        {"manager": "xpyd-operator", "operation": "Apply", "fieldsV1": {"f:spec": {"f:x": {}}}},
        {"manager": "kube-controller-manager", "subresource": "status", "fieldsV1": {"f:spec": {}}},
        {"manager": manager, "operation": "Update", "fieldsV1": {"f:spec": fields}},
    ]
    children[kind][name] = trim(kind, found)
    return children


def router_service(**more: Any) -> tuple[Obj, Obj]:
    """The Service's spec, and the same with `more` in it; maps are merged, lists are lengthened."""
    before = settled()[SERVICE]["chat-router"]["spec"]
    after = deepcopy(before)
    for name, value in more.items():
        after[name] = (
            {**before.get(name, {}), **value}
            if isinstance(value, dict)
            else [*before.get(name, []), *value]
        )
    return before, after


def decode_pod(change: Any) -> tuple[str, Obj, Obj]:
    """The name of the Deployment of decode, its spec, and the same after `change(pod's spec)`."""
    (name,) = [n for n in settled()[DEPLOYMENT] if "decode" in n]
    before = settled()[DEPLOYMENT][name]["spec"]
    after = deepcopy(before)
    change(after["template"]["spec"])
    return name, before, after


def only_removal(children: Children) -> RemoveFields:
    (write,) = writes(decide(look(children)))
    assert isinstance(write, RemoveFields)
    return write


@pytest.mark.parametrize(
    "fields",
    [{"f:selector": {}}, {"f:selector": {"f:version": {}}}],
    ids=["as one value", "by key"],
)
def test_a_key_that_somebody_adds_to_a_services_selector_is_removed(fields: Obj) -> None:
    """A total outage: no pod has the label, and the fleet was Ready."""
    before, after = router_service(selector={"version": "2"})
    write = only_removal(touched(SERVICE, "chat-router", after, fields))
    assert merged(after, write.patch["spec"]) == before
    assert "selector" in write.fields[0]
    assert "kubectl-patch" in write.fields[0]


def merged(target: Obj, patch: Obj) -> Obj:
    """RFC 7386."""
    found = dict(target)
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict):
            found[key] = merged(found.get(key, {}), value)
        else:
            found[key] = value
    return found


def test_a_sidecar_and_the_nodes_network_are_taken_out_of_a_deployment() -> None:
    def change(pod: Obj) -> None:
        pod["hostNetwork"] = True
        pod["containers"].append({"name": "spy", "image": "spy:1", "terminationMessagePath": "/x"})
        for port in pod["containers"][0]["ports"]:
            port["hostPort"] = port["containerPort"]

    name, before, after = decode_pod(change)
    ports = {
        f'k:{{"containerPort":{port["containerPort"]},"protocol":"TCP"}}': {"f:hostPort": {}}
        for port in before["template"]["spec"]["containers"][0]["ports"]
    }
    containers = {
        'k:{"name":"engine"}': {"f:ports": ports},
        'k:{"name":"spy"}': {".": {}, "f:image": {}, "f:name": {}},
    }
    pod = {"f:hostNetwork": {}, "f:containers": containers}
    fields = {"f:template": {"f:metadata": {"f:labels": {"f:a": {}}}, "f:spec": pod}}
    write = only_removal(touched(DEPLOYMENT, name, after, fields))
    assert merged(after, write.patch["spec"]) == before
    assert write.pool == "decode"
    assert any("containers[spy]" in field for field in write.fields)
    assert any(field.startswith("spec.template.spec.hostNetwork (") for field in write.fields)


def test_a_restart_by_kubectl_is_no_drift() -> None:
    """`kubectl rollout restart` sets an annotation of the pod template, as others set labels."""
    (name,) = [n for n in settled()[DEPLOYMENT] if "decode" in n]
    after = deepcopy(settled()[DEPLOYMENT][name]["spec"])
    key = "kubectl.kubernetes.io/restartedAt"
    after["template"]["metadata"].setdefault("annotations", {})[key] = "2026-11-23T10:00:00Z"
    after["template"]["metadata"]["labels"]["team"] = "a"
    metadata = {"f:annotations": {".": {}, f"f:{key}": {}}, "f:labels": {"f:team": {}}}
    turn = decide(look(touched(DEPLOYMENT, name, after, {"f:template": {"f:metadata": metadata}})))
    assert (writes(turn), turn.problems) == ([], ())


@pytest.mark.parametrize(
    ("more", "fields", "path"),
    [
        ({"externalIPs": ["192.0.2.1"]}, {"f:externalIPs": {}}, "spec.externalIPs"),
        (
            {"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 5}}},
            {"f:sessionAffinityConfig": {"f:clientIP": {"f:timeoutSeconds": {}}}},
            "spec.sessionAffinityConfig",
        ),
    ],
)
def test_an_administrators_setting_stays_and_is_reported(more: Obj, fields: Obj, path: str) -> None:
    _, after = router_service(**more)
    state = look(touched(SERVICE, "chat-router", after, fields, manager="ansible"))
    turn = decide(state)
    assert writes(turn) == []
    found = report(state, turn.problems, has_key=True).after["conditions"]
    (drifted,) = [c for c in found if c["type"] == "Drifted"]
    assert (drifted["status"], drifted["reason"]) == ("True", "FieldsAdded")
    assert f"Service chat-router: others added {path} (set by ansible)" in drifted["message"]
    (degraded,) = [c for c in found if c["type"] == "Degraded"]
    assert degraded["status"] == "False"


def test_a_port_is_removed_and_a_nodeport_is_a_setting() -> None:
    before, after = router_service(ports=[{"name": "other", "port": 81, "protocol": "TCP"}])
    after["ports"][0]["nodePort"] = 30080
    fields = {
        "f:ports": {
            'k:{"port":81,"protocol":"TCP"}': {".": {}, "f:port": {}},
            f'k:{{"port":{before["ports"][0]["port"]},"protocol":"TCP"}}': {"f:nodePort": {}},
        }
    }
    turn = decide(look(touched(SERVICE, "chat-router", after, fields)))
    (write,) = writes(turn)
    assert isinstance(write, RemoveFields)
    assert [p["port"] for p in write.patch["spec"]["ports"]] == [before["ports"][0]["port"]]
    assert write.patch["spec"]["ports"][0]["nodePort"] == 30080
    (problem,) = turn.problems
    assert "nodePort" in problem.message


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        # Defaults, and what a webhook puts into the operator's writes, have no other manager.
        (SERVICE, {"manager": "xpyd-operator", "fieldsV1": {"f:spec": {"f:externalIPs": {}}}}),
        (SERVICE, {"manager": "hpa", "subresource": "scale", "fieldsV1": {"f:spec": {"f:x": {}}}}),
        (SERVICE, {"manager": "kubectl", "fieldsV1": {"f:metadata": {"f:labels": {"f:a": {}}}}}),
        (SERVICE, {"manager": "before-first-apply", "fieldsV1": {"f:spec": {"f:x": {}}}}),
        (NETWORK_POLICY, {"manager": 5, "fieldsV1": "junk"}),
        (NETWORK_POLICY, "junk"),
    ],
)
def test_what_no_other_client_set_is_no_drift_and_is_not_kept(kind: Kind, entry: object) -> None:
    children = settled()
    found = children[kind]["chat-router"]
    found["spec"]["externalIPs"] = ["192.0.2.1"]
    found["metadata"]["managedFields"] = [entry]
    children[kind]["chat-router"] = trim(kind, found)
    assert "managedFields" not in children[kind]["chat-router"]["metadata"]
    turn = decide(look(children))
    assert (writes(turn), turn.problems) == ([], ())


def test_a_field_that_comes_back_each_time_is_removed_three_times_an_hour() -> None:
    _, after = router_service(selector={"version": "2"})
    children = touched(SERVICE, "chat-router", after, {"f:selector": {"f:version": {}}})
    history, now = FleetHistory(0.0), 0.0
    for _ in range(REMOVALS):
        assert history.contested(now) == frozenset()
        history.wrote(only_removal(children), now)
        now += 60.0
        history.forget_old(frozenset(), now)
    effect = effect_of(only_removal(children))
    assert history.contested(now) == {effect}
    turn = decide(look(children, contested=history.contested(now)))
    assert writes(turn) == []
    assert {(p.kind, p.reason) for p in turn.problems} == {
        ("Degraded", "Contested"),
        ("Drifted", "FieldsReturn"),
    }
    assert history.contested(now + REMOVALS_S) == frozenset()


def test_a_client_that_undoes_all_for_ten_minutes_is_one_contest() -> None:
    """It was ten: one for each write that the window of the last ten let through again."""
    children = settled()
    children[SERVICE]["chat-router"]["spec"]["type"] = "NodePort"
    history, begins, written, was = FleetHistory(0.0), 0, 0, False
    for now in range(600):
        turn = decide(look(children, contested=history.contested(now)))
        for write in writes(turn):
            history.wrote(write, now)
            written += 1
        again = [p for write, _ in history.contests(now).values() for p in contest_problems(write)]
        problems = in_order((*turn.problems, *again))
        assert len(problems) <= 1
        begins += bool(problems) and not was
        was = bool(problems)
        history.forget_old(frozenset(), now)
    assert (begins, was) == (1, True)
    assert CONTESTED_WRITES < written <= CONTESTED_WRITES + 10
    assert history.contests(600 + CONTESTED_S) == {}


NAMES = st.sampled_from(["a", "b", "c", "name"])
VALUES = st.recursive(
    st.integers(0, 2) | st.sampled_from(["x", ""]),
    lambda inner: st.dictionaries(NAMES, inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["f:a", "f:b", "f:name", ".", 'k:{"name":"x"}', "k:junk", 'v:"x"', "i:0", ""]
)
FIELDS = st.recursive(
    st.just({}) | st.none() | st.text(max_size=2),
    lambda inner: st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(observed=VALUES, desired=VALUES, fields=FIELDS)
@example(observed=[{}, {}], desired=0, fields={'k:{"name":"x"}': {}})
def test_removing_what_was_added_ends_for_any_managed_fields(
    observed: object, desired: object, fields: object
) -> None:
    base = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    rows = [{"manager": "m", "fieldsV1": {"f:spec": fields}}]
    have = {**base, "metadata": {"managedFields": rows}, "spec": observed}
    wanted = {**base, "metadata": {}, "spec": desired}
    added = added_fields(have, wanted)
    left = without(have, wanted, added)
    assert bool(merge_patch(have, left)) == bool(added)
    assert added_fields(left, wanted) == ()
