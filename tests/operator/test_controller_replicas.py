"""How many replicas pods are told to have, one after the other, where these come and go."""

from __future__ import annotations

import pytest

from tests.operator.test_controller_pods import decodes
from tests.operator.test_controller_turn import Children, document, look
from xpyd_operator.controller.decision.kinds import DEPLOYMENT, POD, Obj
from xpyd_operator.controller.decision.pods import replica_problems, replica_writes
from xpyd_operator.manifests.names import ANNOTATION_MAX_REPLICAS, ANNOTATION_REPLICAS
from xpyd_operator.status.instances import ReplicaCount

ELASTIC = {"data": 2, "maxData": 3}


def elastic(data: int) -> Obj:
    """A document whose D have as many replicas, of three."""
    found = document()
    found["spec"]["pools"][1]["parallelism"] = ELASTIC | {"data": data}
    return found


def elastic_pods(told: dict[str, str | None]) -> Children:
    """D that were told so many replicas, and have room for them."""
    children = decodes(len(told))
    (name,) = [name for name in children[DEPLOYMENT] if "decode" in name]
    volumes = children[DEPLOYMENT][name]["spec"]["template"]["spec"]["volumes"]
    volumes.append({"name": "xpyd-replicas", "downwardAPI": {}})
    for pod, said in told.items():
        notes = {} if said is None else {ANNOTATION_REPLICAS: said}
        children[POD][pod]["metadata"]["annotations"] = notes
    return children


def replicas_told(data: int, before: dict[str, str | None], **has: ReplicaCount) -> dict[str, int]:
    counts = {name.replace("_", "-"): one for name, one in has.items()}
    state = look(elastic_pods(before), elastic(data), replicas=counts)
    found = list(replica_writes(state))
    assert {one.pool for one in found} <= {"decode"}
    assert all(one.before == (int(before[one.name] or 0) or None) for one in found)
    return {one.name: one.after for one in found}


def test_new_pods_are_told_at_once_how_many_replicas_they_should_have() -> None:
    assert replicas_told(2, {"d-0": None, "d-1": None}) == {"d-0": 2, "d-1": 2}
    assert replicas_told(2, {"d-0": "2", "d-1": "2"}) == {}


def test_another_number_of_replicas_goes_from_one_instance_to_the_next() -> None:
    both = {"d-0": "1", "d-1": "1"}
    one, two = ReplicaCount(1), ReplicaCount(2)
    assert replicas_told(2, both, d_0=one, d_1=one) == {"d-0": 2}
    half = {"d-0": "2", "d-1": "1"}
    assert replicas_told(2, half, d_0=one, d_1=one) == {}, "it loads"
    assert replicas_told(2, half, d_0=two, d_1=one) == {"d-1": 2}
    # The document changed meanwhile: the one that is at it goes on to the new number.
    assert replicas_told(3, half, d_0=one, d_1=one) == {"d-0": 3}


@pytest.mark.parametrize(
    ("phase", "restarts", "told", "said"),
    [
        ("Running", 0, {}, 0),
        ("Running", 3, {}, 1),
        ("Pending", 0, {"d-1": 2}, 0),
    ],
)
def test_the_others_stay_as_they_are_behind_one_that_may_have_ended_of_it(
    phase: str, restarts: int, told: dict[str, int], said: int
) -> None:
    """No router has the one that was told first."""
    children = elastic_pods({"d-0": "2", "d-1": "1"})
    ended = [{"name": "engine", "restartCount": restarts}]
    children[POD]["d-0"]["status"] |= {"phase": phase, "containerStatuses": ended}
    state = look(children, elastic(2), replicas={"d-1": ReplicaCount(1)})
    assert {one.name: one.after for one in replica_writes(state)} == told
    problems = replica_problems(state)
    assert len(problems) == said
    assert all("d-0 was told 2 replicas, ended 3 times" in one.message for one in problems)


def test_a_pod_of_another_revision_is_told_no_more_than_it_has_room_for() -> None:
    children = elastic_pods({"d-0": None, "d-1": "1"})
    for name in ("d-0", "d-1"):
        children[POD][name]["metadata"]["annotations"][ANNOTATION_MAX_REPLICAS] = "2"
    found = list(replica_writes(look(children, elastic(3), replicas={"d-1": ReplicaCount(1)})))
    assert {one.name: one.after for one in found} == {"d-0": 2, "d-1": 2}


def test_an_instance_that_cannot_have_more_keeps_the_others_as_they_are_and_is_named() -> None:
    refused = ReplicaCount(1, "--kv-cache-memory: no room")
    before = {"d-0": "2", "d-1": "1"}
    assert replicas_told(2, before, d_0=refused, d_1=ReplicaCount(1)) == {}
    counts = {"d-0": refused, "d-1": ReplicaCount(1)}
    (problem,) = replica_problems(look(elastic_pods(before), elastic(2), replicas=counts))
    assert (problem.reason, problem.pool) == ("ReplicasNotScaled", "decode")
    assert "d-0 has 1 replicas and should have 2: --kv-cache-memory: no room" in problem.message


def test_an_instance_that_has_lost_a_replica_is_named_where_none_come_or_go() -> None:
    lost = ReplicaCount(2, "of 2 replicas these were lost: 1")
    found = document()
    found["spec"]["pools"][1]["parallelism"] = {"data": 2}
    counts = {"d-0": ReplicaCount(2), "d-1": lost}
    (problem,) = replica_problems(look(decodes(2), found, replicas=counts))
    assert (problem.reason, problem.pool) == ("ReplicasNotScaled", "decode")
    assert problem.message == "d-1: of 2 replicas these were lost: 1; they are started again"
    assert replica_problems(look(decodes(2), found, replicas={"d-0": ReplicaCount(2)})) == ()
