"""spec.rollout and spec.pools[].rollout: how a new revision replaces an old one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from xpyd_operator.document.base import ApiModel, matching, rule


class PoolRollout(ApiModel):
    """How far a pool may be from its replicas while a new revision replaces an old one.

    Percents are of the pool's replicas and at least one instance: surge is rounded up, unavailable
    down.
    """

    max_surge_percent: Annotated[int, Field(ge=0, le=100)] = 25
    """Instances above the replicas; 0: an old instance goes before a new one comes."""
    max_unavailable_percent: Annotated[int, Field(ge=0, le=100)] = 0
    """Instances that may be missing, where a new one has no room otherwise: none above replicas is
    allowed, or no node has a place for it."""

    @rule(
        # The API server tries it on the default {} of the whole, which has no defaults in it.
        "!has(self.maxSurgePercent) || "
        "self.maxSurgePercent != 0 || self.maxUnavailablePercent != 0",
        "nothing could ever be replaced: set one of maxSurgePercent and maxUnavailablePercent",
        field="maxSurgePercent",
    )
    def _can_move(self) -> bool:
        return self.max_surge_percent != 0 or self.max_unavailable_percent != 0


class Rollout(PoolRollout):
    """How a new revision replaces an old one; P and D move together."""

    progress_deadline_seconds: Annotated[int, Field(ge=60, le=604800)] = 3600
    """In a cluster, how long no new instance may become ready before the fleet says Degraded."""
    pairing: Literal["SameRevision", "Compatible"] = "SameRevision"
    """SameRevision: a Prefill and a Decode instance of different revisions of what the pools have
    in common serve no request together. Compatible: they do, where their KV is compatible."""
    paused: bool = False
    """In a cluster, no new revision begins and one under way stops where it is; what runs goes on
    and can be scaled."""
    history_limit: Annotated[int, Field(ge=0, le=50)] = 5
    """In a cluster, earlier revisions of the fleet that are kept for `xpyd rollout undo`."""
    restarted_at: (
        Annotated[
            str,
            Field(max_length=35),
            matching(
                "[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(Z|[+-][0-9]{2}:[0-9]{2})",
                "must be a time such as 2026-01-31T12:00:00Z",
            ),
        ]
        | None
    ) = None
    """Another time is a new revision of every pool and of the routers; `xpyd rollout restart` sets
    it."""
