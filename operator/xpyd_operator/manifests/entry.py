"""What leads clients to a fleet's routers: the Service, and an Ingress and HTTPRoute if asked.

Answers are streams that last for minutes and pause for a long prompt, so both routes say that no
proxy may end or hold them up earlier than the router does. See docs/adr/0078.
"""

from __future__ import annotations

from xpyd_operator.document.entry import HttpRoute, Ingress, ParentRef
from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.manifests import names
from xpyd_operator.manifests.names import JsonObject, Placement, owned_object
from xpyd_operator.plan.values import ROUTER

HTTP_ROUTE_API = "gateway.networking.k8s.io/v1"
_PORT = "http"
_NGINX = "nginx.ingress.kubernetes.io/"
_FOR_STREAMS = {
    # --request-timeout of the router: between two parts of an answer, and of a request.
    f"{_NGINX}proxy-read-timeout": "1800",
    f"{_NGINX}proxy-send-timeout": "1800",
    f"{_NGINX}proxy-buffering": "off",
    # --max-body-bytes of the router, which nginx would refuse from 1 MiB on.
    f"{_NGINX}proxy-body-size": "32m",
}
"""What ingress-nginx needs: it ends an answer that pauses for a minute."""


def client_service(fleet: InferenceFleet, placement: Placement) -> JsonObject:
    """The Service with the routers' port of clients."""
    service = fleet.spec.router.service
    port = {
        "name": _PORT,
        "port": service.port,
        "targetPort": "http",
        "protocol": "TCP",
        "appProtocol": "http" if fleet.spec.router.tls is None else "https",
    }
    spec: JsonObject = {
        "type": service.type,
        "selector": names.pool_selector(fleet.name, ROUTER),
        "ports": [port],
    }
    # What is the server's default is left to it: a Service of before stays as it is.
    if service.load_balancer_class:
        spec["loadBalancerClass"] = service.load_balancer_class
    if service.source_ranges:
        spec["loadBalancerSourceRanges"] = list(service.source_ranges)
    if service.session_affinity != "None":
        spec["sessionAffinity"] = service.session_affinity
    if service.ip_family_policy is not None:
        spec["ipFamilyPolicy"] = service.ip_family_policy
    if service.external_traffic_policy != "Cluster":
        spec["externalTrafficPolicy"] = service.external_traffic_policy
    made = _owned(fleet, placement, "v1", "Service", service.labels, spec)
    return _annotated(made, service.annotations)


def routes(fleet: InferenceFleet, placement: Placement) -> tuple[JsonObject, ...]:
    """The Ingress and the HTTPRoute, as far as the document asks for them."""
    router = fleet.spec.router
    found: list[JsonObject] = []
    if router.ingress is not None:
        found.append(_ingress(fleet, placement, router.ingress))
    if router.http_route is not None:
        found.append(_http_route(fleet, placement, router.http_route))
    return tuple(found)


def hosts_of(fleet: InferenceFleet) -> list[str]:
    """Names by which clients outside reach the fleet."""
    router = fleet.spec.router
    found = [] if router.ingress is None else [router.ingress.host]
    found += [] if router.http_route is None else router.http_route.hostnames
    return list(dict.fromkeys(found))


def _ingress(fleet: InferenceFleet, placement: Placement, ingress: Ingress) -> JsonObject:
    service = {"name": names.client_service_name(fleet.name), "port": {"name": _PORT}}
    path = {"path": ingress.path, "pathType": "Prefix", "backend": {"service": service}}
    spec: JsonObject = {"rules": [{"host": ingress.host, "http": {"paths": [path]}}]}
    if ingress.class_name:
        spec = {"ingressClassName": ingress.class_name, **spec}
    if ingress.tls_secret_name:
        spec["tls"] = [{"hosts": [ingress.host], "secretName": ingress.tls_secret_name}]
    defaults = _FOR_STREAMS if "nginx" in ingress.class_name else {}
    if defaults and fleet.spec.router.tls is not None:
        defaults = {**defaults, f"{_NGINX}backend-protocol": "HTTPS"}
    made = _owned(fleet, placement, "networking.k8s.io/v1", "Ingress", ingress.labels, spec)
    return _annotated(made, {**defaults, **ingress.annotations})


def _http_route(fleet: InferenceFleet, placement: Placement, route: HttpRoute) -> JsonObject:
    port = fleet.spec.router.service.port
    backend = {"name": names.client_service_name(fleet.name), "port": port}
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": route.path}}],
        "backendRefs": [backend],
        "timeouts": {"request": f"{route.request_timeout_seconds}s"},
    }
    spec: JsonObject = {"parentRefs": [_parent(one) for one in route.parent_refs]}
    if route.hostnames:
        spec["hostnames"] = list(route.hostnames)
    spec["rules"] = [rule]
    made = _owned(fleet, placement, HTTP_ROUTE_API, "HTTPRoute", route.labels, spec)
    return _annotated(made, route.annotations)


def _parent(ref: ParentRef) -> JsonObject:
    given = {"name": ref.name, "namespace": ref.namespace, "sectionName": ref.section_name}
    return {key: value for key, value in given.items() if value}


def _owned(
    fleet: InferenceFleet,
    placement: Placement,
    api_version: str,
    kind: str,
    labels: dict[str, str],
    spec: JsonObject,
) -> JsonObject:
    """All have the Service's name."""
    name = names.client_service_name(fleet.name)
    labels = {**labels, **names.fleet_labels(fleet.name, names.ROUTER_APP)}
    return owned_object(api_version, kind, name, labels, fleet, placement, spec=spec)


def _annotated(obj: JsonObject, annotations: dict[str, str]) -> JsonObject:
    if annotations:
        obj["metadata"]["annotations"] = dict(annotations)
    return obj
