"""spec.router.service, ingress, httpRoute, auth and tls: how clients reach a fleet's routers in a
cluster, and what they need.

They change no pod. What only the cluster can judge (a class that exists, a certificate, a gateway
that admits the route) it says at the objects that are made of them. See docs/adr/0078.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xpyd_core.pod_env import ROUTER_HTTP_PORT
from xpyd_operator.document.base import (
    ApiModel,
    Check,
    DnsName,
    KeyName,
    Unique,
    matching,
    rule,
)
from xpyd_operator.document.engines import Annotations, Labels

OUR_PREFIX = "xpyd.dev/"
OUR_LABELS = (
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/name",
)
_OUR_KEY = f"k.startsWith('{OUR_PREFIX}') || k in {list(OUR_LABELS)!r}"
_OTHERS_LABELS = Check(
    f"!self.exists(k, {_OUR_KEY})",
    f"keys that begin with {OUR_PREFIX}, and {', '.join(OUR_LABELS)}, are set by xpyd",
    lambda labels: not any(k.startswith(OUR_PREFIX) or k in OUR_LABELS for k in labels),
    kind="object",
)
_OTHERS_ANNOTATIONS = Check(
    f"!self.exists(k, k.startsWith('{OUR_PREFIX}'))",
    f"keys that begin with {OUR_PREFIX} are set by xpyd",
    lambda annotations: not any(k.startswith(OUR_PREFIX) for k in annotations),
    kind="object",
)
ObjectLabels = Annotated[Labels, _OTHERS_LABELS]
ObjectAnnotations = Annotated[Annotations, _OTHERS_ANNOTATIONS]

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_V4 = rf"{_BYTE}(\.{_BYTE}){{3}}/(3[0-2]|[12]?[0-9])"
_V6 = "[0-9a-fA-F]{0,4}(:[0-9a-fA-F]{0,4}){2,7}/(12[0-8]|1[01][0-9]|[1-9]?[0-9])"
Cidr = Annotated[
    str,
    Field(max_length=43),
    matching(f"{_V4}|{_V6}", "must be a block of addresses: 203.0.113.0/24, 2001:db8::/32"),
]
_HOST_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
Hostname = Annotated[
    str,
    Field(max_length=253),
    matching(
        rf"(\*\.)?{_HOST_LABEL}(\.{_HOST_LABEL})*",
        "must be a DNS name such as chat.example.com, or *.example.com",
    ),
]
_SEGMENT = "[-_~A-Za-z0-9][-._~A-Za-z0-9]*"
PathPrefix = Annotated[
    str,
    Field(max_length=256),
    matching(rf"/|(/{_SEGMENT})+/?", "must be a path such as / or /v1"),
]


class Service(ApiModel):
    """The Service in front of the routers. It has their port of clients alone."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Who reaches it: the cluster, also each node's port, or also a load balancer's address."""
    port: Annotated[int, Field(ge=1, le=65535)] = ROUTER_HTTP_PORT
    """Its port."""
    labels: ObjectLabels = Field(default_factory=dict[str, str])
    """Labels of the Service, in addition to the operator's."""
    annotations: ObjectAnnotations = Field(default_factory=dict[str, str])
    """Annotations of the Service, such as a cloud's load balancer reads."""
    load_balancer_class: Annotated[
        str,
        Field(max_length=253),
        matching(
            "([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?",
            "must be a name such as service.k8s.aws/nlb",
        ),
    ] = ""
    """Which controller makes the load balancer; none: the cluster's own. Kubernetes lets nobody
    change it while the type is LoadBalancer."""
    source_ranges: Annotated[
        tuple[Cidr, ...],
        Field(strict=False, max_length=64),
        Unique(),
    ] = ()
    """Addresses that the load balancer lets in; none: all."""
    session_affinity: Literal["None", "ClientIP"] = "None"
    """ClientIP: connections from one address go to one router."""
    ip_family_policy: Literal["SingleStack", "PreferDualStack", "RequireDualStack"] | None = None
    """Whether it has addresses of IPv4 and IPv6; none: what the cluster decides."""
    external_traffic_policy: Literal["Cluster", "Local"] = "Cluster"
    """Local: from outside only a node's own routers are reached, which see the client's address."""

    @rule(
        "!has(self.loadBalancerClass) || (has(self.type) && self.type == 'LoadBalancer')",
        "only type LoadBalancer has a class: leave it out, or set the type",
        field="loadBalancerClass",
    )
    def _has_class_of_a_balancer(self) -> bool:
        return not self.load_balancer_class or self.type == "LoadBalancer"

    @rule(
        "!has(self.sourceRanges) || size(self.sourceRanges) == 0 || "
        "(has(self.type) && self.type == 'LoadBalancer')",
        "only a load balancer keeps others out: set type LoadBalancer, or use a NetworkPolicy",
        field="sourceRanges",
    )
    def _has_ranges_of_a_balancer(self) -> bool:
        return not self.source_ranges or self.type == "LoadBalancer"

    @rule(
        "!has(self.externalTrafficPolicy) || self.externalTrafficPolicy != 'Local' || "
        "(has(self.type) && self.type != 'ClusterIP')",
        "nothing comes from outside to a ClusterIP: leave it out, or set another type",
        field="externalTrafficPolicy",
    )
    def _has_traffic_from_outside(self) -> bool:
        return self.external_traffic_policy != "Local" or self.type != "ClusterIP"


