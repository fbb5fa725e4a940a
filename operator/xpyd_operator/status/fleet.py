"""The status of a fleet and of its pools.

The same inputs give the same status, so that it is written only when something changed. The status
before gives only the times of transitions and what the conditions carry over; all else is counted
anew. A fleet whose document cannot be obeyed keeps what the last good document said, with the
counts of now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.status import MAX_POOLS
from xpyd_operator.manifests.entry import hosts_of
from xpyd_operator.manifests.names import endpoint, pool_selector, selector_text
from xpyd_operator.manifests.pods import pods_per_instance
from xpyd_operator.manifests.volumes import model_in_pod, uses_host_path
from xpyd_operator.plan.values import FleetSeen, FleetWant
from xpyd_operator.status.canary import CanaryView
from xpyd_operator.status.children import (
    NOTHING,
    WORKER_INDEX,
    Children,
    Counts,
    Raw,
    at,
    count,
    fields,
    is_pool_object,
    rows,
    text,
)
from xpyd_operator.status.conditions import (
    INVALID,
    conditions,
    conditions_of_invalid,
)
from xpyd_operator.status.drains import (
    DRAIN_FIELDS,
    Drain,
    InstanceLoad,
    drains_of,
    drains_text,
    leaving_field,
)
from xpyd_operator.status.models import ModelState
from xpyd_operator.status.pools import ROLES, PoolRow, RoleChoice, by_role, pool_rows
from xpyd_operator.status.problems import Problem, in_order
from xpyd_operator.status.rotation import KeyVerdict
from xpyd_operator.status.upgrades import (
    Upgrade,
    document_digests,
)
from xpyd_operator.status.verified import NOT_LOOKED, KvVerdict

_HOST_PATH = (
    "pods mount folders of their nodes (hostPath), which a namespace of pod security "
    '"restricted" or "baseline" refuses'
)
_INSECURE = (
    "the fleet has no KV key (spec.kvTransfer.insecure): anyone who reaches an engine's KV port "
    "may read and write KV"
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
    kv: KvVerdict = NOT_LOOKED,
    has_pair: bool | None = None,
    loads: Mapping[str, InstanceLoad] | None = None,
    model: ModelState | None = None,
    key: KeyVerdict | None = None,
    upgrade: Upgrade | None = None,
    canary: CanaryView | None = None,
    alone: Mapping[str, str] | None = None,
    unknown: Sequence[str] = (),
) -> dict[str, Any]:
    """The fleet's whole status; to be put in place of the one before, not merged into it.

    `problems`: find_problems() and those that only the caller knows (a name that another object
    has, a missing API). `before`: the status that the fleet has. `now`: RFC 3339. `generation`: of
    the document. `key_secret`: "" while there is none. `kv`: what routers' counts say of the KV.
    `has_pair`: whether a router has instances that can serve a request; None: none has said.
    `loads`: what routers say that instances which leave still have, by pod.
    `model`: the download of its model; None: no Job downloads it. `key`: how far the rotation of
    the fleet's key is; None: nobody asked for one. `upgrade`: what the pods are made with.
    `canary`: how far it is; None: the document's revision was on no trial.
    `alone`: pools whose only instance a node drain takes at once, and why. `unknown`: fields that
    the operator does not know.
    """
    rows = pool_rows(want, seen, children)
    port = fleet.spec.router.service.port
    layouts = fleet.spec.layouts()
    drains = drains_of(children.pods, loads or {})
    status: dict[str, Any] = {
        "observedGeneration": generation,
        "endpoint": endpoint(fleet.name, namespace, port, is_tls=fleet.spec.router.tls is not None),
        "conditions": conditions(
            rows,
            in_order(problems),
            stopping=want.stopping,
            notices=(*_notices(fleet), *_alone(alone or {})),
            choice=RoleChoice(fleet.spec.router.on_no_prefill, fleet.spec.router.on_no_decode),
            kv=kv,
            has_pair=has_pair,
            leaving=drains_text(drains),
            model=model,
            key=key,
            paused=want.paused,
            upgrade=upgrade,
            canary=canary,
            unknown=unknown,
            before=before or {},
            now=now,
            generation=generation,
        ),
        "pools": [_pool(row, layouts, drains.get(row.name, Drain())) for row in rows[:MAX_POOLS]],
        "summary": _summary(fleet, rows, drains),
    }
    if hosts := hosts_of(fleet):
        status["hosts"] = hosts
    if upgrade is not None:
        status["defaults"] = upgrade.defaults.row
        digests = document_digests(fleet)
        for row in status["pools"]:
            if "revision" in row:
                row["document"] = digests[row["name"]]
    if key_secret:
        status["kvKeySecret"] = key_secret
    if canary is not None:
        status["canary"] = dict(canary.row)
    if model is not None:
        status["model"] = model.row(model_in_pod(fleet), fields(before or {}, "model"))
    return status


def pool_statuses(
    fleet: InferenceFleet,
    *,
    want: FleetWant,
    seen: FleetSeen,
    children: Children,
    loads: Mapping[str, InstanceLoad] | None = None,
) -> dict[str, dict[str, Any]]:
    """The status of each pool's own object that is there, by the pool's name."""
    generations = {
        text(p, "spec", "poolName"): count(p, "metadata", "generation")
        for p in children.pools
        if is_pool_object(p)
    }
    layouts = fleet.spec.layouts()
    drains = drains_of(children.pods, loads or {})
    grouped = {pool.name for pool in fleet.spec.pools if pods_per_instance(pool) > 1}
    found: dict[str, dict[str, Any]] = {}
    for row in pool_rows(want, seen, children):
        if row.name not in generations:
            continue
        selector = pool_selector(fleet.name, row.name)
        if row.name in grouped:
            # One pod per instance: an HPA would count every pod as an instance.
            selector[WORKER_INDEX] = "0"
        found[row.name] = {
            "observedGeneration": generations[row.name],
            "replicas": row.staying,
            "readyReplicas": row.ready,
            "updatedReplicas": row.updated,
            "drainingReplicas": row.draining,
            "selector": selector_text(selector),
        }
        found[row.name] |= drains.get(row.name, Drain()).row
        if row.name in layouts:
            found[row.name]["layout"] = layouts[row.name]
    return found


def _notices(fleet: InferenceFleet) -> tuple[str, ...]:
    """What the document asks for that weakens the fleet or needs more of its namespace."""
    found = {_HOST_PATH: uses_host_path(fleet), _INSECURE: fleet.spec.kv_transfer.insecure}
    return tuple(text for text, holds in found.items() if holds)


def _alone(pools: Mapping[str, str]) -> Iterator[str]:
    """What a node drain takes away before another instance serves, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in pools.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        what = f"a drain of its node takes the only instance of {', '.join(names)} away at once"
        yield f"{what}, as {reason}: scale to 2 before you drain"


def _pool(row: PoolRow, layouts: Mapping[str, str], drain: Drain) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": row.name,
        "role": row.role,
        "replicas": row.replicas,
        "readyReplicas": row.ready,
        "updatedReplicas": row.updated,
        "drainingReplicas": row.draining,
    }
    found |= drain.row
    if row.name in layouts:
        found["layout"] = layouts[row.name]
    if row.declared is not None:
        found["declaredReplicas"] = row.declared
    if row.revision:
        found["revision"] = row.revision
    return found


def _summary(
    fleet: InferenceFleet, pools: Sequence[PoolRow], drains: Mapping[str, Drain]
) -> dict[str, Any]:
    """Ready and wanted instances of each role that the fleet has, and the GPUs that it wants."""
    by_name = {pool.name: pool for pool in fleet.spec.pools}
    wanted, ready = by_role(pools)
    roles = {pool.role for pool in fleet.spec.pools}
    found: dict[str, Any] = {
        role.lower(): f"{ready[role]}/{wanted[role]}" for role in ROLES if role in roles
    }
    found |= leaving_field(sum(row.draining for row in pools), drains.values())
    sizes = [(row.replicas, by_name[row.name]) for row in pools if row.name in by_name]
    found["gpus"] = sum(n * pods_per_instance(pool) * pool.resources.gpus for n, pool in sizes)
    return found


