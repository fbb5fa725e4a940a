"""Pod templates of engines and routers, as the "restricted" pod security standard wants them. Pure.

    InferenceFleet + Workload + Site --engine_pod / router_pod--> PodTemplateSpec

What the document says about a pod and what is read here must also be part of the plan's Template
(its args, env, image or pod), or a change of it would alter pods without a new revision. Names,
the namespace and the discovery address are added here and are in no revision.
"""

from __future__ import annotations

from xpyd_core.pod_env import HTTP_PORT, ROUTER_HTTP_PORT, data_port
from xpyd_operator.document import InferenceFleet, Pool
from xpyd_operator.manifests import names
from xpyd_operator.manifests.overrides import merged
from xpyd_operator.manifests.sockets import (
    USER_ID,
    shares_sockets,
    socket_args,
    socket_init,
    socket_mount,
    socket_volume,
)
from xpyd_operator.manifests.values import JsonObject, Site
from xpyd_operator.manifests.volumes import (
    MODELS_FOLDER,
    common_mounts,
    common_volumes,
    model_mounts,
    model_volumes,
)
from xpyd_operator.plan import ROUTER, Workload

GRACE_EXTRA_S = 30
"""Beyond the drain timeout, which the program itself honours: KV leases end, sockets close."""
GPU_CLAIM = "xpyd-gpus"
_START_S = 600
"""An engine answers /live before it loads its model; this is for a slow image and slow imports."""
_ROUTER_START_S = 120


def pods_per_instance(pool: Pool) -> int:
    """Pods that make up one instance: as many as its ranks need with `gpus` each."""
    return pool.parallelism.ranks // (pool.resources.gpus or pool.parallelism.ranks)


def engine_pod(
    fleet: InferenceFleet, pool: Pool, workload: Workload, site: Site, *, leads: bool = True
) -> JsonObject:
    """The pod template of an engine. `leads` False: another pod of the instance, not its first.

    Only the first pod of an instance serves HTTP and speaks for its ranks, so only it has probes; a
    rank that is stuck elsewhere ends it. Ranks count through the pods in their order.
    """
    shares = shares_sockets(fleet, pool)
    container: JsonObject = {
        "name": names.ENGINE_CONTAINER,
        "args": ["worker", *(socket_args() if shares else ()), *workload.template.args],
        "env": _engine_env(fleet, workload, site),
        "resources": _devices(pool),
        "volumeMounts": [
            *common_mounts(fleet),
            {"name": "xpyd-shm", "mountPath": "/dev/shm"},
            *([socket_mount()] if shares else ()),
            *model_mounts(fleet),
        ],
    }
    if leads:
        container |= {
            "ports": [_port(name, port) for name, port in engine_ports(fleet, pool).items()],
            "startupProbe": _probe("/live", period_s=1, failures=_START_S, timeout_s=2),
            "livenessProbe": _probe("/live", period_s=10, failures=6, timeout_s=5),
            "readinessProbe": _probe("/health", period_s=1, failures=3, timeout_s=2),
        }
    shared_memory = {"medium": "Memory", "sizeLimit": pool.resources.shared_memory}
    volumes = [
        *common_volumes(fleet, site.uid),
        {"name": "xpyd-shm", "emptyDir": shared_memory},
        *([socket_volume(fleet, site)] if shares else ()),
        *model_volumes(fleet),
    ]
    pod = _pod(fleet, workload, site, container, volumes)
    if shares:
        pull_policy = site.settings.image_pull_policy
        init = socket_init(pool, image=workload.template.image, pull_policy=pull_policy)
        pod["spec"]["initContainers"] = [init]
    if pool.resources.gpus and pool.resources.device_class_name:
        claim = names.workload_name(fleet.name, workload.pool, workload.revision)
        pod["spec"]["resourceClaims"] = [{"name": GPU_CLAIM, "resourceClaimTemplateName": claim}]
    return merged(pod, pool.template or {})


def engine_ports(fleet: InferenceFleet, pool: Pool) -> dict[str, int]:
    """What an instance's first pod listens on, by name. Its other pods have one template for all of
    them, which cannot say whose ranks listen where; a pod need not name its ports to use them."""
    kv_port, ranks = fleet.spec.kv_transfer.port, pool.parallelism.ranks
    here = ranks // pods_per_instance(pool) if ranks > 1 else 0
    data = {f"data-{rank}": data_port(kv_port, rank) for rank in range(here)}
    return {"http": HTTP_PORT, "kv": kv_port, **data}


