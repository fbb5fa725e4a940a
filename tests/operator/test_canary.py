"""A canary from its first instance to its end: one turn after the other, as pure functions."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.operator.test_controller_turn import Children, document, look, stored, writes
from tests.operator.test_rollout_pause import running
from xpyd_operator.controller.decision.decide import decide
from xpyd_operator.controller.decision.kinds import CONFIG_MAP, DEPLOYMENT, Obj, kind_of
from xpyd_operator.controller.decision.report import report
from xpyd_operator.controller.decision.writes import Apply, DeleteObject, Scale
from xpyd_operator.manifests.names import ANNOTATION_PROMOTE
from xpyd_operator.status.canary import CanaryReport, CanaryState, read_state
from xpyd_operator.status.canary_figures import Key
from xpyd_operator.status.children import condition, key_of
from xpyd_operator.status.events import events

RULES = {
    "weightPercent": 10,
    "steps": [50],
    "analysis": {"errorPercent": 1, "ttftMilliseconds": 500, "minRequests": 100},
}


def fleet(image: str = "", **rollout: Any) -> Obj:
    found = deepcopy(document())
    found["spec"]["rollout"] = {"canary": RULES, "maxSurgePercent": 100, **rollout}
    for pool in found["spec"]["pools"]:
        pool["replicas"] = 2
    if image:
        found["spec"].setdefault("engine", {})["image"] = image
    return found


def counts(
    *,
    served: int = 0,
    failed: int = 0,
    ttft_s: float = 0.1,
    refused: int = 0,
    recomputed: int = 0,
    old: tuple[int, ...] = (0, 0),
) -> dict[Key, int]:
    """`old`: what the old revision served, refused and, if given, computed again."""
    found = {Key("new", "_served_total"): served, Key("new", "_failed_total"): failed}
    found |= {Key("new", "_refused_total"): refused}
    found |= {Key("new", "_recomputed_total"): recomputed}
    found |= {Key("old", "_recomputed_total"): sum(old[2:])}
    found |= {Key("old", "_served_total"): old[0], Key("old", "_refused_total"): old[1]}
    times = {bound: served * (ttft_s <= bound) for bound in (0.05, 0.1, 0.4, 1.0, float("inf"))}
    return found | {Key("new", "_ttft_seconds_bucket", b): n for b, n in times.items()}


@dataclass
class Cluster:
    """The objects of a fleet, and its routers' word of a canary."""

    found: Obj
    children: Children = field(default_factory=dict[Any, Any])
    report: CanaryReport = field(default_factory=CanaryReport)
    now: str = "2026-01-01T00:00:00Z"

    def state(self) -> Any:
        state = look(self.children, self.found)
        return replace(state, routers_canary=self.report, now=self.now)

    def turn(self) -> None:
        """One turn, its status and its pods."""
        for write in writes(decide(self.state())):
            match write:
                case Apply(obj):
                    kind, name = kind_of(obj), obj["metadata"]["name"]
                    self.children.setdefault(kind, {})[name] = stored(obj)
                case DeleteObject(kind, name):
                    del self.children[kind][name]
                case Scale(kind, name, replicas):
                    self.children[kind][name]["spec"]["replicas"] = replicas
                case _:
                    pass
        self.children = running(self.children)
        self.found["status"] = report(self.state(), (), has_key=True).after

    def settle(self) -> None:
        for _ in range(12):
            before = deepcopy(self.children)
            self.turn()
            if before == self.children:
                return
        raise AssertionError("no end")

    def edit(self, found: Obj) -> None:
        self.found = {**found, "status": self.found.get("status") or {}}

    @property
    def canary(self) -> CanaryState:
        (found,) = [o for n, o in self.children[CONFIG_MAP].items() if n.endswith("-canary")]
        state = read_state(found)
        assert state is not None
        return state

    @property
    def file(self) -> dict[str, Any]:
        """What routers read."""
        (found,) = [o for n, o in self.children[CONFIG_MAP].items() if n.endswith("-canary")]
        return json.loads(found["data"]["canary.json"] or "{}")

    def say(self, name: str | None = None, **found: Any) -> None:
        """Two routers say that they divide requests by this step, and what they counted."""
        name = self.canary.name if name is None else name
        self.report = CanaryReport(name, dict.fromkeys("ab", name), counts(**found))

    def sizes(self) -> dict[str, list[int]]:
        """Replicas of the pools of engines: of the old revision and of the document's."""
        wanted = {(pool.name, pool.revision) for pool in self.state().want.pools}
        found: dict[str, list[int]] = {}
        for obj in self.children[DEPLOYMENT].values():
            key = key_of(obj)
            assert key is not None
            if key[0] != "router":
                row = found.setdefault(key[0], [0, 0])
                row[key in wanted] += obj["spec"]["replicas"]
        return found

    def progressing(self) -> tuple[str, str]:
        found = condition(self.found, "Progressing")
        return str(found["reason"]), str(found["message"])


