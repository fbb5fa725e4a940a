"""InferenceFleet, xpyd.dev/v1alpha1: the fields that this version makes work, with their bounds.

A field or an enum's value enters with the code behind it; until then xpyd_operator.api.later names
it, so that a document is refused and not half obeyed. Names and bounds are append-only.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from xpyd_operator.api.base import DNS_LABEL, ApiModel
from xpyd_operator.api.model import Engine, Model
from xpyd_operator.api.pod import Annotations, Labels
from xpyd_operator.api.pool import POOL_ROLES, Pool
from xpyd_operator.api.router import Drain, Heartbeat, KvTransfer, NetworkPolicy, Router
from xpyd_operator.api.rules import Check, Unique, matching

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
