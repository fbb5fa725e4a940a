"""The writes that a turn decides on, as values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from xpyd_operator.controller.kinds import Kind, Obj, kind_of
from xpyd_operator.manifests.names import LABEL_POOL


@dataclass(frozen=True)
class Apply:
    """Server-side apply of `obj`, which carries its hash as an annotation.

    `resource_version`: the version that was looked at, where a change by others in between must
    not be overwritten. `create`: nothing of that name was seen; what is there nevertheless is not
    touched.
    """

    obj: Obj
    hash: str
    create: bool = False
    resource_version: str = ""


@dataclass(frozen=True)
class Scale:
    """Give a workload other replicas and leave the rest of it alone."""

    kind: Kind
    name: str
    replicas: int
    resource_version: str


@dataclass(frozen=True)
class Remove:
    """Delete exactly the object that was looked at."""

    kind: Kind
    name: str
    uid: str
    resource_version: str = ""


@dataclass(frozen=True)
class MakeKey:
    """Create the fleet's KV key, unless its Secret exists."""


@dataclass(frozen=True)
class SetFinalizers:
    """Replace the document's finalizers, if nobody else changed it meanwhile."""

    finalizers: tuple[str, ...]
    resource_version: str


Write = Apply | Scale | Remove | MakeKey | SetFinalizers

Effect = tuple[Kind, str, str]
"""Kind and name of an object, and what became of it."""


def effect_of(write: Write) -> Effect | None:
    """What the write makes of which object: the same again means that somebody undid it."""
    match write:
        case Apply(obj, digest):
            return kind_of(obj), str(obj["metadata"]["name"]), digest
        case Scale(kind, name, replicas):
            return kind, name, f"{replicas} replicas"
        case Remove(kind, name, uid):
            return kind, name, f"no {uid}"
        case _:
            return None


def pool_of(write: Write) -> str:
    """The pool whose object it is; empty: the whole fleet's, or not said."""
    if isinstance(write, Apply):
        labels = cast("dict[str, str]", write.obj["metadata"].get("labels") or {})
        return labels.get(LABEL_POOL, "")
    return ""


def describe(write: Write) -> str:
    """The write for a log line or a message."""
    match write:
        case Apply(obj, create=create):
            verb = "create" if create else "apply"
            return f"{verb} {obj['kind']} {obj['metadata']['name']}"
        case Scale(kind, name, replicas):
            return f"scale {kind.name} {name} to {replicas}"
        case Remove(kind, name):
            return f"delete {kind.name} {name}"
        case MakeKey():
            return "create the Secret with the KV key"
        case SetFinalizers(finalizers):
            return f"set finalizers {list(finalizers)}"