def begun() -> Cluster:
    """A fleet whose new image is on trial, with its instances."""
    cluster = Cluster(fleet())
    cluster.settle()
    assert cluster.canary.phase == "Promoted"
    assert cluster.file == {}
    cluster.edit(fleet("image:1"))
    cluster.settle()
    cluster.say()
    cluster.settle()
    return cluster


def promoted(image: str, mark: str) -> Obj:
    """The document with this image, and somebody's promotion."""
    found = fleet(image)
    found["metadata"].setdefault("annotations", {})[ANNOTATION_PROMOTE] = mark
    return found


def all_at(old: int, new: int) -> dict[str, list[int]]:
    return {"prefill": [old, new], "decode": [old, new]}


def test_no_instance_comes_before_all_routers_know() -> None:
    cluster = Cluster(fleet())
    cluster.settle()
    cluster.edit(fleet("image:1"))
    cluster.settle()
    assert cluster.sizes() == all_at(2, 0)
    assert cluster.file["weightPercent"] == 10
    assert cluster.file["name"] == cluster.canary.name
    assert {key.split("/")[0] for role in ("prefill", "decode") for key in cluster.file[role]} == {
        "prefill", "decode",
    }  # fmt: skip
    assert cluster.progressing()[0] == "Canary"
    assert "waits for routers to know of it (0 of 0 do)" in cluster.progressing()[1]
    cluster.report = CanaryReport(cluster.canary.name, {"a": cluster.canary.name, "b": ""})
    cluster.settle()
    assert cluster.sizes() == all_at(2, 0)
    assert "(1 of 2 do)" in cluster.progressing()[1]
    cluster.say()
    cluster.settle()
    assert cluster.sizes() == all_at(2, 1)
    assert "0 of 100 requests, 0 failed" in cluster.progressing()[1]
    assert condition(cluster.found, "Available")["status"] == "True"