class Ingress(ApiModel):
    """An Ingress to the routers."""

    host: Hostname
    """The name that clients use."""
    class_name: DnsName = ""
    """IngressClass; none: the cluster's default. A name with `nginx` in it gets the annotations of
    ingress-nginx for long streams."""
    path: PathPrefix = "/"
    """Which paths are let in; /v1 lets in the API alone."""
    tls_secret_name: DnsName = ""
    """Secret of type kubernetes.io/tls with the certificate of the host; none: plain HTTP."""
    labels: ObjectLabels = Field(default_factory=dict[str, str])
    """Labels of the Ingress, in addition to the operator's."""
    annotations: ObjectAnnotations = Field(default_factory=dict[str, str])
    """Annotations of the Ingress; they win over those of ingress-nginx."""


class ParentRef(ApiModel):
    """A Gateway that serves the route."""

    name: DnsName
    """Name of the Gateway."""
    namespace: Annotated[
        str,
        Field(max_length=63),
        matching(_HOST_LABEL, "must be a DNS label"),
    ] = ""
    """Its namespace; none: the fleet's."""
    section_name: DnsName = ""
    """Name of one listener; none: all that admit the route."""


class HttpRoute(ApiModel):
    """An HTTPRoute (Gateway API) to the routers."""

    parent_refs: Annotated[tuple[ParentRef, ...], Field(strict=False, min_length=1, max_length=8)]
    """Gateways that serve the route."""
    hostnames: Annotated[tuple[Hostname, ...], Field(strict=False, max_length=16), Unique()] = ()
    """Names that clients use; none: those of the Gateways' listeners."""
    path: PathPrefix = "/"
    """Which paths are let in; /v1 lets in the API alone."""
    request_timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 0
    """Deadline of a whole answer, a stream to its end; 0: none, whatever the Gateway's default. The
    router has deadlines of its own."""
    labels: ObjectLabels = Field(default_factory=dict[str, str])
    """Labels of the HTTPRoute, in addition to the operator's."""
    annotations: ObjectAnnotations = Field(default_factory=dict[str, str])
    """Annotations of the HTTPRoute."""


class ClientKeysRef(ApiModel):
    """A Secret's key that holds the file of client keys."""

    name: DnsName
    """Name of a Secret in the fleet's namespace."""
    key: KeyName = "keys"
    """Key in the Secret."""


class Auth(ApiModel):
    """What clients need."""

    secret_ref: ClientKeysRef
    """Secret with the keys' hashes and limits, one key per line, as `xpyd key new` makes them
    (docs/keys.md). Routers read it again when it changes."""


class AdminKeyRef(ApiModel):
    """A Secret's key that holds keys of the admin API: one to four, one a line."""

    name: DnsName
    """Name of a Secret in the fleet's namespace."""
    key: KeyName = "key"
    """Key in the Secret."""


class RouterTls(ApiModel):
    """HTTPS on the routers' port of clients, in a cluster."""

    secret_name: DnsName
    """Secret of type kubernetes.io/tls with tls.crt and tls.key; a new certificate in it is loaded
    without a restart."""
    client_ca_secret_name: DnsName = ""
    """Secret with the authorities of clients' certificates in ca.crt: clients must then show one;
    none: they are asked for none."""
