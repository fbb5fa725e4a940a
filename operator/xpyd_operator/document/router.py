"""spec.router: who serves a request, what waits and how long, and how clients reach the routers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from xpyd_core.pod_env import DISCOVERY_PORT, ROUTER_ADMIN_PORT, ROUTER_HTTP_PORT
from xpyd_operator.document.base import ApiModel, Plain, Size, other_port
from xpyd_operator.document.engines import PodTemplate, ShapedLike
from xpyd_operator.document.entry import (
    AdminKeyRef,
    Auth,
    HttpRoute,
    Ingress,
    RouterTls,
    Service,
)

Policy = Literal[
    "RoundRobin",
    "Random",
    "PowerOfTwo",
    "LeastLoaded",
    "PrefixAware",
    "SessionAffinity",
    "SloAware",
]
"""The router's own policies (docs/router.md) that a document may name."""


class Slo(ApiModel):
    """Objectives of requests that state none themselves."""

    ttft_milliseconds: Annotated[int, Field(ge=1, le=3_600_000)] | None = None
    """From the request to its first token; none: no objective."""
    itl_milliseconds: Annotated[int, Field(ge=1, le=3_600_000)] | None = None
    """Between two of its tokens, in the mean; none: no objective."""


class Limits(ApiModel):
    """What one router works on at once; further requests wait in its queue."""

    requests: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Requests in flight; none: no limit."""
    tokens: Annotated[int, Field(ge=1, le=2_000_000_000)] | None = None
    """Tokens in flight, of prompts and allowed outputs together; none: no limit."""


class Queue(ApiModel):
    """Requests that wait in one router: for their turn, or for instances to return."""

    size: Annotated[int, Field(ge=0, le=1_000_000)] = 1024
    """How many may wait; more get status 429."""
    memory: Size = "256Mi"
    """Memory for the bodies of those that wait."""
    timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 60
    """How long a request waits for its turn and for a pair; then it gets status 503."""


class Router(ApiModel):
    """The HTTP entry."""

    replicas: Annotated[int, Field(ge=1, le=64)] = 2
    """Router pods in a cluster; local mode runs one."""
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes of each router that serve HTTP; more than 1 where one core is too slow."""
    policy: Policy = "LeastLoaded"
    """Which instances a request gets."""
    prefill_policy: Policy | None = None
    """Another policy for prefill instances; none: `policy`."""
    decode_policy: Policy | None = None
    """Another policy for decode instances; none: `policy`."""
    slo: Slo = Slo()
    """Objectives of requests: SloAware places by them, and metrics count who met them."""
    local_prefill_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Prompts with fewer tokens to compute run on a Decode instance alone; 0: none."""
    on_no_prefill: Literal["Queue", "PrefillOnDecode", "Reject"] = "Queue"
    """What happens to a request that finds neither a pair nor an Aggregated instance: it waits for
    one; a Decode instance computes it alone; it gets status 503 at once. Without a Decode instance,
    PrefillOnDecode waits, too."""
    on_no_decode: Literal["Queue", "DecodeOnPrefill", "Reject"] | None = None
    """The same where it is a Decode instance that is missing; DecodeOnPrefill: a Prefill instance
    makes the whole answer. None: Reject where onNoPrefill is Reject, else Queue."""
    limits: Limits = Limits()
    """How much each router works on at once."""
    queue: Queue = Queue()
    """How much waits in each router, and how long."""
    discovery_port: Annotated[
        int,
        Field(ge=1024, le=65535),
        other_port(ROUTER_HTTP_PORT, "the router serves HTTP there"),
        other_port(ROUTER_ADMIN_PORT, "the router's admin port is there"),
    ] = DISCOVERY_PORT
    """Port on which a router receives the engines' heartbeats."""
    service: Service = Service()
    """The Service in front of the routers."""
    auth: Auth | None = None
    """Keys that clients need; none: clients need no key."""
    tls: RouterTls | None = None
    """HTTPS instead of HTTP for clients; none: HTTP."""
    ingress: Ingress | None = None
    """An Ingress to them; none: no Ingress is made."""
    http_route: HttpRoute | None = None
    """An HTTPRoute to them, where the cluster has the Gateway API; none: none is made."""
    args: Annotated[
        tuple[Annotated[str, Field(max_length=1024), Plain], ...],
        Field(strict=False, max_length=128),
    ] = ()
    """Flags of `xpyd router` that no other field sets; they come last. docs/router.md has them."""
    admin_key_secret_ref: AdminKeyRef | None = None
    """Secret with the keys that open the routers' admin API; none: it is closed."""
    template: Annotated[dict[str, Any] | None, ShapedLike(PodTemplate)] = None
    """Merged into the routers' pods in a cluster; the router's container is `router`."""
