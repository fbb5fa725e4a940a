"""The status of a fleet and of its pools, from what is wanted and what is there. Pure.

The same inputs give the same status, so that it is written only when something changed. A status
can always be made again: `before` gives nothing but the times of transitions, and whether the fleet
has ever been ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xpyd_operator.document import InferenceFleet
from xpyd_operator.document.status import MAX_POOLS
from xpyd_operator.manifests.names import endpoint, pool_selector, selector_text
from xpyd_operator.manifests.pods import pods_per_instance, uses_host_path
from xpyd_operator.plan import FleetSeen, FleetWant
from xpyd_operator.status.children import WORKER_INDEX, Children, is_pool_object
from xpyd_operator.status.conditions import conditions
from xpyd_operator.status.pools import ROLES, PoolRow, by_role, pool_rows
from xpyd_operator.status.problems import Problem, in_order
from xpyd_operator.status.raw import Raw, count, text

_HOST_PATH = (
    "pods mount folders of their nodes (hostPath), which a namespace of pod security "
    '"restricted" or "baseline" refuses'
)
_INSECURE = (
    "the fleet has no KV key (spec.kvTransfer.insecure): whoever reaches an engine's KV port may "
    "read and write KV"
)


def fleet_status(
    fleet: InferenceFleet,
    *,
    want: FleetWant,
    seen: FleetSeen,
    children: Children,
    problems: Sequence[Problem],
    before: Raw | None,
    now: str,
    generation: int,
    key_secret: str,
    namespace: str,
) -> dict[str, Any]:
    """The fleet's whole status; to be put in place of the one before, not merged into it.

    `problems`: find_problems() and those that only the caller knows (a name that somebody else
    has, a missing API). `before`: the status that the fleet has. `now`: RFC 3339. `generation`: of
    the document. `key_secret`: "" while there is none.
    """
    rows = pool_rows(want, seen, children)
    port = fleet.spec.router.service.port
    layouts = _layouts(fleet)
    status: dict[str, Any] = {
        "observedGeneration": generation,
        "endpoint": endpoint(fleet.name, namespace, port),
        "conditions": conditions(
            rows,
            in_order(problems),
            stopping=want.stopping,
            notices=_notices(fleet),
            decode_alone=fleet.spec.router.on_no_prefill == "PrefillOnDecode",
            before=before or {},
            now=now,
            generation=generation,
        ),
        "pools": [_pool(row, layouts) for row in rows[:MAX_POOLS]],
        "summary": _summary(fleet, rows),
    }
    if key_secret:
        status["kvKeySecret"] = key_secret
    return status


def pool_statuses(
    fleet: InferenceFleet, *, want: FleetWant, seen: FleetSeen, children: Children
) -> dict[str, dict[str, Any]]:
    """The status of each pool's own object that is there, by the pool's name."""
    generations = {
        text(p, "spec", "poolName"): count(p, "metadata", "generation")
        for p in children.pools
        if is_pool_object(p)
    }
    layouts = _layouts(fleet)
    grouped = {pool.name for pool in fleet.spec.pools if pods_per_instance(pool) > 1}
    found: dict[str, dict[str, Any]] = {}
    for row in pool_rows(want, seen, children):
        if row.name not in generations:
            continue
        selector = pool_selector(fleet.name, row.name)
        if row.name in grouped:
            # One pod for each instance, or an HPA would take the pods for instances.
            selector[WORKER_INDEX] = "0"
        found[row.name] = {
            "observedGeneration": generations[row.name],
            "replicas": row.staying,
            "readyReplicas": row.ready,
            "updatedReplicas": row.updated,
            "drainingReplicas": row.draining,
            "selector": selector_text(selector),
        }
        if row.name in layouts:
            found[row.name]["layout"] = layouts[row.name]
    return found


def _notices(fleet: InferenceFleet) -> tuple[str, ...]:
    """What the document asks for that weakens the fleet, or asks more of its namespace."""
    found = {_HOST_PATH: uses_host_path(fleet), _INSECURE: fleet.spec.kv_transfer.insecure}
    return tuple(text for text, holds in found.items() if holds)


def _layouts(fleet: InferenceFleet) -> dict[str, str]:
    """How the instances of each pool of the document split the model."""
    return {pool.name: pool.parallelism.layout for pool in fleet.spec.pools}


def _pool(row: PoolRow, layouts: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": row.name,
        "role": row.role,
        "replicas": row.replicas,
        "readyReplicas": row.ready,
        "updatedReplicas": row.updated,
        "drainingReplicas": row.draining,
    }
    if row.name in layouts:
        found["layout"] = layouts[row.name]
    if row.declared is not None:
        found["declaredReplicas"] = row.declared
    if row.revision:
        found["revision"] = row.revision
    return found


def _summary(fleet: InferenceFleet, pools: Iterable[PoolRow]) -> dict[str, Any]:
    """Ready and wanted instances of each role that the fleet has, and the GPUs that it wants."""
    by_name = {pool.name: pool for pool in fleet.spec.pools}
    wanted, ready = by_role(pools)
    roles = {pool.role for pool in fleet.spec.pools}
    found: dict[str, Any] = {
        role.lower(): f"{ready[role]}/{wanted[role]}" for role in ROLES if role in roles
    }
    sizes = [(row.replicas, by_name[row.name]) for row in pools if row.name in by_name]
    found["gpus"] = sum(n * pods_per_instance(pool) * pool.resources.gpus for n, pool in sizes)
    return found
