"""What pods mount: the checkpoint, the fleet's key, a folder of their node for sockets.

`manifests.pods` puts it into pod templates.
"""

from __future__ import annotations

import json
import posixpath
import re
from hashlib import sha256
from typing import cast

from xpyd_core.checkpoints import checkpoint_folder
from xpyd_operator.document.engines import Pool
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.manifests import names
from xpyd_operator.manifests.names import JsonObject, Placement, list_in, map_in
from xpyd_operator.manifests.resources import INIT_RESOURCES, without_given
from xpyd_operator.manifests.tls import router_tls_volumes, tls_mounts

MODELS_FOLDER = "/models"
_OWNER_AND_GROUP_READ = 0o440


def model_in_pod(fleet: InferenceFleet) -> str:
    """What the worker's --model gets in a pod.

    An absolute file:// path is taken as it is, a relative one lies below /models: there, a folder
    above the document's means nothing, so leading `..` are dropped. A downloaded model is a folder
    of its own, but an hf:// one that each engine downloads itself.
    """
    model = fleet.spec.model
    uri = model.uri
    scheme, _, path = uri.partition("://")
    if scheme == "s3" or model.by_job:
        return posixpath.join(
            MODELS_FOLDER, checkpoint_folder(uri, model.revision, model.endpoint_url)
        )
    if scheme == "pvc":
        return posixpath.normpath(posixpath.join(MODELS_FOLDER, path.partition("/")[2].strip("/")))
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
    if ref is None:
        return [*found, {"name": "xpyd-kv", "projected": _own_keys(fleet, uid)}]
    secret = {
        "secretName": ref.name,
        "defaultMode": _OWNER_AND_GROUP_READ,
        "items": [{"key": ref.key, "path": names.KV_KEY}],
    }
    return [*found, {"name": "xpyd-kv", "secret": secret}]


def _own_keys(fleet: InferenceFleet, uid: str) -> JsonObject:
    """Both Secrets that may have the fleet's key, of which one is missing but for a rotation, and
    the ConfigMap, which comes after the first key: pods wait for it."""
    sources: list[JsonObject] = [
        {
            "secret": {
                "name": names.kv_secret_name(fleet.name, uid, slot),
                "optional": True,
                "items": [{"key": names.KV_KEY, "path": slot}],
            }
        }
        for slot in names.KEY_SLOTS
    ]
    order = {
        "name": names.kv_secret_name(fleet.name, uid),
        "items": [{"key": names.KV_ORDER, "path": names.KV_ORDER}],
    }
    return {"defaultMode": _OWNER_AND_GROUP_READ, "sources": [*sources, {"configMap": order}]}


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


_CANARY = "xpyd-canary"


def canary_volumes(fleet: InferenceFleet) -> list[JsonObject]:
    """The volume of routers that says which share of requests a revision on trial gets."""
    if fleet.spec.rollout.canary is None:
        return []
    found = {
        "name": names.canary_name(fleet.name),
        "optional": True,  # routers do not wait for it
        "items": [{"key": names.CANARY_FILE, "path": names.CANARY_FILE}],
    }
    return [{"name": _CANARY, "configMap": found}]


def canary_mounts(fleet: InferenceFleet) -> list[JsonObject]:
    """Where canary_volumes are mounted: a folder, for a file would not change with the map."""
    if fleet.spec.rollout.canary is None:
        return []
    return [{"name": _CANARY, "mountPath": names.CANARY_FOLDER, "readOnly": True}]


def file_args(fleet: InferenceFleet) -> list[str]:
    """The flags of routers that name files of admin_key_volumes and canary_volumes."""
    found: list[str] = []
    if fleet.spec.router.admin_key_secret_ref is not None:
        found.append(f"--admin-key-file={names.ADMIN_FOLDER}/{names.ADMIN_KEY}")
    if fleet.spec.rollout.canary is not None:
        found.append(f"--canary-file={names.CANARY_FOLDER}/{names.CANARY_FILE}")
    return found


def router_volumes(fleet: InferenceFleet) -> list[JsonObject]:
    """The volumes that routers alone have."""
    return [
        *client_keys_volumes(fleet),
        *admin_key_volumes(fleet),
        *canary_volumes(fleet),
        *router_tls_volumes(fleet),
    ]


