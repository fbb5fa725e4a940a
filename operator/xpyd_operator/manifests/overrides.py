"""How pool.template and router.template are laid over the pods that xpyd renders. Pure.

A template is a PodTemplateSpec that lists only what differs: maps are merged key by key, lists by
the key that Kubernetes merges them by, other lists are replaced. null counts as left out, as it
does for the API server. A template that names what is xpyd's is refused before it comes here
(xpyd_operator.manifests.refusals), never silently overruled.
"""

from __future__ import annotations

from typing import Any, cast

from xpyd_operator.manifests.values import JsonObject

MERGE_KEYS = {
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
APPENDED = ("tolerations",)


def merged(base: JsonObject, template: JsonObject) -> JsonObject:
    """`base`, a whole pod template, with `template` laid over it."""
    return _merge_maps(base, template)


def _merge_maps(ours: JsonObject, theirs: JsonObject) -> JsonObject:
    result = dict(ours)
    for key, value in theirs.items():
        before = result.get(key)
        if isinstance(value, dict):
            below = cast("JsonObject", before) if isinstance(before, dict) else {}
            result[key] = _merge_maps(below, cast("JsonObject", value))
        elif isinstance(value, list):
            lower = cast("list[Any]", before) if isinstance(before, list) else []
            result[key] = _merge_lists(key, lower, cast("list[Any]", value))
        elif value is not None:
            result[key] = value
    return result


def _merge_lists(name: str, ours: list[Any], theirs: list[Any]) -> list[Any]:
    theirs = [_without_nulls(item) for item in theirs]
    if name in APPENDED:
        return [*ours, *(item for item in theirs if item not in ours)]
    key = MERGE_KEYS.get(name)
    if key is None:
        return theirs
    result = list(ours)
    for item in theirs:
        same = [i for i, own in enumerate(result) if _is_same(own, item, key)]
        if not same:
            result.append(item)
        elif name in _WHOLE_ITEMS:
            result[same[0]] = item
        else:
            result[same[0]] = _merge_maps(result[same[0]], item)
    return result


def _is_same(own: object, item: object, key: str) -> bool:
    """Without its key (an unnamed port), or as no map at all, an item is one of its own."""
    if not isinstance(own, dict) or not isinstance(item, dict):
        return False
    mine, other = cast("JsonObject", own), cast("JsonObject", item)
    return key in other and mine.get(key) == other[key]


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return _merge_maps({}, cast("JsonObject", value))
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast("list[object]", value)]
    return value
