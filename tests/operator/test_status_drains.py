"""The condition Progressing says what instances that leave still have."""

from __future__ import annotations

from tests.operator.observed_cluster import settled
from tests.operator.test_status_conditions import fleet_of, status_of
from xpyd_operator.status.drains import InstanceLoad


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
