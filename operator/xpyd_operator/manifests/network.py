"""NetworkPolicies: who may open a connection to an engine or a router of the fleet. Pure.

Ingress only. Egress stays free: engines fetch models from anywhere and P dials addresses that only
requests name, so a list of allowed targets would either be the internet or break fleets; what must
be kept apart is kept apart at the side that accepts.

An engine's HTTP port also carries /metrics. Prometheus mostly runs in another namespace, and a
policy cannot see paths, so the port is open to namespaces with the label `xpyd.dev/scrape: "true"`:
labels of namespaces are an administrator's, while any tenant may label a pod.
"""

from __future__ import annotations

from xpyd_core.pod_env import HTTP_PORT, ROUTER_HTTP_PORT, data_port
from xpyd_operator.document import InferenceFleet
from xpyd_operator.manifests import names
from xpyd_operator.manifests.meta import metadata
from xpyd_operator.manifests.pods import pods_per_instance
from xpyd_operator.manifests.values import JsonObject, Site


def network_policies(fleet: InferenceFleet, site: Site) -> tuple[JsonObject, ...]:
    """The engines' policy and the routers'."""
    engines = {"podSelector": _labels(fleet, names.ENGINE_APP)}
    routers = {"podSelector": _labels(fleet, names.ROUTER_APP)}
    scrapers = {"namespaceSelector": {"matchLabels": {names.LABEL_SCRAPE: "true"}}}
    to_engines = [
        {"from": [engines], "ports": [_kv_ports(fleet)]},
        {"from": [routers, scrapers], "ports": [_port(HTTP_PORT)]},
        *_inside_instances(fleet),
    ]
    to_routers = [
        {"ports": [_port(ROUTER_HTTP_PORT)]},
        {"from": [engines], "ports": [_port(fleet.spec.router.discovery_port)]},
    ]
    return (
        _policy(fleet, site, names.engine_policy_name(fleet.name), names.ENGINE_APP, to_engines),
        _policy(fleet, site, names.router_policy_name(fleet.name), names.ROUTER_APP, to_routers),
    )


def _labels(fleet: InferenceFleet, app: str) -> JsonObject:
    return {"matchLabels": names.app_selector(fleet.name, app)}


def _port(number: int) -> JsonObject:
    return {"protocol": "TCP", "port": number}


def _kv_ports(fleet: InferenceFleet) -> JsonObject:
    """The KV port, and one after it for each rank where an instance has several."""
    first = fleet.spec.kv_transfer.port
    ranks = max(pool.parallelism.ranks for pool in fleet.spec.pools)
    return _port(first) if ranks == 1 else _port(first) | {"endPort": data_port(first, ranks - 1)}


def _inside_instances(fleet: InferenceFleet) -> list[JsonObject]:
    """Ranks of one instance meet on one port and then talk on ports that their libraries choose. A
    policy cannot tell the instances of a pool apart, so the pool's pods may reach each other."""
    return [
        {"from": [{"podSelector": {"matchLabels": names.pool_selector(fleet.name, pool.name)}}]}
        for pool in fleet.spec.pools
        if pods_per_instance(pool) > 1
    ]


def _policy(
    fleet: InferenceFleet, site: Site, name: str, app: str, ingress: list[JsonObject]
) -> JsonObject:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(name, fleet, site, names.fleet_labels(fleet.name, app)),
        "spec": {
            "podSelector": _labels(fleet, app),
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }
