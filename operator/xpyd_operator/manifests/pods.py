"""Pod templates of engines and routers, as the pod security standard "restricted" wants them.

    InferenceFleet + Workload + Placement --engine_pod / router_pod--> PodTemplateSpec

Whatever the document says about a pod and this module reads must also be in the plan's Template
(args, env, image or pod). Otherwise a change would alter pods without a new revision. Names, the
namespace and the discovery address are added here and are in no revision.

The document's own templates are merged over the result (`merge`). `manifests.refusals` refuses a
template that sets what xpyd sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import cast

from xpyd_core.parallel.ranks import replica_kv_port
from xpyd_core.pod_env import HTTP_PORT, ROUTER_ADMIN_PORT, ROUTER_HTTP_PORT, data_port
from xpyd_operator.document.engine import NIXL_HOST, NIXL_PORT
from xpyd_operator.document.engines import Pool
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.manifests import names
from xpyd_operator.manifests.merge import merged
from xpyd_operator.manifests.names import JsonObject, Placement
from xpyd_operator.manifests.resources import (
    BEATS_RESOURCES,
    DOWNLOAD_RESOURCES,
    engine_resources,
    router_resources,
    without_given,
)
from xpyd_operator.manifests.tls import (
    engine_tls_args,
    engine_tls_volumes,
    probed_engine,
    probed_router,
    router_tls_args,
    tls_mounts,
)
from xpyd_operator.manifests.volumes import (
    MODELS_FOLDER,
    USER_ID,
    common_mounts,
    common_volumes,
    download_args,
    download_env,
    file_args,
    model_mounts,
    model_volumes,
    router_mounts,
    router_volumes,
    shares_sockets,
    socket_init,
    socket_mount,
    socket_volume,
)
from xpyd_operator.plan.template import REPLICAS_FILE, REPLICAS_FOLDER
from xpyd_operator.plan.values import ROUTER, Probe, Workload, probes_of
from xpyd_operator.plan.vllm import SOCKET_VARIABLE, variables

GRACE_EXTRA_S = 30
"""Beyond the drain timeout, which the program itself honours: KV leases end, sockets close."""
GPU_CLAIM = "xpyd-gpus"


def pods_per_instance(pool: Pool) -> int:
    """Pods that make up one instance: as many as its ranks need with `gpus` each."""
    return pool.parallelism.ranks // (pool.resources.gpus or pool.parallelism.ranks)


def engine_pod(
    fleet: InferenceFleet,
    pool: Pool,
    workload: Workload,
    placement: Placement,
    *,
    leads: bool = True,
) -> JsonObject:
    """The pod template of an engine. `leads` False: another pod of the instance, not its first.

    Only the first pod of an instance serves HTTP and reports for its ranks, so only it has probes;
    a stuck rank in another pod ends it. Ranks count through the pods in their order.
    """
    shares = shares_sockets(fleet, pool)
    certificates = engine_tls_volumes(fleet)
    container: JsonObject = {
        "name": names.ENGINE_CONTAINER,
        **_program(workload, engine_tls_args(fleet) if leads else [], shares=shares),
        "env": _engine_env(fleet, pool, workload, placement),
        "resources": _engine_resources(fleet, pool),
        "volumeMounts": [
            *common_mounts(fleet),
            {"name": "xpyd-shm", "mountPath": "/dev/shm"},
            *([socket_mount()] if shares else ()),
            *model_mounts(fleet),
            *tls_mounts(certificates),
            *(_replicas_mounts(pool) if leads else ()),
        ],
    }
    if leads:
        probe = partial(_probe, **probed_engine(fleet))
        container |= {
            "ports": [_port(name, port) for name, port in engine_ports(fleet, pool).items()],
            "startupProbe": probe(probes_of(workload.template).startup),
            "livenessProbe": probe(probes_of(workload.template).liveness),
            "readinessProbe": probe(Probe("/health", 1, 3, 2)),
        }
    shared_memory = {"medium": "Memory", "sizeLimit": pool.resources.shared_memory}
    volumes = [
        *common_volumes(fleet, placement.uid),
        {"name": "xpyd-shm", "emptyDir": shared_memory},
        *([socket_volume(fleet, placement)] if shares else ()),
        *model_volumes(fleet),
        *certificates,
        *(_replicas_volumes(pool) if leads else ()),
    ]
    pod = _pod(fleet, workload, placement, container, volumes)
    if certificates:
        pod["metadata"]["annotations"][names.ANNOTATION_SCHEME] = "https"
    if leads and pool.parallelism.max_data is not None:
        most = str(pool.parallelism.max_data)
        pod["metadata"]["annotations"][names.ANNOTATION_MAX_REPLICAS] = most
    inits: list[JsonObject] = []
    if shares:
        pull_policy = placement.settings.image_pull_policy
        inits.append(socket_init(pool, image=workload.template.image, pull_policy=pull_policy))
    if fleet.spec.model.by_pods:
        inits.append(download_container(fleet, placement))
    if inits:
        pod["spec"]["initContainers"] = inits
    if workload.template.beats:
        pod["spec"]["containers"].append(_beats_container(fleet, workload, placement))
    if pool.resources.gpus and pool.resources.device_class_name:
        claim = names.workload_name(fleet.name, workload.pool, workload.revision)
        pod["spec"]["resourceClaims"] = [{"name": GPU_CLAIM, "resourceClaimTemplateName": claim}]
    if leads and workload.template.gated:
        pod["spec"]["readinessGates"] = [{"conditionType": names.ROUTABLE}]
    return merged(pod, pool.template or {})


_REPLICAS = "xpyd-replicas"


def _replicas_volumes(pool: Pool) -> list[JsonObject]:
    """The pod's own annotation as a file, which changes with it."""
    if pool.parallelism.max_data is None:
        return []
    field = {"fieldPath": f"metadata.annotations['{names.ANNOTATION_REPLICAS}']"}
    items = [{"path": REPLICAS_FILE, "fieldRef": field}]
    return [{"name": _REPLICAS, "downwardAPI": {"items": items}}]


