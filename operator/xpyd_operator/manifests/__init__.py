"""A fleet's Kubernetes objects, from values. Pure: no client, no clock, no random numbers.

    InferenceFleet + Workload (of the plan) + Placement --> workload_objects
    InferenceFleet + Placement                          --> support_objects, pool_object, kv_secret

Objects are plain JSON-able maps with apiVersion and kind. Each call makes new ones, so the caller
may change them. The shell (`controller`) decides what is applied and when, with `desired_hash` and
`contains`.
"""

from xpyd_operator.manifests.compare import contains, desired_hash
from xpyd_operator.manifests.names import JsonObject, Placement, Settings
from xpyd_operator.manifests.objects import (
    kv_secret,
    pool_object,
    support_objects,
    workload_objects,
)
from xpyd_operator.manifests.pods import model_in_pod, pods_per_instance, uses_host_path
from xpyd_operator.manifests.refusals import template_problems

__all__ = [
    "JsonObject",
    "Placement",
    "Settings",
    "contains",
    "desired_hash",
    "kv_secret",
    "model_in_pod",
    "pods_per_instance",
    "pool_object",
    "support_objects",
    "template_problems",
    "uses_host_path",
    "workload_objects",
]
