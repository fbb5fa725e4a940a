"""Another operator or chart changes no pod until somebody asks: what a fleet's pods are made with,
as pure functions and as decisions of a turn.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from tests.operator.fleets import changed
from tests.operator.test_controller_turn import Children, document, settled, writes
from xpyd_operator.cluster.page import concerns_of
from xpyd_operator.controller.decision.decide import decide
from xpyd_operator.controller.decision.kinds import (
    ALWAYS,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    Kind,
    Obj,
    kind_of,
)
from xpyd_operator.controller.decision.report import report
from xpyd_operator.controller.decision.state import FleetState, own_children, read
from xpyd_operator.controller.decision.writes import Apply, Scale
from xpyd_operator.controller.reconcile import keeping
from xpyd_operator.manifests.names import Settings
from xpyd_operator.plan.revisions import record_of, restored
from xpyd_operator.status.events import events
from xpyd_operator.status.upgrades import (
    UP_TO_DATE,
    Defaults,
    asked_restart,
    defaults_of,
    next_defaults,
    own_defaults,
    takes_turn,
    upgrade,
)

OLD = Settings("xpyd-worker:1", "xpyd-router:1", version="1")
NEW = Settings(
    "registry/worker:2", "registry/router:2", "Always", image_pull_secrets=("login",), version="2"
)
NOW = "2026-01-01T00:00:00Z"


def look(
    children: Children | dict[Kind, dict[str, Obj]],
    found: Obj,
    settings: Settings,
    *,
    turn: bool = False,
) -> FleetState:
    """What a turn of an operator with these settings sees."""
    upgraded = upgrade(found, own_children("fleet", children), settings, turn=turn)
    within = upgraded.defaults.within(settings)
    state = FleetState(
        found,
        read(found, within),
        children,
        within,
        frozenset(ALWAYS),
        NOW,
        upgrade=upgraded,
    )
    return keeping(state, settings.version)


def told(state: FleetState) -> Obj:
    """The status that the turn writes."""
    return report(state, [], has_key=True).after


def up_to_date(status: Obj) -> tuple[str, str, str]:
    found = next(c for c in status["conditions"] if c["type"] == UP_TO_DATE)
    return found["status"], found["reason"], found["message"]


def made() -> tuple[Children, Obj]:
    """A fleet of the old operator, with its status."""
    children, found = settled(), document()
    found["status"] = told(look(children, found, OLD))
    return children, found


def images(state: FleetState) -> dict[str, str]:
    """The image of each pool of the revision that is wanted."""
    return {pool.name: pool.template.image for pool in state.want.pools}


OLD_IMAGES = {"router": "xpyd-router:1", "prefill": "xpyd-worker:1", "decode": "xpyd-worker:1"}
NEW_IMAGES = {
    "router": "registry/router:2",
    "prefill": "registry/worker:2",
    "decode": "registry/worker:2",
}


def test_the_status_says_what_pods_are_made_with() -> None:
    _, found = made()
    assert found["status"]["defaults"] == {
        "version": "1",
        "workerImage": "xpyd-worker:1",
        "routerImage": "xpyd-router:1",
        "imagePullPolicy": "IfNotPresent",
        "readinessGate": True,
    }
    assert up_to_date(found["status"])[:2] == ("True", "Current")
    assert defaults_of(found["status"]) == own_defaults(found, OLD)


def test_an_operator_with_other_defaults_writes_nothing_but_what_differs_into_the_status() -> None:
    children, found = made()
    state = look(children, found, NEW)
    assert writes(decide(state)) == []
    after = told(state)
    status, reason, message = up_to_date(after)
    assert (status, reason) == ("False", "OlderDefaults")
    assert "worker image xpyd-worker:1 (now registry/worker:2)" in message
    assert "router image xpyd-router:1 (now registry/router:2)" in message
    assert "pull policy IfNotPresent (now Always)" in message
    assert "pull secrets none (now login)" in message
    assert "operator 1 (now 2)" in message
    assert after["defaults"] == found["status"]["defaults"]


@pytest.mark.parametrize("lost", ["defaults", "all"])
def test_where_the_status_is_lost_the_workloads_say_what_they_are_made_with(lost: str) -> None:
    children, found = made()
    if lost == "all":
        del found["status"]
    else:
        del found["status"]["defaults"]
    state = look(children, found, replace(NEW, version="1"))
    assert images(state) == OLD_IMAGES
    assert writes(decide(state)) == []
    assert told(state)["defaults"]["workerImage"] == "xpyd-worker:1"


def test_images_of_the_documents_templates_are_not_taken_for_the_operators() -> None:
    found = document()
    own = {"spec": {"containers": [{"name": "engine", "image": "mine:7"}]}}
    found["spec"]["pools"][1]["template"] = own
    children: Children = {}
    for write in writes(decide(look({}, found, OLD))):
        if isinstance(write, Apply):
            obj = deepcopy(write.obj)
            obj["metadata"] |= {"uid": obj["metadata"]["name"], "resourceVersion": "1"}
            children.setdefault(kind_of(obj), {})[obj["metadata"]["name"]] = obj
    state = look(children, found, replace(NEW, version="1"))
    assert state.upgrade is not None
    assert state.upgrade.defaults.worker_image == "xpyd-worker:1"
    assert writes(decide(state)) == []


def test_a_new_fleet_is_made_with_the_operators_own() -> None:
    state = look({}, document(), NEW)
    assert images(state) == NEW_IMAGES
    assert told(state)["defaults"]["imagePullSecrets"] == ["login"]


def test_a_restart_takes_the_operators_own_once() -> None:
    before, ours = own_defaults(document(), OLD), own_defaults(document(), NEW)
    asked = replace(ours, restarted_at="2026-01-01T00:00:00Z")
    taken = next_defaults(before, asked, turn=False)
    assert taken == asked
    # The same wish is no other one when the next version comes, and neither is its end.
    newest = replace(asked, worker_image="registry/worker:3")
    assert next_defaults(taken, newest, turn=False) == taken
    assert next_defaults(taken, replace(newest, restarted_at=""), turn=False) == taken
    again = replace(newest, restarted_at="2026-01-02T00:00:00Z")
    assert next_defaults(taken, again, turn=False) == again


@pytest.mark.parametrize(
    ("asked", "is_new"),
    [
        ("2026-01-01T12:00:01Z", True),
        ("2026-01-01T12:00:00Z", False),
        ("2026-01-01T11:59:59Z", False),
        ("2026-01-01T13:00:00+01:00", False),
        ("2026-01-01T12:00:00-01:00", True),
        ("2026-99-01T12:00:00Z", False),
    ],
)
def test_only_a_later_restart_takes_the_operators_own(asked: str, is_new: bool) -> None:
    before = replace(own_defaults(document(), OLD), restarted_at="2026-01-01T12:00:00Z")
    ours = replace(own_defaults(document(), NEW), restarted_at=asked)
    assert next_defaults(before, ours, turn=False) == (ours if is_new else before)
    # What is taken for another reason does not forget which one was obeyed.
    for now in (replace(ours, engine_image="mine:7"), ours):
        taken = next_defaults(before, now, turn=now is ours)
        assert taken.worker_image == NEW.worker_image
        assert taken.restarted_at == (asked if is_new else before.restarted_at)


def test_an_undo_of_a_restart_keeps_the_images() -> None:
    first = changed(document(), {"spec.rollout": {"restartedAt": "2026-01-01T00:00:00Z"}})
    second = changed(document(), {"spec.rollout": {"restartedAt": "2026-01-02T00:00:00Z"}})
    children = settled()
    second["status"] = told(look(children, second, OLD))
    undone = {**second, "spec": restored(second["spec"], record_of(first["spec"]))}
    assert undone["spec"]["rollout"] == first["spec"]["rollout"]
    state = look(children, undone, NEW)
    assert images(state) == OLD_IMAGES
    assert up_to_date(told(state))[1] == "OlderDefaults"
    undone["status"] = told(state)
    redone = {**undone, "spec": second["spec"]}
    assert images(look(children, redone, NEW)) == OLD_IMAGES


def test_the_wish_is_read_where_the_document_has_it() -> None:
    at = "2026-01-01T00:00:00Z"
    assert asked_restart({"spec": {"rollout": {"restartedAt": at}}}) == at
    assert asked_restart({"spec": {"rollout": {}}}) == asked_restart({}) == ""


def test_another_image_of_the_document_takes_the_operators_own() -> None:
    children, found = made()
    found["spec"]["engine"] = {"image": "mine:7"}
    state = look(children, found, NEW)
    assert images(state) == NEW_IMAGES | {"prefill": "mine:7", "decode": "mine:7"}
    applied = [w.obj["kind"] for w in writes(decide(state)) if isinstance(w, Apply)]
    assert applied.count("Deployment") == 3
    assert up_to_date(told(state))[1] == "Upgrading"


def test_an_edit_of_something_else_keeps_the_images() -> None:
    children, found = made()
    found["spec"]["engine"] = {"args": ["--seed=1"]}
    assert images(look(children, found, NEW)) == OLD_IMAGES


def test_a_fleet_says_upgrading_until_it_is_ready() -> None:
    children, found = made()
    state = look(children, found, NEW, turn=True)
    found["status"] = told(state)
    assert up_to_date(found["status"])[:2] == ("False", "Upgrading")
    assert images(state) == NEW_IMAGES
    later = told(look(children, found, NEW))
    assert up_to_date(later)[1] == "Upgrading"
    assert found["status"]["defaults"]["version"] == "2"


def of_revision(children: Children, found: Obj, revision: str) -> None:
    """As if the old operator had made other pods of the same document."""
    for name, obj in list(children[DEPLOYMENT].items()):
        before = obj["metadata"]["labels"]["xpyd.dev/revision"]
        changed = deepcopy(obj)
        changed["metadata"]["name"] = name.replace(before, revision)
        changed["metadata"]["labels"]["xpyd.dev/revision"] = revision
        changed["spec"]["template"]["spec"]["hostname"] = "made-otherwise"
        del children[DEPLOYMENT][name]
        children[DEPLOYMENT][changed["metadata"]["name"]] = changed
    for row in found["status"]["pools"]:
        row["revision"] = revision


def test_pods_of_another_version_keep_their_revision_and_are_only_scaled() -> None:
    children, found = made()
    of_revision(children, found, "0ld0ld00")
    state = look(children, found, NEW)
    assert {pool.revision for pool in state.want.pools} == {"0ld0ld00"}
    assert writes(decide(state)) == []
    # The operator that made them otherwise would roll the fleet for that.
    same = look(children, found, OLD)
    assert "0ld0ld00" not in {pool.revision for pool in same.want.pools}
    assert writes(decide(same)) != []


def test_pods_of_another_version_follow_a_scale() -> None:
    children, found = made()
    of_revision(children, found, "0ld0ld00")
    found["spec"]["pools"][1]["replicas"] = 3
    done = writes(decide(look(children, found, NEW)))
    scales = {(w.name, w.replicas) for w in done if isinstance(w, Scale)}
    assert scales == {("chat-decode-0ld0ld00", 3)}
    assert "Deployment" not in {w.obj["kind"] for w in done if isinstance(w, Apply)}


@pytest.mark.parametrize(
    ("change", "rolled"),
    [
        ({"router": {"replicas": 5}}, ""),
        ({"rollout": {"maxSurgePercent": 50}}, ""),
        ({"router": {"args": ["--log-level=debug"]}}, "router"),
        ({"engine": {"args": ["--seed=1"]}}, "decode prefill router"),
    ],
)
def test_only_what_the_document_changes_is_made_by_the_new_version(
    change: dict[str, Any], rolled: str
) -> None:
    children, found = made()
    of_revision(children, found, "0ld0ld00")
    found["spec"] |= change
    want = look(children, found, NEW).want
    found_rolled = {pool.name for pool in want.pools if pool.revision != "0ld0ld00"}
    assert sorted(found_rolled) == rolled.split()


def test_a_lost_workload_of_another_version_is_made_by_this_one() -> None:
    children, found = made()
    of_revision(children, found, "0ld0ld00")
    del children[DEPLOYMENT]["chat-decode-0ld0ld00"]
    state = look(children, found, NEW)
    made_now = [w.obj["metadata"]["name"] for w in writes(decide(state)) if isinstance(w, Apply)]
    assert len(made_now) == 1
    assert made_now[0].startswith("chat-decode-")
    assert images(state) == OLD_IMAGES


def status(reason: str, *, ready: bool = True) -> Obj:
    return {
        "conditions": [
            {"type": UP_TO_DATE, "status": "False", "reason": reason},
            {"type": "Ready", "status": str(ready)},
        ]
    }


def test_so_many_fleets_at_a_time_take_new_defaults() -> None:
    older = {name: status("OlderDefaults") for name in "abc"}
    assert takes_turn("a", older.items(), (), 1)
    assert not takes_turn("a", older.items(), (), 0)
    # One took them a moment ago, and its status does not say so yet.
    assert not takes_turn("b", older.items(), {"a"}, 1)
    assert takes_turn("b", older.items(), {"a"}, 2)
    busy = {**older, "a": status("Upgrading", ready=False)}
    assert not takes_turn("b", busy.items(), (), 1)
    assert takes_turn("a", busy.items(), (), 1)
    assert takes_turn("b", {**older, "a": status("Current")}.items(), (), 1)


def test_a_fleet_that_is_not_ready_takes_none_by_itself() -> None:
    older = {"a": status("OlderDefaults", ready=False), "b": status("OlderDefaults")}
    assert not takes_turn("a", older.items(), (), 5)
    assert takes_turn("b", older.items(), (), 5)


def test_a_fleet_whose_rollout_is_paused_takes_none_by_itself() -> None:
    children, found = made()
    paused = {**found, "spec": {**found["spec"], "rollout": {"paused": True}}}
    own = own_children("fleet", children)
    assert upgrade(paused, own, NEW, turn=True).older
    assert not upgrade(found, own, NEW, turn=True).older


def test_junk_in_the_status_counts_as_none() -> None:
    for junk in ({}, {"defaults": "x"}, {"defaults": {"workerImage": 1, "routerImage": "r"}}):
        assert defaults_of(junk) is None
    row: Obj = {"workerImage": "w", "routerImage": "r", "imagePullSecrets": ["a", 1]}
    assert defaults_of({"defaults": row}) is None
    found = defaults_of({"defaults": row | {"imagePullPolicy": "Never"}})
    assert found == Defaults("", "w", "r", "Never", ("a",))


def without_gate(found: Obj) -> None:
    """As an operator before the gate left the fleet."""
    found["status"]["defaults"].pop("readinessGate", None)


def gates(state: FleetState) -> dict[str, bool]:
    return {pool.name: pool.template.gated for pool in state.want.pools}


def test_a_fleet_of_before_the_readiness_gate_keeps_its_revisions_until_it_is_asked() -> None:
    """The gate is a part of pods: to add it would make new ones."""
    before = replace(OLD, gated=False)
    children, found = settled(before), document()
    found["status"] = told(look(children, found, before))
    without_gate(found)
    state = look(children, found, OLD)
    assert writes(decide(state)) == []
    assert gates(state) == {"router": False, "prefill": False, "decode": False}
    assert "readiness gate off (now on)" in up_to_date(told(state))[2]
    lost = {**found, "status": {k: v for k, v in found["status"].items() if k != "defaults"}}
    assert writes(decide(look(children, lost, OLD))) == [], "its Deployments say it, too"
    found["spec"]["rollout"] = {"restartedAt": "2026-01-02T00:00:00Z"}
    assert gates(look(children, found, OLD)) == {"router": False, "prefill": True, "decode": True}


def test_a_fleet_with_the_gate_keeps_it_where_an_older_crd_drops_the_field() -> None:
    children, found = made()
    without_gate(found)
    state = look(children, found, OLD)
    assert writes(decide(state)) == []
    assert gates(state)["decode"]
    assert up_to_date(told(state))[1] == "Current"


def test_a_pods_gate_is_rendered_and_makes_another_revision() -> None:
    of_old = {n for n in settled(replace(OLD, gated=False))[DEPLOYMENT] if "router" not in n}
    new = settled(OLD)[DEPLOYMENT]
    assert not of_old & new.keys()
    for name, made in new.items():
        spec = made["spec"]["template"]["spec"]
        expected = None if "router" in name else [{"conditionType": "xpyd.dev/routable"}]
        assert spec.get("readinessGates") == expected


def test_gates_of_a_pools_template_come_beside_ours() -> None:
    found = document()
    theirs = {"conditionType": "example.com/seen"}
    found["spec"]["pools"][1]["template"] = {"spec": {"readinessGates": [theirs]}}
    applied = [w.obj for w in writes(decide(look({}, found, OLD))) if isinstance(w, Apply)]
    (made,) = [
        o for o in applied if o["kind"] == "Deployment" and "decode" in o["metadata"]["name"]
    ]
    gates = made["spec"]["template"]["spec"]["readinessGates"]
    assert gates == [{"conditionType": "xpyd.dev/routable"}, theirs]


NEWER = {"spec.rollout": {"fadePercent": 5}, "spec.pools.1.placement": "Packed"}
"""Fields of CRDs that are newer than the operator: filled in by the API server, or a user's."""


