"""The rotation of a fleet's key, as the operator drives it: from what pods say to the next step.

`World` is a cluster of values: it does what a turn decides, and its pods follow the ConfigMap when
the test says so. Any turn may be the first one of a new operator.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.operator.test_controller_turn import Children, document, look, settled, stored
from xpyd_operator.controller.decision.decide import decide
from xpyd_operator.controller.decision.kinds import CONFIG_MAP, DEPLOYMENT, POD, Obj
from xpyd_operator.controller.decision.report import report
from xpyd_operator.controller.decision.state import FleetState, asked_rotation, key_order
from xpyd_operator.controller.decision.writes import Apply, CreateKey, DeleteKey
from xpyd_operator.manifests.names import ANNOTATION_ROTATE, KEY_SLOTS, kv_secret_name
from xpyd_operator.status.events import events
from xpyd_operator.status.rotation import (
    HOLD_S,
    OVERDUE_S,
    KeyOrder,
    Progress,
    RouterKeys,
    progress,
    read_keys,
    read_order,
    rotate,
)

FIRST, SECOND = KEY_SLOTS
NOBODY = Progress(0, (), has_hidden=False)


@dataclass
class World:
    """The cluster. `secrets`: the id of each Secret's key, by slot; `have`: the files that each pod
    has, as kubelet brought them."""

    found: Obj = field(default_factory=document)
    children: Children = field(default_factory=settled)
    secrets: dict[str, str] = field(default_factory=lambda: {FIRST: "id-0"})
    have: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    made: dict[str, str] = field(default_factory=dict[str, str])
    deleted: str = ""
    second: int = 0
    done: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        for name, deployment in self.children[DEPLOYMENT].items():
            self.add_pod(f"{name}-5d9c7b8f4d-x", deployment)

    def add_pod(self, name: str, deployment: Obj) -> None:
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        owner = deployment["metadata"]["name"] + "-5d9c7b8f4d"
        owners = [{"kind": "ReplicaSet", "name": owner, "uid": "r", "controller": True}]
        meta = {"name": name, "uid": name, "labels": labels, "ownerReferences": owners}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": {"phase": "Running"}}
        self.children.setdefault(POD, {})[name] = pod
        self.follow(name)

    @property
    def order(self) -> KeyOrder:
        return key_order(self.found, self.children)

    def ask(self, wish: str) -> None:
        self.found["metadata"].setdefault("annotations", {})[ANNOTATION_ROTATE] = wish

    def follow(self, name: str) -> None:
        """Kubelet brings what there is now."""
        self.have[name] = tuple(
            self.secrets[file] for file in self.order.files if file in self.secrets
        )

    def restart_operator(self) -> None:
        self.made, self.deleted = {}, ""

    def said(self) -> dict[str, RouterKeys]:
        engines = {name: ids for name, ids in self.have.items() if "-router-" not in name}
        routers = {name: ids for name, ids in self.have.items() if "-router-" in name}
        return {name: RouterKeys(ids, engines) for name, ids in routers.items()}

    def state(self) -> FleetState:
        return look(
            self.children,
            self.found,
            keys=self.said(),
            made_keys=self.made,
            deleted_key=self.deleted,
        )

    def turn(self) -> None:
        """As the reconciler does it; the status is written, too."""
        self.second += 1
        state = self.state()
        for write in (write for stage in decide(state).stages for write in stage):
            match write:
                case CreateKey(slot, anew):
                    assert anew or slot not in self.secrets
                    self.secrets[slot] = self.made[slot] = f"id-{len(self.done)}-{self.second}"
                    self.deleted = ""
                    self.done.append(f"create {slot}")
                case DeleteKey(slot):
                    self.secrets.pop(slot, None)
                    self.made.pop(slot, None)
                    self.deleted = slot
                    self.done.append(f"delete {slot}")
                case Apply(obj) if obj["kind"] == "ConfigMap":
                    self.children[CONFIG_MAP][obj["metadata"]["name"]] = stored(obj)
                    self.done.append(" ".join(obj["data"]["key.order"].split()))
                case _:
                    raise AssertionError(write)
        self.found["status"] = report(self.state(), (), has_key=True).after

    def condition(self) -> dict[str, Any]:
        rows = self.found["status"]["conditions"]
        return next((row for row in rows if row["type"] == "KeyRotated"), {})


def test_a_rotation_goes_on_when_all_pods_follow_and_ends_with_the_old_secret() -> None:
    world = World()
    world.turn()
    assert world.done == []
    assert world.condition() == {}
    world.ask("now")
    told: list[str] = []
    for _ in range(12):
        before = world.found.get("status")
        world.turn()
        told += [event.reason for event in events(before, world.found["status"])]
        for name in list(world.have):
            world.follow(name)
    assert world.done == [f"create {SECOND}", f"{FIRST} {SECOND}", f"{SECOND} {FIRST}", SECOND,
                          f"delete {FIRST}", SECOND]  # fmt: skip
    assert (world.condition()["status"], world.condition()["reason"]) == ("True", "Done")
    assert world.found["status"]["kvKeySecret"] == kv_secret_name("chat", "fleet", SECOND)
    assert [one for one in told if "Key" in one] == ["KeyRotationAdding", "KeyRotationDone"]
    world.ask("again")
    for _ in range(12):
        world.turn()
        for name in list(world.have):
            world.follow(name)
    assert list(world.secrets) == [FIRST]
    assert world.found["status"]["kvKeySecret"] == kv_secret_name("chat", "fleet")


@pytest.mark.parametrize("seed", range(10))
def test_no_two_pods_are_ever_without_a_common_key_however_late_they_are(seed: int) -> None:
    """Pods follow one at a time, in any order; the operator starts anew at any turn; pods come."""
    dice, world = random.Random(seed), World()
    world.ask("now")
    for number in range(200):
        world.turn()
        if world.condition()["reason"] == "Done":
            break
        if dice.random() < 0.2:
            world.restart_operator()
        if dice.random() < 0.05 and number < 40:
            name = dice.choice([*world.children[DEPLOYMENT]])
            world.add_pod(f"{name}-5d9c7b8f4d-{number}", world.children[DEPLOYMENT][name])
        if dice.random() < 0.5:
            world.follow(dice.choice([*world.have]))
        for signs in world.have.values():
            assert signs, "a pod has no key"
            assert all(signs[0] in accepts for accepts in world.have.values())
    assert world.condition()["reason"] == "Done"
    assert list(world.secrets) == [SECOND]


def test_a_pod_that_does_not_follow_is_named_and_stops_the_step_alone() -> None:
    world = World()
    world.ask("now")
    late = next(name for name in world.have if "-decode-" in name)
    for _ in range(5):
        world.turn()
        for name in world.have:
            if name != late:
                world.follow(name)
    assert world.order.phase == "Adding"
    found = world.condition()
    assert (found["status"], found["reason"]) == ("False", "Adding")
    assert found["message"] == f"2 of 3 pods accept the new key; waits for {late}"
    del world.have[late]  # it beats to nobody any more
    world.turn()
    assert world.order.phase == "Adding"
    del world.children[POD][late]
    world.turn()
    assert world.order.phase == "Switching"


def test_what_takes_too_long_is_blocked_and_says_what_to_do() -> None:
    order = KeyOrder(phase="Adding", request="now", new_id="n", since="2026-01-01T10:00:00Z")

    def verdict(now: str, *missing: str) -> Any:
        found = Progress(1, missing, has_hidden=False)
        return rotate(order, asked="now", made={}, deleted="", found=found, now=now).verdict

    assert OVERDUE_S == 600
    assert verdict("2026-01-01T10:09:00Z", "a").reason == "Adding"
    late = verdict("2026-01-01T10:11:00Z", "a", "b", "c", "d")
    assert late.reason == "Blocked"
    assert "waits for a, b, c and 1 more" in late.message
    assert "mend or delete these pods" in late.message
    assert verdict("2026-01-01T10:11:00Z").reason == "Switching"


def test_pods_that_beat_to_nobody_get_their_kubelets_time() -> None:
    order = KeyOrder(phase="Adding", request="now", new_id="n", since="2026-01-01T10:00:00Z")
    found = Progress(1, (), has_hidden=True)

    def phase(now: str) -> str:
        return rotate(order, asked="now", made={}, deleted="", found=found, now=now).order.phase

    assert HOLD_S == 180
    assert phase("2026-01-01T10:02:59Z") == "Adding"
    assert phase("2026-01-01T10:03:00Z") == "Switching"


def test_an_instance_that_is_no_pod_counts_and_pods_of_others_do_not() -> None:
    world, order = World(), KeyOrder(phase="Removing", new_id="n")
    (name,) = (name for name in world.have if "-router-" in name)
    said = {name: RouterKeys(("n",), {"static": ("n", "o")})}
    pods = [world.children[POD][name]]
    assert progress(order, pods, said).missing == ("static",)
    stranger = json.loads(json.dumps(pods[0]))
    stranger["metadata"] |= {"name": "stranger", "ownerReferences": []}
    assert progress(order, [*pods, stranger], said).missing == ("static",)
    assert progress(order, pods, {}).missing == (name,)


@pytest.mark.parametrize(
    ("kv", "reason", "word"),
    [
        ({"keySecretRef": {"name": "mine"}}, "OwnSecret", "second line"),
        ({"insecure": True}, "NoKey", "insecure"),
    ],
)
def test_a_key_that_is_not_the_operators_is_left_alone_and_said_so(
    kv: dict[str, Any], reason: str, word: str
) -> None:
    found = document()
    found["spec"]["kvTransfer"] = kv
    state = look({}, found)
    assert state.rotation is None
    found["metadata"]["annotations"] = {ANNOTATION_ROTATE: "now"}
    state = look({}, found)
    assert state.key_changes == ((), ())
    assert state.rotation is not None
    assert state.rotation.verdict is not None
    assert state.rotation.verdict.reason == reason
    assert word in state.rotation.verdict.message


def test_a_new_fleet_with_the_annotation_is_not_rotated_at_once() -> None:
    found = document()
    found["metadata"]["annotations"] = {ANNOTATION_ROTATE: "copied"}
    state = look({}, found)
    assert asked_rotation(found) == "copied"
    assert state.rotation is not None
    assert (state.rotation.create, state.rotation.order.request) == ("", "copied")


def test_a_lost_config_map_comes_back_with_the_key_that_the_status_names() -> None:
    assert read_order(None, secret_is_second=True, asked="").files == (SECOND,)
    assert read_order(None, secret_is_second=False, asked="").files == (FIRST,)
    spoilt = {"metadata": {"annotations": {"xpyd.dev/key-slot": "x", "xpyd.dev/key-phase": "y"}}}
    assert read_order(spoilt, secret_is_second=True, asked="").files == (SECOND,)


def test_a_secret_that_was_made_anew_gives_the_rotation_its_new_id() -> None:
    order = KeyOrder(phase="Switching", request="now", new_id="lost", since="2026-01-01T10:00:00Z")
    now = "2026-01-01T10:01:00Z"
    made = {SECOND: "other"}
    after = rotate(order, asked="now", made=made, deleted="", found=NOBODY, now=now)
    assert (after.order.phase, after.order.new_id) == ("Switching", "other")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"nonsense", b'{"instances": 3, "key_ids": "x"}', b"[" * 5000]
)
def test_an_answer_of_a_router_that_says_nothing_of_keys_holds_nothing(body: bytes) -> None:
    found = read_keys(body)
    assert found is None or found == RouterKeys((), {})


def test_a_routers_answer_is_read() -> None:
    said = {"key_ids": ["a", 3], "instances": [{"instance": "p", "key_ids": ["b", "a"]}, {}]}
    found = read_keys(json.dumps(said).encode())
    assert found == RouterKeys(("a",), {"p": ("b", "a"), "": ()})
