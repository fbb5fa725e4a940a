"""Objects of the API server in memory: its JSON arithmetic, and pods as controllers make them."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

from xpyd_operator.controller.decision.kinds import Obj


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
