"""Instances of several pods: one that fails takes the others with it, and its cause stays known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.operator.observed_cluster import EXAMPLE, rfc3339
from tests.operator.test_status_children import group_pod, group_set
from xpyd_operator.controller.decision.kinds import POD, trim
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.load import load_fleet
from xpyd_operator.document.parallelism import Parallelism
from xpyd_operator.document.status import FleetPoolStatus
from xpyd_operator.manifests.volumes import model_in_pod
from xpyd_operator.plan.template import fleet_want
from xpyd_operator.status.children import Children, fleet_seen, moment
from xpyd_operator.status.events import events
from xpyd_operator.status.fleet import fleet_status
from xpyd_operator.status.problems import find_problems

Obj = dict[str, Any]
NOW = "2026-11-21T10:00:05Z"
LAST = "ERROR xpyd.worker rank 2 (stage 1, tensor 0) ended: killed by signal 9 (SIGKILL)"
REVISION = "0123abcd"
AGAIN = "a pod of the instance ended, and all of its pods are made again"


def seconds_later(time: str, seconds: float) -> str:
    found = moment(time)
    assert found is not None
    return rfc3339(found.fromtimestamp(found.timestamp() + seconds, found.tzinfo))


def failed(
    group: int, worker: int, *, code: int = 70, ran_s: int = 3600, asked_after_s: int = 1
) -> Obj:
    """A pod whose container failed at 10:00:00, was started again, and which then was deleted."""
    pod = group_pod(group, worker, ready=False)
    ended = "2026-11-21T10:00:00Z"
    exited = {
        "exitCode": code,
        "reason": "Error",
        "startedAt": seconds_later(ended, -ran_s),
        "finishedAt": ended,
        "message": f"INFO xpyd.worker up\n{LAST}\n",
    }
    pod["metadata"] |= {
        "deletionTimestamp": seconds_later(ended, asked_after_s + 330),
        "deletionGracePeriodSeconds": 330,
    }
    pod["status"]["containerStatuses"] = [
        {
            "name": "engine",
            "ready": False,
            "restartCount": 1,
            "state": {"running": {"startedAt": ended}},
            "lastState": {"terminated": exited},
        }
    ]
    return trim(POD, pod)


def leaving(group: int, worker: int) -> Obj:
    pod = group_pod(group, worker, leaves=True)
    pod["metadata"]["deletionGracePeriodSeconds"] = 60
    return trim(POD, pod)


def told(*pods: Obj) -> list[tuple[str, str, str]]:
    children = Children(leader_worker_sets=(group_set(1),), pods=pods)
    return [(p.kind, p.reason, p.message) for p in find_problems(children, {})]


def test_the_pod_that_failed_is_told_and_its_neighbours_leave() -> None:
    message = f"decode: {AGAIN} (1 pod, chat-decode-0123abcd-0-1): exit code 70: {LAST}"
    draining = "decode: draining, gone by 10:01:00Z at the latest (1 pod, chat-decode-0123abcd-0)"
    assert told(leaving(0, 0), failed(0, 1)) == [
        ("Waiting", "InstanceRecreated", message),
        ("Waiting", "Draining", draining),
    ]


def test_the_first_pod_speaks_for_its_instance_where_both_failed() -> None:
    ((kind, reason, message),) = told(failed(0, 1, code=1), failed(0, 0, code=70))
    assert (kind, reason) == ("Waiting", "InstanceRecreated")
    assert message.startswith(f"decode: {AGAIN} (2 pods, chat-decode-0123abcd-0): exit code 70: ")


def test_an_instance_that_fails_soon_after_its_start_needs_somebody() -> None:
    ((kind, reason, _),) = told(failed(0, 0, ran_s=599))
    assert (kind, reason) == ("Degraded", "InstanceRecreated")


@pytest.mark.parametrize(
    "pod",
    [
        failed(0, 0, asked_after_s=-1),  # it failed while it was being asked to go
        failed(0, 0, code=0),
        leaving(0, 0),
    ],
)
def test_a_pod_that_ends_since_it_is_asked_to_has_not_failed(pod: Obj) -> None:
    assert [reason for _, reason, _ in told(pod)] == ["Draining"]


def test_a_single_pod_that_leaves_after_a_failure_is_replaced_and_not_told() -> None:
    pod = failed(0, 0)
    pod["metadata"]["labels"] = {
        key: value
        for key, value in pod["metadata"]["labels"].items()
        if not key.startswith("leaderworkerset")
    }
    assert [reason for _, reason, _ in told(pod)] == ["Draining"]


@pytest.mark.parametrize(
    ("age_s", "reasons"), [(60.0, set()), (61.0, {"ProgressDeadlineExceeded"})]
)
def test_a_group_that_is_not_ready_by_its_deadline_is_degraded(
    age_s: float, reasons: set[str]
) -> None:
    pod = trim(POD, group_pod(0, 1))
    pod["metadata"]["uid"] = "u"
    children = Children(leader_worker_sets=(group_set(1),), pods=(pod,))
    found = find_problems(children, {"u": age_s}, 60)
    assert {p.reason for p in found if p.kind == "Degraded"} == reasons


def fleet_of_groups() -> InferenceFleet:
    fleet = load_fleet(EXAMPLE)
    prefill, decode = fleet.spec.pools
    decode = decode.model_copy(
        update={
            "parallelism": decode.parallelism.model_copy(update={"tensor": 2, "pipeline": 2}),
            "resources": decode.resources.model_copy(update={"gpus": 2}),
        }
    )
    return fleet.model_copy(
        update={"spec": fleet.spec.model_copy(update={"pools": (prefill, decode)})}
    )


def status(
    fleet: InferenceFleet, before: Obj | None, *pods: Obj, alone: Mapping[str, str] | None = None
) -> Obj:
    want = fleet_want(fleet, model=model_in_pod(fleet))
    want = replace(want, pools=tuple(replace(pool, revision=REVISION) for pool in want.pools))
    children = Children(leader_worker_sets=(group_set(2),), pods=pods)
    return fleet_status(
        fleet,
        want=want,
        seen=fleet_seen(children),
        children=children,
        problems=find_problems(children, {}),
        before=before,
        now=NOW,
        generation=1,
        key_secret="",
        namespace="team",
        alone=alone,
    )


def condition(status: Obj, kind: str) -> Obj:
    return next(c for c in status["conditions"] if c["type"] == kind)


def test_an_instance_that_falls_again_and_again_stays_degraded_between_its_falls() -> None:
    fleet = fleet_of_groups()
    fell = status(fleet, None, failed(0, 0, ran_s=9))
    assert condition(fell, "Degraded")["reason"] == "InstanceRecreated"
    between = status(fleet, fell, group_pod(0, 0, ready=False), group_pod(0, 1))
    assert condition(between, "Degraded") == condition(fell, "Degraded")
    assert LAST in condition(between, "Degraded")["message"]
    assert [e for e in events(fell, between) if e.reason == "Degraded"] == []


def test_a_fall_that_is_carried_over_is_noted_with_what_weakens_the_fleet_now() -> None:
    fleet, alone = fleet_of_groups(), {"decode": "of its pods"}
    fell = status(fleet, None, failed(0, 0, ran_s=9), alone=alone)
    message = condition(fell, "Degraded")["message"]
    assert LAST in message.partition("; note: a drain of its node takes the only instance")[0]
    pods = (group_pod(0, 0, ready=False), group_pod(0, 1))
    again = condition(status(fleet, fell, *pods, alone=alone), "Degraded")
    assert again["message"] == message, "noted once"
    later = condition(status(fleet, fell, *pods), "Degraded")
    assert later["message"] == message.partition("; note: ")[0]


def test_a_first_fall_is_remembered_by_an_event() -> None:
    fleet = fleet_of_groups()
    calm = status(fleet, None, group_pod(0, 0), group_pod(0, 1))
    ready = {**condition(calm, "Ready"), "status": "True"}
    settled = {**condition(calm, "Progressing"), "status": "False", "reason": "Settled"}
    calm["conditions"] = [ready, settled]
    fell = status(fleet, calm, failed(0, 0), leaving(0, 1))
    unexplained = status(fleet, calm, leaving(0, 0), group_pod(0, 1))
    for earlier in (calm, unexplained):
        (event,) = [e for e in events(earlier, fell) if e.reason == "Recovering"]
        assert event.type == "Warning"
    assert [e for e in events(fell, fell) if e.reason == "Recovering"] == []
    assert "rank 2 (stage 1, tensor 0) ended: killed by signal 9" in event.message
    assert condition(fell, "Degraded")["status"] == "False"


def test_a_status_shows_how_instances_split_the_model() -> None:
    pools = {p["name"]: p.get("layout") for p in status(fleet_of_groups(), None)["pools"]}
    assert pools == {"router": None, "prefill": "TP1xPP1", "decode": "TP2xPP2"}


@pytest.mark.parametrize("is_field", [True, False])
def test_a_status_shows_whole_experts_whoever_asks_for_them(is_field: bool) -> None:
    fleet = fleet_of_groups()
    spec = fleet.spec
    if is_field:
        prefill, decode = spec.pools
        whole = decode.parallelism.model_copy(update={"expert": 2})
        decode = decode.model_copy(update={"parallelism": whole})
        spec = spec.model_copy(update={"pools": (prefill, decode)})
    else:
        args = spec.engine.model_copy(update={"args": ("--enable-expert-parallel",)})
        spec = spec.model_copy(update={"engine": args})
    fleet = fleet.model_copy(update={"spec": spec})
    pools = {p["name"]: p.get("layout") for p in status(fleet, None)["pools"]}
    assert pools == {"router": None, "prefill": "TP1xPP1", "decode": "TP2xPP2xEP2"}


def test_a_status_shows_replicas_and_fits_its_schema() -> None:
    fleet = fleet_of_groups()
    prefill, decode = fleet.spec.pools
    most = decode.parallelism.model_copy(update={"pipeline": 16, "data": 64, "expert": 64})
    pools = (prefill, decode.model_copy(update={"parallelism": most}))
    fleet = fleet.model_copy(update={"spec": fleet.spec.model_copy(update={"pools": pools})})
    layout = {p["name"]: p.get("layout") for p in status(fleet, None)["pools"]}["decode"]
    assert layout == "TP2xPP16xDP64xEP64"
    assert FleetPoolStatus(name="decode", layout=layout).layout == layout


@pytest.mark.parametrize(
    ("elastic", "shown"),
    [
        (Parallelism(tensor=64, data=3, max_data=64), "TP64xPP1xDP1-64"),
        (Parallelism(tensor=2, data=3, max_data=32, expert=6), "TP2xPP1xDP1-32xEP2-64"),
    ],
)
def test_a_status_shows_how_many_replicas_there_may_be_where_they_come_and_go(
    elastic: Parallelism, shown: str
) -> None:
    fleet = fleet_of_groups()
    prefill, decode = fleet.spec.pools
    pools = (prefill, decode.model_copy(update={"parallelism": elastic}))
    fleet = fleet.model_copy(update={"spec": fleet.spec.model_copy(update={"pools": pools})})
    layout = {p["name"]: p.get("layout") for p in status(fleet, None)["pools"]}["decode"]
    assert layout == shown
    assert FleetPoolStatus(name="decode", layout=layout).layout == layout
