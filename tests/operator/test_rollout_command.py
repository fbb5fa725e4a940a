"""`xpyd rollout`, with a kubectl that keeps one fleet and its records in a file."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.operator.kube_objects import merge
from tests.operator.test_controller_turn import SETTINGS, document
from tests.operator.test_rollout_pause import after_turn, edited
from xpyd_core import __version__, cli
from xpyd_operator.cluster.command import kubectl_main
from xpyd_operator.controller.decision.kinds import CONTROLLER_REVISION, Obj
from xpyd_operator.rollout import command as rollout_command
from xpyd_operator.rollout.edit import edit_json, edit_of
from xpyd_operator.status.upgrades import Defaults

_KUBECTL = f"""#!{sys.executable}
import json, sys
from pathlib import Path
here, words = Path(__file__).parent, sys.argv[1:]
words = [word for word in words if not word.startswith("--namespace")]
with (here / "said").open("a") as said:
    said.write(" ".join(sys.argv[1:]) + "\\n")
def read(name):
    return json.loads((here / name).read_text())
if "gone" in " ".join(words):
    sys.exit('Error from server (NotFound): inferencefleets.xpyd.dev "gone" not found')
if words[0] == "apply":
    print(json.dumps(read("edit")))
elif words[0] == "patch":
    patch = json.loads(sys.stdin.read())
    version = patch.get("metadata", {{}}).get("resourceVersion")
    if version not in (None, read("fleet")[0]["metadata"]["resourceVersion"]):
        sys.exit("Error from server (Conflict): the object has been modified")
    (here / "patch").write_text(json.dumps(patch))
elif words[1].startswith("controllerrevisions"):
    print(json.dumps({{"items": read("records")}}))
else:
    looks = read("fleet")
    print(json.dumps(looks[0]))
    if len(looks) > 1:
        (here / "fleet").write_text(json.dumps(looks[1:]))
"""


class Kubectl:
    """What the fake kubectl answers, and what it was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "kubectl"
        program.write_text(_KUBECTL)
        program.chmod(0o755)

    def has(self, *looks: Obj, records: list[Obj] | None = None, edit: Obj | None = None) -> None:
        """`looks`: the fleet at each look; the last one stays."""
        (self.folder / "fleet").write_text(json.dumps(looks))
        (self.folder / "records").write_text(json.dumps(records or []))
        (self.folder / "edit").write_text(json.dumps(edit))

    @property
    def patch(self) -> Any:
        return json.loads((self.folder / "patch").read_text())

    @property
    def said(self) -> list[str]:
        return (self.folder / "said").read_text().splitlines()


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(rollout_command, "LOOK_S", 0.01)
    return Kubectl(tmp_path)


def rollout(*words: str) -> int:
    return cli.main(["rollout", *words])


def with_status(found: Obj, *conditions: tuple[str, str, str], seen: int = 1, **row: int) -> Obj:
    """The fleet with these conditions (type, status, reason) and one pool's row."""
    pool = {"name": "decode", "revision": "0a1b2c3d", "replicas": 2, "updatedReplicas": 1} | row
    told = [{"type": t, "status": s, "reason": r, "message": f"of {r}"} for t, s, r in conditions]
    status = {"observedGeneration": seen, "conditions": told, "pools": [pool]}
    return {**found, "status": status}


MOVES = ("Progressing", "True", "Rollout")
DONE = ("Progressing", "False", "Settled")


@pytest.mark.parametrize(
    ("conditions", "seen", "word", "code"),
    [
        ((DONE,), 1, "Complete", 0),
        ((DONE,), 0, "Progressing", 3),
        ((MOVES,), 1, "Progressing", 3),
        ((MOVES, ("Degraded", "True", "ImagePullBackOff")), 1, "Progressing", 3),
        ((MOVES, ("Degraded", "True", "ProgressDeadlineExceeded")), 1, "Failed", 1),
        ((DONE, ("Degraded", "True", "InvalidSpec")), 1, "Failed", 1),
        ((("Progressing", "False", "Paused"),), 1, "Paused", 4),
    ],
)
def test_the_status_of_a_rollout_is_in_words_and_in_the_exit_status(
    kubectl: Kubectl,
    capsys: pytest.CaptureFixture[str],
    conditions: tuple[tuple[str, str, str], ...],
    seen: int,
    word: str,
    code: int,
) -> None:
    kubectl.has(with_status(document(), *conditions, seen=seen))
    assert rollout("status", "chat", "-n", "llm") == code
    shown = capsys.readouterr().out
    assert "decode  0a1b2c3d  1/2" in shown
    assert f"{word}: " in shown
    assert kubectl.said == ["--namespace=llm get inferencefleet.xpyd.dev/chat --output=json"]
    assert rollout("status", "chat", "-o", "json") == code
    assert json.loads(capsys.readouterr().out)["outcome"] == word


