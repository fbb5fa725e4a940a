"""Fields and values of the API that this version does not make work yet. Pure.

They are refused by their name, apart from misspellings, so that a person knows which of the two it
is. An entry leaves this page when its field enters xpyd_operator.document.fleet.
"""

from __future__ import annotations

FIELDS = frozenset(
    {
        "spec.pools[].restartPolicy",
        "spec.kvTransfer.verify",
        "spec.router.gateway",
        "spec.rollout",
        "spec.autoscaling",
        "spec.deletion",
    }
)
"""Paths without list indexes."""

VALUES = {
    "spec.kvTransfer.transport": ("NCCL", "CUDAIPC", "NIXL"),
}
"""Path without list indexes -> values of its enum."""
