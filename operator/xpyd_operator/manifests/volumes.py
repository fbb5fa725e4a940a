"""What pods mount: the checkpoint, the fleet's key, a folder of their node for sockets.

`manifests.pods` puts it into pod templates.
"""

from __future__ import annotations

import posixpath
from typing import cast

from xpyd_operator.document.engines import Pool
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.manifests import names
from xpyd_operator.manifests.names import JsonObject, Placement, list_in, map_in
from xpyd_operator.manifests.resources import INIT_RESOURCES, without_given

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
    volumes = list_in(map_in(template, "spec"), "volumes")
    return any(isinstance(item, dict) and "hostPath" in item for item in volumes)


def common_volumes(fleet: InferenceFleet, uid: str) -> list[JsonObject]:
    """Volumes of engines and routers: a place to write, and the KV key. `uid`: the
    InferenceFleet's."""
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


_CLIENT_KEYS = "xpyd-client-keys"


def client_keys_volumes(fleet: InferenceFleet) -> list[JsonObject]:
    """The volume of the routers with the keys of clients, where these need one."""
    if fleet.spec.router.auth is None:
        return []
    ref = fleet.spec.router.auth.secret_ref
    secret = {
        "secretName": ref.name,
        "defaultMode": _OWNER_AND_GROUP_READ,
        "items": [{"key": ref.key, "path": names.CLIENT_KEYS}],
    }
    return [{"name": _CLIENT_KEYS, "secret": secret}]


def client_keys_mounts(fleet: InferenceFleet) -> list[JsonObject]:
    """Where client_keys_volumes are mounted: a folder, for a file would not change with the
    Secret."""
    if fleet.spec.router.auth is None:
        return []
    return [{"name": _CLIENT_KEYS, "mountPath": names.CLIENT_KEYS_FOLDER, "readOnly": True}]


def admin_key_volumes(fleet: InferenceFleet) -> list[JsonObject]:
    """Volumes of routers: the keys of their admin API, if there are any."""
    ref = fleet.spec.router.admin_key_secret_ref
    if ref is None:
        return []
    secret = {
        "secretName": ref.name,
        "defaultMode": _OWNER_AND_GROUP_READ,
        "items": [{"key": ref.key, "path": names.ADMIN_KEY}],
    }
    return [{"name": "xpyd-admin", "secret": secret}]


def admin_key_mounts(fleet: InferenceFleet) -> list[JsonObject]:
    """Where admin_key_volumes are mounted."""
    if fleet.spec.router.admin_key_secret_ref is None:
        return []
    return [{"name": "xpyd-admin", "mountPath": names.ADMIN_FOLDER, "readOnly": True}]


def model_volumes(fleet: InferenceFleet) -> list[JsonObject]:
    """Volumes of engines: what is mounted at /models, if anything."""
    model, cache = fleet.spec.model, fleet.spec.model.cache
    if cache.type == "PersistentVolumeClaim":
        claim = {"claimName": cache.claim_name, "readOnly": cache.read_only}
        return [{"name": "xpyd-models", "persistentVolumeClaim": claim}]
    if cache.type == "HostPath":
        # No DirectoryOrCreate: an empty folder of root's would hide a wrong path.
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


USER_ID = 10001
"""The id of the images' user; also the group that may read mounted secrets."""
_VOLUME = "xpyd-sockets"


def shares_sockets(fleet: InferenceFleet, pool: Pool) -> bool:
    """Whether the pool's pods mount a folder of their node for Unix sockets."""
    return pool.role != "Aggregated" and bool(fleet.spec.kv_transfer.socket_folder)


def socket_mount() -> JsonObject:
    """Where the folder is mounted."""
    return {"name": _VOLUME, "mountPath": names.SOCKET_FOLDER}


def socket_volume(fleet: InferenceFleet, placement: Placement) -> JsonObject:
    """The fleet's own folder on the node; no namespace has a dot in its name."""
    folder = posixpath.join(
        fleet.spec.kv_transfer.socket_folder, f"{placement.namespace}.{fleet.name}"
    )
    return {"name": _VOLUME, "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}


def socket_init(pool: Pool, *, image: str, pull_policy: str) -> JsonObject:
    """The container that gives the folder to the engine's user before the engine starts."""
    user = str(user_of(pool))
    give = ["install", "-d", "-m", "0700", "-o", user, "-g", user, names.SOCKET_FOLDER]
    return {
        "name": names.SOCKET_CONTAINER,
        "image": image,
        "imagePullPolicy": pull_policy,
        "resources": without_given(
            INIT_RESOURCES, pool.template or {}, names.SOCKET_CONTAINER, inits=True
        ),
        "command": give,
        "volumeMounts": [socket_mount()],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "runAsUser": 0,
            "runAsGroup": 0,
            "runAsNonRoot": False,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            # FOWNER: on a later start the folder is the engines' already, and keeps its mode.
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]},
        },
    }


def user_of(pool: Pool) -> int:
    """The user that the pool's engines run as: the image's, or what the template says."""
    spec = map_in(pool.template or {}, "spec")
    found: object = map_in(spec, "securityContext").get("runAsUser")
    for item in list_in(spec, "containers"):
        container = cast("JsonObject", item) if isinstance(item, dict) else {}
        if container.get("name") == names.ENGINE_CONTAINER:
            found = map_in(container, "securityContext").get("runAsUser", found)
    return found if isinstance(found, int) else USER_ID
