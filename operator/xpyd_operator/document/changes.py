"""Changes that are refused: the rules that `xpyd up` and `xpyd scale` ask apart from a document's.

The API server asks the same rules by itself; so the operator has no use for this module. Pure.
"""

from __future__ import annotations

from xpyd_operator.document.fleet import InferenceFleet
from xpyd_operator.document.fleetpool import PoolSpec
from xpyd_operator.document.pool import Pool


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
    """What the API server says to a scale of the pool, which the fleet has; "": nothing."""
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
    return f"spec.{broken[0].field}: {broken[0].told(scaled)}" if broken else ""
