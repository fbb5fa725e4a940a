"""A fleet's Kubernetes objects: workloads, pool objects, Services, disruption and network policies.

    workload_objects  what runs the pods of one (pool, revision): a Deployment, or a LeaderWorkerSet
                      where an instance needs several pods
    support_objects   one set per fleet: identity, addresses, disruption budgets, network policies
    pool_object       one per pool, for `kubectl scale` and an HPA
    kv_secret         the fleet's KV key, created once and never read

Only workload objects carry a revision: a change of another object changes no pod.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping

from xpyd_core.pod_env import HTTP_PORT, ROUTER_ADMIN_PORT, ROUTER_HTTP_PORT
from xpyd_operator.document.engines import Pool
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.manifests import names
from xpyd_operator.manifests.entry import client_service, routes
from xpyd_operator.manifests.names import JsonObject, Placement, owned_object
from xpyd_operator.manifests.pods import (
    GPU_CLAIM,
    engine_pod,
    model_pod,
    pods_per_instance,
    router_pod,
)
from xpyd_operator.manifests.volumes import job_digest
from xpyd_operator.plan.values import ROUTER, Workload


def workload_objects(
    fleet: InferenceFleet, workload: Workload, placement: Placement
) -> tuple[JsonObject, ...]:
    """The objects of a workload of the newest revision, in the order of their making.

    The document's templates must be without problems (`template_problems`).
    """
    if workload.pool == ROUTER:
        return (_deployment(fleet, workload, placement, router_pod(fleet, workload, placement)),)
    pool = next(pool for pool in fleet.spec.pools if pool.name == workload.pool)
    objects: list[JsonObject] = []
    if pool.resources.gpus and pool.resources.device_class_name:
        objects.append(_claim_template(fleet, pool, workload, placement))
    if pods_per_instance(pool) == 1:
        pod = engine_pod(fleet, pool, workload, placement)
        objects.append(_deployment(fleet, workload, placement, pod))
    else:
        objects.append(_leader_worker_set(fleet, pool, workload, placement))
    return tuple(objects)


def _workload_labels(fleet: InferenceFleet, workload: Workload) -> dict[str, str]:
    return names.workload_labels(
        fleet.name, workload.pool, workload.template.role, workload.revision
    )


def _deployment(
    fleet: InferenceFleet, workload: Workload, placement: Placement, pod: JsonObject
) -> JsonObject:
    """A revision's pods never change, except in how a newer operator renders them."""
    name = names.workload_name(fleet.name, workload.pool, workload.revision)
    selector = names.workload_selector(fleet.name, workload.pool, workload.revision)
    labels = _workload_labels(fleet, workload)
    spec = {
        "replicas": workload.replicas,
        "minReadySeconds": 0,
        "revisionHistoryLimit": 0,
        "progressDeadlineSeconds": fleet.spec.rollout.progress_deadline_seconds,
        "selector": {"matchLabels": selector},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": pod,
    }
    return owned_object("apps/v1", "Deployment", name, labels, fleet, placement, spec=spec)


def _leader_worker_set(
    fleet: InferenceFleet, pool: Pool, workload: Workload, placement: Placement
) -> JsonObject:
    """LeaderWorkerSet itself gives the pods LWS_LEADER_ADDRESS, LWS_GROUP_SIZE and their index.

    The other pods start with the first, which is not ready before they are there. An instance fails
    as a whole: when a container ends, all pods of its group are created again.
    """
    api_version = "leaderworkerset.x-k8s.io/v1"
    name = names.group_workload_name(fleet.name, workload.pool, workload.revision)
    labels = _workload_labels(fleet, workload)
    spec = {
        "replicas": workload.replicas,
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "leaderWorkerTemplate": {
            "size": pods_per_instance(pool),
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": engine_pod(fleet, pool, workload, placement),
            "workerTemplate": engine_pod(fleet, pool, workload, placement, leads=False),
        },
    }
    return owned_object(api_version, "LeaderWorkerSet", name, labels, fleet, placement, spec=spec)


def _claim_template(
    fleet: InferenceFleet, pool: Pool, workload: Workload, placement: Placement
) -> JsonObject:
    """Each pod gets a claim of its own for its devices."""
    name = names.workload_name(fleet.name, workload.pool, workload.revision)
    request = {
        "name": GPU_CLAIM,
        "exactly": {
            "deviceClassName": pool.resources.device_class_name,
            "allocationMode": "ExactCount",
            "count": pool.resources.gpus,
        },
    }
    kind, labels = "ResourceClaimTemplate", _workload_labels(fleet, workload)
    spec = {"spec": {"devices": {"requests": [request]}}}
    return owned_object("resource.k8s.io/v1", kind, name, labels, fleet, placement, spec=spec)


