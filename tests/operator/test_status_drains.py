"""What instances that leave still have, as routers say, in the status and its conditions."""

from __future__ import annotations

import pytest

from tests.operator.kube_objects import REVISION, Obj
from tests.operator.kube_objects import ready_pod as pod
from tests.operator.observed_cluster import settled
from tests.operator.test_status_conditions import fleet_of, status_of
from xpyd_operator.status.children import fleet_seen
from xpyd_operator.status.drains import (
    InstanceLoad,
    drains_of,
    drains_text,
    read_loads,
    read_relayed,
)
from xpyd_operator.status.fleet import invalid_status, pool_statuses


def test_progressing_says_what_instances_that_leave_still_have() -> None:
    cluster = settled(fleet_of())
    cluster.scale("decode", 1)
    cluster.turn()
    (leaving,) = [
        one["metadata"]["name"]
        for one in cluster.pods_of("decode")
        if "deletionTimestamp" in one["metadata"]
    ]
    cluster.loads = {leaving: InstanceLoad(3, 2)}
    cluster.turn()
    (progressing,) = [c for c in status_of(cluster)["conditions"] if c["type"] == "Progressing"]
    assert progressing["reason"] == "Draining"
    assert (
        "decode 1 to leave (decode: 3 requests, 2 KV leases, the oldest since "
        in (progressing["message"])
    )
    (row,) = [row for row in status_of(cluster)["pools"] if row["name"] == "decode"]
    assert (row["drainingRequests"], row["drainingKvLeases"]) == (3, 2)
    assert row["drainingSince"].endswith("Z")
    assert status_of(cluster)["summary"]["leaving"] == "1: 3 requests, 2 KV leases"
    children = cluster.children
    pools = pool_statuses(
        cluster.fleet,
        want=cluster.want,
        seen=fleet_seen(children),
        children=children,
        loads=cluster.loads,
    )
    assert pools["decode"]["drainingRequests"] == 3
    assert "drainingRequests" not in pools["prefill"]


def test_a_document_with_mistakes_keeps_no_old_counts_of_a_drain() -> None:
    cluster = settled(fleet_of())
    leaving = cluster.pods_of("decode")[0]
    cluster.delete(leaving)
    cluster.loads = {leaving["metadata"]["name"]: InstanceLoad(3, 2)}
    cluster.turn()
    children = cluster.children
    after = invalid_status(
        status_of(cluster),
        ["spec.x: wrong"],
        seen=fleet_seen(children),
        children=children,
        now="2026-11-21T10:00:05Z",
        generation=2,
    )
    (row,) = [row for row in after["pools"] if row["name"] == "decode"]
    assert row["drainingReplicas"] == 1
    assert "drainingRequests" not in row
    assert "leaving" not in after["summary"]


@pytest.mark.parametrize("body", [b"", b"[]", b'{"instances": [{}]}', b"\xff", b'{"instances": 7}'])
def test_what_is_no_answer_of_a_router_says_nothing_of_loads(body: bytes) -> None:
    assert read_loads([body]) == {}


def leaving_pod(name: str, pool: str, deadline: str) -> Obj:
    owner = f"chat-{pool}-{REVISION}-5d9c7b8f4d"
    made = pod(name, role=pool.title(), owner=owner)
    grace = {"deletionTimestamp": deadline, "deletionGracePeriodSeconds": 330}
    return {**made, "metadata": {**made["metadata"], **grace}}


def test_the_pools_of_leaving_instances_are_said_with_the_oldest() -> None:
    pods = [
        leaving_pod("d-0", "decode", "2026-01-01T12:05:30Z"),
        leaving_pod("d-1", "decode", "2026-01-01T12:07:30Z"),
        leaving_pod("p-0", "prefill", "2026-01-01T12:06:30Z"),
        pod("p-1", role="Prefill", owner=f"chat-prefill-{REVISION}-5d9c7b8f4d"),
    ]
    loads = {"d-0": InstanceLoad(3, 0), "d-1": InstanceLoad(2, 1), "p-0": InstanceLoad(0, 4)}
    drains = drains_of(pods, {**loads, "p-1": InstanceLoad(9, 9)})
    assert drains_text(drains) == (
        "decode: 5 requests, 1 KV leases, the oldest since 12:00:00Z; "
        "prefill: 0 requests, 4 KV leases, the oldest since 12:01:00Z"
    )
    assert drains["decode"].row == {
        "drainingRequests": 5,
        "drainingKvLeases": 1,
        "drainingSince": "2026-01-01T12:00:00Z",
    }
    silent = drains_of(pods, {})
    assert drains_text(silent) == ""
    assert silent["decode"].row == {"drainingSince": "2026-01-01T12:00:00Z"}


@pytest.mark.parametrize(
    "body", [None, b"", b"xpyd_router_in_flight many", b"\xff", b"my_xpyd_router_in_flight 3"]
)
def test_what_is_no_count_of_a_router_is_none(body: bytes | None) -> None:
    assert read_relayed(body) is None
