"""One fleet of many pods beside its peers: created, Ready, and gone.

The peers: one plain Deployment of as many pods, and the fleet's own objects applied by hand. The
second tells what of the difference is the operator's, and what several Deployments, disruption
budgets and Services cost whoever makes them.
"""

from __future__ import annotations

from typing import Any

from bench.operator.documents import (
    DEPLOYMENTS,
    PLAIN_KINDS,
    POOLS,
    fleet,
    plain_copy,
    plain_deployment,
)
from bench.operator.measure import TEMPLATE, Bench
from bench.operator.watching import exactly

_ROUTERS = 2
_PREFILL_SHARE = 0.3
_POOL_LABEL = "xpyd.dev/pool"


def plain_round(bench: Bench, template: list[dict[str, Any]], pods: int) -> dict[str, Any]:
    """A Deployment of `pods` pods from nothing, then all but those that a router would have go."""
    place, namespace = DEPLOYMENTS.format(bench.theirs.name), bench.theirs
    engines = next(obj for obj in template if _pool_of(obj) == "decode")
    document = plain_deployment(engines, TEMPLATE, pods)
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
    bench.delete_plain()
    return _joined(up, down)


def by_hand_round(bench: Bench, template: list[dict[str, Any]], pods: int) -> dict[str, Any]:
    """The objects of a fleet of `pods` pods, created by a client; then its pools' go to 0."""
    namespace, sizes = bench.theirs, _sizes(pods)
    paths = {kind: path.format(namespace.name) for kind, (_, path) in PLAIN_KINDS.items()}
    objects: list[tuple[str, dict[str, Any]]] = []
    pools: list[str] = []
    for obj in template:
        copy = plain_copy(obj, TEMPLATE, "hand")
        if pool := _pool_of(obj):
            copy["spec"]["replicas"] = sizes[pool]
            pools += [f"{paths['Deployment']}/{copy['metadata']['name']}"] * (pool != "router")
        objects.append((paths[obj["kind"]], copy))
    up = bench.measured(
        lambda: bench.post_all(objects),
        {
            "created": exactly(namespace.pods, pods),
            "ready": exactly(namespace.pods_ready, pods),
        },
    )
    down = bench.measured(
        lambda: [bench.client.merge(f"{p}/scale", {"spec": {"replicas": 0}}) for p in pools],
        {"down": exactly(namespace.pods, _ROUTERS)},
    )
    bench.delete_plain()
    return _joined(up, down)


def fleet_round(bench: Bench, pods: int) -> dict[str, Any]:
    """A fleet of `pods` pods, its routers included, from nothing; then its pools go to 0.

    `ready` is the fleet's condition, `podsReady` what the Deployments count.
    """
    namespace, operator, sizes = bench.ours, bench.operator, _sizes(pods)
    document = fleet("big", prefill=sizes["prefill"], decode=sizes["decode"], routers=_ROUTERS)
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


def _pool_of(obj: dict[str, Any]) -> str:
    """The pool whose pods the Deployment `obj` makes; "" if it is none."""
    labels: dict[str, str] = obj["metadata"]["labels"]
    return labels[_POOL_LABEL] if obj["kind"] == "Deployment" else ""


def _sizes(pods: int) -> dict[str, int]:
    prefill = round(pods * _PREFILL_SHARE)
    return {"prefill": prefill, "decode": pods - _ROUTERS - prefill, "router": _ROUTERS}


def _joined(up: dict[str, Any], down: dict[str, Any]) -> dict[str, Any]:
    return {
        "seconds": {**up["seconds"], **down["seconds"]},
        "cpuSeconds": {"up": up["cpuSeconds"], "down": down["cpuSeconds"]},
        "others": {"up": up["others"], "down": down["others"]},
    }
