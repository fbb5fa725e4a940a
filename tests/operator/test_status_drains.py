"""The condition Progressing says what instances that leave still have."""

from __future__ import annotations

from tests.operator.observed_cluster import settled
from tests.operator.test_status_conditions import fleet_of, status_of
from xpyd_operator.status.children import fleet_seen
from xpyd_operator.status.drains import InstanceLoad
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
