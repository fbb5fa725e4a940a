"""The volumes of a fleet's pods, and where its model lies in them. Pure."""

from __future__ import annotations

import posixpath
from typing import cast

from xpyd_operator.document import InferenceFleet
from xpyd_operator.manifests import names
from xpyd_operator.manifests.values import JsonObject

MODELS_FOLDER = "/models"
_OWNER_AND_GROUP_READ = 0o440


def model_in_pod(fleet: InferenceFleet) -> str:
    """What the worker's --model gets in a pod.

    An absolute file:// path is taken as it is, a relative one lies below /models: there, a folder
    above the document's means nothing, so leading `..` are dropped.
    """
    uri = fleet.spec.model.uri
    scheme, _, path = uri.partition("://")
    if scheme != "file":
        return uri
    # From "/", normpath drops leading `..`; a double leading slash it would keep.
    inside = posixpath.normpath("/" + path.lstrip("/"))
    if path.startswith("/"):
        return inside
    return MODELS_FOLDER if inside == "/" else MODELS_FOLDER + inside


def uses_host_path(fleet: InferenceFleet) -> bool:
    """Whether a pod mounts a folder of its node, which "restricted" and "baseline" forbid."""
    if fleet.spec.model.cache.type == "HostPath" or fleet.spec.kv_transfer.socket_folder:
        return True
    templates = [fleet.spec.router.template, *(pool.template for pool in fleet.spec.pools)]
    return any(_has_host_path(template or {}) for template in templates)


def _has_host_path(template: JsonObject) -> bool:
    volumes: object = template.get("spec", {}).get("volumes")
    items = cast("list[object]", volumes) if isinstance(volumes, list) else []
    return any(isinstance(item, dict) and "hostPath" in item for item in items)


def common_volumes(fleet: InferenceFleet, uid: str) -> list[JsonObject]:
    """Of engines and routers: a place to write and the KV key. `uid`: the InferenceFleet's."""
    found: list[JsonObject] = [{"name": "xpyd-tmp", "emptyDir": {}}]
    if fleet.spec.kv_transfer.insecure:
        return found
    ref = fleet.spec.kv_transfer.key_secret_ref
    name = names.kv_secret_name(fleet.name, uid) if ref is None else ref.name
    key = names.KV_KEY if ref is None else ref.key
    secret = {
        "secretName": name,
        "defaultMode": _OWNER_AND_GROUP_READ,
        "items": [{"key": key, "path": names.KV_KEY}],
    }
    return [*found, {"name": "xpyd-kv", "secret": secret}]


def common_mounts(fleet: InferenceFleet) -> list[JsonObject]:
    """Where common_volumes are mounted."""
    found: list[JsonObject] = [{"name": "xpyd-tmp", "mountPath": "/tmp"}]
    if not fleet.spec.kv_transfer.insecure:
        found.append({"name": "xpyd-kv", "mountPath": names.KV_FOLDER, "readOnly": True})
    return found


def model_volumes(fleet: InferenceFleet) -> list[JsonObject]:
    """Of engines: what is mounted at /models, if anything."""
    model, cache = fleet.spec.model, fleet.spec.model.cache
    if cache.type == "PersistentVolumeClaim":
        claim = {"claimName": cache.claim_name, "readOnly": cache.read_only}
        return [{"name": "xpyd-models", "persistentVolumeClaim": claim}]
    if cache.type == "HostPath":
        # No DirectoryOrCreate: an empty folder that root made would hide a wrong path.
        folder = {"path": cache.path, "type": "Directory"}
        return [{"name": "xpyd-models", "hostPath": folder}]
    if model.uri.startswith("hf://"):
        return [{"name": "xpyd-models", "emptyDir": {}}]
    return []  # a path in the image, or one that the pool's template mounts


def model_mounts(fleet: InferenceFleet) -> list[JsonObject]:
    """Where model_volumes are mounted."""
    cache = fleet.spec.model.cache
    if not model_volumes(fleet):
        return []
    read_only = cache.type != "None" and cache.read_only
    return [{"name": "xpyd-models", "mountPath": MODELS_FOLDER, "readOnly": read_only}]
