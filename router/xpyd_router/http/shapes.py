"""The JSON that the router itself answers on all routes but inference. Pure.

`app` and `admin` fill these structs, `openapi` makes schemas of them: they cannot differ.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from xpyd_core.messages import InstanceType
from xpyd_router.fleet.breaker import BreakerState
from xpyd_router.fleet.instances import Dialect, ShownState

_Count = Annotated[int, Meta(ge=0)]
_Seconds = Annotated[float, Meta(ge=0)]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all."""


class Model(Shape, frozen=True, kw_only=True):
    """A model that can be served now, with the members of OpenAI's API and of Anthropic's."""

    id: str
    object: Literal["model"] = "model"
    created: Annotated[_Count, Meta(description="Unix time of the router's start.")]
    owned_by: Literal["xpyd"] = "xpyd"
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Tokens of the context; null where no engine says."),
    ]
    type: Literal["model"] = "model"
    display_name: str
    created_at: Annotated[str, Meta(description="`created` in RFC 3339.")]


class ModelList(Shape, frozen=True, kw_only=True):
    """All models, sorted by name."""

    object: Literal["list"] = "list"
    data: list[Model]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


class ResponseDeleted(Shape, frozen=True, kw_only=True):
    """A response that is kept no more."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class Alive(Shape, frozen=True, kw_only=True):
    """The process works."""

    status: Literal["ok"] = "ok"


class Ready(Shape, frozen=True, kw_only=True):
    """Requests are taken; with `pairs=true` also: an instance can serve them now."""

    status: Literal["ready"] = "ready"


class NotReady(Shape, frozen=True, kw_only=True):
    """Requests should not be sent here: the router ends, its parent is stuck, or it starts and
    engines have not found it yet; with `pairs=true` also: no pair can be picked."""

    status: Literal["draining", "no word of the instances", "starting", "no instances"]


class Version(Shape, frozen=True, kw_only=True):
    """The router's version."""

    version: str


class InstanceHealth(Shape, frozen=True, kw_only=True):
    """What the router thinks of an instance that says it is Ready."""

    ejected_by: Annotated[str | None, Meta(description="Why it is ejected.")]
    ejected_seconds: _Seconds
    breaker: BreakerState
    open_seconds: Annotated[_Seconds, Meta(description="How long the circuit breaker stays open.")]
    weight: Annotated[
        float, Meta(ge=0, le=1, description="Its share of requests; below 1: it starts slowly.")
    ]


class InstanceLoad(Shape, frozen=True, kw_only=True):
    """As of its last heartbeat."""

    running: _Count
    waiting: _Count
    free_blocks: _Count
    total_blocks: _Count
    kv_leases: Annotated[
        _Count, Meta(description="Prompts whose KV it holds for, or moves with, another instance.")
    ]


class InstanceKv(Shape, frozen=True, kw_only=True):
    """What the instance counted with one peer since its start, as of its last heartbeat."""

    peer: Annotated[str, Meta(description="The peer's KV address.")]
    moved: _Count
    failed: Annotated[dict[str, int], Meta(description="KV that did not come, by cause.")]


class InstanceReport(Shape, frozen=True, kw_only=True):
    """One line of the registry."""

    instance: str
    type: Annotated[InstanceType, Meta(description="P: prefill, D: decode, A: aggregated.")]
    state: ShownState
    http_address: str
    zmq_address: str
    incarnation: Annotated[str, Meta(description="Random per start of its process.")]
    age_seconds: Annotated[_Seconds, Meta(description="Since its last heartbeat.")]
    health: InstanceHealth
    models: list[str]
    compatibility: Annotated[str, Meta(description="P and D pair only where theirs are equal.")]
    continuation: Annotated[
        Literal[0, 1], Meta(description="1: it can continue another engine's stream.")
    ]
    dialect: Annotated[Dialect, Meta(description="How it is told of a transfer of KV.")]
    fleet: str
    pool: str
    revision: str
    fleet_revision: Annotated[
        str, Meta(description="P and D that name different ones may be no pair (--pairing).")
    ]
    max_model_len: _Count
    load: InstanceLoad
    kv: Annotated[list[InstanceKv], Meta(description="The last 16 peers, the latest first.")]
    engine: Annotated[str, Meta(description="Which program it is; empty: xpyd's own.")]
    unmet: Annotated[
        list[str],
        Meta(description="Partners of another engine whose KV is not compared yet, at most 16."),
    ]
    refused: Annotated[
        list[str],
        Meta(description="Partners of another engine whose KV differs, at most 16: no pair."),
    ]
    unverified: Annotated[
        list[str],
        Meta(
            description="Partners of which the last probe failed, at most 16; with --kv-verify "
            "strict also those without one yet: no pair."
        ),
    ]
    unpaired: Annotated[
        str,
        Meta(
            description="Why it is in no pair, though instances of the other type and of its "
            "revision are there; empty: it is in one, serves alone, or waits for that type."
        ),
    ]
    key_ids: Annotated[
        list[str], Meta(description="Ids of the fleet's keys that it accepts; the first signs.")
    ]
    in_flight: Annotated[
        _Count, Meta(description="Requests of this router that were given it, and are not over.")
    ]
    replicas: Annotated[
        _Count, Meta(description="Its replicas that serve and stay; 0: it lists none.")
    ]
    scaling_problem: Annotated[
        str, Meta(description="Why it has not as many as it should; empty: it has.")
    ]


class PairReport(Shape, frozen=True, kw_only=True):
    """What the last probe of a pair has shown."""

    prefill: str
    decode: str
    cause: Annotated[str, Meta(description="Why nothing arrived; empty: it did.")]
    detail: Annotated[str, Meta(description="The same for people.")]
    seconds: _Seconds


class Instances(Shape, frozen=True, kw_only=True):
    """The registry."""

    instances: list[InstanceReport]
    kv_verify: Annotated[
        Literal["strict", "report"],
        Meta(description="strict: P and D are a pair only while probes of it pass."),
    ]
    kv_problems: Annotated[
        list[PairReport], Meta(description="At most 64 pairs whose last probe failed.")
    ]
    kv_slowest: Annotated[
        PairReport | None, Meta(description="The pair whose probe passed and took the longest.")
    ]
    key_ids: Annotated[
        list[str],
        Meta(description="Ids of the fleet's keys that this router accepts; the first signs."),
    ]


class AdminInstance(Shape, frozen=True, kw_only=True):
    """An instance as its operator sees it."""

    instance: str
    type: InstanceType
    state: ShownState
    is_cordoned: bool
    http_address: str
    incarnation: str
    in_flight: Annotated[_Count, Meta(description="This router's calls.")]
    others_in_flight: Annotated[int, Meta(description="Calls of others, by its last heartbeat.")]


class AdminState(Shape, frozen=True, kw_only=True):
    """The router and all its instances."""

    is_draining: bool
    instances: list[AdminInstance]


class ErrorDetail(Shape, frozen=True, kw_only=True):
    """What is wrong."""

    message: str
    type: str
    param: Annotated[str | None, Meta(description="The request's field at fault.")]
    code: Annotated[
        str | int | None,
        Meta(description="A code of the router, for programs; or one of the engine, unchanged."),
    ]


class ErrorBody(Shape, frozen=True, kw_only=True):
    """Every error, as OpenAI writes it."""

    error: ErrorDetail
