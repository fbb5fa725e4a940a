"""InferenceFleetPool, which `kubectl scale` and an HPA write, and the changes that are refused.

The operator creates one object for each pool. The API server runs the rules about changes itself;
local mode has no API server, so `xpyd up` and `xpyd scale` call `refused_changes` and
`refused_scale`.

See docs/adr/0007.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xpyd_operator.document.base import ApiModel, rule, transition
from xpyd_operator.document.engines import Pool, Role
from xpyd_operator.document.fleet import InferenceFleet

_BY_OPERATOR = "is set by the operator and immutable"


class PoolSpec(ApiModel):
    """A pool of a fleet; only replicas is written by others than the operator."""

    fleet_name: Annotated[str, Field(max_length=30)]
    """The fleet that the pool belongs to."""
    pool_name: Annotated[str, Field(max_length=16)]
    """The pool's name in the fleet."""
    role: Role
    """What its instances do."""
    replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    """Instances wanted, written by `kubectl scale` and an HPA; the operator obeys this number."""
    min_replicas: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Fewest instances, from the fleet's scaling.minReplicas."""
    max_replicas: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Most instances, from the fleet's scaling.maxReplicas."""
    declared_replicas: Annotated[int, Field(ge=0, le=1024)] | None = None
    """What the fleet declared when the operator last copied it into replicas."""

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
    """A pool of a fleet; only replicas is written by others than the operator."""


def refused_changes(before: InferenceFleet, after: InferenceFleet) -> list[str]:
    """One line for each change of a document that is refused, in the API server's words."""
    old = {pool.name: pool for pool in before.spec.pools}
    return [
        f"spec.pools[{index}].{rule.field}: {rule.text}"
        for index, pool in enumerate(after.spec.pools)
        for rule in Pool.transitions
        if pool.name in old and not rule.holds(pool, old[pool.name])
    ]


def refused_scale(fleet: InferenceFleet, pool: str, replicas: int) -> str:
    """The API server's refusal of a scale of the fleet's pool; "": it accepts."""
    found = next(item for item in fleet.spec.pools if item.name == pool)
    scaled = PoolSpec.model_construct(  # unchecked, or its own rules would raise
        fleet_name=fleet.name,
        pool_name=pool,
        role=found.role,
        replicas=replicas,
        min_replicas=found.scaling.min_replicas,
        max_replicas=found.scaling.max_replicas,
    )
    broken = [rule for rule in PoolSpec.rules if not rule.holds(scaled)]
    return f"spec.{broken[0].field}: {broken[0].message_for(scaled)}" if broken else ""