def router_pod(fleet: InferenceFleet, workload: Workload, site: Site) -> JsonObject:
    """The pod template of a router; replicas prefer different nodes."""
    discovery_port = fleet.spec.router.discovery_port
    container: JsonObject = {
        "name": names.ROUTER_CONTAINER,
        "args": [
            "router",
            f"--port={ROUTER_HTTP_PORT}",
            f"--discovery-port={discovery_port}",
            *workload.template.args,
        ],
        "env": _env(_place_env(fleet, workload, site)),
        "ports": [_port("http", ROUTER_HTTP_PORT), _port("discovery", discovery_port)],
        "startupProbe": _probe("/health", period_s=1, failures=_ROUTER_START_S, timeout_s=2),
        "livenessProbe": _probe("/health", period_s=10, failures=3, timeout_s=5),
        "readinessProbe": _probe("/readiness", period_s=1, failures=2, timeout_s=2),
        "volumeMounts": common_mounts(fleet),
    }
    pod = _pod(fleet, workload, site, container, common_volumes(fleet, site.uid))
    pod["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {
                "matchLabels": names.workload_selector(fleet.name, ROUTER, workload.revision)
            },
        }
    ]
    return merged(pod, fleet.spec.router.template or {})


def _pod(
    fleet: InferenceFleet,
    workload: Workload,
    site: Site,
    container: JsonObject,
    volumes: list[JsonObject],
) -> JsonObject:
    """What engines and routers have in common."""
    role = workload.template.role
    name = container["name"]
    container = {
        "name": name,
        "image": workload.template.image,
        "imagePullPolicy": site.settings.image_pull_policy,
        **container,
        # A crash is told with the last line of the log: xpyd_operator.status.crashes reads it.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    spec: JsonObject = {
        "serviceAccountName": names.service_account_name(fleet.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": fleet.spec.drain.timeout_seconds + GRACE_EXTRA_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            # A large volume is not walked at each start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    if site.settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in site.settings.image_pull_secrets]
    return {
        "metadata": {
            "labels": names.workload_labels(fleet.name, workload.pool, role, workload.revision),
            "annotations": {"kubectl.kubernetes.io/default-container": name},
        },
        "spec": spec,
    }


def _place_env(fleet: InferenceFleet, workload: Workload, site: Site) -> dict[str, JsonObject]:
    """Variables that say which pod this is and where it lies: name -> the rest of the entry."""
    key = {"XPYD_KV_KEY_FILE": {"value": f"{names.KV_FOLDER}/{names.KV_KEY}"}}
    return {
        "XPYD_POD_IP": _field("status.podIP"),
        **({} if fleet.spec.kv_transfer.insecure else key),
        "XPYD_FLEET": {"value": f"{site.namespace}/{fleet.name}"},
        "XPYD_POOL": {"value": workload.pool},
        "XPYD_INSTANCE": _field("metadata.name"),
        "XPYD_REVISION": {"value": workload.revision},
        # The root file system is read-only.
        "HOME": {"value": "/tmp"},
    }


def _engine_env(fleet: InferenceFleet, workload: Workload, site: Site) -> list[JsonObject]:
    model = fleet.spec.model
    discovery = names.discovery_host(fleet.name, site.namespace)
    env = {
        **_place_env(fleet, workload, site),
        "XPYD_ROLE": {"value": workload.template.role},
        "XPYD_HTTP_PORT": {"value": str(HTTP_PORT)},
        "XPYD_KV_PORT": {"value": str(fleet.spec.kv_transfer.port)},
        "XPYD_DISCOVERY": {"value": f"{discovery}:{fleet.spec.router.discovery_port}"},
    }
    if model.uri.startswith("hf://"):
        env["HF_HOME"] = {"value": MODELS_FOLDER}
    if model.secret_ref is not None:
        ref = {"name": model.secret_ref.name, "key": model.secret_ref.key}
        env["HF_TOKEN"] = {"valueFrom": {"secretKeyRef": ref}}
    # The document's come last, in its order: they may refer to ours, and a name given twice would
    # be refused by the API server.
    for variable in fleet.spec.engine.env:
        env.pop(variable.name, None)
        if variable.value_from is None:
            env[variable.name] = {"value": variable.value}
        else:
            source = variable.value_from.model_dump(by_alias=True, exclude_none=True)
            env[variable.name] = {"valueFrom": source}
    return _env(env)


def _env(variables: dict[str, JsonObject]) -> list[JsonObject]:
    return [{"name": name, **rest} for name, rest in variables.items()]


def _field(path: str) -> JsonObject:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def _port(name: str, number: int) -> JsonObject:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def _probe(path: str, *, period_s: int, failures: int, timeout_s: int) -> JsonObject:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def _devices(pool: Pool) -> JsonObject:
    resources = pool.resources
    if not resources.gpus:
        return {}
    if resources.device_class_name:
        return {"claims": [{"name": GPU_CLAIM}]}
    # A device's limit is its request too.
    return {
        "limits": {resources.gpu_resource_name or names.DEFAULT_GPU_RESOURCE: str(resources.gpus)}
    }
