"""What stands beside the pods: identity, addresses, disruption budgets, network rules. Pure.

    support_objects  one set per fleet, applied whole
    pool_object      one per pool: what `kubectl scale` and HPA write
    kv_secret        made once, never read again

None of these is in a revision: changing one changes no pod.
"""

from __future__ import annotations

from base64 import b64encode

from xpyd_operator.document import InferenceFleet, Pool
from xpyd_operator.manifests import names
from xpyd_operator.manifests.meta import metadata
from xpyd_operator.manifests.network import network_policies
from xpyd_operator.manifests.values import JsonObject, Site
from xpyd_operator.plan import ROUTER


def support_objects(fleet: InferenceFleet, site: Site) -> tuple[JsonObject, ...]:
    """ServiceAccount, Services, PodDisruptionBudgets and NetworkPolicies, in that order."""
    roles = [(ROUTER, ROUTER), *((pool.name, pool.role) for pool in fleet.spec.pools)]
    return (
        _service_account(fleet, site),
        _client_service(fleet, site),
        _discovery_service(fleet, site),
        *(_disruption_budget(fleet, site, pool, role) for pool, role in roles),
        *(network_policies(fleet, site) if fleet.spec.network_policy.enabled else ()),
    )


def pool_object(
    fleet: InferenceFleet, pool: Pool, replicas: int, declared: int | None, site: Site
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
    return {
        "apiVersion": fleet.api_version,
        "kind": "InferenceFleetPool",
        "metadata": metadata(name, fleet, site, labels),
        "spec": spec,
    }


def kv_secret(fleet: InferenceFleet, site: Site, key: str) -> JsonObject:
    """The Secret with the fleet's KV key, `key`: 64 hex digits from the shell's random source."""
    labels = names.fleet_labels(fleet.name, names.ENGINE_APP)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(names.kv_secret_name(fleet.name, site.uid), fleet, site, labels),
        "type": "Opaque",
        "data": {names.KV_KEY: b64encode(key.encode()).decode()},
    }


def _service_account(fleet: InferenceFleet, site: Site) -> JsonObject:
    """Pods talk to each other only, never to the API server."""
    name = names.service_account_name(fleet.name)
    labels = names.fleet_labels(fleet.name, names.ENGINE_APP)
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(name, fleet, site, labels),
        "automountServiceAccountToken": False,
    }


def _client_service(fleet: InferenceFleet, site: Site) -> JsonObject:
    service = fleet.spec.router.service
    port = {
        "name": "http",
        "port": service.port,
        "targetPort": "http",
        "protocol": "TCP",
        "appProtocol": "http",
    }
    spec = {
        "type": service.type,
        "selector": names.pool_selector(fleet.name, ROUTER),
        "ports": [port],
    }
    return _service(fleet, site, names.client_service_name(fleet.name), spec)


def _discovery_service(fleet: InferenceFleet, site: Site) -> JsonObject:
    """Headless: each A record is a router. A router is ready only once it knows engines, so the
    engines must find it before."""
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
    return _service(fleet, site, names.discovery_service_name(fleet.name), spec)


def _service(fleet: InferenceFleet, site: Site, name: str, spec: JsonObject) -> JsonObject:
    labels = names.fleet_labels(fleet.name, names.ROUTER_APP)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(name, fleet, site, labels),
        "spec": spec,
    }


def _disruption_budget(fleet: InferenceFleet, site: Site, pool: str, role: str) -> JsonObject:
    """One pod at a time leaves for a node's sake; a broken one never holds a node."""
    name = names.disruption_budget_name(fleet.name, pool)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(name, fleet, site, names.pool_labels(fleet.name, pool, role)),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": names.pool_selector(fleet.name, pool)},
        },
    }
