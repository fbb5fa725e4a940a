"""Revisions of a fleet's document: what of it makes pods, and how an earlier one is taken back.

A revision is recorded when its pods begin. The record is the part of `spec` that pods are made of,
without what is of the moment: replicas and their bounds, how a rollout goes, how clients come in.
Its name says which pods the document makes, so that a document that goes back to an earlier one
goes back to its record, too. The images and what else the operator itself brings lie beside it, and
are a part of the name: a fleet that takes newer ones gets a new record.
See docs/adr/0096 and docs/adr/0119.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, cast

from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.plan.template import fleet_want

Json = dict[str, Any]

_PARTS = ("model", "engine", "pools", "kvTransfer", "router", "heartbeat", "drain")
OF_NOW: Mapping[str, frozenset[str]] = {
    "router": frozenset({"replicas", "service", "ingress", "httpRoute"}),
    "pools": frozenset({"replicas", "scaling", "rollout"}),
}
"""Fields that change no pod of an instance: they stay as they are when a record is taken back."""
_RESTARTED = "restartedAt"


def revision_id(
    fleet: InferenceFleet, model: str, defaults: Mapping[str, Any] | None = None
) -> str:
    """10 hex digits over all pods that the document makes. `model`: as in fleet_want; `defaults`:
    what the operator adds, None: not a part of it, as in records of operators that had none."""
    want = fleet_want(fleet, model=model, in_cluster=True)
    parts: list[object] = [*sorted((pool.name, pool.revision) for pool in want.pools)]
    if defaults is not None:
        parts.append(defaults)
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


def record_of(spec: Mapping[str, Any]) -> Json:
    """What of a document's spec makes pods."""
    found: Json = {name: spec[name] for name in _PARTS if name in spec}
    if "router" in found:
        found["router"] = _without(found["router"], OF_NOW["router"])
    if "pools" in found:
        found["pools"] = [_lasting(pool) for pool in found["pools"]]
    rollout: Mapping[str, Any] = spec.get("rollout") or {}
    if rollout.get(_RESTARTED):
        found["rollout"] = {_RESTARTED: rollout[_RESTARTED]}
    return found


def restored(spec: Mapping[str, Any], record: Mapping[str, Any]) -> Json:
    """The spec with a record's parts in place of its own. What is of the moment stays; a pool that
    only the record has comes without replicas."""
    found: Json = {name: part for name, part in spec.items() if name not in (*_PARTS, "rollout")}
    found |= {name: record[name] for name in _PARTS if name in record}
    if "router" in record or "router" in spec:
        router: Json = spec.get("router") or {}
        found["router"] = {**record.get("router", {}), **_only(router, OF_NOW["router"])}
    now = {pool.get("name"): pool for pool in cast("list[Json]", spec.get("pools") or [])}
    found["pools"] = [
        _as_now(pool, now.get(pool.get("name"), {}))
        for pool in cast("list[Json]", record.get("pools") or [])
    ]
    rollout = _without(spec.get("rollout") or {}, {_RESTARTED})
    rollout |= record.get("rollout", {})
    if rollout:
        found["rollout"] = rollout
    return found


def differences(before: object, after: object, path: str = "") -> list[tuple[str, object, object]]:
    """Paths at which two JSON values differ, with both values; None: not there. Items of lists go
    by their name where they have one."""
    old, new = _members(before), _members(after)
    is_map = {isinstance(one, dict) for one in (before, after) if one is not None} == {True}
    is_item = path.endswith("]") and None in (before, after)
    if is_item or not (is_map or (old and new)):
        return [] if before == after else [(path, before, after)]
    found: list[tuple[str, object, object]] = []
    for key in dict.fromkeys((*old, *new)):
        below = f"{path}{key}" if path else key.removeprefix(".")
        found += differences(old.get(key), new.get(key), below)
    return found


def _members(value: object) -> Json:
    """A map's values and a list's items with names, by how a path goes on to them."""
    if isinstance(value, dict):
        return {f".{key}": below for key, below in cast("Json", value).items()}
    rows = cast("list[object]", value) if isinstance(value, list) else []
    named = [cast("Json", one) for one in rows if isinstance(one, dict)]
    found = {f"[{one['name']}]": one for one in named if "name" in one}
    return found if len(found) == len(rows) else {}


def _lasting(pool: Mapping[str, Any]) -> Json:
    """A pool without what is of the moment: of replicas that come and go, their number, too. Ranks
    that share experts are as many as there may be then, which is right with any number."""
    found = _without(pool, OF_NOW["pools"])
    parallelism: Json = found.get("parallelism") or {}
    if most := parallelism.get("maxData"):
        lasting = found["parallelism"] = _without(parallelism, {"data"})
        if parallelism.get("expert", 1) > 1:
            lasting["expert"] = parallelism.get("tensor", 1) * most
    return found


def _as_now(record: Mapping[str, Any], pool: Mapping[str, Any]) -> Json:
    """A record's pool with what the pool has of the moment, as far as it has room."""
    found: Json = {**record, **_only(pool, OF_NOW["pools"])}
    then: Json = found.get("parallelism") or {}
    now: Json = pool.get("parallelism") or {}
    data, most = now.get("data"), then.get("maxData")
    if data and most:
        found["parallelism"] = {**then, "data": min(data, most)}
    return found


def _without(part: Mapping[str, Any], names: Iterable[str]) -> Json:
    left = set(names)
    return {key: value for key, value in part.items() if key not in left}


def _only(part: Mapping[str, Any], names: Iterable[str]) -> Json:
    kept = set(names)
    return {key: value for key, value in part.items() if key in kept}
