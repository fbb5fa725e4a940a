"""The folder of a node in which the fleet's engines there find each other's Unix sockets. Pure.

Each fleet has a folder of its own below spec.kvTransfer.sameHostPath, and a pod sees no other. Its
engines run without rights and refuse a folder that others may write to, while kubelet makes it as
root's: so a first container, as root with two capabilities, gives it to the engines' user. fsGroup
would not: Kubernetes leaves hostPath volumes as they are.
"""

from __future__ import annotations

import posixpath
from typing import cast

from xpyd_operator.document import InferenceFleet, Pool
from xpyd_operator.manifests import names
from xpyd_operator.manifests.values import JsonObject, Site

USER_ID = 10001
"""Of the images' user; also the group that may read mounted secrets."""
_VOLUME = "xpyd-sockets"


def shares_sockets(fleet: InferenceFleet, pool: Pool) -> bool:
    """Whether the pool's pods mount a folder of their node for Unix sockets."""
    return pool.role != "Aggregated" and bool(fleet.spec.kv_transfer.socket_folder)


def socket_args() -> list[str]:
    """The worker's flag for the folder."""
    return [f"--kv-socket-dir={names.SOCKET_FOLDER}"]


def socket_mount() -> JsonObject:
    """Where the folder is mounted."""
    return {"name": _VOLUME, "mountPath": names.SOCKET_FOLDER}


def socket_volume(fleet: InferenceFleet, site: Site) -> JsonObject:
    """The fleet's own folder on the node; no namespace has a dot in its name."""
    folder = posixpath.join(fleet.spec.kv_transfer.socket_folder, f"{site.namespace}.{fleet.name}")
    return {"name": _VOLUME, "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}


def socket_init(pool: Pool, *, image: str, pull_policy: str) -> JsonObject:
    """The container that gives the folder to the engine's user before the engine starts."""
    user = str(user_of(pool))
    give = ["install", "-d", "-m", "0700", "-o", user, "-g", user, names.SOCKET_FOLDER]
    return {
        "name": names.SOCKET_CONTAINER,
        "image": image,
        "imagePullPolicy": pull_policy,
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
    spec = _map(pool.template or {}, "spec")
    found: object = _map(spec, "securityContext").get("runAsUser")
    containers: object = spec.get("containers")
    for item in cast("list[object]", containers) if isinstance(containers, list) else []:
        container = cast("JsonObject", item) if isinstance(item, dict) else {}
        if container.get("name") == names.ENGINE_CONTAINER:
            found = _map(container, "securityContext").get("runAsUser", found)
    return found if isinstance(found, int) else USER_ID


def _map(above: JsonObject, key: str) -> JsonObject:
    value: object = above.get(key)
    return cast("JsonObject", value) if isinstance(value, dict) else {}
