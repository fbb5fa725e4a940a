"""A rollout that is paused, and the history of a fleet's revisions: one turn as pure functions."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from tests.operator.fleets import changed
from tests.operator.kube_objects import pod_of
from tests.operator.test_controller_turn import Children, document, look, stored, writes
from xpyd_operator.controller.decision.decide import decide
from xpyd_operator.controller.decision.kinds import (
    CONTROLLER_REVISION,
    DEPLOYMENT,
    POD,
    Obj,
    kind_of,
)
from xpyd_operator.controller.decision.report import report
from xpyd_operator.controller.decision.writes import Apply, DeleteObject, Scale
from xpyd_operator.document.load import parse_object
from xpyd_operator.document.parallelism import Parallelism
from xpyd_operator.manifests.volumes import model_in_pod
from xpyd_operator.plan.fleet import plan
from xpyd_operator.plan.revisions import differences, record_of, restored, revision_id
from xpyd_operator.plan.values import (
    FleetSeen,
    FleetWant,
    PoolSeen,
    PoolWant,
    PutWorkload,
    Template,
    Workload,
    WorkloadSeen,
)
from xpyd_operator.status.events import events

OLD, NEW = Template("Prefill", ("old",)), Template("Prefill", ("new",))


@pytest.mark.parametrize(
    ("replicas", "old", "new", "after"),
    [
        (4, 4, None, {}),
        (4, 3, 2, {}),  # between two steps, with a surge of one
        (4, 4, 1, {}),
        (6, 4, None, {"old": 6}),
        (2, 4, None, {"old": 2}),
        (6, 4, 1, {"old": 5}),
        (6, 1, 4, {"new": 5}),
        (2, 3, 2, {"old": 2, "new": 1}),  # nothing of P's partner is new: a pair stays old
        (0, 4, None, {"old": 0}),
    ],
)
def test_a_paused_rollout_takes_no_step_and_is_scaled_in_the_revisions_that_it_has(
    replicas: int, old: int, new: int | None, after: dict[str, int]
) -> None:
    want = PoolWant("p", NEW, "new", None, 25, 0)
    seen = [WorkloadSeen(Workload("p", "old", old, OLD), old, old)]
    if new is not None:
        seen.append(WorkloadSeen(Workload("p", "new", new, NEW), new, new))
    partner = PoolWant("d", NEW, "new", 2)
    seen.append(WorkloadSeen(Workload("d", "old", 2, OLD), 2, 2))
    sizes = PoolSeen("p", replicas, None), PoolSeen("d", 2, 2)
    found = plan(FleetWant("f", (want, partner), paused=True), FleetSeen(sizes, tuple(seen)), 0.0)
    puts = [a.workload for a in found.actions if isinstance(a, PutWorkload)]
    assert {put.revision: put.replicas for put in puts if put.pool == "p"} == after
    assert [put for put in puts if put.pool == "d"] == []


def test_a_scale_in_a_pause_waits_for_the_room_of_instances_that_end() -> None:
    seen = (
        WorkloadSeen(Workload("p", "old", 1, OLD), alive=3, ready=1),
        WorkloadSeen(Workload("p", "new", 2, NEW), alive=2, ready=2),
    )
    want = FleetWant("f", (PoolWant("p", NEW, "new", 4),), paused=True)
    assert not puts_of(want, seen)
    ended = (replace(seen[0], alive=1), seen[1])
    assert puts_of(want, ended) == [Workload("p", "new", 3, NEW)]


def puts_of(want: FleetWant, seen: tuple[WorkloadSeen, ...]) -> list[Workload]:
    actions = plan(want, FleetSeen(workloads=seen), 0.0).actions
    return [action.workload for action in actions if isinstance(action, PutWorkload)]


def test_what_has_no_instance_starts_in_a_pause_and_a_pool_that_left_stays() -> None:
    want = FleetWant("f", (PoolWant("p", NEW, "new", 2),), paused=True)
    left = WorkloadSeen(Workload("q", "old", 1, OLD), 1, 1)
    first = Workload("p", "new", 2, NEW)
    assert puts_of(want, (left,)) == puts_of(want, ()) == [first]


def edited(image: str = "", found: Obj | None = None, **rollout: Any) -> Obj:
    """The fleet with another image of its engines."""
    changes = {f"spec.rollout.{name}": value for name, value in rollout.items()}
    if image:
        changes["spec.engine"] = {"image": image}
    found = deepcopy(found or document())
    found["spec"].setdefault("rollout", {})
    return changed(found, changes)


def running(children: Children) -> Children:
    """The same with every pod that a Deployment asks for, ready."""
    made = deepcopy(children)
    made[POD] = {}
    for name, deployment in made[DEPLOYMENT].items():
        for number in range(deployment["spec"]["replicas"]):
            pod = pod_of(deployment, f"{name}-{number}")
            pod["metadata"]["uid"] = f"uid-{name}-{number}"
            pod["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
            made[POD][f"{name}-{number}"] = pod
    return made


def after_turn(children: Children, found: Obj) -> Children:
    """What an API server has after a turn; pods are not made."""
    return after_writes(children, writes(decide(look(children, found))))


def after_writes(children: Children, turn: list[Any]) -> Children:
    """What an API server has after these writes."""
    made = deepcopy(children)
    for write in turn:
        match write:
            case Apply(obj):
                made.setdefault(kind_of(obj), {})[obj["metadata"]["name"]] = stored(obj)
            case DeleteObject(kind, name):
                del made[kind][name]
            case Scale(kind, name, replicas):
                made[kind][name]["spec"]["replicas"] = replicas
            case _:
                pass
    return made


def history(children: Children) -> dict[int, str]:
    """Number -> the image of the engines."""
    return {
        obj["revision"]: obj["data"]["spec"].get("engine", {}).get("image", "")
        for obj in children.get(CONTROLLER_REVISION, {}).values()
    }


def test_each_revision_is_recorded_once_and_the_oldest_go() -> None:
    children = after_turn({}, document())
    assert history(children) == {1: ""}
    for number in range(5):
        found = edited(f"image:{number}", historyLimit=2)
        children = after_turn(children, found)
        assert writes_of_history(children, found) == []
    assert history(children) == {4: "image:2", 5: "image:3", 6: "image:4"}
    owner = next(iter(children[CONTROLLER_REVISION].values()))["metadata"]["ownerReferences"][0]
    assert owner["uid"] == "fleet"
    # Back to an earlier one: its number is the highest, and its data is never written anew.
    children = after_turn(children, edited("image:3", historyLimit=2))
    assert history(children) == {4: "image:2", 6: "image:4", 7: "image:3"}
    children = after_turn(children, edited("image:3", historyLimit=0))
    assert history(children) == {7: "image:3"}


def writes_of_history(children: Children, found: Obj) -> list[Any]:
    kinds = (kind_of(w.obj) for w in writes(decide(look(children, found))) if isinstance(w, Apply))
    return [kind for kind in kinds if kind == CONTROLLER_REVISION]


def test_a_scale_is_no_revision_and_an_upgrade_is_one_when_the_fleet_takes_it() -> None:
    children = after_turn({}, document())
    scaled = changed(document(), {"spec.pools.1.replicas": 3})
    assert writes_of_history(children, scaled) == []
    assert history(children) == {1: ""}
    state = look(children, document())
    newer = replace(state, settings=replace(state.settings, worker_image="xpyd-worker:2"))
    made = after_writes(children, writes(decide(newer)))
    assert history(made) == {1: "", 2: ""}
    images = {
        one["revision"]: one["data"]["defaults"]["workerImage"]
        for one in made[CONTROLLER_REVISION].values()
    }
    assert images == {1: state.settings.worker_image, 2: "xpyd-worker:2"}
    again = after_writes(made, writes(decide(look(made, document()))))
    assert sorted(history(again)) == [2, 3], "back to the first one's images"


def test_a_record_without_images_goes_when_the_same_document_has_one_with_them() -> None:
    children = after_turn({}, document())
    ((name, record),) = children[CONTROLLER_REVISION].items()
    fleet = parse_object(document())
    bare = f"chat-{revision_id(fleet, model_in_pod(fleet))}"
    older = deepcopy(record)
    older["metadata"] |= {"name": bare, "uid": bare}
    del older["data"]["defaults"]
    children[CONTROLLER_REVISION] = {bare: older}
    assert name != bare
    after = after_turn(children, document())[CONTROLLER_REVISION]
    assert {one: obj["revision"] for one, obj in after.items()} == {name: 2}
    # That of another document stays: an undo goes there.
    edit = after_turn(children, edited("image:1"))[CONTROLLER_REVISION]
    assert bare in edit
    assert len(edit) == 2


def test_a_pause_records_nothing_that_does_not_begin_and_leaves_services_as_they_are() -> None:
    children = running(after_turn({}, document()))
    paused = edited("image:1", paused=True)
    paused["spec"]["kvTransfer"] = {"port": 25001}
    assert writes(decide(look(children, paused))) == []
    resumed = edited(found=paused, paused=False)
    begun = after_turn(children, resumed)
    assert history(begun) == {1: "", 2: "image:1"}
    assert len(begun[DEPLOYMENT]) == 5


def test_a_paused_rollout_is_told_and_its_deadline_does_not_run() -> None:
    children = running(after_turn({}, document()))
    moving = edited("image:1")
    children = after_turn(children, moving)
    before = report(look(children, moving), (), has_key=True).after
    paused = edited("image:1", paused=True)
    state = look(children, {**paused, "status": before})
    marked = [
        w.obj["spec"].get("paused")
        for w in writes(decide(state))
        if isinstance(w, Apply) and kind_of(w.obj) == DEPLOYMENT
    ]
    assert marked == [True, True]  # the newest revisions; old ones are complete
    newest = [d for d in children[DEPLOYMENT].values() if "image:1" in str(d)]
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    newest[0]["status"] = {"conditions": [late]}
    after = report(state, (), has_key=True).after
    reasons = {c["type"]: c["reason"] for c in after["conditions"]}
    assert (reasons["Progressing"], reasons["Ready"], reasons["Degraded"]) == (
        "Paused", "Paused", "AsExpected",
    )  # fmt: skip
    assert "xpyd rollout resume" in str(after["conditions"])
    assert [e.reason for e in events(before, after)] == ["RolloutPaused"]
    resumed = report(look(children, {**moving, "status": after}), (), has_key=True).after
    assert "RolloutResumed" in [e.reason for e in events(after, resumed)]
    assert "ProgressDeadlineExceeded" in str(resumed)


def test_pods_that_were_taken_back_are_late_no_more() -> None:
    children = running(after_turn({}, document()))
    children = after_turn(children, edited("image:1"))
    (stuck, *_) = [d for d in children[DEPLOYMENT].values() if "image:1" in str(d)]
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
    stuck["status"] = {"conditions": [late]}
    told = report(look(children, edited("image:1")), (), has_key=True).after
    taken_back = report(look(children, document()), (), has_key=True).after
    assert [late["reason"] in str(one) for one in (told, taken_back)] == [True, False]


def test_a_record_taken_back_makes_the_pods_that_it_made_and_leaves_sizes_alone() -> None:
    first = changed(document(), {"spec.rollout": {"restartedAt": "2026-01-01T00:00:00Z"}})
    record = record_of(first["spec"])
    assert "replicas" not in str(record)
    now = edited("image:9", found=document(decode=7), paused=True, maxSurgePercent=50)
    now["spec"]["pools"].append({"name": "more", "role": "Decode", "resources": {"gpus": 0}})
    now["spec"]["router"] = {"replicas": 3, "args": ["--drain-seconds=9"]}
    back = {**now, "spec": restored(now["spec"], record)}
    ids = [revision_id(parse_object(one), "m") for one in (first, back, now)]
    assert ids[0] == ids[1] != ids[2]
    spec = back["spec"]
    assert [pool.get("replicas") for pool in spec["pools"]] == [1, 7]
    assert spec["router"] == {"replicas": 3}
    assert spec["rollout"] == {
        "paused": True, "maxSurgePercent": 50, "restartedAt": "2026-01-01T00:00:00Z",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("then", "now", "back"),
    [
        ({"data": 1, "maxData": 4}, {"data": 3, "maxData": 4}, {"data": 3, "maxData": 4}),
        ({"data": 1, "maxData": 2}, {"data": 3, "maxData": 4}, {"data": 2, "maxData": 2}),
        ({"data": 1, "maxData": 4}, {"data": 3}, {"data": 3, "maxData": 4}),
        ({"data": 3, "maxData": 4}, {}, {"maxData": 4}),
        ({"data": 2}, {"data": 3, "maxData": 4}, {"data": 2}),
        (
            {"tensor": 2, "data": 1, "maxData": 4, "expert": 2},
            {"tensor": 2, "data": 3, "maxData": 4, "expert": 6},
            {"tensor": 2, "data": 3, "maxData": 4, "expert": 8},
        ),
        (
            {"data": 2, "maxData": 3, "expert": 2},
            {"data": 1, "maxData": 4},
            {"data": 1, "maxData": 3, "expert": 3},
        ),
    ],
)
def test_a_record_taken_back_leaves_the_replicas_of_an_instance_alone_where_they_come_and_go(
    then: Obj, now: Obj, back: Obj
) -> None:
    first, second = document(), document()
    first["spec"]["pools"][1]["parallelism"] = then
    second["spec"]["pools"][1]["parallelism"] = now
    found = restored(second["spec"], record_of(first["spec"]))
    assert found["pools"][1]["parallelism"] == back
    assert Parallelism.model_validate(back), "a document may say it"


def test_differences_name_the_fields_and_items_by_their_names() -> None:
    before = {"a": 1, "pools": [{"name": "p", "x": 1}, {"name": "q"}], "args": ["--a"]}
    after = {"a": 1, "pools": [{"name": "p", "x": 2}], "args": ["--a", "--b"]}
    assert differences(before, after) == [
        ("pools[p].x", 1, 2),
        ("pools[q]", {"name": "q"}, None),
        ("args", ["--a"], ["--a", "--b"]),
    ]
