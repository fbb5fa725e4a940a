"""The models of both kinds' status, for the CRDs' schema.

The operator can rebuild a status from the cluster's objects. Lists and texts are bounded, and the
writer of a status cuts them to these bounds.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from xpyd_operator.document.base import ApiModel, Unique
from xpyd_operator.document.engines import Role

Count = Annotated[int, Field(ge=0, le=2147483647)]
Generation = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]
Bytes = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]
Layout = Annotated[str, Field(max_length=32)]
MAX_MESSAGE = 32768
"""Characters of a condition's message."""
MAX_POOLS = 32
"""Pools in a status: those of the document and those that still leave."""


class Condition(ApiModel):
    """A condition as Kubernetes' own kinds have it (metav1.Condition)."""

    type: Annotated[str, Field(max_length=316)]
    """Ready, Available, Progressing, Degraded, RouterReady, CapacityAvailable, Drifted,
    KVTransferVerified, RolesReady, UpToDate, ModelReady, KeyRotated,
    FieldsIgnored or OtherRelease."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """One CamelCase word: why."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE)]
    """What the fleet waits for, or what is wrong."""
    last_transition_time: datetime
    """When status last changed."""
    observed_generation: Generation | None = None
    """The metadata.generation that the condition is about."""


class FleetPoolStatus(ApiModel):
    """One pool of the fleet."""

    name: Annotated[str, Field(max_length=16)]
    """Name of the pool."""
    role: Role | Literal["router"] | None = None
    """What its instances do."""
    layout: Layout | None = None
    """How one instance splits the model: TP2xPP2 is 2 ranks that share each layer, in 2 stages;
    xDP2 behind it: twice, with a copy each, xDP1-4: once to four times; xEP4 behind that: whole
    experts on 4 ranks."""
    replicas: Count | None = None
    """Instances wanted now."""
    declared_replicas: Count | None = None
    """Instances that the document declares."""
    ready_replicas: Count | None = None
    """Instances that serve."""
    updated_replicas: Count | None = None
    """Instances of the newest revision that serve."""
    draining_replicas: Count | None = None
    """Instances that leave and finish their requests."""
    draining_requests: Count | None = None
    """Requests that they still have, as routers say."""
    draining_kv_leases: Count | None = None
    """Prompts whose KV they hold for, or move with, others."""
    draining_since: Annotated[str, Field(max_length=32)] | None = None
    """When the first of them was asked to leave."""
    revision: Annotated[str, Field(max_length=16)] | None = None
    """The newest revision of the pool's pods."""
    document: Annotated[str, Field(max_length=16)] | None = None
    """Digest of what the document said of them when this revision was made."""


class Summary(ApiModel):
    """Ready and wanted instances of each role, for `kubectl get`."""

    prefill: Annotated[str, Field(max_length=32)] | None = None
    """Prefill instances, such as 1/1."""
    decode: Annotated[str, Field(max_length=32)] | None = None
    """Decode instances."""
    aggregated: Annotated[str, Field(max_length=32)] | None = None
    """Aggregated instances."""
    leaving: Annotated[str, Field(max_length=64)] | None = None
    """Instances that leave, and what they still have, such as 1: 3 requests, 2 KV leases."""
    gpus: Count | None = None
    """GPUs of all instances wanted."""


class ModelStatus(ApiModel):
    """How far the download of the model into its claim is."""

    folder: Annotated[str, Field(max_length=512)] | None = None
    """The model's folder in the engines' pods."""
    downloaded_bytes: Bytes | None = None
    """Bytes that are there."""
    total_bytes: Bytes | None = None
    """Bytes of all files that serving reads."""


class DefaultsStatus(ApiModel):
    """What the operator added to the document to make the fleet's pods. Another operator or chart
    changes none of it before somebody asks for it. Records of the history have it, too."""

    version: Annotated[str, Field(max_length=64)] | None = None
    """Version of the operator that made them."""
    worker_image: Annotated[str, Field(max_length=512)] | None = None
    """Image of engines where the document names none, and of what runs beside others."""
    router_image: Annotated[str, Field(max_length=512)] | None = None
    """Image of routers."""
    image_pull_policy: Annotated[str, Field(max_length=16)] | None = None
    """Pull policy of the pods."""
    image_pull_secrets: Annotated[
        tuple[Annotated[str, Field(max_length=253)], ...], Field(strict=False, max_length=64)
    ] = ()
    """Secrets with registry credentials."""
    readiness_gate: bool | None = None
    """Whether engines' pods are Ready only when routers send them requests."""
    engine_image: Annotated[str, Field(max_length=512)] | None = None
    """spec.engine.image when these were taken; another one takes the operator's own."""
    restarted_at: Annotated[str, Field(max_length=64)] | None = None
    """The spec.rollout.restartedAt that was obeyed; a later one takes the operator's own."""
    undo: Annotated[str, Field(max_length=128)] | None = None
    """The undo that was obeyed, of the fleet's annotation xpyd.dev/undo: what it brought back stays
    until a later restart."""


