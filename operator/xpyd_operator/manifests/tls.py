"""Certificates in pods: Secrets that are mounted, flags that name files, ports that are probed.

A Secret with a private key is mounted whole by its owner alone; the other side gets its ca.crt and
nothing else, so that a router cannot pass for an engine nor an engine for a router. Volumes are
whole folders: kubelet swaps them when the Secret changes, which it does not do with a single file
(subPath). `manifests.pods` puts it into pod templates. See docs/adr/0085.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.manifests import names
from xpyd_operator.manifests.names import JsonObject, list_in, map_in

_OWNER_AND_GROUP_READ = 0o440
_CA = "ca.crt"
_FOLDERS = {
    "xpyd-tls": names.TLS_FOLDER,
    "xpyd-client-ca": names.CLIENT_CA_FOLDER,
    "xpyd-engine-ca": names.ENGINE_CA_FOLDER,
    "xpyd-router-tls": names.ROUTER_TLS_FOLDER,
    "xpyd-router-ca": names.ROUTER_CA_FOLDER,
}
"""Each volume, and where it is mounted. `xpyd-tls` is what a pod's own HTTP port shows, and
`xpyd-router-tls` what routers show to engines."""


def router_tls_args(fleet: InferenceFleet, namespace: str) -> list[str]:
    """The flags of routers for both sides: clients and engines."""
    args = _server_args(is_tls=fleet.spec.router.tls is not None)
    if fleet.spec.router.tls is not None and fleet.spec.router.tls.client_ca_secret_name:
        args.append(f"--ssl-ca-certs={names.CLIENT_CA_FOLDER}/{_CA}")
    if (tls := fleet.spec.engine.tls) is None:
        return args
    name = tls.server_name or names.engine_server_name(fleet.name, namespace)
    args += [f"--engine-ca-file={names.ENGINE_CA_FOLDER}/{_CA}", f"--engine-server-name={name}"]
    if tls.router_secret_name:
        args += [
            f"--engine-certfile={names.ROUTER_TLS_FOLDER}/tls.crt",
            f"--engine-keyfile={names.ROUTER_TLS_FOLDER}/tls.key",
        ]
    return args


def router_tls_volumes(fleet: InferenceFleet) -> list[JsonObject]:
    """The Secrets of routers' certificates and authorities."""
    found: list[JsonObject] = []
    if (tls := fleet.spec.router.tls) is not None:
        found.append(_volume("xpyd-tls", tls.secret_name))
        if tls.client_ca_secret_name:
            found.append(_volume("xpyd-client-ca", tls.client_ca_secret_name, only=_CA))
    if (tls := fleet.spec.engine.tls) is not None:
        found.append(_volume("xpyd-engine-ca", tls.secret_name, only=_CA))
        if tls.router_secret_name:
            found.append(_volume("xpyd-router-tls", tls.router_secret_name))
    return found


def engine_tls_args(fleet: InferenceFleet) -> list[str]:
    """The flags of engines, of xpyd's and of vLLM."""
    tls = fleet.spec.engine.tls
    args = _server_args(is_tls=tls is not None)
    if tls is not None and tls.router_secret_name:
        args += [f"--ssl-ca-certs={names.ROUTER_CA_FOLDER}/{_CA}", "--ssl-open-probes"]
    return args


def engine_tls_volumes(fleet: InferenceFleet) -> list[JsonObject]:
    """The Secrets of engines' certificate, and of the authority of routers' certificates."""
    if (tls := fleet.spec.engine.tls) is None:
        return []
    found = [_volume("xpyd-tls", tls.secret_name)]
    if tls.router_secret_name:
        found.append(_volume("xpyd-router-ca", tls.router_secret_name, only=_CA))
    return found


def tls_of_pods(spec: Mapping[str, object], *, is_router: bool) -> int:
    """What Template.tls was of pods that have this spec: their volumes say it."""
    volumes = list_in(cast("JsonObject", spec), "volumes")
    mounted = [map_in({"volume": one}, "volume").get("name") for one in volumes]
    if is_router:
        trusts, shows = "xpyd-engine-ca" in mounted, "xpyd-router-tls" in mounted
        return 2 if shows else int(trusts)
    return 2 if "xpyd-router-ca" in mounted else int("xpyd-tls" in mounted)


def _server_args(*, is_tls: bool) -> list[str]:
    folder = names.TLS_FOLDER
    found = [f"--ssl-certfile={folder}/tls.crt", f"--ssl-keyfile={folder}/tls.key"]
    return found if is_tls else []


def _volume(name: str, secret_name: str, *, only: str = "") -> JsonObject:
    """A volume with a Secret's keys, or `only` one of them."""
    secret: JsonObject = {"secretName": secret_name, "defaultMode": _OWNER_AND_GROUP_READ}
    if only:
        secret["items"] = [{"key": only, "path": only}]
    return {"name": name, "secret": secret}


def tls_mounts(volumes: Sequence[JsonObject]) -> list[JsonObject]:
    """Where such volumes are mounted."""
    return [
        {"name": one["name"], "mountPath": _FOLDERS[one["name"]], "readOnly": True}
        for one in volumes
    ]


def probed_router(fleet: InferenceFleet) -> dict[str, str]:
    """The routers' port that kubelet asks: that of clients, whose certificate it does not verify;
    it has none itself, so where routers ask for one, the admin port."""
    if (tls := fleet.spec.router.tls) is None:
        return {"port": "http"}
    return {"port": "admin"} if tls.client_ca_secret_name else {"port": "http", "scheme": "HTTPS"}


def probed_engine(fleet: InferenceFleet) -> dict[str, str]:
    """The engines' port that kubelet asks."""
    is_tls = fleet.spec.engine.tls is not None
    return {"port": "http", **({"scheme": "HTTPS"} if is_tls else {})}