def test_a_canary_that_holds_goes_from_step_to_step_and_then_the_rest_follows() -> None:
    cluster, told = begun(), list[str]()

    def go(**found: Any) -> None:
        before = cluster.found["status"]
        cluster.say(**found)
        cluster.settle()
        told.extend(one.reason for one in events(before, cluster.found["status"]))

    go(served=99)
    assert (cluster.canary.step, cluster.file["weightPercent"]) == (0, 10)
    go(served=100)
    assert (cluster.canary.phase, cluster.file["weightPercent"]) == ("Running", 50)
    assert cluster.canary.name.endswith("-1")
    assert "step 1 (10 %) held: 100 of 100 requests, 0 failed, TTFT p95" in cluster.canary.said
    go(served=150, failed=1)
    assert (cluster.canary.phase, cluster.file) == ("Promoting", {})
    assert cluster.sizes() == all_at(2, 1), "routers still send the rest few requests"
    go(name="")
    assert cluster.canary.phase == "Promoted"
    assert cluster.sizes() == all_at(0, 2)
    assert cluster.progressing()[0] == "Settled"
    assert [word for word in told if "Canary" in word] == ["CanaryStep", "CanaryPromoted"]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"served": 90, "failed": 10}, "10 % of its requests failed, the limit is 1 %"),
        ({"served": 10, "failed": 2}, "16.7 % of its requests failed, the limit is 1 %"),
        ({"served": 100, "ttft_s": 0.9}, "its TTFT p95 is 970 ms, the limit is 500 ms"),
    ],
)
def test_a_canary_that_breaks_a_limit_goes_and_the_old_revision_stays(
    found: dict[str, Any], words: str
) -> None:
    cluster = begun()
    before = cluster.found["status"]
    document_before = deepcopy(cluster.found["spec"])
    cluster.say(**found)
    cluster.settle()
    assert cluster.canary.phase == "Failed"
    assert cluster.sizes() == all_at(2, 0)
    assert cluster.file == {}
    assert cluster.found["spec"] == document_before
    for kind, status in (("Degraded", "True"), ("Progressing", "False"), ("Available", "True")):
        assert condition(cluster.found, kind)["status"] == status
    message = condition(cluster.found, "Degraded")["message"]
    assert words in message
    assert "edit the document, or `xpyd rollout undo" in message
    (event,) = [e for e in events(before, cluster.found["status"]) if e.reason == "CanaryFailed"]
    assert (event.type, words in event.message) == ("Warning", True)
    # The counts of routers that started anew change nothing of it.
    cluster.report = CanaryReport()
    cluster.settle()
    assert cluster.canary.phase == "Failed"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        # All of it, and no request is counted as answered or failed.
        (
            {"refused": 100, "old": (900, 0)},
            "100 % of its requests were refused with a 4xx, of the old revision's 0 %, the limit "
            "is 1 % more",
        ),
        ({"served": 90, "refused": 10, "old": (900, 0)}, "10 % of its requests were refused"),
        ({"served": 880, "refused": 120, "old": (900, 50)}, "of the old revision's 5.26 %"),
    ],
)
def test_a_canary_that_refuses_what_the_old_revision_serves_fails(
    found: dict[str, Any], words: str
) -> None:
    cluster = begun()
    cluster.say(**found)
    cluster.settle()
    assert cluster.canary.phase == "Failed"
    assert cluster.sizes() == all_at(2, 0)
    assert words in condition(cluster.found, "Degraded")["message"]
    assert f"{found['refused']} refused (4xx)" in condition(cluster.found, "Degraded")["message"]


@pytest.mark.parametrize(
    "found",
    [
        # Clients are wrong on both sides alike.
        {"served": 100, "refused": 20, "old": (900, 180)},
        # 8 % and 5 %, of so few that chance does it.
        {"served": 100, "refused": 9, "old": (900, 50)},
        # Below the limit, and nothing to compare with.
        {"served": 100, "refused": 1},
        # The old revision refuses more.
        {"served": 100, "refused": 2, "old": (500, 500)},
    ],
)
def test_what_clients_do_wrong_fails_no_canary(found: dict[str, Any]) -> None:
    cluster = begun()
    cluster.say(**found)
    cluster.settle()
    assert (cluster.canary.phase, cluster.canary.step) == ("Running", 1)


def test_refusals_wait_for_the_old_revision_to_be_compared_with() -> None:
    cluster = begun()
    for old in ((0, 0), (99, 0)):
        cluster.say(served=100, refused=20, old=old)
        cluster.settle()
        assert (cluster.canary.phase, cluster.canary.step) == ("Running", 0)
    assert cluster.found["status"]["canary"]["refused"] == 20
    assert "20 refused (4xx)" in cluster.progressing()[1]
    cluster.say(served=100, refused=20, old=(100, 0))
    cluster.settle()
    assert cluster.canary.phase == "Failed"