def has_replicas(spec: Mapping[str, object]) -> bool:
    """Whether a pod of this spec has that file: its engine's replicas come and go."""
    volumes = cast("list[JsonObject]", spec.get("volumes") or [])
    return any(volume.get("name") == _REPLICAS for volume in volumes)


def _replicas_mounts(pool: Pool) -> list[JsonObject]:
    if pool.parallelism.max_data is None:
        return []
    return [{"name": _REPLICAS, "mountPath": REPLICAS_FOLDER, "readOnly": True}]


def _program(workload: Workload, tls: list[str], *, shares: bool) -> JsonObject:
    args = workload.template.args
    if workload.template.is_vllm:  # to it the folder is a variable: _engine_env
        return {"command": ["vllm", "serve"], "args": [*args[:1], *tls, *args[1:]]}
    folder = [f"--kv-socket-dir={names.SOCKET_FOLDER}"] if shares else []
    return {"args": ["worker", *folder, *tls, *args]}


def download_container(fleet: InferenceFleet, placement: Placement) -> JsonObject:
    """The container that downloads the model; it writes where engines only read."""
    container: JsonObject = {
        "name": names.MODEL_CONTAINER,
        "image": placement.settings.worker_image,
        "args": download_args(fleet),
        "env": download_env(fleet),
        "resources": deepcopy(DOWNLOAD_RESOURCES),
        "volumeMounts": [
            {"name": "xpyd-tmp", "mountPath": "/tmp"},
            {"name": "xpyd-models", "mountPath": MODELS_FOLDER},
        ],
    }
    return _restricted(container, placement)


def model_pod(fleet: InferenceFleet, placement: Placement) -> JsonObject:
    """The pod template of the Job that downloads the model into its claim."""
    container = download_container(fleet, placement)
    container["args"].append(f"--progress-port={names.PROGRESS_PORT}")
    container["env"].append({"name": "XPYD_POD_IP", **_field("status.podIP")})
    container["ports"] = [_port("progress", names.PROGRESS_PORT)]
    claim = {"claimName": fleet.spec.model.cache.claim_name}
    volumes: list[JsonObject] = [
        {"name": "xpyd-tmp", "emptyDir": {}},
        {"name": "xpyd-models", "persistentVolumeClaim": claim},
    ]
    spec = _pod_spec(fleet, placement, container, volumes, {"restartPolicy": "OnFailure"})
    labels = names.fleet_labels(fleet.name, names.MODEL_APP) | {names.LABEL_ROLE: names.MODEL_ROLE}
    return {"metadata": {"labels": labels}, "spec": spec}


