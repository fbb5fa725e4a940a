"""A fleet's objects as the API server returns them, and what plan() needs to know of them.

An instance is a pod, or the pods of one group of a LeaderWorkerSet. The pool and revision of an
object come from its labels, never from its name; the caller passes only the fleet's own objects.
Many writers and versions wrote these objects, so nothing here raises: a missing field, or one of an
unexpected type, reads as empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from typing import Any, cast, get_args

from xpyd_operator.manifests.names import (
    FLEET_REVISION,
    LABEL_FLEET,
    LABEL_POOL,
    LABEL_REVISION,
    LABEL_ROLE,
    group_workload_name,
    pool_object_name,
    workload_name,
)
from xpyd_operator.manifests.tls import tls_of_pods
from xpyd_operator.plan.values import (
    ROUTER,
    FleetSeen,
    PoolRole,
    PoolSeen,
    Template,
    Workload,
    WorkloadSeen,
)

Raw = Mapping[str, Any]
"""One object, or a part of one, as JSON has it."""

MOST_TEXT = 240
_ELLIPSIS = "..."


def at(obj: object, *path: str) -> object:
    """The field at `path`, None where there is none."""
    found: Any = obj
    for key in path:
        # Hot path: a cast is a call, and costs as much as the rest.
        if not isinstance(found, dict):
            return None
        found = found.get(key)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast("object", found)


def fields(obj: object, *path: str) -> Raw:
    """The map at `path`."""
    value = at(obj, *path)
    return cast("Raw", value) if isinstance(value, dict) else {}


def rows(obj: object, *path: str) -> list[Raw]:
    """The maps of the list at `path`."""
    value = at(obj, *path)
    if not isinstance(value, list):
        return []
    return [cast("Raw", v) for v in cast("list[object]", value) if isinstance(v, dict)]


def text(obj: object, *path: str) -> str:
    """The text at `path`."""
    value = at(obj, *path)
    return value if isinstance(value, str) else ""


def count(obj: object, *path: str) -> int:
    """The whole number at `path`; 0 where there is none or a negative one."""
    value = at(obj, *path)
    return max(0, value) if isinstance(value, int) and not isinstance(value, bool) else 0


def condition(obj: object, kind: str) -> Raw:
    """The object's status condition of that type."""
    listed = at(obj, "status", "conditions")
    if isinstance(listed, list):
        for row in cast("list[object]", listed):
            if isinstance(row, dict) and cast("Raw", row).get("type") == kind:
                return cast("Raw", row)
    return {}


def is_true(obj: object, kind: str) -> bool:
    """Whether the object's status condition of that type is True."""
    return text(condition(obj, kind), "status") == "True"


def moment(value: str) -> datetime | None:
    """An RFC 3339 time with its zone."""
    try:
        found = datetime.fromisoformat(value)
        return found.astimezone(UTC) if found.tzinfo else None
    except (ValueError, OverflowError):
        return None


def seconds_between(before: str, after: str) -> float | None:
    """Seconds between two RFC 3339 times; None where one is not a time."""
    first, second = moment(before), moment(after)
    return (second - first).total_seconds() if first and second else None


def short(value: str, most: int = MOST_TEXT) -> str:
    """`value` in one line of at most `most` printable characters."""
    # Only the start matters: a termination message may be long.
    line = " ".join(value[: 4 * most].split())
    line = "".join(c if c.isprintable() else "?" for c in line)
    if len(line) <= most and len(value) <= 4 * most:
        return line
    return line[: most - len(_ELLIPSIS)].rstrip() + _ELLIPSIS


def tail(value: str, most: int = MOST_TEXT) -> str:
    """As short(), but keeps the end of a long text: errors name the outermost layer first."""
    line = short(value[-4 * most :], 4 * most)
    return line if len(line) <= most else _ELLIPSIS + line[len(_ELLIPSIS) - most :].lstrip()