def test_a_canary_whose_kv_does_not_come_is_taken_back() -> None:
    """Each request is served, by a D that computes its prompt again."""
    cluster = begun()
    before = cluster.found["status"]
    cluster.say(served=99, recomputed=99, old=(900, 0, 0))
    cluster.settle()
    assert cluster.canary.phase == "Running"
    assert cluster.found["status"]["canary"]["recomputed"] == 99
    assert "99 computed again by D" in cluster.progressing()[1]
    cluster.say(served=100, recomputed=100, old=(900, 0, 0))
    cluster.settle()
    assert cluster.canary.phase == "Failed"
    assert cluster.sizes() == all_at(2, 0)
    (event,) = [e for e in events(before, cluster.found["status"]) if e.reason == "CanaryFailed"]
    assert event.message.startswith(
        "step 1 (10 %): 100 % of its requests were computed again by D (their KV did not come), of "
        "the old revision's 0 %, the limit is 1 % more; 100 of 100 requests, 0 failed, "
        "100 computed again by D"
    )


def test_slow_but_few_requests_decide_nothing() -> None:
    cluster = begun()
    cluster.say(served=99, ttft_s=0.9)
    cluster.settle()
    assert cluster.canary.phase == "Running"


def test_another_edit_after_a_failure_is_a_new_canary_beside_the_same_old_revision() -> None:
    cluster = begun()
    first = cluster.canary
    cluster.say(failed=50)
    cluster.settle()
    cluster.edit(fleet("image:2"))
    cluster.settle()
    assert cluster.canary.phase == "Running"
    assert cluster.canary.stable == first.stable
    assert cluster.canary.revision != first.revision
    cluster.say()
    cluster.settle()
    assert cluster.sizes() == all_at(2, 1)


def test_an_edit_in_the_middle_takes_the_place_of_what_is_on_trial() -> None:
    cluster = begun()
    stable = cluster.canary.stable
    cluster.edit(fleet("image:2"))
    cluster.settle()
    assert cluster.canary.stable == stable
    assert cluster.sizes() == all_at(2, 0)
    assert len(cluster.children[DEPLOYMENT]) == 3


def test_an_undo_ends_a_canary() -> None:
    cluster = begun()
    cluster.edit(fleet())
    cluster.settle()
    assert cluster.sizes() == all_at(0, 2)
    assert len(cluster.children[DEPLOYMENT]) == 3
    assert (cluster.canary.phase, cluster.file) == ("Promoted", {})
    assert "canary" not in cluster.found["status"]


def test_an_undo_behind_a_promotion_goes_back_without_another_trial() -> None:
    """Straight to what stayed, also where most instances are of the promoted revision by now."""
    cluster = begun()
    for found in ({"served": 100}, {"served": 100}, {"name": ""}):
        cluster.say(**found)
        cluster.settle()
    assert (cluster.canary.phase, cluster.file) == ("Promoted", {})
    cluster.edit(fleet())
    cluster.settle()
    assert (cluster.canary.phase, cluster.file) == ("Promoted", {})
    assert cluster.sizes() == all_at(0, 2)
    cluster.edit(fleet("image:2"))
    cluster.settle()
    assert cluster.canary.phase == "Running"


@pytest.mark.parametrize("phase", ["Running", "Failed"])
def test_a_person_may_promote_it(phase: str) -> None:
    cluster = begun()
    if phase == "Failed":
        cluster.say(failed=50)
        cluster.settle()
    assert cluster.canary.phase == phase
    cluster.edit(promoted("image:1", cluster.found["status"]["canary"]["revision"]))
    cluster.say("")
    cluster.settle()
    assert cluster.sizes() == all_at(0, 2)


def test_to_promote_one_revision_promotes_no_later_one() -> None:
    cluster = begun()
    earlier = cluster.canary.revision
    cluster.edit(promoted("image:2", earlier))
    cluster.settle()
    cluster.say()
    cluster.settle()
    assert (cluster.canary.phase, cluster.canary.revision != earlier) == ("Running", True)
    assert cluster.sizes() == all_at(2, 1)


