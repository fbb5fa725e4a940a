"""spec.engine: which program serves, its image, flags and environment."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from xpyd_core.parallel.checks import SHORT_NAMES
from xpyd_operator.document.base import (
    ApiModel,
    Check,
    DnsName,
    KeyName,
    Numbers,
    Plain,
    Unique,
    matching,
    rule,
)


class FieldRef(ApiModel):
    """A field of the pod."""

    api_version: Annotated[str, Field(max_length=16)] = "v1"
    """Version of the schema that fieldPath is written in."""
    field_path: Annotated[str, Field(min_length=1, max_length=256)]
    """Path of the field, such as metadata.name, spec.nodeName or status.podIP."""


class KeyRef(ApiModel):
    """A key of a Secret or ConfigMap in the fleet's namespace."""

    name: DnsName
    """Name of the object."""
    key: KeyName
    """Key in it."""
    optional: bool = False
    """The pod starts also without it."""


class EnvSource(ApiModel):
    """Where a variable's value comes from; exactly one of the fields."""

    field_ref: FieldRef | None = None
    """A field of the pod."""
    secret_key_ref: KeyRef | None = None
    """A key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """A key of a ConfigMap."""

    @rule(
        "[has(self.fieldRef), has(self.secretKeyRef), has(self.configMapKeyRef)]"
        ".filter(given, given).size() == 1",
        "needs exactly one of fieldRef, secretKeyRef and configMapKeyRef",
    )
    def _is_one(self) -> bool:
        given = (self.field_ref, self.secret_key_ref, self.config_map_key_ref)
        return sum(source is not None for source in given) == 1


class EnvVar(ApiModel):
    """One environment variable of every engine."""

    name: Annotated[
        str,
        Field(max_length=256),
        matching("[ -<>-~]+", "must be printable ASCII without '='"),
        Check(
            "!self.startsWith('XPYD_')",
            "must not begin with XPYD_: xpyd sets these variables itself",
            lambda name: not name.startswith("XPYD_"),
        ),
    ]
    """Name of the variable; XPYD_* is reserved."""
    value: Annotated[str, Field(max_length=32768), Plain] = ""
    """Its value; Kubernetes expands $(NAME) of a variable before it."""
    value_from: EnvSource | None = None
    """Where its value comes from, instead of value."""

    @rule(
        "!has(self.value) || self.value == '' || !has(self.valueFrom)",
        "value and valueFrom exclude each other: leave one out",
        field="valueFrom",
    )
    def _is_one(self) -> bool:
        return not self.value or self.value_from is None


_OF_POOLS = (
    *(name[:end] for name in SHORT_NAMES.values() for end in range(2, len(name) + 1)),
    *SHORT_NAMES,
)
"""The worker's flags that the pools set, also with one dash and cut short as argparse accepts them:
the pods of an instance follow from them."""


OF_VLLM = (
    "model",
    "revision",
    "served-model-name",
    "host",
    "port",
    "uds",
    "config",
    "kv-transfer-config",
    "shutdown-timeout",
    "data-parallel-size",
    "ssl-keyfile",
    "ssl-certfile",
)
"""Flags of `vllm serve` that the fleet sets, or that its probes and heartbeats rely on. vLLM reads
`_` as `-`, and a member of a flag's JSON behind a dot."""
_OF_VLLM = re.compile(
    f"(--({'|'.join(name.replace('-', '[-_]') for name in OF_VLLM)})|-dp)([=.].*)?", re.DOTALL
)
_VLLM_PATTERN = f"^(--({'|'.join(name.replace('-', '[-_]') for name in OF_VLLM)})|-dp)([=.]|$)"


NIXL_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
NIXL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
PLUGINS = "VLLM_PLUGINS"
PLUGIN = "xpyd"
"""Its name in VLLM_PLUGINS, whose commas vLLM splits at and at nothing else."""
_NAMES_PLUGIN = f"^(.*,)?{PLUGIN}(,.*)?$"


def _names_plugin(value: str) -> bool:
    return PLUGIN in value.split(",")


def _first_of_vllm(engine: Engine) -> tuple[str | int, ...]:
    """The first of engine.args that the fleet sets itself; () for none."""
    if engine.type == "VLLM":
        for arg in engine.args:
            if _OF_VLLM.fullmatch(arg):
                return (arg,)
    return ()