def support_objects(
    fleet: InferenceFleet, placement: Placement, *, guarded: Collection[str] = ()
) -> tuple[JsonObject, ...]:
    """ServiceAccount, Services, routes, PodDisruptionBudgets, NetworkPolicies and the Job of the
    model, in that order. `guarded`: pools whose only instance no eviction may take."""
    roles = [(ROUTER, ROUTER), *((pool.name, pool.role) for pool in fleet.spec.pools)]
    return (
        _service_account(fleet, placement),
        client_service(fleet, placement),
        _discovery_service(fleet, placement),
        *routes(fleet, placement),
        *(
            _disruption_budget(fleet, placement, pool, role, most=0 if pool in guarded else 1)
            for pool, role in roles
        ),
        *(network_policies(fleet, placement) if fleet.spec.network_policy.enabled else ()),
        *((_model_job(fleet, placement),) if fleet.spec.model.by_job else ()),
    )


_TRIES = 100_000
"""Of a Job's pod: Kubelet waits up to 5 minutes between them, so a year's. When rights, path or
volume are mended, the next one succeeds; a Job that had failed for good would stay so."""


def _model_job(fleet: InferenceFleet, placement: Placement) -> JsonObject:
    """See docs/adr/0082."""
    name = names.model_job_name(fleet.name, job_digest(fleet))
    labels = names.fleet_labels(fleet.name, names.MODEL_APP)
    spec = {"backoffLimit": _TRIES, "template": model_pod(fleet, placement)}
    return owned_object("batch/v1", "Job", name, labels, fleet, placement, spec=spec)


def pool_object(
    fleet: InferenceFleet, pool: Pool, replicas: int, declared: int | None, placement: Placement
) -> JsonObject:
    """The pool's InferenceFleetPool.

    `replicas`: what it has from now on; `declared`: what the document declared when it was last
    taken over, None for nothing.
    """
    spec: JsonObject = {
        "fleetName": fleet.name,
        "poolName": pool.name,
        "role": pool.role,
        "replicas": replicas,
    }
    bounds = {
        "minReplicas": pool.scaling.min_replicas or None,
        "maxReplicas": pool.scaling.max_replicas,
        "declaredReplicas": declared,
    }
    spec |= {name: value for name, value in bounds.items() if value is not None}
    labels = names.pool_labels(fleet.name, pool.name, pool.role)
    name = names.pool_object_name(fleet.name, pool.name)
    kind = "InferenceFleetPool"
    return owned_object(fleet.api_version, kind, name, labels, fleet, placement, spec=spec)


def kv_secret(fleet: InferenceFleet, placement: Placement, key: str, slot: str) -> JsonObject:
    """The Secret of this slot with the fleet's KV key, `key`: 64 hex digits from the shell's random
    source."""
    labels = names.fleet_labels(fleet.name, names.ENGINE_APP)
    name = names.kv_secret_name(fleet.name, placement.uid, slot)
    data = {names.KV_KEY: b64encode(key.encode()).decode()}
    return owned_object("v1", "Secret", name, labels, fleet, placement, type="Opaque", data=data)


def kv_order(
    fleet: InferenceFleet,
    placement: Placement,
    files: Iterable[str],
    annotations: dict[str, str],
) -> JsonObject:
    """The ConfigMap that says which keys count; `files`: the first signs, all are accepted."""
    labels = names.fleet_labels(fleet.name, names.ENGINE_APP)
    name = names.kv_secret_name(fleet.name, placement.uid)
    data = {names.KV_ORDER: "".join(f"{file}\n" for file in files)}
    found = owned_object("v1", "ConfigMap", name, labels, fleet, placement, data=data)
    found["metadata"]["annotations"] = annotations
    return found


def canary_map(fleet: InferenceFleet, placement: Placement, data: Mapping[str, str]) -> JsonObject:
    """The ConfigMap of a canary: its state, and the file of the routers."""
    labels = names.fleet_labels(fleet.name, names.ROUTER_APP)
    name = names.canary_name(fleet.name)
    return owned_object("v1", "ConfigMap", name, labels, fleet, placement, data=dict(data))


def _service_account(fleet: InferenceFleet, placement: Placement) -> JsonObject:
    """Pods call each other, never the API server."""
    name = names.service_account_name(fleet.name)
    labels = names.fleet_labels(fleet.name, names.ENGINE_APP)
    beginning = ("v1", "ServiceAccount", name, labels, fleet, placement)
    return owned_object(*beginning, automountServiceAccountToken=False)


def _discovery_service(fleet: InferenceFleet, placement: Placement) -> JsonObject:
    """Headless: each A record is a router. A router that starts is ready once it knows engines, so
    the engines must find it before."""
    port = {
        "name": "discovery",
        "port": fleet.spec.router.discovery_port,
        "targetPort": "discovery",
        "protocol": "TCP",
    }
    spec = {
        "type": "ClusterIP",
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": names.pool_selector(fleet.name, ROUTER),
        "ports": [port],
    }
    return _service(fleet, placement, names.discovery_service_name(fleet.name), spec)


