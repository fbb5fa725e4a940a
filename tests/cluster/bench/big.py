"""One fleet of many pods beside one Deployment of as many: created, Ready, and gone."""

from __future__ import annotations

from typing import Any

from tests.cluster.bench.documents import DEPLOYMENTS, POOLS, fleet, plain_deployment
from tests.cluster.bench.measure import TEMPLATE, Bench
from tests.cluster.bench.watching import exactly

_ROUTERS = 2
_PREFILL_SHARE = 0.3


def plain_round(bench: Bench, template: dict[str, Any], pods: int) -> dict[str, Any]:
    """A Deployment of `pods` pods from nothing, then all but those that a router would have go."""
    place, namespace = DEPLOYMENTS.format(bench.theirs.name), bench.theirs
    document = plain_deployment(template, TEMPLATE, pods)
    path = f"{place}/{document['metadata']['name']}"
    up = bench.measured(
        lambda: bench.client.post(place, document),
        {
            "created": exactly(namespace.pods, pods),
            "ready": exactly(namespace.pods_ready, pods),
        },
    )
    down = bench.measured(
        lambda: bench.client.merge(f"{path}/scale", {"spec": {"replicas": _ROUTERS}}),
        {"down": exactly(namespace.pods, _ROUTERS)},
    )
    bench.client.delete(path)
    bench.wait_until_empty(namespace)
    return _joined(up, down)


def fleet_round(bench: Bench, pods: int) -> dict[str, Any]:
    """A fleet of `pods` pods, its routers included, from nothing; then its pools go to 0.

    `ready` is the fleet's condition, `podsReady` what the Deployments count.
    """
    prefill, namespace, operator = round(pods * _PREFILL_SHARE), bench.ours, bench.operator
    document = fleet("big", prefill=prefill, decode=pods - _ROUTERS - prefill, routers=_ROUTERS)
    heard, turns = operator.heard(), operator.turns()
    up = bench.measured(
        lambda: bench.client.post(bench.fleets, document),
        {
            "created": exactly(namespace.pods, pods),
            "podsReady": exactly(namespace.pods_ready, pods),
            "ready": exactly(namespace.fleets_ready, 1),
        },
    )

    def scale_to_nothing() -> None:
        for pool in ("prefill", "decode"):
            path = f"{POOLS.format(namespace.name)}/big-{pool}/scale"
            bench.client.merge(path, {"spec": {"replicas": 0}})

    down = bench.measured(scale_to_nothing, {"down": exactly(namespace.pods, _ROUTERS)})
    told = {
        "watchEvents": dict(operator.heard() - heard),
        "turns": operator.turns() - turns,
        "memoryMiB": operator.memory_mib(),
    }
    bench.client.delete(f"{bench.fleets}/big")
    bench.wait_until_empty(namespace)
    return {**_joined(up, down), **told}


def _joined(up: dict[str, Any], down: dict[str, Any]) -> dict[str, Any]:
    return {
        "seconds": {**up["seconds"], **down["seconds"]},
        "cpuSeconds": {"up": up["cpuSeconds"], "down": down["cpuSeconds"]},
    }