def test_wait_ends_with_the_rollout_or_with_its_time(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    moving, done = with_status(document(), MOVES), with_status(document(), DONE)
    kubectl.has(moving, moving, done)
    assert rollout("status", "chat", "--wait") == 0
    shown = capsys.readouterr()
    assert shown.err.count("Progressing: of Rollout") == 1
    assert "Complete" in shown.out
    kubectl.has(moving)
    assert rollout("status", "chat", "--wait", "--timeout", "0") == 3
    kubectl.has(with_status(document(), MOVES, ("Degraded", "True", "CrashLoopBackOff")))
    assert rollout("status", "chat", "--wait", "--timeout", "0") == 1


def recorded(*images: str) -> list[Obj]:
    """The records of a fleet that had these images one after the other."""
    children: dict[Any, Any] = {}
    for image in images:
        children = after_turn(children, edited(image) if image else document())
    found = list(children[CONTROLLER_REVISION].values())
    for one in found:
        one["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    return found


def test_history_is_a_table_with_the_current_revision_marked(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    other = deepcopy(recorded("old:fleet")[0])
    other["metadata"]["ownerReferences"][0]["uid"] = "of-a-fleet-before"
    kubectl.has(edited("b:1"), records=[other, *recorded("", "a:1", "b:1")])
    assert rollout("history", "chat") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["REVISION", "CURRENT", "AGE", "IMAGE", "ROUTER", "ARGS"]
    worker, router = SETTINGS.worker_image, SETTINGS.router_image
    assert [(line[0], *line[-3:-1]) for line in lines[1:]] == [
        ("1", worker, router), ("2", "a:1", router), ("3", "b:1", router),
    ]  # fmt: skip
    assert [line[1] == "*" for line in lines[1:]] == [False, False, True]
    assert rollout("history", "chat", "--output", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["spec"].get("engine", {}).get("image") for row in rows] == [None, "a:1", "b:1"]
    assert [row["images"]["engines"] for row in rows] == [worker, "a:1", "b:1"]
    records = recorded("a:1")
    del records[0]["data"]["defaults"]
    kubectl.has(edited("b:1"), records=records)
    assert rollout("history", "chat") == 0
    assert "a:1    (not recorded)" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "image"), [((), "a:1"), (("--to", "1"), None)])
def test_undo_writes_the_earlier_revision_and_leaves_sizes_alone(
    kubectl: Kubectl, words: tuple[str, ...], image: str | None
) -> None:
    fleet = edited("b:1", found=document(decode=5))
    kubectl.has(fleet, records=recorded("", "a:1", "b:1"))
    assert rollout("undo", "chat", *words) == 0
    assert kubectl.patch["metadata"] == {"resourceVersion": "5"}
    after = merge(deepcopy(fleet), kubectl.patch)
    assert after["spec"].get("engine", {}).get("image") == image
    assert [pool["replicas"] for pool in after["spec"]["pools"]] == [1, 5]


@pytest.mark.parametrize("what", ["status", "edit", "images"])
def test_undo_goes_over_a_status_that_was_written_meanwhile_and_over_no_edit(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    before, is_edit = edited("b:1"), what != "status"
    seen: Obj = before["metadata"]
    later = {"resourceVersion": "6", "generation": seen["generation"] + (what == "edit")}
    after = {**before, "metadata": seen | later}
    if what == "images":
        after["status"] = {"defaults": {"workerImage": "newer:1"}}
    kubectl.has(before, after, records=recorded("a:1", "b:1"))
    assert rollout("undo", "chat") == (2 if is_edit else 0)
    assert (kubectl.folder / "patch").exists() is not is_edit
    assert ("the object has been modified" in capsys.readouterr().err) is is_edit


def test_undo_in_a_pause_goes_back_to_what_runs(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.has(edited("c:1", paused=True), records=recorded("a:1", "b:1"))
    assert rollout("undo", "chat") == 0
    assert kubectl.patch["spec"] == {"engine": {"image": "b:1"}}
    assert "back to revision 2; rollouts are paused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("undo", "chat", "--to", "9"), "--to 9: there is no such revision; there are: 1"),
        (("undo", "chat", "--to", "2"), "--to 2: the document is at that revision; others: 1"),
        (("status", "gone"), 'inferencefleets.xpyd.dev "gone" not found'),
    ],
)
def test_what_cannot_be_done_is_told_with_the_way_out(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    kubectl.has(edited("b:1"), records=recorded("a:1", "b:1"))
    assert rollout(*words) == 2
    assert says in capsys.readouterr().err
    assert not (kubectl.folder / "patch").exists()


def test_undo_of_a_first_revision_and_a_missing_kubectl_are_told(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl.has(edited("a:1"), records=recorded("a:1"))
    assert rollout("undo", "chat") == 2
    assert "there is no earlier revision" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    assert rollout("pause", "chat") == 2
    assert "kubectl is not in PATH" in capsys.readouterr().err


def test_pause_resume_and_restart_change_one_field_of_the_document(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.has(document())
    assert rollout("pause", "chat") == 0
    assert kubectl.patch == {"spec": {"rollout": {"paused": True}}}
    assert rollout("resume", "chat") == 0
    assert kubectl.patch == {"spec": {"rollout": {"paused": None}}}
    assert rollout("restart", "chat", "-o", "json") == 0
    at = json.loads(capsys.readouterr().out.splitlines()[-1])["restartedAt"]
    assert kubectl.patch == {"spec": {"rollout": {"restartedAt": at}}}
    edited(restartedAt=at)  # a value that the document takes


@pytest.mark.parametrize(
    ("spec", "kept", "undo", "then"),
    [
        ("2099-01-02T00:00:00Z", "2099-01-02T02:00:00+01:00", "", "2099-01-02T01:00:01Z"),
        ("", "", "r@2099-01-02T00:00:00Z", "2099-01-02T00:00:01Z"),
    ],
)
def test_a_restart_is_later_than_those_before_whatever_this_clock_says(
    kubectl: Kubectl, spec: str, kept: str, undo: str, then: str
) -> None:
    fleet = document()
    fleet["spec"]["rollout"] = {"restartedAt": spec} if spec else {}
    fleet["metadata"]["annotations"] = {"xpyd.dev/undo": undo} if undo else {}
    if kept:
        fleet["status"] = {"defaults": {"version": "1", "workerImage": "a", "restartedAt": kept}}
    kubectl.has(fleet)
    assert rollout("restart", "chat") == 0
    assert kubectl.patch == {"spec": {"rollout": {"restartedAt": then}}}


def test_a_canary_is_shown_and_promoted_by_its_revision(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    found = with_status(document(), ("Progressing", "True", "Canary"))
    kubectl.has(found)
    assert rollout("promote", "chat") == 2
    assert "no canary is under way" in capsys.readouterr().err
    row = {"revision": "0a1b2c3d4e", "phase": "Running", "step": 2, "weightPercent": 50}
    row |= {"requests": 7, "failed": 1, "recomputed": 3, "ttftMilliseconds": 80, "said": "held"}
    found["status"]["canary"] = row
    kubectl.has(found)
    assert rollout("status", "chat") == 3
    assert (
        "Canary 0a1b2c3d4e: Running, step 2, 50 % of new requests, 7 requests, 1 failed, "
        "3 computed again by D, TTFT p95 80 ms; held\nProgressing: of Canary\n"
    ) in capsys.readouterr().out
    assert rollout("promote", "chat") == 0
    asked = kubectl.patch["metadata"]["annotations"]
    assert asked["xpyd.dev/promote-canary"].partition("@")[0] == "0a1b2c3d4e"
    failed = with_status(document(), ("Degraded", "True", "CanaryFailed"))
    failed["status"]["canary"] = {**row, "phase": "Failed", "revision": "1b2c3d4e5f"}
    kubectl.has(failed)
    assert rollout("status", "chat", "--wait") == 1
    assert rollout("promote", "chat") == 0, "whoever knows that the limit was wrong"
    asked = kubectl.patch["metadata"]["annotations"]
    assert asked["xpyd.dev/promote-canary"].partition("@")[0] == "1b2c3d4e5f"
    failed["metadata"]["annotations"] = asked
    kubectl.has(failed)
    assert rollout("status", "chat") == 3, "the operator has not seen it yet"


def test_plan_says_what_makes_new_pods_and_why_and_writes_nothing(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    before = edited("a:1", found=document(decode=4))
    row = {"name": "decode", "replicas": 4, "declaredReplicas": 4}
    before["status"] = {"pools": [row, {"name": "prefill", "replicas": 1, "declaredReplicas": 1}]}
    after = deepcopy(before)
    after["spec"]["pools"][1] |= {"replicas": 8}
    after["spec"]["pools"][0]["template"] = {"spec": {"priorityClassName": "high"}}
    after["spec"]["router"] = {"policy": "Random", "service": {"port": 81}}
    after["spec"]["rollout"] = {"maxUnavailablePercent": 25}
    kubectl.has(before, edit=after)
    assert rollout("plan", "-f", "fleet.yaml", "-o", "json") == 0
    found = {one["pool"]: one for one in json.loads(capsys.readouterr().out)["pools"]}
    assert {name: one["change"] for name, one in found.items()} == {
        "router": "new revision", "prefill": "new revision", "decode": "scale",
    }  # fmt: skip
    assert found["decode"]["replicas"] == {"before": 4, "after": 8}
    assert (found["decode"]["surge"], found["decode"]["unavailable"]) == (2, 2)
    assert [found[name]["why"] for name in ("prefill", "router")] == [
        ["pools[prefill].template.spec.priorityClassName"], ["router.policy"],
    ]  # fmt: skip
    assert rollout("plan", "-f", "fleet.yaml") == 0
    shown = capsys.readouterr().out
    assert "decode   scale         4 -> 8" in shown
    assert 'spec.router.policy: (none) -> "Random"' in shown
    assert shown.endswith("nothing was written\n")
    assert not any(line.startswith("patch") for line in kubectl.said)
    assert "apply --dry-run=server --filename=fleet.yaml --output=json" in kubectl.said


def test_plan_of_an_image_names_it_for_each_pool_of_engines_and_not_for_routers(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl.has(edited("a:1"), edit=edited("a:2", paused=True))
    assert rollout("plan", "-f", "fleet.yaml") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:4]] == ["-", "engine.image", "engine.image"]
    assert "rollouts are paused: it begins with `xpyd rollout resume`" in lines
    kubectl.has({}, edit=edited("a:2"))
    (kubectl.folder / "fleet").write_text("[{}]")
    assert rollout("plan", "-f", "fleet.yaml") == 0
    assert capsys.readouterr().out.count("new pool") == 3


def plan_of(before: Obj, after: Obj) -> dict[str, Any]:
    """What an edit would do, for machines; pools by name."""
    found = edit_json(edit_of(before, after))
    return {**found, "pools": {one["pool"]: one for one in found["pools"]}}


def made_by_operator(found: Obj, **status: Any) -> Obj:
    """The fleet with the defaults of an operator of this version."""
    defaults = Defaults(__version__, f"worker:{__version__}", "router:1", "IfNotPresent")
    return {**found, "status": {"defaults": defaults.row, **status}}


def test_plan_says_the_bounds_that_a_pool_has_from_its_own_rollout_and_from_the_fleets() -> None:
    before = document(decode=10)
    before["spec"]["pools"][1]["rollout"] = {"maxSurgePercent": 10}
    after = deepcopy(before)
    after["spec"]["rollout"] = {"maxSurgePercent": 50, "maxUnavailablePercent": 20}
    found = plan_of(before, after)["pools"]
    bounds = {name: (one["surge"], one["unavailable"]) for name, one in found.items()}
    assert bounds == {"router": (1, 1), "prefill": (1, 1), "decode": (1, 2)}
    assert {one["change"] for one in found.values()} == {"unchanged"}


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            {"engine": {"args": ["--no-such-flag=1"]}},
            "spec.engine.args[0]: '--no-such-flag=1' is no flag",
        ),
        (
            {"router": {"args": ["--no-such-flag=1"]}},
            "spec.router.args[0]: '--no-such-flag=1' is no flag",
        ),
        ({"router": {"template": {"spec": {"nonsense": 1}}}}, "spec.router.template.spec.nonsense"),
    ],
)
def test_plan_refuses_what_the_operator_would_hold_back(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], edit: Obj, says: str
) -> None:
    before = made_by_operator(document())
    after = deepcopy(before)
    after["spec"] |= edit
    kubectl.has(before, edit=after)
    assert rollout("plan", "-f", "fleet.yaml") == 2
    shown = capsys.readouterr()
    assert says in shown.err
    assert "the operator would hold this edit back" in shown.err
    assert shown.out == ""


def test_plan_refuses_no_scale_of_a_fleet_whose_mistake_is_older_than_its_operator() -> None:
    before = made_by_operator(document())
    before["spec"]["engine"] = {"args": ["--no-such-flag=1"]}
    after = deepcopy(before)
    after["spec"]["pools"][1]["replicas"] = 3
    assert plan_of(before, after)["pools"]["decode"]["change"] == "scale"


def test_plan_names_routers_that_take_the_operators_newer_image() -> None:
    kept = Defaults("0.0.9", f"worker:{__version__}", "router:1", "IfNotPresent")
    newer = replace(kept, version=__version__, router_image="router:2")
    what = f"pods are made with {', '.join(kept.differences(newer))}, until a restart"
    older = {"type": "UpToDate", "status": "False", "reason": "OlderDefaults", "message": what}
    before = made_by_operator(document(), conditions=[older])
    found = plan_of(before, {**before, "spec": edited("a:2")["spec"]})["pools"]
    assert found["router"]["change"] == "new revision"
    assert found["router"]["why"] == ["the operator's defaults"]
    assert found["decode"]["why"] == ["engine.image"]
    scaled = {**before, "spec": document(decode=3)["spec"]}
    found = plan_of(before, scaled)["pools"]
    assert {one["change"] for name, one in found.items() if name != "decode"} == {"unchanged"}


def test_plan_says_the_images_of_before_and_after_and_that_an_undo_keeps_newer_ones_away(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Defaults("0.0.9", f"worker:{__version__}", "router:1", "IfNotPresent")
    newer = replace(kept, version=__version__, router_image="router:2")
    what = f"pods are made with {', '.join(kept.differences(newer))}, until a restart"
    older = {"type": "UpToDate", "status": "False", "reason": "Undone", "message": what}
    before = made_by_operator(document(), conditions=[older])
    after = {**before, "spec": edited("a:2")["spec"]}
    kubectl.has(before, edit=after)
    assert rollout("plan", "-f", "fleet.yaml") == 0
    shown = capsys.readouterr().out
    assert f"images of engines: worker:{__version__} -> a:2\n" in shown
    assert "images of routers: router:1 -> router:2\n" in shown
    undone = deepcopy(after)
    undone["metadata"]["annotations"] = {"xpyd.dev/undo": "chat-0a1b2c3d4e"}
    images = plan_of(before, undone)["images"]
    assert images["routers"] == {"before": "router:1", "after": "router:1"}
    assert images["engines"]["after"] == "a:2"
    undone["spec"]["rollout"] = {"restartedAt": "2026-01-02T00:00:00Z"}
    assert plan_of(before, undone)["images"]["routers"]["after"] == "router:2"


@pytest.mark.parametrize(
    ("field", "value"), [("pairing", "Compatible"), ("canary", {"weightPercent": 10})]
)
def test_plan_names_the_field_of_the_rollout_that_makes_new_routers(field: str, value: Any) -> None:
    before = made_by_operator(document())
    found = plan_of(before, edited("", before, **{field: value, "historyLimit": 3}))
    assert found["pools"]["router"]["why"] == [f"rollout.{field}"]
    assert found["pools"]["decode"]["change"] == "unchanged"
    assert "canary" not in found, "no engine's pod is new"


def test_plan_says_that_an_edit_begins_a_canary(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = {"weightPercent": 10, "steps": [50], "analysis": {"ttftMilliseconds": 500}}
    kubectl.has(edited("a:1"), edit=edited("a:2", canary=rules))
    assert rollout("plan", "-f", "fleet.yaml") == 0
    assert (
        "begins a canary, where the old revision runs: 10 %, then 50 % of new requests, then all\n"
        "  it waits for all routers to know of it, and in each step for 100 requests: at most 1 % "
        "of them failed, TTFT p95 at most 500 ms\n"
    ) in capsys.readouterr().out
    assert plan_of(edited("a:1"), edited("a:2", canary=rules))["canary"]["steps"] == [50]
    failed = edited("a:1") | {"status": {"canary": {"phase": "Failed", "revision": "0a1b2c3d4e"}}}
    kubectl.has(failed, edit=edited("a:2", canary=rules))
    assert rollout("plan", "-f", "fleet.yaml") == 0
    assert "  in place of 0a1b2c3d4e; an edit back to what stays" in capsys.readouterr().out
    assert "canary" not in plan_of(edited("a:1"), edited("a:2"))


def test_kubectl_xpyd_has_the_same_commands_and_no_local_ones(
    kubectl: Kubectl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl.has(with_status(document(), DONE))
    monkeypatch.setattr(sys, "argv", ["kubectl-xpyd", "rollout", "status", "chat"])
    assert kubectl_main() == 0
    assert "Complete" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["kubectl-xpyd", "up"])
    with pytest.raises(SystemExit):
        kubectl_main()
    assert "invalid choice: 'up'" in capsys.readouterr().err
    program = Path(sys.executable).with_name("kubectl-xpyd")
    said = subprocess.run(
        [program, "rollout", "--help"], capture_output=True, text=True, check=True
    )
    assert "usage: kubectl xpyd rollout" in said.stdout
