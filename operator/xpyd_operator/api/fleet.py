"""InferenceFleet, xpyd.dev/v1alpha1: the fields that this version makes work, with their bounds.

A field or an enum's value enters with the code behind it; until then xpyd_operator.api.later names
it, so that a document is refused and not half obeyed. Names and bounds are append-only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import InitErrorDetails

from xpyd_operator.api.base import (
    DNS_LABEL,
    ApiModel,
    Size,
    SizeOrPercent,
    allowed,
    also,
    mistake,
    no_null,
    rule,
    unique,
)

API_VERSION = "xpyd.dev/v1alpha1"
KIND = "InferenceFleet"
ROUTER = "router"
"""The router's place in pod names; a pool of this name would take it."""

Role = Literal["Prefill", "Decode", "Aggregated"]

_NAME_RULE = (
    "metadata.name must be a DNS label of at most 30 characters that begins with a letter "
    "(pod, Service and pool names are derived from it)"
)
_ROLES_RULE = "a fleet needs at least one Prefill and one Decode pool, or only Aggregated pools"
_NO_NUL = r"^[^\x00]*$"


def _fleet_name(value: str) -> str:
    if len(value) > 30 or not re.fullmatch(DNS_LABEL, value):
        raise rule(f"given {value!r:.80}; {_NAME_RULE}")
    return value


class Metadata(ApiModel):
    """Kubernetes object metadata; local mode uses the name and ignores the rest."""

    name: Annotated[str, Field(max_length=253), AfterValidator(_fleet_name)]
    namespace: Annotated[str, Field(max_length=63, pattern=DNS_LABEL)] = "default"
    labels: Annotated[dict[str, str], Field(max_length=64, default_factory=dict[str, str])]
    annotations: Annotated[dict[str, str], Field(max_length=64, default_factory=dict[str, str])]


class Model(ApiModel):
    """Which checkpoint the fleet serves, and under which names."""

    uri: Annotated[
        str,
        Field(
            min_length=1,
            max_length=512,
            pattern=r"^(hf|file)://[^\x00]+$",
            json_schema_extra=allowed("hf://ORG/NAME or file://FOLDER, at most 512 characters"),
        ),
    ]
    revision: Annotated[str, Field(max_length=128, pattern=_NO_NUL)] = ""
    served_names: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256, pattern=_NO_NUL)], ...],
        Field(strict=False, max_length=8),
        also(unique()),
    ] = ()


class EnvVar(ApiModel):
    """One environment variable of every engine."""

    name: Annotated[
        str,
        Field(
            min_length=1,
            max_length=256,
            pattern=r"^[^=\x00]+$",
            json_schema_extra=allowed("a variable's name, at most 256 characters without '='"),
        ),
    ]
    value: Annotated[str, Field(max_length=32768, pattern=_NO_NUL)] = ""


def _no_xpyd_variable(raw: list[Any]) -> Iterable[InitErrorDetails]:
    for index, item in enumerate(raw):
        name = cast("dict[str, Any]", item).get("name") if isinstance(item, dict) else None
        if isinstance(name, str) and name.startswith("XPYD_"):
            yield mistake(f"{name!r} is set by xpyd itself; XPYD_* is reserved", index, "name")


class Engine(ApiModel):
    """What every engine gets beside what the fleet decides; `args` come last, so they win."""

    args: Annotated[
        tuple[Annotated[str, Field(max_length=1024, pattern=_NO_NUL)], ...],
        Field(strict=False, max_length=128),
    ] = ()
    env: Annotated[
        tuple[EnvVar, ...],
        Field(strict=False, max_length=128),
        also(unique("name")),
        also(_no_xpyd_variable),
    ] = ()


class Resources(ApiModel):
    """Devices of one instance. 0 GPUs is a CPU instance in one pod."""

    gpus: Annotated[
        int,
        Field(ge=0, le=0, json_schema_extra=allowed("0: this version runs CPU instances only")),
    ]


class Pool(ApiModel):
    """Instances of one role."""

    name: Annotated[
        str,
        Field(
            max_length=16,
            pattern=DNS_LABEL,
            json_schema_extra=allowed(
                "a DNS label of at most 16 characters that begins with a letter"
            ),
        ),
    ]
    role: Role
    replicas: Annotated[Annotated[int, Field(ge=0, le=1024)] | None, BeforeValidator(no_null)] = (
        None
    )
    """None: not declared; the pool keeps what it has, 1 at first."""
    resources: Annotated[
        Resources,
        Field(
            json_schema_extra=allowed(
                "`resources: {gpus: 0}`: this version runs CPU instances only"
            )
        ),
    ]


class KvTransfer(ApiModel):
    """How KV moves from P to D."""

    mode: Literal["PutAsync"] = "PutAsync"
    transport: Literal["Auto", "TCP"] = "Auto"
    port: Annotated[int, Field(ge=1024, le=65535)] = 21001
    buffer_size: SizeOrPercent = "10%"
    """Receiving side's device buffer; a percentage is of the instance's KV cache."""
    host_pool_size: Size = "4Gi"
    lease_seconds: Annotated[int, Field(ge=5, le=3600)] = 30
    wait_seconds: Annotated[int, Field(ge=1, le=600)] = 10
    on_failure: Literal["Recompute", "Fail"] = "Recompute"


class Router(ApiModel):
    """The HTTP entry."""

    policy: Literal["RoundRobin"] = "RoundRobin"


class Heartbeat(ApiModel):
    """An instance leaves the routers' registry after `missedBeats` intervals without a beat."""

    interval_milliseconds: Annotated[int, Field(ge=100, le=60000)] = 3000
    missed_beats: Annotated[int, Field(ge=2, le=60)] = 3


class Drain(ApiModel):
    """How long a leaving instance may take to finish its requests."""

    timeout_seconds: Annotated[int, Field(ge=0, le=86400)] = 300


def _pool_rules(raw: list[Any]) -> Iterable[InitErrorDetails]:
    maps = [cast("dict[str, Any]", item) for item in raw if isinstance(item, dict)]
    for index, item in enumerate(raw):
        if isinstance(item, dict) and cast("dict[str, Any]", item).get("name") == ROUTER:
            yield mistake("'router' is the name of the fleet's router", index, "name")
    roles = [item.get("role") for item in maps]
    known = [role for role in roles if role in ("Prefill", "Decode", "Aggregated")]
    if not known or len(known) < len(raw):
        return  # a role that is wrong itself says enough
    if set(known) != {"Aggregated"} and not {"Prefill", "Decode"} <= set(known):
        yield mistake(_ROLES_RULE)


class Spec(ApiModel):
    """What the user wants."""

    model: Model
    engine: Engine = Engine()
    pools: Annotated[
        tuple[Pool, ...],
        Field(strict=False, min_length=1, max_length=8),
        also(unique("name")),
        also(_pool_rules),
    ]
    kv_transfer: KvTransfer = KvTransfer()
    router: Router = Router()
    heartbeat: Heartbeat = Heartbeat()
    drain: Drain = Drain()


class InferenceFleet(ApiModel):
    """One fleet: a model, its pools and the router in front of them."""

    api_version: Literal["xpyd.dev/v1alpha1"]
    kind: Literal["InferenceFleet"]
    metadata: Metadata
    spec: Spec

    @property
    def name(self) -> str:
        """The fleet's name."""
        return self.metadata.name
