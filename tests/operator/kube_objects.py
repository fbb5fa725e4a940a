"""Objects of the API server in memory: its JSON arithmetic, and pods as controllers make them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict
from itertools import zip_longest
from typing import Any, cast

from tests.operator.fleets import document
from xpyd_operator.controller.decision.cache import Cache, FleetKey
from xpyd_operator.controller.decision.kinds import CONFIG_MAP, DEPLOYMENT, FLEET, POD, Obj, trim
from xpyd_operator.controller.routers import RouterReader
from xpyd_operator.manifests.names import canary_name
from xpyd_operator.status.canary import STATE, CanaryState


def same(before: Obj, after: Obj) -> bool:
    return json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True)


def merge(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict) and isinstance(target.get(key), dict):
            merge(target[key], value)
        else:
            target[key] = deepcopy(value)
    return target


class Applied:
    """What each object got by its last apply: a later apply removes of that what it leaves out, as
    the managedFields of a real server have it, and keeps what another client made of it."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str, str], Obj] = {}

    def left(self, before: Obj | None, body: Obj) -> Obj:
        """What is left of the object where this body is about to be applied; {}: it is new."""
        metadata = body["metadata"]
        place = (body["kind"], metadata["namespace"], metadata["name"])
        last, self._last[place] = self._last.get(place, {}), deepcopy(body)
        return _without(before, last, body) if before is not None else {}


def _without(found: Obj, last: Obj, new: Obj) -> Obj:
    """A copy of `found` without the values that are in `last` and whose keys are not in `new`."""
    left: Obj = {}
    for key, value in found.items():
        below = last.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            rest = _without(cast("Obj", value), cast("Obj", below), new.get(key) or {})
            if rest or key in new:
                left[key] = rest
        elif key in new or key not in last or value != below:
            left[key] = deepcopy(value)
    return left


def by_type(before: Obj, patch: Obj) -> list[Obj]:
    """The conditions of an object after a strategic merge patch of some of them."""
    new = {row["type"]: row for row in patch["status"].get("conditions", ())}
    old = before.get("status", {}).get("conditions", ())
    kept = [new.pop(row["type"], row) for row in old]
    return [*kept, *new.values()]


def without_type(obj: Obj) -> Obj:
    return {key: value for key, value in obj.items() if key not in ("apiVersion", "kind")}


def pod_of(deployment: Obj, name: str) -> Obj:
    """A pod as a Deployment's ReplicaSet would make it; the owner's uid is the Deployment's."""
    meta, template = deployment["metadata"], deployment["spec"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": meta["namespace"],
            "labels": dict(template["metadata"]["labels"]),
            "ownerReferences": [
                {
                    "apiVersion": "apps/v1",
                    "kind": "ReplicaSet",
                    "name": f"{meta['name']}-5d9c7b8f4d",
                    "uid": meta["uid"],
                    "controller": True,
                }
            ],
        },
        "spec": {"nodeName": "node", "containers": []},
        "status": {"phase": "Pending"},
    }


# --- what a RouterReader needs: a fleet, the Deployment of its routers, pods

KEY = FleetKey("team", "chat")
REVISION = "12345678"
MAKER = f"chat-router-{REVISION}"


def labels_of(role: str) -> Obj:
    kind = {"xpyd.dev/pool": role.lower(), "xpyd.dev/role": role}
    return {"xpyd.dev/fleet": "chat", "xpyd.dev/revision": REVISION, **kind}


def owned_by(kind: str, name: str, uid: str) -> list[Obj]:
    return [{"kind": kind, "name": name, "uid": uid, "controller": True}]


def deployment(*, fleet: str = "u") -> Obj:
    metadata = {"name": MAKER, "namespace": "team", "uid": "d", "resourceVersion": "1"}
    metadata |= {
        "labels": labels_of("router"),
        "ownerReferences": owned_by("InferenceFleet", "chat", fleet),
    }
    return trim(DEPLOYMENT, {"metadata": metadata})


def ready_pod(
    name: str,
    *,
    role: str = "router",
    ready: str = "True",
    ip: str = "127.0.0.1",
    owner: str = f"{MAKER}-5d9c7b8f4d",
) -> Obj:
    metadata = {"name": name, "namespace": "team", "uid": name, "labels": labels_of(role)}
    metadata |= {"ownerReferences": owned_by("ReplicaSet", owner, "r")} if owner else {}
    conditions = [{"type": kind, "status": ready} for kind in ("Ready", "ContainersReady")]
    status = {"podIP": ip, "conditions": conditions}
    return trim(POD, {"metadata": {**metadata, "resourceVersion": "1"}, "status": status})


def canary_map(revision: str, **state: Any) -> Obj:
    """The ConfigMap of a canary of the fleet."""
    found = CanaryState(revision, **{"phase": "Running", **state})
    metadata = {"name": canary_name("chat"), "namespace": "team", "uid": "c"}
    metadata |= {"labels": labels_of("router"), "resourceVersion": f"{found.phase}-{found.shown}"}
    metadata |= {"ownerReferences": owned_by("InferenceFleet", "chat", "u")}
    return trim(CONFIG_MAP, {"metadata": metadata, "data": {STATE: json.dumps(asdict(found))}})


class RoutersWorld:
    """A reader of the figures of a fleet's routers, which are at `port` of their pods' addresses,
    and the cache that it finds them in."""

    def __init__(self, port: int, *pods: Obj, clock: Callable[[], float]) -> None:
        self.cache = Cache()
        fleet = document("chat")
        metadata = {"namespace": "team", "uid": "u", "resourceVersion": "1"}
        self.cache.put(FLEET, {**fleet, "metadata": {**fleet["metadata"], **metadata}})
        self.cache.put(DEPLOYMENT, deployment())
        for one in pods:
            self.cache.put(POD, one)
        self.woken: list[FleetKey] = []
        self.reader = RouterReader(self.cache, self.woken.append, clock=clock, port=port)


_OWN = ("uid", "resourceVersion", "creationTimestamp", "generation")
_TIMES = ("lastTransitionTime", "observedGeneration", "startedAt", "keyId")


def plain(obj: Obj, *, is_secret: bool) -> Obj:
    """The object without what differs from one play of the same edits to another."""
    metadata = {k: v for k, v in obj["metadata"].items() if k not in _OWN}
    data = {"data": sorted(obj["data"])} if is_secret else {}
    return _timeless({**obj, "metadata": metadata, **data})


def _timeless(found: Any) -> Any:
    if isinstance(found, dict):
        fields = cast("dict[str, Any]", found)
        return {key: _timeless(value) for key, value in fields.items() if key not in _TIMES}
    if isinstance(found, list):
        return [_timeless(one) for one in cast("list[Any]", found)]
    return found


def differing(place: str, found: Any, wanted: Any) -> Iterator[str]:
    """Where two values differ, as lines."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        ours, theirs = cast("Obj", found), cast("Obj", wanted)
        for key in {**ours, **theirs}:
            yield from differing(f"{place}/{key}", ours.get(key), theirs.get(key))
    elif isinstance(found, list) and isinstance(wanted, list):
        pairs = zip_longest(cast("list[Any]", found), cast("list[Any]", wanted))
        for number, pair in enumerate(pairs):
            yield from differing(f"{place}/{number}", *pair)
    elif found != wanted:
        yield f"{place}: {found} instead of {wanted}"
