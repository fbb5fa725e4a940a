"""spec.rollout and spec.pools[].rollout: how a new revision replaces an old one."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from xpyd_operator.document.base import ApiModel, matching, rule

_Percent = Annotated[int, Field(ge=0, le=100)]


class PoolRollout(ApiModel):
    """How far one pool may be from its replicas while a new revision replaces an old one. What it
    leaves out is as spec.rollout says."""

    max_surge_percent: _Percent | None = None
    """Instances above the replicas; none: as spec.rollout says."""
    max_unavailable_percent: _Percent | None = None
    """Instances that may be missing, where a new one has no room otherwise; none: as spec.rollout
    says."""


Percent = Annotated[int, Field(ge=1, le=99)]


class CanaryAnalysis(ApiModel):
    """What the new revision must hold, in each step, for the next one to come."""

    error_percent: Annotated[int, Field(ge=0, le=100)] = 1
    """The most of its requests that may fail: 5xx of engines and streams that break. And so much
    larger than the old revision's may the parts be that it refuses with a 4xx, and whose prompts D
    computes again because the KV did not come."""
    ttft_milliseconds: Annotated[int, Field(ge=1, le=3600000)] | None = None
    """What 95 % of its streams may take to their first byte; none: any time."""
    itl_milliseconds: Annotated[int, Field(ge=1, le=3600000)] | None = None
    """What 95 % of the gaps in its streams may take; none: any time."""
    min_requests: Annotated[int, Field(ge=1, le=1000000)] = 100
    """Requests that it must have answered before it is judged."""


class Canary(ApiModel):
    """A new revision gets a share of the new requests first. The rest follows when its figures
    hold; else it goes, and the old revision stays."""

    weight_percent: Percent = 10
    """The share in the first step."""
    steps: Annotated[tuple[Percent, ...], Field(strict=False, max_length=8)] = ()
    """The shares after it, each larger; none: the rest follows the first one."""
    analysis: CanaryAnalysis = CanaryAnalysis()
    """What it must hold."""

    @rule(
        "!has(self.steps) || self.steps.all(s, s > self.weightPercent)",
        "each step must be above weightPercent",
        field="steps",
    )
    def _steps_are_above(self) -> bool:
        return all(step > self.weight_percent for step in self.steps)

    @rule(
        "!has(self.steps) || (self.steps.isSorted() && "
        "self.steps.all(a, self.steps.exists_one(b, b == a)))",
        "each step must be above the one before",
        field="steps",
    )
    def _steps_rise(self) -> bool:
        return list(self.steps) == sorted(set(self.steps))

    @property
    def weights(self) -> tuple[int, ...]:
        """The shares of all steps."""
        return (self.weight_percent, *self.steps)


class Bounds(NamedTuple):
    """How far a pool may be from its replicas in a rollout, in percents of them."""

    surge: int
    unavailable: int

    @property
    def can_move(self) -> bool:
        """Whether an instance can ever be replaced."""
        return self != (0, 0)


class Rollout(ApiModel):
    """How a new revision replaces an old one; P and D move together.

    Percents are of a pool's replicas and at least one instance: surge is rounded up, unavailable
    down.
    """

    max_surge_percent: _Percent = 25
    """Instances above the replicas; 0: an old instance goes before a new one comes."""
    max_unavailable_percent: _Percent = 0
    """Instances that may be missing, where a new one has no room otherwise: none above replicas is
    allowed, or no node has a place for it."""
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
    canary: Canary | None = None
    """In a cluster, how a new revision is tried on a share of the requests; none: it is not."""
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

    @rule(
        # The API server tries it on the default {} of the whole, which has no defaults in it.
        "!has(self.maxSurgePercent) || "
        "self.maxSurgePercent != 0 || self.maxUnavailablePercent != 0",
        "nothing could ever be replaced: set one of maxSurgePercent and maxUnavailablePercent",
        field="maxSurgePercent",
    )
    def _can_move(self) -> bool:
        return self.bounds_of(None).can_move

    def bounds_of(self, own: PoolRollout | None) -> Bounds:
        """The bounds of a pool with this rollout of its own; None: it has none. Each percent that
        it leaves out is that of the whole fleet. See docs/adr/0111."""
        surge, unavailable = self.max_surge_percent, self.max_unavailable_percent
        if own is not None and own.max_surge_percent is not None:
            surge = own.max_surge_percent
        if own is not None and own.max_unavailable_percent is not None:
            unavailable = own.max_unavailable_percent
        return Bounds(surge, unavailable)
