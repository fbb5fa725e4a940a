"""InferenceFleet, xpyd.dev/v1alpha1: the fields that this version makes work, with their bounds.

A field or an enum's value enters with the code behind it; until then `document.later` names
it, so that a document is refused and not half obeyed. Names and bounds are append-only.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from xpyd_core.pod_env import HTTP_PORT, LAST_PORT, data_port, rendezvous_port
from xpyd_operator.document.base import DNS_LABEL, ApiModel
from xpyd_operator.document.model import Engine, Model
from xpyd_operator.document.pod import Annotations, Labels
from xpyd_operator.document.pool import POOL_ROLES, Pool
from xpyd_operator.document.router import Drain, Heartbeat, KvTransfer, NetworkPolicy, Router
from xpyd_operator.document.rules import Check, Numbers, Unique, matching, rule

API_VERSION = "xpyd.dev/v1alpha1"
KIND = "InferenceFleet"
FLEET_NAME = re.compile(DNS_LABEL)


class Metadata(ApiModel):
    """Kubernetes object metadata; local mode uses the name and ignores the rest."""

    name: Annotated[
        str,
        Field(max_length=253),
        Check(
            f"size(self.metadata.name) <= 30 && self.metadata.name.matches('^({DNS_LABEL})$')",
            "must be a DNS label of at most 30 characters that begins with a letter "
            "(pod, Service and pool names are derived from it)",
            lambda name: len(name) <= 30 and bool(FLEET_NAME.fullmatch(name)),
            kind="object",
        ),
    ]
    """A DNS label of at most 30 characters that begins with a letter; pod names begin with it."""
    namespace: Annotated[
        str,
        Field(max_length=63),
        matching("[a-z0-9]([-a-z0-9]*[a-z0-9])?", "must be a DNS label"),
    ] = "default"
    """Namespace of the fleet and its children."""
    labels: Labels = Field(default_factory=dict[str, str])
    """Labels of the fleet."""
    annotations: Annotations = Field(default_factory=dict[str, str])
    """Annotations of the fleet."""


_RANKS = "p.parallelism.tensor * p.parallelism.pipeline"
_PORTS_CLASH = (
    f"{_RANKS} > 1 && (self.kvTransfer.port + {_RANKS} > {LAST_PORT} || "
    f"(self.kvTransfer.port - 1 <= {HTTP_PORT} && self.kvTransfer.port + {_RANKS} >= {HTTP_PORT}))"
)
_FIRST_CLASH = f"self.pools.filter(p, {_PORTS_CLASH})[0]"


def _clash(spec: Spec) -> tuple[str | int, ...]:
    """The first pool whose ranks have no ports, its ranks and the KV port; () for none."""
    port = spec.kv_transfer.port
    for pool in spec.pools:
        ranks = pool.parallelism.ranks
        last = data_port(port, ranks - 1)
        holds_http = rendezvous_port(port) <= HTTP_PORT <= last
        if ranks > 1 and (last > LAST_PORT or holds_http):
            return pool.name, ranks, port
    return ()


class Spec(ApiModel):
    """What the user wants."""

    model: Model
    """Which checkpoint the fleet serves, and under which names."""
    engine: Engine = Engine()
    """What every engine gets beside what the fleet decides."""
    pools: Annotated[
        tuple[Pool, ...],
        Field(strict=False, min_length=1, max_length=8),
        Unique("name"),
        POOL_ROLES,
    ]
    """At least one Prefill and one Decode pool, or only Aggregated pools."""
    kv_transfer: KvTransfer = KvTransfer()
    """How KV moves from P to D."""
    router: Router = Router()
    """The HTTP entry."""
    heartbeat: Heartbeat = Heartbeat()
    """When an instance counts as gone."""
    drain: Drain = Drain()
    """How a leaving instance finishes."""
    network_policy: NetworkPolicy = NetworkPolicy()
    """Who may reach the fleet's ports."""

    @rule(
        f"self.pools.all(p, !({_PORTS_CLASH}))",
        "instances of several ranks use the ports from port - 1 to port + tensor * pipeline, "
        f"which must end by {LAST_PORT} and not hold {HTTP_PORT}, where engines serve HTTP: "
        "set another port",
        field="kvTransfer.port",
        numbers=Numbers(
            "pool %s of %d ranks, port %d",
            f"{_FIRST_CLASH}.name, {_FIRST_CLASH}.parallelism.tensor * "
            f"{_FIRST_CLASH}.parallelism.pipeline, self.kvTransfer.port",
            _clash,
        ),
    )
    def _has_ports_for_ranks(self) -> bool:
        return not _clash(self)


class InferenceFleet(ApiModel):
    """One fleet: a model, its pools and the router in front of them."""

    api_version: Literal["xpyd.dev/v1alpha1"]
    """Version of the API."""
    kind: Literal["InferenceFleet"]
    """Kind of the object."""
    metadata: Metadata
    """Name and namespace."""
    spec: Spec
    """What the user wants."""

    @property
    def name(self) -> str:
        """The fleet's name."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """The namespace that it lives in."""
        return self.metadata.namespace
