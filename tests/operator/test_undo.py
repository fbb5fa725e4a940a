"""The way back from an upgrade: an undo brings back the images that a revision ran with, as the
command writes it and as turns of the operator obey it (docs/adr/0119).
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from tests.operator.kube_objects import merge
from tests.operator.test_controller_turn import SETTINGS, Children, document, writes
from tests.operator.test_controller_turn import look as look_now
from tests.operator.test_rollout_command import DONE, Kubectl, rollout, with_status
from tests.operator.test_rollout_pause import after_turn, after_writes, edited, history
from tests.operator.test_upgrades import NEW, NEW_IMAGES, OLD, OLD_IMAGES, images, told, up_to_date
from tests.operator.test_upgrades import look as look_of
from xpyd_operator.controller.decision.decide import decide
from xpyd_operator.controller.decision.kinds import CONTROLLER_REVISION, DEPLOYMENT, Obj
from xpyd_operator.controller.decision.state import FleetState
from xpyd_operator.manifests.names import ANNOTATION_UNDO, Settings
from xpyd_operator.plan.revisions import restored
from xpyd_operator.rollout.view import history_of, target_of, undo_of
from xpyd_operator.status.events import events
from xpyd_operator.status.upgrades import own_defaults, takes_turn

NEWEST = replace(NEW, worker_image="registry/worker:3", router_image="registry/router:3")
RESTARTED = "2026-01-02T00:00:00Z"


class Fleet:
    """A fleet and its objects from turn to turn of one operator or another; pods are not made."""

    def __init__(self) -> None:
        self.children: Children = {}
        self.found = document()
        self.turn(OLD)

    def turn(self, settings: Settings, *, upgrades: bool = False) -> FleetState:
        """A turn. `upgrades`: the operator has a place for it in its --upgrade-fleets."""
        state = look_of(self.children, self.found, settings, turn=upgrades)
        self.children = after_writes(self.children, writes(decide(state)))
        self.found["status"] = told(state)
        return state

    def edit(self, **spec: object) -> None:
        self.found["spec"] |= spec

    def undo(self, to: int | None = None) -> None:
        """What `xpyd rollout undo` writes."""
        revision = target_of(history_of(self.found, self.records), to)
        if wish := undo_of(self.found, revision):
            self.found["metadata"]["annotations"] = {ANNOTATION_UNDO: wish.annotation}
        self.found["spec"] = restored(self.found["spec"], revision.record)

    @property
    def records(self) -> list[Obj]:
        return [*self.children[CONTROLLER_REVISION].values()]


@pytest.mark.parametrize("how", ["turn", "restart"])
def test_an_undo_of_an_upgrade_brings_back_the_images_and_no_newer_chart_takes_them_back(
    how: str,
) -> None:
    fleet = Fleet()
    first = deepcopy(fleet.found["spec"])
    if how == "restart":
        fleet.edit(rollout={"restartedAt": RESTARTED})
    assert images(fleet.turn(NEW, upgrades=how == "turn")) == NEW_IMAGES
    assert sorted(history(fleet.children)) == [1, 2]
    there = set(fleet.children[DEPLOYMENT])

    fleet.undo()
    assert fleet.found["spec"] == first, "images are no part of the document"
    before = fleet.found["status"]
    state = fleet.turn(NEW)
    assert images(state) == OLD_IMAGES
    assert sorted(history(fleet.children)) == [2, 3]
    assert set(fleet.children[DEPLOYMENT]) <= there, "back to the instances that still run"
    status, reason, message = up_to_date(fleet.found["status"])
    assert (status, reason) == ("False", "Undone")
    assert "an undo brought back worker image xpyd-worker:1 (now registry/worker:2)" in message
    assert "Undone" in [event.reason for event in events(before, fleet.found["status"])]

    # Neither a newer chart, nor its turn, nor another image of the document.
    assert images(fleet.turn(NEWEST, upgrades=True)) == OLD_IMAGES
    fleet.edit(engine={"image": "mine:7"})
    assert images(fleet.turn(NEWEST, upgrades=True)) == OLD_IMAGES | {
        "prefill": "mine:7", "decode": "mine:7",
    }  # fmt: skip
    fleet.edit(engine={}, rollout={"restartedAt": "2026-01-03T00:00:00Z"})
    asked = images(fleet.turn(NEWEST))
    assert asked == {name: image.replace(":2", ":3") for name, image in NEW_IMAGES.items()}
    assert up_to_date(fleet.found["status"])[1] == "Upgrading"
    assert images(fleet.turn(NEWEST)) == asked, "the undo is over"


def test_an_undo_of_an_undo_goes_to_the_upgrade_again_and_not_to_a_newer_one() -> None:
    fleet = Fleet()
    fleet.edit(rollout={"restartedAt": RESTARTED})
    fleet.turn(NEW)
    fleet.undo()
    fleet.turn(NEW)
    del fleet.found["status"]["defaults"]["restartedAt"]  # as if nobody remembered it
    fleet.undo()
    assert fleet.found["spec"]["rollout"] == {"restartedAt": RESTARTED}
    assert images(fleet.turn(NEWEST)) == NEW_IMAGES
    assert up_to_date(fleet.found["status"])[1] == "Undone"


def test_an_undo_of_an_undo_that_no_operator_has_seen_keeps_the_images() -> None:
    fleet = Fleet()
    fleet.edit(rollout={"restartedAt": RESTARTED})
    fleet.turn(NEW)
    fleet.undo()
    fleet.undo()
    assert fleet.found["spec"]["rollout"] == {"restartedAt": RESTARTED}
    assert images(fleet.turn(NEW)) == NEW_IMAGES


def test_an_undo_of_an_edit_alone_asks_for_no_images_and_keeps_upgrades_coming() -> None:
    fleet = Fleet()
    fleet.edit(engine={"args": ["--seed=1"]})
    fleet.turn(OLD)
    fleet.undo()
    assert "annotations" not in fleet.found["metadata"]
    assert images(fleet.turn(NEW)) == OLD_IMAGES
    assert up_to_date(fleet.found["status"])[1] == "OlderDefaults"
    assert images(fleet.turn(NEW, upgrades=True)) == NEW_IMAGES


def test_an_undo_holds_where_the_status_is_lost() -> None:
    fleet = Fleet()
    fleet.turn(NEW, upgrades=True)
    fleet.undo()
    fleet.turn(NEW)
    del fleet.found["status"]["defaults"]
    assert images(fleet.turn(NEWEST, upgrades=True)) == OLD_IMAGES
    assert up_to_date(fleet.found["status"])[1] == "Undone"


def test_an_undo_to_a_record_that_is_gone_changes_nothing() -> None:
    fleet = Fleet()
    fleet.turn(NEW, upgrades=True)
    fleet.undo()
    fleet.children[CONTROLLER_REVISION].clear()
    assert images(fleet.turn(NEWEST)) == NEW_IMAGES
    assert "undo" not in fleet.found["status"]["defaults"]


def test_a_fleet_that_was_taken_back_keeps_its_place_so_that_no_other_one_follows() -> None:
    fleet = Fleet()
    fleet.turn(NEW, upgrades=True)
    fleet.undo()
    fleet.turn(NEW)
    ready = {"type": "Ready", "status": "True"}
    other = {"conditions": [{"type": "UpToDate", "reason": "OlderDefaults"}, ready]}
    statuses = {"a": fleet.found["status"], "b": other}
    assert not takes_turn("b", statuses.items(), (), 1)
    assert takes_turn("b", statuses.items(), (), 2)


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Kubectl(tmp_path)


def upgraded() -> tuple[Obj, list[Obj]]:
    """A fleet that a restart gave other images, and its records."""
    fleet, newer = edited(restartedAt=RESTARTED), replace(SETTINGS, worker_image="worker:bad")
    children = after_turn({}, document())
    state = replace(look_now(children, fleet), settings=newer)
    children = after_writes(children, writes(decide(state)))
    status = {"defaults": own_defaults(fleet, newer).row}
    return {**fleet, "status": status}, [*children[CONTROLLER_REVISION].values()]


def test_undo_of_an_upgrade_asks_for_the_images_that_the_revision_ran_with(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, records = upgraded()
    kubectl.has(fleet, records=records)
    assert rollout("undo", "chat") == 0
    name = min(records, key=lambda one: one["revision"])["metadata"]["name"]
    undo = f"{name}@{RESTARTED}"
    assert kubectl.patch == {
        "metadata": {"resourceVersion": "5", "annotations": {"xpyd.dev/undo": undo}},
        "spec": {"rollout": None},
    }
    worker, router = SETTINGS.worker_image, SETTINGS.router_image
    said = f"back to revision 1 and its images: engines {worker}, routers {router}; "
    assert said in capsys.readouterr().out
    after = merge(deepcopy(fleet), kubectl.patch)
    assert "image" not in str(after["spec"]), "the document stays what its user wrote"
    settled = with_status(after, DONE)["status"]
    kubectl.has({**after, "status": settled | fleet["status"]})
    assert rollout("status", "chat", "--wait", "--timeout", "0") == 3
    assert "has not taken up the undo" in capsys.readouterr().out
    done = {**fleet["status"]["defaults"], "undo": undo}
    kubectl.has({**after, "status": settled | {"defaults": done}})
    assert rollout("status", "chat", "--wait", "--timeout", "0") == 0


def test_undo_to_a_revision_whose_images_nobody_recorded_says_so(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, records = upgraded()
    del min(records, key=lambda one: one["revision"])["data"]["defaults"]
    kubectl.has(fleet, records=records)
    assert rollout("undo", "chat") == 0
    assert "annotations" not in kubectl.patch["metadata"]
    assert "images of then are not recorded, those of now stay" in capsys.readouterr().out
