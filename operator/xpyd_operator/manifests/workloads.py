"""What runs the pods of one (pool, revision): a Deployment, or a LeaderWorkerSet. Pure.

An instance that fits into one pod is a pod of a Deployment; one that needs several is a group of a
LeaderWorkerSet, whose first pod leads. GPUs that come by a DeviceClass need a
ResourceClaimTemplate, which stands before the workload that names it.
"""

from __future__ import annotations

from xpyd_operator.document import InferenceFleet, Pool
from xpyd_operator.manifests import names
from xpyd_operator.manifests.meta import metadata
from xpyd_operator.manifests.pods import GPU_CLAIM, engine_pod, pods_per_instance, router_pod
from xpyd_operator.manifests.values import JsonObject, Site
from xpyd_operator.plan import ROUTER, Workload

_PROGRESS_DEADLINE_S = 3600
"""A model of hundreds of gigabytes is loaded in less; the fleet's own conditions speak earlier."""


def workload_objects(
    fleet: InferenceFleet, workload: Workload, site: Site
) -> tuple[JsonObject, ...]:
    """The objects of a workload of the newest revision, in the order of their making.

    The document's templates must be without problems (`template_problems`).
    """
    if workload.pool == ROUTER:
        return (_deployment(fleet, workload, site, router_pod(fleet, workload, site)),)
    pool = next(pool for pool in fleet.spec.pools if pool.name == workload.pool)
    objects: list[JsonObject] = []
    if pool.resources.gpus and pool.resources.device_class_name:
        objects.append(_claim_template(fleet, pool, workload, site))
    if pods_per_instance(pool) == 1:
        pod = engine_pod(fleet, pool, workload, site)
        objects.append(_deployment(fleet, workload, site, pod))
    else:
        objects.append(_leader_worker_set(fleet, pool, workload, site))
    return tuple(objects)


def _labels(fleet: InferenceFleet, workload: Workload) -> dict[str, str]:
    return names.workload_labels(
        fleet.name, workload.pool, workload.template.role, workload.revision
    )


def _deployment(
    fleet: InferenceFleet, workload: Workload, site: Site, pod: JsonObject
) -> JsonObject:
    """A revision's pods never change, but for how a newer operator renders them."""
    name = names.workload_name(fleet.name, workload.pool, workload.revision)
    selector = names.workload_selector(fleet.name, workload.pool, workload.revision)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(name, fleet, site, _labels(fleet, workload)),
        "spec": {
            "replicas": workload.replicas,
            "minReadySeconds": 0,
            "revisionHistoryLimit": 0,
            "progressDeadlineSeconds": _PROGRESS_DEADLINE_S,
            "selector": {"matchLabels": selector},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "template": pod,
        },
    }


def _leader_worker_set(
    fleet: InferenceFleet, pool: Pool, workload: Workload, site: Site
) -> JsonObject:
    """LeaderWorkerSet itself gives the pods LWS_LEADER_ADDRESS, LWS_GROUP_SIZE and their index.

    The others begin with the first, which is not ready before they are there, and an instance goes
    down whole: where a container ended, all pods of its group are made again.
    """
    name = names.group_workload_name(fleet.name, workload.pool, workload.revision)
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata(name, fleet, site, _labels(fleet, workload)),
        "spec": {
            "replicas": workload.replicas,
            "startupPolicy": "LeaderCreated",
            "rolloutStrategy": {
                "type": "RollingUpdate",
                "rollingUpdateConfiguration": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "leaderWorkerTemplate": {
                "size": pods_per_instance(pool),
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": engine_pod(fleet, pool, workload, site),
                "workerTemplate": engine_pod(fleet, pool, workload, site, leads=False),
            },
        },
    }


def _claim_template(
    fleet: InferenceFleet, pool: Pool, workload: Workload, site: Site
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
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": metadata(name, fleet, site, _labels(fleet, workload)),
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }
