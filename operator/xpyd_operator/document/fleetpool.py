"""InferenceFleetPool: the object that `kubectl scale` and HPA write; the operator makes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xpyd_operator.document.base import ApiModel
from xpyd_operator.document.pool import Role
from xpyd_operator.document.rules import rule, transition

_BY_OPERATOR = "is set by the operator and immutable"


class PoolSpec(ApiModel):
    """A pool of a fleet; only replicas is for others than the operator."""

    fleet_name: Annotated[str, Field(max_length=30)]
    """The fleet that the pool belongs to."""
    pool_name: Annotated[str, Field(max_length=16)]
    """The pool's name in the fleet."""
    role: Role
    """What its instances do."""
    replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    """Instances wanted; the truth for the operator, written by `kubectl scale` and HPA."""
    min_replicas: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Fewest instances, from the fleet's scaling.minReplicas."""
    max_replicas: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Most instances, from the fleet's scaling.maxReplicas."""
    declared_replicas: Annotated[int, Field(ge=0, le=1024)] | None = None
    """What the fleet declared when the operator last took it over into replicas."""

    @rule(
        "!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
        "replicas exceeds the pool's maxReplicas (spec.pools[].scaling of the fleet)",
        field="replicas",
    )
    def _is_at_most(self) -> bool:
        return self.max_replicas is None or self.replicas <= self.max_replicas

    @rule(
        "!has(self.minReplicas) || self.replicas >= self.minReplicas",
        "replicas is below the pool's minReplicas (spec.pools[].scaling of the fleet)",
        field="replicas",
    )
    def _is_at_least(self) -> bool:
        return self.min_replicas is None or self.replicas >= self.min_replicas

    @transition(
        "self.fleetName == oldSelf.fleetName", f"fleetName {_BY_OPERATOR}", field="fleetName"
    )
    def _keeps_its_fleet(self, before: PoolSpec) -> bool:
        return self.fleet_name == before.fleet_name

    @transition("self.poolName == oldSelf.poolName", f"poolName {_BY_OPERATOR}", field="poolName")
    def _keeps_its_name(self, before: PoolSpec) -> bool:
        return self.pool_name == before.pool_name

    @transition("self.role == oldSelf.role", f"role {_BY_OPERATOR}", field="role")
    def _keeps_its_role(self, before: PoolSpec) -> bool:
        return self.role == before.role


class PoolMetadata(ApiModel):
    """Kubernetes object metadata."""

    name: Annotated[str, Field(max_length=253)]
    """FLEET-POOL."""
    namespace: Annotated[str, Field(max_length=63)] = "default"
    """The fleet's namespace."""


class InferenceFleetPool(ApiModel):
    """A pool of a fleet, made by the operator; `kubectl scale` it."""

    api_version: Literal["xpyd.dev/v1alpha1"]
    """Version of the API."""
    kind: Literal["InferenceFleetPool"]
    """Kind of the object."""
    metadata: PoolMetadata
    """Name and namespace."""
    spec: PoolSpec
    """A pool of a fleet; only replicas is for others than the operator."""