def ignored(status: Obj) -> list[Obj]:
    return [c for c in status["conditions"] if c["type"] == "FieldsIgnored"]


def test_fields_of_newer_crds_are_named_and_change_nothing_else() -> None:
    children, found = made()
    before = found["status"]
    stored = changed(found, NEWER)
    state = look(children, stored, OLD)
    assert writes(decide(state)) == []
    after = told(state)
    (one,) = ignored(after)
    assert (one["status"], one["reason"]) == ("True", "OlderOperator")
    assert one["message"].startswith("spec.pools[1].placement, spec.rollout.fadePercent: the CRDs")
    assert "upgrade the operator" in one["message"]
    others = [c for c in after["conditions"] if c is not one]
    assert after | {"conditions": others} == before
    (event,) = events(before, after)
    assert (event.type, event.reason, event.message) == ("Warning", "FieldsIgnored", one["message"])
    assert one["type"] in [concern.type for concern in concerns_of({**stored, "status": after})]
    stored["status"] = after
    assert events(after, told(look(children, stored, OLD))) == ()
    found["status"] = after
    assert told(look(children, found, OLD)) == before, "an operator that knows them"


def test_an_edit_beside_fields_of_newer_crds_is_obeyed() -> None:
    children, found = made()
    edit = changed(found, {"spec.engine": {"image": "engines:7"}})

    def written(document: Obj) -> dict[str, Obj]:
        turn = writes(decide(look(children, document, OLD)))
        return {w.obj["metadata"]["name"]: w.obj for w in turn if isinstance(w, Apply)}

    known, stored = written(edit), written(changed(edit, NEWER))
    records = [name for name, obj in known.items() if kind_of(obj) == CONTROLLER_REVISION]
    for name in records:
        # An undo gives all of it back.
        pools = stored[name]["data"]["spec"]["pools"]
        assert pools.pop(1) == {
            **known[name]["data"]["spec"]["pools"].pop(1),
            "placement": "Packed",
        }
    assert (len(records), len(known)) == (1, 3)
    assert without_marks(known) == without_marks(stored)


def without_marks(objects: dict[str, Obj]) -> dict[str, Obj]:
    """Without the digest over what they say."""
    for obj in objects.values():
        del obj["metadata"]["annotations"]["xpyd.dev/applied"]
    return objects


def test_a_document_with_mistakes_names_the_fields_of_newer_crds_too() -> None:
    children, found = made()
    wrong = {"metadata": {"labels": {"xpyd.dev/fleet": "mine"}}}
    stored = changed(found, {**NEWER, "spec.pools.0.template": wrong})
    after = told(look(children, stored, OLD))
    (degraded,) = [c for c in after["conditions"] if c["type"] == "Degraded"]
    assert degraded["reason"] == "InvalidTemplate"
    assert "spec.rollout.fadePercent" in ignored(after)[0]["message"]
