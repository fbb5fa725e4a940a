"""A fleet's Kubernetes objects, from values. Pure: no client, no clock, no random numbers.

    InferenceFleet + Workload (of the plan) + Placement --> workload_objects
    InferenceFleet + Placement                          --> support_objects, pool_object, kv_secret

Objects are plain JSON-able maps with apiVersion and kind. Each call makes new ones, so the caller
may change them. The shell (`controller`) decides what is applied and when.
See journey 3 of docs/architecture.md.
"""