GROUP_SET = "leaderworkerset.sigs.k8s.io/name"
GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"
GROUP_SIZE = "leaderworkerset.sigs.k8s.io/size"
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
_POD_OWNERS = frozenset({"ReplicaSet", "StatefulSet", "LeaderWorkerSet"})
_OURS = re.compile(r"[a-z0-9]([-a-z0-9]{0,14}[a-z0-9])?", re.ASCII)
"""Names of pools and revisions, as the API bounds them: a status has no room for others."""
Key = tuple[str, str]
"""Pool and revision."""


@dataclass(frozen=True)
class Children:
    """The objects that belong to one fleet, raw: dicts and lists. `others`: Services and so on;
    `records`: the ControllerRevisions of its history."""

    deployments: tuple[Raw, ...] = ()
    leader_worker_sets: tuple[Raw, ...] = ()
    pods: tuple[Raw, ...] = ()
    pools: tuple[Raw, ...] = ()
    others: tuple[Raw, ...] = ()
    records: tuple[Raw, ...] = ()
    cordoned: frozenset[str] = frozenset()
    """Nodes that take no new pods."""

    @cached_property
    def counts(self) -> Mapping[Key, Counts]:
        """Instances by pool and revision, as the pods are."""
        return _count_instances(self)


@dataclass(frozen=True)
class Counts:
    """Instances of one workload.

    `alive`: those that hold a place, `draining` included. `ready`: those that serve and stay.
    `unplaced`: those that want a place, and no node fits a pod of theirs. `cordoned`: of those
    ready, the ones on nodes that take no new pods.
    """

    alive: int = 0
    ready: int = 0
    draining: int = 0
    unplaced: int = 0
    cordoned: int = 0

    @property
    def staying(self) -> int:
        """Instances that were not asked to leave."""
        return self.alive - self.draining


NOTHING = Counts()


@dataclass
class _Instance:
    """The sum of one instance's pods."""

    ready: int = 0
    size: int = 1
    draining: bool = False
    unplaced: bool = False
    cordoned: bool = False


def key_of(obj: Raw) -> Key | None:
    """Pool and revision by the object's labels; None: the labels are not the operator's."""
    labels = fields(obj, "metadata", "labels")
    pool, revision = text(labels, LABEL_POOL), text(labels, LABEL_REVISION)
    return (pool, revision) if _is_ours(pool) and _is_ours(revision) else None


@lru_cache(maxsize=4096)
def _is_ours(label: str) -> bool:
    return bool(_OURS.fullmatch(label))


def role_of(obj: Raw) -> PoolRole | None:
    """The role by the object's labels."""
    role = text(obj, "metadata", "labels", LABEL_ROLE)
    return cast("PoolRole", role) if role in get_args(PoolRole) else None


def name_of(obj: Raw) -> str:
    """The object's name."""
    return text(obj, "metadata", "name")


def is_finished(pod: Raw) -> bool:
    """Whether no container of the pod will run again; the pod holds no place then."""
    return text(pod, "status", "phase") in ("Succeeded", "Failed")


def is_leaving(obj: Raw) -> bool:
    """Whether the API server was asked to delete it."""
    return bool(text(obj, "metadata", "deletionTimestamp"))


def is_grouped(pod: Raw) -> bool:
    """Whether it is one of the pods of an instance that LeaderWorkerSet made."""
    return bool(text(pod, "metadata", "labels", GROUP_INDEX))


def workloads(children: Children) -> list[Raw]:
    """Deployments and LeaderWorkerSets that name their pool and revision, in a stable order."""
    found = [*children.deployments, *children.leader_worker_sets]
    return sorted(
        (w for w in found if key_of(w)), key=lambda w: (key_of(w) or ("", ""), name_of(w))
    )


def replicas_of(workload: Raw) -> int:
    """Instances that the workload asks for; Kubernetes' default is 1."""
    value = at(workload, "spec", "replicas")
    return 1 if value is None else count(workload, "spec", "replicas")


def pod_specs(children: Children) -> dict[Key, tuple[Raw, Raw]]:
    """What the pods of each workload are made from: the first pod of an instance, and the others.

    A cache of a thousand pods need not keep what all of them share.
    """
    found: dict[Key, tuple[Raw, Raw]] = {}
    for workload in workloads(children):
        single = fields(workload, "spec", "template", "spec")
        worker = fields(workload, "spec", "leaderWorkerTemplate", "workerTemplate", "spec")
        leader = fields(workload, "spec", "leaderWorkerTemplate", "leaderTemplate", "spec")
        key = key_of(workload)
        if key:
            found[key] = (single or leader or worker, single or worker)
    return found


def spec_of(pod: Raw, specs: Mapping[Key, tuple[Raw, Raw]]) -> Raw:
    """What its workload makes the pod from; the pod's own spec where the workload is gone."""
    found = specs.get(key_of(pod) or ("", ""))
    if found is None:
        return fields(pod, "spec")
    return found[text(pod, "metadata", "labels", WORKER_INDEX) not in ("", "0")]


def fleet_seen(children: Children, before: Raw | None = None) -> FleetSeen:
    """What plan() looks at. `status` stays None: the cluster's status is fleet_status()'s.

    `before`: the fleet's status as it is; it helps where a pool's object was deleted.
    """
    counts = children.counts
    found: dict[Key, WorkloadSeen] = {}
    specs = pod_specs(children)
    for workload in workloads(children):
        key, role = key_of(workload), role_of(workload)
        if key is None or role is None or key in found:
            continue
        have = counts.get(key, NOTHING)
        # The pods may be seen later than the workload's own count of them.
        alive = max(have.alive, count(workload, "status", "replicas"))
        leads = specs.get(key, ({}, {}))[0]
        put = Workload(
            *key,
            replicas_of(workload),
            Template(
                role,
                tls=tls_of_pods(leads, is_router=role == ROUTER),
                fleet_revision=_fleet_revision_of(leads),
            ),
        )
        # A LeaderWorkerSet gives up its last group: none of its groups can be chosen.
        cordoned = have.cordoned if fields(workload, "spec", "template") else 0
        ready = min(have.ready, alive)
        found[key] = WorkloadSeen(put, alive, ready, have.unplaced, min(cordoned, ready))
    pools = _pools(children.pools)
    pools += _lost_pools({pool.name for pool in pools}, found.values(), before or {})
    for key, role in sorted(_orphans(children)):
        if key not in found:
            have = counts.get(key, NOTHING)
            found[key] = WorkloadSeen(Workload(*key, 0, Template(role)), have.alive, have.ready)
    return FleetSeen(pools, tuple(found[key] for key in sorted(found)))


def _fleet_revision_of(spec: Raw) -> str:
    """What Template.fleet_revision was of pods that have this spec."""
    variables = (row for one in rows(spec, "containers") for row in rows(one, "env"))
    return next((text(row, "value") for row in variables if row.get("name") == FLEET_REVISION), "")


def _count_instances(children: Children) -> dict[Key, Counts]:
    sizes = {
        name_of(s): max(1, count(s, "spec", "leaderWorkerTemplate", "size"))
        for s in children.leader_worker_sets
    }
    found = _instances(children.pods, sizes, children.cordoned)
    return {key: _sum(instances.values()) for key, instances in found.items()}


def _instances(
    pods: Iterable[Raw], sizes: Mapping[str, int], cordoned: frozenset[str]
) -> dict[Key, dict[tuple[str, str], _Instance]]:
    found: dict[Key, dict[tuple[str, str], _Instance]] = {}
    for pod in pods:
        key = key_of(pod)
        if key is None or is_finished(pod) or not is_of_workload(pod, key):
            continue
        labels = fields(pod, "metadata", "labels")
        group = text(labels, GROUP_SET), text(labels, GROUP_INDEX)
        name = group if all(group) else ("", name_of(pod))
        instance = found.setdefault(key, {}).setdefault(name, _Instance())
        instance.size = sizes.get(group[0]) or _size_of(pod)
        instance.draining = instance.draining or is_leaving(pod)
        instance.ready += is_true(pod, "Ready")
        instance.cordoned |= text(pod, "spec", "nodeName") in cordoned
        scheduled = condition(pod, "PodScheduled")
        instance.unplaced |= text(scheduled, "reason") == "Unschedulable"
    return found


