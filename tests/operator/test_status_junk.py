"""Whatever stands in the objects, nothing raises, and what comes out keeps its bounds."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.operator.observed_cluster import Cluster, settled
from tests.operator.test_status_children import group_pod, group_set
from xpyd_operator.controller.decision.history import FleetHistory
from xpyd_operator.document.load import load_fleet
from xpyd_operator.document.status import FleetStatus, PoolStatus
from xpyd_operator.plan.fleet import plan
from xpyd_operator.status.children import Children, fleet_seen
from xpyd_operator.status.events import events
from xpyd_operator.status.fleet import (
    fleet_status,
    invalid_pool_statuses,
    invalid_status,
    leaving_status,
    pool_statuses,
)
from xpyd_operator.status.problems import find_problems

EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.yaml"
Obj = dict[str, Any]

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.sampled_from(["True", "CrashLoopBackOff", "2026-11-21T10:00:00Z", "9999-12-31T23:59:59Z"])
    | st.sampled_from(["0001-01-01T00:00:00+14:00", "a\nb", "\x00", "x" * 3000, "{" * 3000])
)
junk = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


def a_trouble() -> Cluster:
    """Pods in many states, so that every branch has something to read."""
    cluster = settled(load_fleet(EXAMPLE))
    cluster.scale("decode", 8)
    cluster.turn()
    pods = cluster.living("decode")
    cluster.crashed(pods[:1], log="a\nb")
    cluster.waiting(pods[1:2], "ImagePullBackOff", "x")
    cluster.bind(pods[2:3])
    cluster.bind(pods[3:4], sandbox=True)
    cluster.unschedulable(pods[4:5], "0/1 nodes are available: 1 Insufficient cpu.")
    cluster.failed(pods[5:6], "Evicted", "low on memory")
    cluster.delete(pods[6])
    cluster.wait(100)
    cluster.running(pods[7:], ready=False)
    for workload in cluster.workloads.values():
        failure = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: x"}
        late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
        workload["status"]["conditions"] = [failure, late]
    return cluster


TROUBLE = a_trouble()
GROUPS = (group_set(2), *(group_pod(n, w) for n in range(2) for w in range(2)))


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The path of every field below `value`."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += places(item, (*path, key))
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += places(item, (*path, index))
    return found


def put(obj: Any, path: tuple[str | int, ...], value: object) -> None:
    for key in path[:-1]:
        obj = obj[key]
    if value is DELETE:
        del obj[path[-1]]
    else:
        obj[path[-1]] = copy.deepcopy(value)


DELETE = object()
UNREAD = frozenset(
    {"env", "args", "ports", "volumeMounts", "securityContext", "topologySpreadConstraints"}
    | {"startupProbe", "livenessProbe", "readinessProbe"}
)
"""Large parts of pods that nothing here reads."""


def everything(children: Children, before: Any, now: str) -> None:
    """Run all of the package on these objects, and what reads its results."""
    seen = fleet_seen(children)
    want = TROUBLE.want
    history = FleetHistory(0.0)
    for pods in ((), children.pods):
        history.ages(pods, 0.0)
    problems = find_problems(children, history.ages(children.pods, 200.0))
    for problem in problems:
        assert len(problem.message) < 1500
        assert problem.message.isprintable()
    status = fleet_status(
        TROUBLE.fleet,
        want=want,
        seen=seen,
        children=children,
        problems=problems,
        before=before,
        now=now,
        generation=1,
        key_secret="",
        namespace="team",
    )
    json.dumps(status)
    FleetStatus.model_validate(status, strict=False)
    for event in events(before, status):
        assert len(event.message) <= 1000
    for one in pool_statuses(TROUBLE.fleet, want=want, seen=seen, children=children).values():
        PoolStatus.model_validate(one)
    invalid = invalid_status(
        before,
        [m.message for m in problems],
        seen=seen,
        children=children,
        now=now,
        generation=2,
    )
    leaving = leaving_status(before, problems, seen=seen, children=children, now=now, generation=2)
    json.dumps(leaving)
    for one in invalid_pool_statuses(children).values():
        PoolStatus.model_validate(one)
    events(before, invalid)
    for w in seen.workloads:
        assert w.ready <= w.alive
        assert w.workload.replicas >= 0
    plan(want, seen, 0.0)


@given(data=st.data())
@settings(deadline=None, max_examples=150)
def test_any_field_of_any_object_may_be_anything(data: st.DataObject) -> None:
    c = copy.deepcopy(TROUBLE.children)
    objects: list[Obj] = [*c.deployments, *c.pods, *c.pools, *copy.deepcopy(GROUPS)]
    for _ in range(data.draw(st.integers(1, 4))):
        obj = data.draw(st.sampled_from(objects))
        found = [path for path in places(obj) if not UNREAD.intersection(path)]
        if not found:
            continue  # an earlier change emptied it
        path = data.draw(st.sampled_from(found))
        value = data.draw(junk | st.just(DELETE))
        try:
            put(obj, path, value)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took this place away
    children = Children(
        tuple(o for o in objects if o.get("kind") == "Deployment"),
        tuple(o for o in objects if o.get("kind") == "LeaderWorkerSet"),
        tuple(o for o in objects if "metadata" in o and o.get("kind") in ("Pod", None)),
        c.pools,
    )
    everything(children, TROUBLE.status, TROUBLE.time)


@given(st.lists(st.dictionaries(st.text(max_size=8), junk, max_size=4), max_size=4), junk)
@settings(deadline=None, max_examples=60)
def test_objects_that_are_junk_altogether_are_nothing(objects: list[Obj], before: object) -> None:
    children = Children(*(tuple(objects) for _ in range(5)))
    everything(children, before if isinstance(before, dict) else None, TROUBLE.time)
    assert fleet_seen(children).workloads == ()


@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_the_status_before_may_be_anything(data: st.DataObject) -> None:
    before = copy.deepcopy(TROUBLE.status)
    path = data.draw(st.sampled_from(places(before)))
    put(before, path, data.draw(junk | st.just(DELETE)))
    everything(TROUBLE.children, before, TROUBLE.time)
