"""The writes that a turn of a fleet may decide on, as values. The executor does them."""

from __future__ import annotations

from dataclasses import dataclass

from xpyd_operator.controller.decision.kinds import POD, Kind, Obj, kind_of
from xpyd_operator.manifests.names import KV_KEY, LABEL_POOL
from xpyd_operator.status.children import text
from xpyd_operator.status.routable import Gate


@dataclass(frozen=True)
class Apply:
    """Server-side apply of `obj`, which carries its hash as an annotation.

    `resource_version`: the version that was read, where a later change by others must not be
    overwritten. `create`: no object of that name was seen; an existing one is not touched.
    """

    obj: Obj
    hash: str
    create: bool = False
    resource_version: str = ""


@dataclass(frozen=True)
class Scale:
    """Change a workload's replicas and nothing else."""

    kind: Kind
    name: str
    replicas: int
    resource_version: str


@dataclass(frozen=True)
class DeleteObject:
    """Delete exactly the object that was read."""

    kind: Kind
    name: str
    uid: str
    resource_version: str = ""


@dataclass(frozen=True)
class RemoveFields:
    """Take out of an object what other clients added. `patch`: a merge patch; `fields`: words."""

    kind: Kind
    name: str
    pool: str
    patch: Obj
    fields: tuple[str, ...]
    resource_version: str


@dataclass(frozen=True)
class CreateKey:
    """Create the fleet's KV key of this slot, unless its Secret exists. `anew`: one that exists is
    of a rotation that ended with the process which began it, and goes."""

    slot: str = KV_KEY
    anew: bool = False


@dataclass(frozen=True)
class DeleteKey:
    """Delete the Secret of this slot, which no pod uses any more."""

    slot: str


@dataclass(frozen=True)
class SetFinalizers:
    """Replace the document's finalizers, unless it changed meanwhile. `operator`: and mark it as
    this release's; "": leave its mark."""

    finalizers: tuple[str, ...]
    resource_version: str
    operator: str = ""


@dataclass(frozen=True)
class SetGate:
    """Open or shut the readiness gate of a pod, in its status."""

    name: str
    uid: str
    gate: Gate


@dataclass(frozen=True)
class SetCost:
    """Say what it costs to lose a pod, before a ReplicaSet gives one up."""

    name: str
    uid: str
    cost: int


@dataclass(frozen=True)
class SetReplicas:
    """Say how many replicas the engine in a pod should have; None: it was not said before."""

    name: str
    uid: str
    pool: str
    before: int | None
    after: int


Write = (
    Apply
    | Scale
    | RemoveFields
    | DeleteObject
    | CreateKey
    | DeleteKey
    | SetFinalizers
    | SetGate
    | SetCost
    | SetReplicas
)

Effect = tuple[Kind, str, str]
"""Kind and name of an object, and what became of it."""


WITHOUT = "without "
"""Begins the effect of RemoveFields."""


def effect_of(write: Write) -> Effect | None:
    """The write's effect on its object: an equal effect later means that another client undid
    it."""
    match write:
        case Apply(obj, digest):
            return kind_of(obj), str(obj["metadata"]["name"]), digest
        case Scale(kind, name, replicas):
            return kind, name, f"{replicas} replicas"
        case DeleteObject(kind, name, uid):
            return kind, name, f"no {uid}"
        case RemoveFields(kind, name, fields=fields):
            return kind, name, f"{WITHOUT}{', '.join(fields)}"
        case SetGate(name, uid, gate):
            return POD, name, f"{uid} gate {gate.is_open}"
        case SetReplicas(name, uid, after=after):
            return POD, name, f"{uid} replicas {after}"
        case _:
            return None


def pool_of(write: Write) -> str:
    """The pool of the object; empty: the object is of the whole fleet, or the pool is unknown."""
    if isinstance(write, RemoveFields):
        return write.pool
    return text(write.obj, "metadata", "labels", LABEL_POOL) if isinstance(write, Apply) else ""


def describe(write: Write) -> str:
    """The write for a log line or a message."""
    match write:
        case Apply(obj, create=create):
            verb = "create" if create else "apply"
            return f"{verb} {obj['kind']} {obj['metadata']['name']}"
        case Scale(kind, name, replicas):
            return f"scale {kind.name} {name} to {replicas}"
        case DeleteObject(kind, name):
            return f"delete {kind.name} {name}"
        case RemoveFields(kind, name, fields=fields):
            return f"remove from {kind.name} {name}: {', '.join(fields)}"
        case CreateKey(slot):
            return f"create the Secret with the KV key ({slot})"
        case DeleteKey(slot):
            return f"delete the Secret with the old KV key ({slot})"
        case SetFinalizers(finalizers, operator=operator):
            mark = f" and the mark {operator}" if operator else ""
            return f"set finalizers {list(finalizers)}{mark}"
        case SetGate(name, gate=gate):
            return f"{'open' if gate.is_open else 'shut'} the gate of Pod {name}: {gate.message}"
        case SetCost(name, cost=cost):
            return f"set the deletion cost of Pod {name} to {cost}"
        case SetReplicas(name, before=before, after=after):
            return f"replicas of Pod {name}: {'new' if before is None else before} -> {after}"