def _size_of(pod: Raw) -> int:
    """Pods of its group by the pod itself, for when its LeaderWorkerSet is gone already."""
    size = text(pod, "metadata", "annotations", GROUP_SIZE)
    return int(size) if re.fullmatch("[1-9][0-9]{0,3}", size, re.ASCII) else 1


def _sum(instances: Iterable[_Instance]) -> Counts:
    alive = ready = draining = unplaced = cordoned = 0
    for instance in instances:
        alive += 1
        draining += instance.draining
        serves = not instance.draining and instance.ready >= instance.size
        ready += serves
        cordoned += serves and instance.cordoned
        unplaced += not instance.draining and instance.unplaced
    return Counts(alive, ready, draining, unplaced, cordoned)


def _orphans(children: Children) -> set[tuple[Key, PoolRole]]:
    """Workloads that are gone while their pods still end."""
    found: set[tuple[Key, PoolRole]] = set()
    for pod in children.pods:
        key, role = key_of(pod), role_of(pod)
        if key and role and not is_finished(pod) and is_of_workload(pod, key):
            found.add((key, role))
    return found


def is_of_workload(pod: Raw, key: Key) -> bool:
    """Whether the workload made the pod: its owner's name is the workload's, or begins with it.

    Other pods may have our labels, made by hand or by a copy of a Deployment. They do not serve,
    and would keep a deleted fleet from ending for ever.
    """
    begins = _workload_names(text(pod, "metadata", "labels", LABEL_FLEET), *key)
    return any(
        text(owner, "kind") in _POD_OWNERS
        and at(owner, "controller") is True
        and f"{text(owner, 'name')}-".startswith(begins)
        for owner in rows(pod, "metadata", "ownerReferences")
    )


@lru_cache(maxsize=4096)
def _workload_names(fleet: str, pool: str, revision: str) -> tuple[str, str]:
    """Prefixes of the names of the owners of a workload's pods; an empty fleet matches none."""
    if not fleet:
        return "\0", "\0"
    names = workload_name(fleet, pool, revision), group_workload_name(fleet, pool, revision)
    return f"{names[0]}-", f"{names[1]}-"


def is_pool_object(pool: Raw) -> bool:
    """Whether it is the object of the pool that it names: users can create others that name it."""
    fleet, name = text(pool, "metadata", "labels", LABEL_FLEET), text(pool, "spec", "poolName")
    return bool(name) and name_of(pool) == pool_object_name(fleet, name)


def _pools(pools: Iterable[Raw]) -> tuple[PoolSeen, ...]:
    found: dict[str, PoolSeen] = {}
    for pool in sorted(pools, key=name_of):
        name = text(pool, "spec", "poolName")
        if not is_pool_object(pool):
            continue
        has = at(pool, "spec", "declaredReplicas")
        declared = None if has is None else count(pool, "spec", "declaredReplicas")
        found.setdefault(name, PoolSeen(name, replicas_of(pool), declared))
    return tuple(found.values())


def _lost_pools(known: set[str], made: Iterable[WorkloadSeen], before: Raw) -> tuple[PoolSeen, ...]:
    """Pools whose objects were deleted, or their CRD was: the size is that of their workloads.

    While one revision replaces another, the sum may be above the pool's size, and the status has
    the size. A pool that left the document and came back starts as a new one.
    """
    sizes: dict[str, list[int]] = {}
    for workload in (seen.workload for seen in made):
        if workload.pool not in known and workload.template.role != ROUTER:
            sizes.setdefault(workload.pool, []).append(workload.replicas)
    last = {text(row, "name"): row for row in rows(before, "pools")}
    found: list[PoolSeen] = []
    for name, each in sizes.items():
        row = last.get(name, {})
        if last and not text(row, "revision"):
            continue
        size = max(*each, min(sum(each), count(row, "replicas"))) if len(each) > 1 else each[0]
        declared = None if at(row, "declaredReplicas") is None else count(row, "declaredReplicas")
        found.append(PoolSeen(name, size, declared))
    return tuple(found)