def _service(
    fleet: InferenceFleet, placement: Placement, name: str, spec: JsonObject
) -> JsonObject:
    labels = names.fleet_labels(fleet.name, names.ROUTER_APP)
    return owned_object("v1", "Service", name, labels, fleet, placement, spec=spec)


def _disruption_budget(
    fleet: InferenceFleet, placement: Placement, pool: str, role: str, *, most: int
) -> JsonObject:
    """A node drain evicts `most` pods at a time; a broken pod never blocks a drain."""
    name = names.disruption_budget_name(fleet.name, pool)
    labels = names.pool_labels(fleet.name, pool, role)
    spec = {
        "maxUnavailable": most,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": names.pool_selector(fleet.name, pool)},
    }
    kind = "PodDisruptionBudget"
    return owned_object("policy/v1", kind, name, labels, fleet, placement, spec=spec)


def network_policies(fleet: InferenceFleet, placement: Placement) -> tuple[JsonObject, ...]:
    """The engines' policy and the routers'."""
    engines = {"podSelector": _pod_selector(fleet, names.ENGINE_APP)}
    routers = {"podSelector": _pod_selector(fleet, names.ROUTER_APP)}
    scrapers = _namespace(names.LABEL_SCRAPE, "true")
    # An admin's own pods, too, which have the key.
    own: JsonObject = {"podSelector": {}}
    others = [_namespace(names.LABEL_NAMESPACE, n) for n in placement.settings.admin_namespaces]
    to_engines = [
        _between_engines(fleet, engines),
        {"from": [routers, scrapers], "ports": [_port(HTTP_PORT)]},
        *_inside_instances(fleet),
    ]
    to_routers = [
        {"ports": [_port(ROUTER_HTTP_PORT)]},
        {"from": [own, scrapers, *others], "ports": [_port(ROUTER_ADMIN_PORT)]},
        {"from": [engines], "ports": [_port(fleet.spec.router.discovery_port)]},
    ]
    return (
        _policy(
            fleet, placement, names.engine_policy_name(fleet.name), names.ENGINE_APP, to_engines
        ),
        _policy(
            fleet, placement, names.router_policy_name(fleet.name), names.ROUTER_APP, to_routers
        ),
        *((_model_policy(fleet, placement),) if fleet.spec.model.by_job else ()),
    )


def _namespace(label: str, value: str) -> JsonObject:
    return {"namespaceSelector": {"matchLabels": {label: value}}}


def _model_policy(fleet: InferenceFleet, placement: Placement) -> JsonObject:
    """The download goes out wherever the model is; the operator, whose namespace no policy here
    knows, asks how far it is."""
    ingress = [{"ports": [_port(names.PROGRESS_PORT)]}]
    policy = _policy(
        fleet, placement, names.model_policy_name(fleet.name), names.MODEL_APP, ingress
    )
    policy["spec"] |= {"policyTypes": ["Ingress", "Egress"], "egress": [{}]}
    return policy


def _pod_selector(fleet: InferenceFleet, app: str) -> JsonObject:
    return {"matchLabels": names.app_selector(fleet.name, app)}


def _port(number: int) -> JsonObject:
    return {"protocol": "TCP", "port": number}


def _between_engines(fleet: InferenceFleet, engines: JsonObject) -> JsonObject:
    """NIXL's data comes to ports that UCX chooses; its handshake to the KV port."""
    if fleet.spec.engine.is_nixl:
        return {"from": [engines]}
    return {"from": [engines], "ports": [_kv_ports(fleet)]}


def _kv_ports(fleet: InferenceFleet) -> JsonObject:
    """The KV port, and those after it of ranks and replicas where an instance has several, or is
    vLLM's."""
    first, is_vllm = fleet.spec.kv_transfer.port, fleet.spec.engine.type == "VLLM"
    last = max(pool.kv_ports(first, is_vllm=is_vllm)[-1] for pool in fleet.spec.pools)
    return _port(first) if last == first else _port(first) | {"endPort": last}


def _inside_instances(fleet: InferenceFleet) -> list[JsonObject]:
    """Ranks of one instance meet on one port and then talk on ports that their libraries choose. A
    policy cannot tell the instances of a pool apart, so the pool's pods may reach each other."""
    return [
        {"from": [{"podSelector": {"matchLabels": names.pool_selector(fleet.name, pool.name)}}]}
        for pool in fleet.spec.pools
        if pods_per_instance(pool) > 1
    ]


def _policy(
    fleet: InferenceFleet, placement: Placement, name: str, app: str, ingress: list[JsonObject]
) -> JsonObject:
    kind, labels = "NetworkPolicy", names.fleet_labels(fleet.name, app)
    spec = {
        "podSelector": _pod_selector(fleet, app),
        "policyTypes": ["Ingress"],
        "ingress": ingress,
    }
    return owned_object("networking.k8s.io/v1", kind, name, labels, fleet, placement, spec=spec)
