"""The metadata of every child: place, labels and the owner. Pure."""

from __future__ import annotations

from xpyd_operator.document import InferenceFleet
from xpyd_operator.manifests.values import JsonObject, Site


def metadata(name: str, fleet: InferenceFleet, site: Site, labels: dict[str, str]) -> JsonObject:
    """Owned by the fleet: the garbage collector takes the object when the fleet is gone."""
    return {
        "name": name,
        "namespace": site.namespace,
        "labels": labels,
        "ownerReferences": [
            {
                "apiVersion": fleet.api_version,
                "kind": fleet.kind,
                "name": fleet.name,
                "uid": site.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