def test_a_promotion_by_hand_is_of_one_trial() -> None:
    """The annotation stays in the document: the same pods on trial again are judged again."""
    cluster = begun()
    mark = f"{cluster.canary.revision}@"
    trials = (("image:1", "1", "Promoted"), ("", "1", "Promoted"), ("image:1", "1", "Running"))
    for image, at, phase in (*trials, ("image:1", "2", "Promoted")):
        cluster.edit(promoted(image, mark + at))
        cluster.say("")
        cluster.settle()
        assert cluster.canary.phase == phase


def test_an_edit_during_a_pause_is_on_no_trial_before_the_pause_ends() -> None:
    cluster = begun()

    def replicas() -> dict[str, int]:
        return {n: obj["spec"]["replicas"] for n, obj in cluster.children[DEPLOYMENT].items()}

    before, file, runs, status = cluster.canary, cluster.file, replicas(), cluster.found["status"]
    cluster.edit(fleet("image:2", paused=True))
    cluster.say(failed=100)
    cluster.settle()
    assert (cluster.canary, cluster.file, replicas()) == (before, file, runs)
    assert "canary" not in cluster.found["status"]
    told = [event.reason for event in events(status, cluster.found["status"])]
    assert told == ["RolloutPaused"]
    cluster.edit(fleet("image:2"))
    cluster.report = CanaryReport()
    cluster.settle()
    assert (cluster.canary.phase, cluster.canary.stable) == ("Running", before.stable)
    assert cluster.file["name"] == cluster.canary.name != before.name


@pytest.mark.parametrize("pools", [("prefill", "decode"), ("decode",)])
@pytest.mark.parametrize("figures", [{}, {"failed": 100}])
def test_a_canary_is_over_when_nothing_of_a_pool_is_left_beside_it(
    pools: tuple[str, ...], figures: dict[str, int]
) -> None:
    cluster = begun()
    cluster.say(**figures)
    cluster.settle()
    for obj in list(cluster.children[DEPLOYMENT].values()):
        key = key_of(obj)
        if key in cluster.canary.stable and key is not None and key[0] in pools:
            del cluster.children[DEPLOYMENT][obj["metadata"]["name"]]
    cluster.settle()
    assert (cluster.canary.phase, cluster.file) == ("Promoted", {})
    assert cluster.canary.said == "nothing of the old revision is left"
    assert cluster.sizes() == all_at(0, 2)


def test_a_pause_holds_a_canary_whatever_its_figures_are() -> None:
    cluster = begun()
    cluster.edit(fleet("image:1", paused=True))
    cluster.say(failed=100)
    cluster.settle()
    assert cluster.canary.phase == "Running"
    assert cluster.sizes() == all_at(2, 1)
    assert cluster.progressing()[0] == "Paused"
    cluster.edit(fleet("image:1"))
    cluster.settle()
    assert cluster.canary.phase == "Failed"


def test_too_few_requests_are_told_and_promote_nothing() -> None:
    cluster = begun()
    before = cluster.found["status"]
    cluster.say(served=7)
    cluster.now = "2026-01-01T02:00:00Z"
    cluster.settle()
    assert cluster.canary.phase == "Running"
    reason, message = cluster.progressing()
    assert reason == "CanaryTooFewRequests"
    assert "7 of 100 requests" in message
    assert "too few within 3600 s" in message
    told = [one.reason for one in events(before, cluster.found["status"])]
    assert told.count("CanaryTooFewRequests") == 1


def test_routers_that_never_answer_do_not_hold_a_promotion_for_ever() -> None:
    cluster = begun()
    cluster.say(served=100)
    cluster.settle()
    cluster.say(served=100)
    cluster.settle()
    assert cluster.canary.phase == "Promoting"
    cluster.now = "2026-01-01T00:05:00Z"
    cluster.settle()
    assert cluster.sizes() == all_at(0, 2)


def test_a_document_without_a_canary_rolls_as_ever_and_has_no_map() -> None:
    cluster = begun()
    plain = fleet("image:1")
    del plain["spec"]["rollout"]["canary"]
    cluster.edit(plain)
    cluster.settle()
    assert cluster.sizes() == all_at(0, 2)
    assert not any(name.endswith("-canary") for name in cluster.children[CONFIG_MAP])
