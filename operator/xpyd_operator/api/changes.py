"""What a changed document may not change: the transition rules, asked by `xpyd up`. Pure.

The API server asks the same rules by itself; so the operator has no use for this module.
"""

from __future__ import annotations

from xpyd_operator.api.fleet import InferenceFleet
from xpyd_operator.api.pool import Pool


def refused_changes(before: InferenceFleet, after: InferenceFleet) -> list[str]:
    """One line for each change that is refused, in the API server's words."""
    old = {pool.name: pool for pool in before.spec.pools}
    return [
        f"spec.pools[{index}].{rule.field}: {rule.text}"
        for index, pool in enumerate(after.spec.pools)
        for rule in Pool.transitions
        if pool.name in old and not rule.holds(pool, old[pool.name])
    ]