def _beats_container(fleet: InferenceFleet, workload: Workload, placement: Placement) -> JsonObject:
    """What tells the routers of a vLLM in the same pod."""
    tls = [] if fleet.spec.engine.tls is None else ["--tls"]
    container: JsonObject = {
        "name": names.BEATS_CONTAINER,
        "image": placement.settings.worker_image,
        "args": ["vllm-beats", *tls, *workload.template.beats],
        "env": _env(_instance_env(fleet, workload, placement)),
        "resources": BEATS_RESOURCES,
        "volumeMounts": common_mounts(fleet),
    }
    return _restricted(container, placement)


def engine_ports(fleet: InferenceFleet, pool: Pool) -> dict[str, int]:
    """What an instance's first pod listens on, by name. Its other pods have one template for all of
    them, which cannot say whose ranks listen where; a pod need not name its ports to use them."""
    kv_port, each = fleet.spec.kv_transfer.port, pool.parallelism.sizes.replica
    if fleet.spec.engine.is_nixl:
        # Its scheduler answers for all ranks; where they take KV is UCX's to choose.
        return {"http": HTTP_PORT, "kv": kv_port}
    found = {"http": HTTP_PORT, "kv": kv_port}
    here = pool.parallelism.ranks // pods_per_instance(pool)
    if len(pool.kv_ports(kv_port, is_vllm=fleet.spec.engine.type == "VLLM")) == 1:
        return found
    for rank in range(pool.parallelism.ranks):
        replica, own = divmod(rank, each)
        control = replica_kv_port(kv_port, replica, each)
        # All replicas' schedulers are in the first pod, and the ranks of its own.
        found |= {f"kv-{replica}": control} if replica else {}
        found |= {f"data-{rank}": data_port(control, own)} if rank < here else {}
    return found


def router_pod(fleet: InferenceFleet, workload: Workload, placement: Placement) -> JsonObject:
    """The pod template of a router; replicas prefer different nodes."""
    router = fleet.spec.router
    discovery_port = router.discovery_port
    probe = partial(_probe, **probed_router(fleet))
    container: JsonObject = {
        "name": names.ROUTER_CONTAINER,
        "args": [
            "router",
            f"--port={ROUTER_HTTP_PORT}",
            f"--admin-port={ROUTER_ADMIN_PORT}",
            f"--discovery-port={discovery_port}",
            *_client_keys_args(fleet, placement),
            *file_args(fleet),
            *router_tls_args(fleet, placement.namespace),
            *workload.template.args,
        ],
        "env": _env(_place_env(fleet, workload, placement)),
        "ports": [
            _port("http", ROUTER_HTTP_PORT),
            _port("admin", ROUTER_ADMIN_PORT),
            _port("discovery", discovery_port),
        ],
        "startupProbe": probe(probes_of(workload.template).startup),
        "livenessProbe": probe(probes_of(workload.template).liveness),
        "readinessProbe": probe(Probe("/readiness", 1, 2, 2)),
        "resources": without_given(
            router_resources(fleet), router.template or {}, names.ROUTER_CONTAINER
        ),
        "volumeMounts": [*common_mounts(fleet), *router_mounts(fleet)],
    }
    volumes = [*common_volumes(fleet, placement.uid), *router_volumes(fleet)]
    pod = _pod(fleet, workload, placement, container, volumes)
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


def _client_keys_args(fleet: InferenceFleet, placement: Placement) -> list[str]:
    """The file of client keys, and the name whose addresses are the routers that share their
    limits."""
    if fleet.spec.router.auth is None:
        return []
    return [
        f"--api-key-file={names.CLIENT_KEYS_FOLDER}/{names.CLIENT_KEYS}",
        f"--peers={names.discovery_host(fleet.name, placement.namespace)}",
    ]


def _pod(
    fleet: InferenceFleet,
    workload: Workload,
    placement: Placement,
    container: JsonObject,
    volumes: list[JsonObject],
) -> JsonObject:
    """The parts that engines and routers share."""
    role = workload.template.role
    name = container["name"]
    container = _restricted(
        {"name": name, "image": workload.template.image, **container}, placement
    )
    grace_s = fleet.spec.drain.timeout_seconds + GRACE_EXTRA_S
    spec = _pod_spec(
        fleet, placement, container, volumes, {"terminationGracePeriodSeconds": grace_s}
    )
    return {
        "metadata": {
            "labels": names.workload_labels(fleet.name, workload.pool, role, workload.revision),
            "annotations": names.pod_annotations(fleet, name),
        },
        "spec": spec,
    }


