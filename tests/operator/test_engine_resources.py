"""How much memory the operator asks for, of an engine's pod."""

from __future__ import annotations

from tests.operator.test_manifests_documents import changed
from xpyd_operator.manifests.resources import engine_resources


def test_a_pod_may_take_the_weights_of_each_of_its_replicas():
    """Ranks that divide the model take them once."""

    def limit(layout):
        fleet = changed(
            ("spec.pools.0.parallelism", layout), ("spec.pools.0.resources", {"gpus": 0})
        )
        memory = engine_resources(fleet, fleet.spec.pools[0])["limits"]["memory"]
        return int(memory.removesuffix("Mi"))

    assert limit({"data": 3}) - limit({"tensor": 3}) == 2 * 64 * 1024


def test_each_replica_that_may_come_has_a_buffer_and_a_pool_as_the_first_one():
    """Those that are there from the start divide them."""

    def request(kv, layout):
        fleet = changed(
            ("spec.kvTransfer", {**kv, "mode": "PutAsync"}),
            ("spec.pools.1.parallelism", layout),
            ("spec.pools.1.resources", {"gpus": 0}),
        )
        memory = engine_resources(fleet, fleet.spec.pools[1])["requests"]["memory"]
        return int(memory.removesuffix("Mi"))

    for kv, each in (({"hostPoolSize": "32Gi"}, 32), ({"bufferSize": "8Gi"}, 8)):
        assert request(kv, {"data": 1, "maxData": 4}) - request(kv, {"data": 4}) == 3 * each * 1024
    half = {"bufferSize": "50%", "hostPoolSize": "0"}
    assert request(half, {"data": 1, "maxData": 4}) == request(half, {"data": 4})