class Engine(ApiModel):
    """What every engine gets in addition to what the fleet decides."""

    type: Literal["Xpyd", "VLLM"] = "Xpyd"
    """Which engine: xpyd's own, or vLLM 0.32 or later."""
    connector: Literal["Xpyd", "Nixl"] | None = None
    """What moves KV between engines of type VLLM: Xpyd, xpyd's own transfer inside vLLM, for which
    the image has `xpyd[vllm]`; Nixl, vLLM's NixlConnector, for which the image has NIXL and nothing
    of xpyd, and which authenticates no one. Pools of role Aggregated need none."""
    image: Annotated[
        str,
        Field(max_length=512),
        matching("[^ \\x00-\\x1f]+", "must be an image such as registry.example/worker:1.0"),
    ] = ""
    """Image of the engines in a cluster; none: the operator's default, which is xpyd's own engine;
    type VLLM needs one."""
    args: Annotated[
        tuple[
            Annotated[
                str,
                Field(max_length=1024),
                Plain,
                Check(
                    f"!self.matches('^({'|'.join(_OF_POOLS)})(=|$)')",
                    "must not say how an instance splits the model: use spec.pools[].parallelism",
                    lambda arg: arg.partition("=")[0] not in _OF_POOLS,
                ),
            ],
            ...,
        ],
        Field(strict=False, max_length=128),
    ] = ()
    """Flags of `xpyd worker`, for type VLLM of `vllm serve`; they come last, so they win."""
    env: Annotated[
        tuple[EnvVar, ...],
        Field(strict=False, max_length=128),
        Unique("name"),
    ] = ()
    """Environment of every engine."""

    @property
    def is_nixl(self) -> bool:
        """Whether vLLM's NixlConnector moves the KV."""
        return self.connector == "Nixl"

    @rule(
        "!has(self.type) || self.type != 'VLLM' || has(self.image)",
        "type VLLM needs an image with vLLM",
        field="image",
        missing=True,
        in_cluster=True,
    )
    def _has_image(self) -> bool:
        return self.type != "VLLM" or bool(self.image)

    @rule(
        f"!has(self.type) || self.type != 'VLLM' || !has(self.env) || "
        f"!self.env.exists(e, e.name in ['{NIXL_HOST}', '{NIXL_PORT}'])",
        f"xpyd sets {NIXL_HOST} and {NIXL_PORT}: leave them out (spec.kvTransfer.port is the port)",
        field="env",
    )
    def _leaves_side_channel(self) -> bool:
        given = any(item.name in (NIXL_HOST, NIXL_PORT) for item in self.env)
        return self.type != "VLLM" or not given

    @rule(
        f"!has(self.type) || self.type != 'VLLM' || !has(self.env) || "
        f"!self.env.exists(e, e.name == '{PLUGINS}' && (has(e.valueFrom) || "
        f"(has(e.value) && e.value.matches('{_NAMES_PLUGIN}'))))",
        f"xpyd adds its own plugin to {PLUGINS} where the connector is Xpyd: give the others as a "
        f"value, without {PLUGIN}",
        field="env",
    )
    def _leaves_plugin(self) -> bool:
        given = (item for item in self.env if item.name == PLUGINS)
        wrong = any(item.value_from is not None or _names_plugin(item.value) for item in given)
        return self.type != "VLLM" or not wrong

    @rule(
        "!has(self.connector) || (has(self.type) && self.type == 'VLLM')",
        "xpyd's own engine has no connector: leave it out, or set engine.type to VLLM",
        field="connector",
    )
    def _has_connector_of_vllm(self) -> bool:
        return self.type == "VLLM" or self.connector is None

    @rule(
        "!has(self.type) || self.type != 'VLLM' || !has(self.args) || "
        f"!self.args.exists(a, a.matches('{_VLLM_PATTERN}'))",
        "xpyd sets this flag of vLLM: leave it out (spec.model, spec.pools, spec.kvTransfer and "
        "spec.drain say what it gets; a pod has one engine, and speaks plain HTTP)",
        field="args",
        numbers=Numbers(
            "%s", f"self.args.filter(a, a.matches('{_VLLM_PATTERN}'))[0]", _first_of_vllm
        ),
    )
    def _leaves_flags_of_vllm(self) -> bool:
        return not _first_of_vllm(self)
