"""What the cache keeps of an object: a thousand pods must stay small. Pure.

Keys and short texts repeat in every object: they are interned, so that each exists once. That
halves a cache of many fleets. Fields of pods that nothing reads are dropped; `observe` is the
reader. Of a pod that is ready it asks only that; what a pod that is not ready waits for may be
anywhere in its spec.
"""

from __future__ import annotations

import sys
from typing import Any, cast

from xpyd_operator.controller.kinds import POD, Kind, Obj

_SHORT = 64
"""Longer texts are messages, hardly ever the same."""
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_POD_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "labels",
    "annotations",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "finalizers",
    "ownerReferences",
)
_POD_SPEC = ("nodeName", "volumes", "resourceClaims", "readinessGates")
_CONTAINER_SPEC = ("name", "image")
_POD_STATUS = ("phase", "reason", "message", "conditions")
_CONDITION = ("type", "status", "reason", "message", "lastTransitionTime")
_CONTAINER_STATUS = ("name", "image", "ready", "restartCount", "state", "lastState")


def trim(kind: Kind, obj: Obj) -> Obj:
    """`obj` with what is kept of it; parts are shared with it, and it is not to be used again."""
    if kind == POD:
        return _trim_pod(obj)
    metadata = cast("dict[str, Any]", obj.get("metadata") or {})
    metadata.pop("managedFields", None)
    annotations = metadata.get("annotations")
    if annotations:
        annotations.pop(_LAST_APPLIED, None)
    # Items of a list come without these two; who reads the cache relies on them.
    return _shared({**obj, "apiVersion": kind.api_version, "kind": kind.name})


def _trim_pod(pod: Obj) -> Obj:
    metadata = _pick(pod.get("metadata"), _POD_METADATA)
    whole = cast("dict[str, Any]", pod.get("status") or {})
    status = _pick(whole, _POD_STATUS)
    if "conditions" in status:
        status["conditions"] = [_pick(c, _CONDITION) for c in status["conditions"]]
    if _is_serving(metadata, status):
        spec = _pick(pod.get("spec"), ("nodeName",))
    else:
        spec = _spec(cast("dict[str, Any]", pod.get("spec") or {}))
        for name in ("initContainerStatuses", "containerStatuses"):
            if whole.get(name):
                status[name] = [_pick(container, _CONTAINER_STATUS) for container in whole[name]]
    kept = {"metadata": metadata, "spec": spec, "status": status}
    return _shared({"apiVersion": POD.api_version, "kind": POD.name, **kept})


def _is_serving(metadata: dict[str, Any], status: dict[str, Any]) -> bool:
    if "deletionTimestamp" in metadata:
        return False
    conditions = cast("list[dict[str, Any]]", status.get("conditions") or [])
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def _spec(spec: dict[str, Any]) -> dict[str, Any]:
    kept = _pick(spec, _POD_SPEC)
    for name in ("initContainers", "containers"):
        if spec.get(name):
            kept[name] = [_container(container) for container in spec[name]]
    return kept


def _container(container: dict[str, Any]) -> dict[str, Any]:
    kept = _pick(container, _CONTAINER_SPEC)
    resources = _pick(container.get("resources"), ("limits",))
    if resources:
        kept["resources"] = resources
    return kept


def _pick(value: object, names: tuple[str, ...]) -> dict[str, Any]:
    """The members `names` of a JSON object that are there and not empty."""
    fields = cast("dict[str, Any]", value or {})
    return {name: fields[name] for name in names if fields.get(name) not in (None, "", [], {})}


def _shared(obj: Obj) -> Obj:
    """A copy in which equal keys and equal short texts are one, with those of other objects."""
    return {sys.intern(key): _shared_value(value) for key, value in obj.items()}


def _shared_value(value: object) -> object:
    # Runs for every field of every event; a match statement takes twice as long.
    if type(value) is str:
        return sys.intern(value) if len(value) <= _SHORT else value
    if type(value) is dict:
        return _shared(cast("Obj", value))
    if type(value) is list:
        return [_shared_value(item) for item in cast("list[object]", value)]
    return value