def _pod_spec(
    fleet: InferenceFleet,
    placement: Placement,
    container: JsonObject,
    volumes: list[JsonObject],
    more: JsonObject,
) -> JsonObject:
    """What every pod of the fleet has; `more`: what its kind has besides."""
    spec: JsonObject = {
        "serviceAccountName": names.service_account_name(fleet.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **more,
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
    if placement.settings.image_pull_secrets:
        spec["imagePullSecrets"] = [
            {"name": name} for name in placement.settings.image_pull_secrets
        ]
    return spec


def _restricted(container: JsonObject, placement: Placement) -> JsonObject:
    """A container with what all of them have."""
    first = {key: container.pop(key) for key in ("name", "image")}
    return {
        **first,
        "imagePullPolicy": placement.settings.image_pull_policy,
        **container,
        # The last line of the log explains a crash: xpyd_operator.status.crashes reads it.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _place_env(
    fleet: InferenceFleet, workload: Workload, placement: Placement
) -> dict[str, JsonObject]:
    """Variables that identify the pod and its place: name -> the rest of the entry."""
    key = {"XPYD_KV_KEY_FILE": {"value": f"{names.KV_FOLDER}/{names.KV_KEY}"}}
    return {
        "XPYD_POD_IP": _field("status.podIP"),
        **({} if fleet.spec.kv_transfer.insecure else key),
        "XPYD_FLEET": {"value": f"{placement.namespace}/{fleet.name}"},
        "XPYD_POOL": {"value": workload.pool},
        "XPYD_INSTANCE": _field("metadata.name"),
        "XPYD_REVISION": {"value": workload.revision},
        # The root file system is read-only.
        "HOME": {"value": "/tmp"},
    }


def _instance_env(
    fleet: InferenceFleet, workload: Workload, placement: Placement
) -> dict[str, JsonObject]:
    """Those, and what an instance says of itself to the routers."""
    common = workload.template.fleet_revision
    discovery = names.discovery_host(fleet.name, placement.namespace)
    return {
        **_place_env(fleet, workload, placement),
        "XPYD_ROLE": {"value": workload.template.role},
        **({names.FLEET_REVISION: {"value": common}} if common else {}),
        "XPYD_HTTP_PORT": {"value": str(HTTP_PORT)},
        "XPYD_KV_PORT": {"value": str(fleet.spec.kv_transfer.port)},
        "XPYD_DISCOVERY": {"value": f"{discovery}:{fleet.spec.router.discovery_port}"},
    }


def _engine_env(
    fleet: InferenceFleet, pool: Pool, workload: Workload, placement: Placement
) -> list[JsonObject]:
    model = fleet.spec.model
    env = _instance_env(fleet, workload, placement)
    ours: dict[str, str] = {}
    if workload.template.is_vllm:
        # Where its ranks meet; and torch asks for the user's name, which the image may not have.
        env |= {"VLLM_HOST_IP": _field("status.podIP"), "LOGNAME": {"value": "xpyd"}}
        ours = variables(fleet.spec, pool)
        if shares_sockets(fleet, pool):
            env[SOCKET_VARIABLE] = {"value": names.SOCKET_FOLDER}
        if NIXL_PORT in ours:
            env[NIXL_HOST] = _field("status.podIP")
        env |= {name: {"value": value} for name, value in ours.items()}
    loads_itself = model.uri.startswith("hf://") and not model.by_job
    if loads_itself:
        env["HF_HOME"] = {"value": MODELS_FOLDER}
    if loads_itself and model.secret_ref is not None:
        ref = {"name": model.secret_ref.name, "key": model.secret_ref.key}
        env["HF_TOKEN"] = {"valueFrom": {"secretKeyRef": ref}}
    # The document's variables come last, in its order, because they may refer to ours. The API
    # server would refuse a name that is given twice.
    for variable in fleet.spec.engine.env:
        env.pop(variable.name, None)
        if variable.value_from is None:
            env[variable.name] = {"value": ours.get(variable.name, variable.value)}
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


def _probe(probe: Probe, **asked: str) -> JsonObject:
    return {
        "httpGet": {"path": probe.path, **asked},
        "periodSeconds": int(probe.period_s),
        "timeoutSeconds": int(probe.timeout_s),
        "failureThreshold": probe.failures,
    }


def _engine_resources(fleet: InferenceFleet, pool: Pool) -> JsonObject:
    ours = without_given(engine_resources(fleet, pool), pool.template or {}, names.ENGINE_CONTAINER)
    return merged(ours, _devices(pool))


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
