"""spec.kvTransfer, router, heartbeat, drain and networkPolicy: how instances work together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from xpyd_core.pod_env import DISCOVERY_PORT, HTTP_PORT, KV_PORT, ROUTER_HTTP_PORT
from xpyd_operator.api.base import ApiModel, DnsName, KeyName, Size, SizeOrPercent
from xpyd_operator.api.pod import PodTemplate, shaped_like
from xpyd_operator.api.rules import Check


class KvKeyRef(ApiModel):
    """A Secret's key that holds the fleet's KV key: 64 hex digits."""

    name: DnsName
    """Name of a Secret in the fleet's namespace."""
    key: KeyName = "key"
    """Key in the Secret."""


class KvTransfer(ApiModel):
    """How KV moves from P to D."""

    mode: Literal["PutAsync"] = "PutAsync"
    """P sends while it prefills."""
    transport: Literal["Auto", "TCP"] = "Auto"
    """What carries the KV; Auto is TCP in this version."""
    port: Annotated[
        int,
        Field(ge=1024, le=65535),
        Check(
            f"self != {HTTP_PORT}",
            f"must not be {HTTP_PORT}: engines serve HTTP there",
            lambda port: port != HTTP_PORT,
            kind="integer",
        ),
    ] = KV_PORT
    """The KV port of each engine."""
    buffer_size: SizeOrPercent = "10%"
    """D's device buffer: a size, or a percentage of the instance's KV cache."""
    host_pool_size: Size | None = None
    """D's host pool; none: 4Gi in a cluster, a size that fits in local mode."""
    lease_seconds: Annotated[int, Field(ge=5, le=3600)] = 30
    """How long KV stays that no request asks for."""
    wait_seconds: Annotated[int, Field(ge=1, le=600)] = 10
    """How long a request on D waits for its KV."""
    on_failure: Literal["Recompute", "Fail"] = "Recompute"
    """What a request does whose KV does not come."""
    key_secret_ref: KvKeyRef | None = None
    """Secret with the key by which engines know each other; none: the operator makes one."""


class Service(ApiModel):
    """The Service in front of the routers."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Who reaches it: the cluster, also each node's port, or also a load balancer's address."""
    port: Annotated[int, Field(ge=1, le=65535)] = ROUTER_HTTP_PORT
    """Its port."""


class Router(ApiModel):
    """The HTTP entry."""

    replicas: Annotated[int, Field(ge=1, le=64)] = 2
    """Router pods in a cluster; local mode runs one."""
    policy: Literal["RoundRobin"] = "RoundRobin"
    """Which instances a request gets."""
    discovery_port: Annotated[
        int,
        Field(ge=1024, le=65535),
        Check(
            f"self != {ROUTER_HTTP_PORT}",
            f"must not be {ROUTER_HTTP_PORT}: the router serves HTTP there",
            lambda port: port != ROUTER_HTTP_PORT,
            kind="integer",
        ),
    ] = DISCOVERY_PORT
    """Port on which a router hears the engines' heartbeats."""
    service: Service = Service()
    """The Service in front of the routers."""
    template: Annotated[dict[str, Any] | None, shaped_like(PodTemplate)] = None
    """Merged into the routers' pods in a cluster; the router's container is `router`."""


class Heartbeat(ApiModel):
    """An instance leaves the routers' registry after missedBeats intervals without a beat."""

    interval_milliseconds: Annotated[int, Field(ge=100, le=60000)] = 3000
    """How often engines tell the routers that they live."""
    missed_beats: Annotated[int, Field(ge=2, le=60)] = 3
    """Beats missed before a router drops an engine."""


class Drain(ApiModel):
    """How long a leaving instance may take."""

    timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 300
    """How long a leaving instance may take to finish its requests."""


class NetworkPolicy(ApiModel):
    """Who may reach the fleet's ports in a cluster whose network enforces policies."""

    enabled: bool = True
    """Only the fleet's own pods reach KV and discovery ports; anybody reaches the routers' HTTP."""
