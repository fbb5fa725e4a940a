"""A pod template of the document over ours: maps key by key, lists by the key by which Kubernetes
merges them, other lists as a whole; null counts as absent.
"""

from __future__ import annotations

from typing import Any, cast

from xpyd_operator.manifests.names import JsonObject, list_in, map_in

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
"""Name of a list -> the key that identifies its items."""
_WHOLE_ITEMS = ("env", "volumes", "volumeMounts", "ports")
"""Lists whose items replace ours: two sources of one variable or volume would be an error."""
APPENDED = ("tolerations", "readinessGates")


def merged(ours: JsonObject, theirs: JsonObject) -> JsonObject:
    """`ours`, a pod template or a part of one, with `theirs` merged over it."""
    result = dict(ours)
    for key, value in theirs.items():
        if isinstance(value, dict):
            result[key] = merged(map_in(result, key), cast("JsonObject", value))
        elif isinstance(value, list):
            result[key] = _merge_lists(key, list_in(result, key), cast("list[Any]", value))
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
            result[same[0]] = merged(result[same[0]], item)
    return result


def _is_same(own: object, item: object, key: str) -> bool:
    """Without its key (an unnamed port), or as no map at all, an item is one of its own."""
    if not isinstance(own, dict) or not isinstance(item, dict):
        return False
    mine, other = cast("JsonObject", own), cast("JsonObject", item)
    return key in other and mine.get(key) == other[key]


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return merged({}, cast("JsonObject", value))
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast("list[object]", value)]
    return value