def invalid_status(
    before: Raw | None,
    messages: Iterable[str],
    *,
    seen: FleetSeen,
    children: Children,
    now: str,
    generation: int,
    reason: str = INVALID,
    unknown: Sequence[str] = (),
) -> dict[str, Any]:
    """The status of a fleet whose document cannot be obeyed. `messages`: its mistakes, one per
    line; `reason`: the kind of mistakes; `unknown`: fields that the operator does not know."""
    found = conditions_of_invalid(
        list(messages),
        pool_rows(FleetWant("", ()), seen, children),
        before=before or {},
        now=now,
        generation=generation,
        reason=reason,
        unknown=unknown,
    )
    return {**_counted(before or {}, children, generation), "conditions": found}


def leaving_status(
    before: Raw | None,
    problems: Sequence[Problem],
    *,
    seen: FleetSeen,
    children: Children,
    now: str,
    generation: int,
) -> dict[str, Any]:
    """The status of such a fleet while it is being deleted, for which its document is not
    needed."""
    found = conditions(
        pool_rows(FleetWant("", (), stopping=True), seen, children),
        in_order(problems),
        stopping=True,
        before=before or {},
        now=now,
        generation=generation,
    )
    return {**_counted(before or {}, children, generation), "conditions": found}


def invalid_pool_statuses(children: Children) -> dict[str, dict[str, Any]]:
    """The status of each pool's own object, by the pool's name; none for an object without a
    status."""
    found: dict[str, dict[str, Any]] = {}
    for pool in children.pools:
        status, name = fields(pool, "status"), text(pool, "spec", "poolName")
        if status and is_pool_object(pool):
            have = list(_counts_of(name, children).values())
            ready = sum(c.ready for c in have)
            found[name] = {
                **{name: status[name] for name in status.keys() - DRAIN_FIELDS},
                "observedGeneration": count(pool, "metadata", "generation"),
                "replicas": sum(c.staying for c in have),
                "readyReplicas": ready,
                "updatedReplicas": min(ready, count(status, "updatedReplicas")),
                "drainingReplicas": sum(c.draining for c in have),
            }
    return found


def _counted(before: Raw, children: Children, generation: int) -> dict[str, Any]:
    """The status before with the numbers of now, its conditions left out."""
    status = {name: value for name, value in before.items() if name != "conditions"}
    status["observedGeneration"] = generation
    if not isinstance(at(before, "pools"), list):
        return status
    pools = [_recounted_pool(pool, children) for pool in rows(before, "pools")]
    status["pools"] = pools
    if summary := fields(before, "summary"):
        lasting = {name: summary[name] for name in summary.keys() - DRAIN_FIELDS}
        status["summary"] = lasting | _ready_of(summary, pools)
    return status


def _recounted_pool(before: Raw, children: Children) -> dict[str, Any]:
    have = _counts_of(text(before, "name"), children)
    return {
        **{name: before[name] for name in before.keys() - DRAIN_FIELDS},
        "readyReplicas": sum(c.ready for c in have.values()),
        "updatedReplicas": have.get(text(before, "revision"), NOTHING).ready,
        "drainingReplicas": sum(c.draining for c in have.values()),
    }


def _ready_of(summary: Raw, pools: Sequence[Raw]) -> dict[str, str]:
    """The summary's entries of roles, `ready/wanted`."""
    found: dict[str, str] = {}
    for role in ROLES:
        if role.lower() in summary:
            mine = [pool for pool in pools if text(pool, "role") == role]
            ready = sum(count(pool, "readyReplicas") for pool in mine)
            wanted = sum(count(pool, "replicas") for pool in mine)
            found[role.lower()] = f"{ready}/{wanted}"
    return found


def _counts_of(pool: str, children: Children) -> Mapping[str, Counts]:
    """The pool's counts by revision."""
    return {rev: have for (name, rev), have in children.counts.items() if name == pool}