def router_mounts(fleet: InferenceFleet) -> list[JsonObject]:
    """Where router_volumes are mounted."""
    return [
        *client_keys_mounts(fleet),
        *admin_key_mounts(fleet),
        *canary_mounts(fleet),
        *tls_mounts(router_tls_volumes(fleet)),
    ]


def model_volumes(fleet: InferenceFleet) -> list[JsonObject]:
    """Volumes of engines: what is mounted at /models, if anything."""
    model, cache = fleet.spec.model, fleet.spec.model.cache
    if model.uri.startswith("pvc://"):
        claim = {"claimName": claim_of(model.uri), "readOnly": True}
        return [{"name": "xpyd-models", "persistentVolumeClaim": claim}]
    if model.by_job:
        claim = {"claimName": cache.claim_name, "readOnly": True}
        return [{"name": "xpyd-models", "persistentVolumeClaim": claim}]
    if cache.type == "PersistentVolumeClaim":
        claim = {"claimName": cache.claim_name, "readOnly": cache.read_only}
        return [{"name": "xpyd-models", "persistentVolumeClaim": claim}]
    if cache.type == "HostPath":
        # No DirectoryOrCreate: an empty folder of root's would hide a wrong path.
        folder = {"path": cache.path, "type": "Directory"}
        return [{"name": "xpyd-models", "hostPath": folder}]
    if model.is_downloaded:
        return [{"name": "xpyd-models", "emptyDir": {}}]
    return []  # a path in the image, or one that the pool's template mounts


def model_mounts(fleet: InferenceFleet) -> list[JsonObject]:
    """Where model_volumes are mounted."""
    cache = fleet.spec.model.cache
    if not model_volumes(fleet):
        return []
    read_only = cache.type != "None" and cache.read_only
    # All but an hf:// model that engines download themselves is there before they start.
    read_only |= fleet.spec.model.by_job or fleet.spec.model.uri.startswith(("pvc://", "s3://"))
    return [{"name": "xpyd-models", "mountPath": MODELS_FOLDER, "readOnly": read_only}]


def claim_of(uri: str) -> str:
    """The PersistentVolumeClaim that a pvc:// URI names."""
    return uri.removeprefix("pvc://").partition("/")[0]


def download_args(fleet: InferenceFleet) -> list[str]:
    """The program that downloads the model into its folder of a pod."""
    model = fleet.spec.model
    args = ["model", "download", model.uri, f"--to={model_in_pod(fleet)}", "--output=json"]
    args += [f"--revision={model.revision}"] if model.revision else []
    return [*args, f"--endpoint-url={model.endpoint_url}"] if model.endpoint_url else args


_S3_KEYS = {
    "AWS_ACCESS_KEY_ID": False,
    "AWS_SECRET_ACCESS_KEY": False,
    "AWS_SESSION_TOKEN": True,
    "AWS_REGION": True,
}
"""Entries of an s3:// model's Secret, and whether they may be missing."""
_OF_DOWNLOADS = re.compile(r"(HF|AWS)_\w+|(HTTPS?|ALL|NO)_PROXY|SSL_CERT_(FILE|DIR)", re.IGNORECASE)


def download_env(fleet: InferenceFleet) -> list[JsonObject]:
    """What it needs of the environment: credentials, and those of the engine's variables that
    libraries for downloads read."""
    model = fleet.spec.model
    env: dict[str, JsonObject] = {"HOME": {"value": "/tmp"}}
    if model.secret_ref is not None:
        name = model.secret_ref.name
        if model.uri.startswith("hf://"):
            ref = {"name": name, "key": model.secret_ref.key}
            env["HF_TOKEN"] = {"valueFrom": {"secretKeyRef": ref}}
        else:
            for key, optional in _S3_KEYS.items():
                ref = {"name": name, "key": key, **({"optional": True} if optional else {})}
                env[key] = {"valueFrom": {"secretKeyRef": ref}}
    for variable in fleet.spec.engine.env:
        if _OF_DOWNLOADS.fullmatch(variable.name) and variable.value_from is None:
            env[variable.name] = {"value": variable.value}
    return [{"name": name, **rest} for name, rest in env.items()]


def job_digest(fleet: InferenceFleet) -> str:
    """8 hex digits over what a download depends on: with other credentials it is another Job."""
    model = fleet.spec.model
    parts = [
        model.model_dump(mode="json", by_alias=True, exclude={"served_names"}),
        download_env(fleet),
    ]
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


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