class CanaryStatus(ApiModel):
    """How the revision of the document that is on trial does, or did."""

    revision: Annotated[str, Field(max_length=16)] | None = None
    """The revision of all pools of engines; `xpyd rollout promote` names it."""
    phase: Literal["Running", "Promoting", "Promoted", "Failed"] | None = None
    """Promoting: routers are being told to divide requests no more."""
    step: Count | None = None
    """Which share it has or had, from 1."""
    weight_percent: Count | None = None
    """Its share of new requests now."""
    requests: Count | None = None
    """Requests of this step that it answered or failed."""
    failed: Count | None = None
    """Those that failed."""
    refused: Count | None = None
    """Further ones, which its engines refused with a 4xx."""
    recomputed: Count | None = None
    """Those of `requests` whose prompt D computed again because the KV did not come."""
    ttft_milliseconds: Count | None = None
    """What 95 % of its streams took to their first byte."""
    itl_milliseconds: Count | None = None
    """What 95 % of the gaps in its streams took."""
    said: Annotated[str, Field(max_length=1024)] | None = None
    """The last decision, with its numbers."""


class FleetStatus(ApiModel):
    """What the operator saw last."""

    observed_generation: Generation | None = None
    """The metadata.generation that this status is about."""
    endpoint: Annotated[str, Field(max_length=512)] | None = None
    """URL of the fleet's OpenAI API inside the cluster."""
    hosts: Annotated[
        tuple[Annotated[str, Field(max_length=253)], ...], Field(strict=False, max_length=17)
    ] = ()
    """Names by which clients outside reach it, of spec.router.ingress and httpRoute."""
    conditions: Annotated[
        tuple[Condition, ...], Field(strict=False, max_length=16), Unique("type")
    ] = ()
    """Ready, Available, Progressing, Degraded, RouterReady, CapacityAvailable, Drifted,
    KVTransferVerified, RolesReady, UpToDate; ModelReady where a Job downloads it, KeyRotated where
    somebody asked to rotate the key, FieldsIgnored where the document has fields that the operator
    does not know, OtherRelease where another release of the operator stands by."""
    pools: Annotated[
        tuple[FleetPoolStatus, ...], Field(strict=False, max_length=MAX_POOLS), Unique("name")
    ] = ()
    """Instances of each pool."""
    summary: Summary | None = None
    """Ready and wanted instances of each role."""
    model: ModelStatus | None = None
    """The download of the model, where a Job brings it into a claim."""
    defaults: DefaultsStatus | None = None
    """The operator's defaults that its pods were made with."""
    canary: CanaryStatus | None = None
    """A revision on trial."""
    kv_key_secret: Annotated[str, Field(max_length=253)] | None = None
    """Secret with the key by which engines know each other."""


class PoolStatus(ApiModel):
    """What the operator saw last of a pool."""

    observed_generation: Generation | None = None
    """The metadata.generation that this status is about."""
    layout: Layout | None = None
    """How one instance splits the model: TP2xPP2 is 2 ranks that share each layer, in 2 stages;
    xDP2 behind it: twice, with a copy each, xDP1-4: once to four times; xEP4 behind that: whole
    experts on 4 ranks."""
    replicas: Count | None = None
    """Instances there are."""
    ready_replicas: Count | None = None
    """Instances that serve."""
    updated_replicas: Count | None = None
    """Instances of the newest revision that serve."""
    draining_replicas: Count | None = None
    """Instances that leave and finish their requests."""
    draining_requests: Count | None = None
    """Requests that they still have, as routers say."""
    draining_kv_leases: Count | None = None
    """Prompts whose KV they hold for, or move with, others."""
    draining_since: Annotated[str, Field(max_length=32)] | None = None
    """When the first of them was asked to leave."""
    selector: Annotated[str, Field(max_length=1024)] | None = None
    """Label selector of the pool's pods, for HPA."""
