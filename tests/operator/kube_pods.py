"""Pods as the controllers of a cluster make them."""

from __future__ import annotations

from xpyd_operator.controller.decision.kinds import Obj


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
