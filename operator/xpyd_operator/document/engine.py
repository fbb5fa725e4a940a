"""spec.engine: which program serves, its image, flags and environment (docs/adr/0062)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from xpyd_core.parallel.checks import EXPERT, SHORT_NAMES
from xpyd_operator.document.base import (
    ApiModel,
    Check,
    DnsName,
    KeyName,
    Numbers,
    Plain,
    Rule,
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
_NOT_CUT_SHORT = ("", "-", "--", "-dc", *_OF_POOLS)
"""What begins a refused flag of vLLM and is none cut short: no flag; a flag of its own that is
allowed (-dc is --diffusion-config); what every engine is refused."""
_NAME = re.compile("[^=.]*")


def flag_name(arg: str) -> str:
    """The flag's name in one of engine.args, as vLLM reads it: `_` is `-`, `=` begins the value and
    `.` a member of the flag's JSON."""
    name = _NAME.match(arg)
    assert name is not None, "the pattern matches any text"
    return name[0].replace("_", "-")


def has_whole_experts(args: Iterable[str]) -> bool:
    """Whether an engine with `args` has whole experts on its ranks: -ep is vLLM's short name."""
    return any(flag_name(arg) in (EXPERT, "-ep") for arg in args)


def _name_in(variable: str) -> str:
    """`flag_name` in CEL."""
    return f"{variable}.find('^{_NAME.pattern}').replace('_', '-')"


def _listed(texts: Iterable[str]) -> str:
    return "[" + ", ".join(f"'{text}'" for text in texts) + "]"


@dataclass(frozen=True)
class _Flags:
    """Flags of `vllm serve` that engine.args may not have, also cut short, as vLLM takes them
    (ADR 0062).

    `names`: one that ends with * stands for all that begin so. A flag of one letter has one, as its
    value may follow at once (-n2).
    """

    names: tuple[str, ...]

    def has(self, arg: str) -> bool:
        """Whether `arg` is one of them."""
        name = flag_name(arg)
        return name not in _NOT_CUT_SHORT and (
            any(whole.startswith(name) for whole in self._whole)
            or any(name.startswith(start) for start in self._starts)
        )

    def cel(self, variable: str) -> str:
        """`has` in CEL."""
        name = _name_in(variable)
        found = [
            f"{_listed(self._whole)}.exists(f, f.startsWith({name}))",
            *(f"{name}.startsWith('{start}')" for start in self._starts),
        ]
        return f"!({name} in {_listed(_NOT_CUT_SHORT)}) && ({' || '.join(found)})"

    @property
    def _whole(self) -> tuple[str, ...]:
        return tuple(name.removesuffix("*") for name in self.names)

    @property
    def _starts(self) -> tuple[str, ...]:
        return tuple(name.removesuffix("*") for name in self.names if name.endswith("*"))


_When = tuple[str, Callable[["Engine"], bool]]
_VLLM: _When = ("has(self.type) && self.type == 'VLLM'", lambda engine: engine.type == "VLLM")
_MOVES_KV: _When = ("has(self.connector)", lambda engine: engine.connector is not None)
_XPYD: _When = (
    "has(self.connector) && self.connector == 'Xpyd'",
    lambda engine: engine.connector == "Xpyd",
)


NIXL_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
NIXL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
API_KEY = "VLLM_API_KEY"
PLUGINS = "VLLM_PLUGINS"
PLUGIN = "xpyd"
"""Its name in VLLM_PLUGINS, whose commas vLLM splits at and at nothing else."""
_NAMES_PLUGIN = f"^(.*,)?{PLUGIN}(,.*)?$"


def _names_plugin(value: str) -> bool:
    return PLUGIN in value.split(",")


def _without(names: str, why: str, when: _When = _VLLM) -> Rule[Engine]:
    """A rule that refuses the flags `names` (`_Flags`; between spaces) of vLLM."""
    flags, (cel, applies) = _Flags(tuple(names.split())), when

    def first(engine: Engine) -> tuple[str, ...]:
        given = engine.args if applies(engine) else ()
        return next(((arg,) for arg in given if flags.has(arg)), ())

    found = rule(
        f"!({cel}) || !has(self.args) || !self.args.exists(a, {flags.cel('a')})",
        f"leave out {', '.join(flags.names)}: {why}",
        field="args",
        numbers=Numbers("%s", f"self.args.filter(a, {flags.cel('a')})[0]", first),
    )
    return found(lambda engine: not first(engine))


_NO_KEY = (
    "heartbeats and routers ask without a key, and vLLM would answer 401: let what stands before "
    "the router ask clients for one"
)


class EngineTls(ApiModel):
    """HTTPS between routers and engines, in a cluster."""

    secret_name: DnsName
    """Secret of type kubernetes.io/tls with the engines' tls.crt and tls.key; routers verify them
    by its ca.crt and get nothing else of it. Engines of xpyd load a new certificate without a
    restart."""
    server_name: Annotated[
        str,
        Field(max_length=253),
        matching(
            "[a-z0-9]([-a-z0-9.]*[a-z0-9])?", "must be a DNS name such as engines.chat.example"
        ),
    ] = ""
    """Name in the certificate, which all engines share; none: FLEET-engines.NAMESPACE.svc."""
    router_secret_name: DnsName = ""
    """Secret of type kubernetes.io/tls that routers show to engines, which verify it by its ca.crt.
    Then they answer nobody else, but for probes and metrics; none: they ask for no certificate."""


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
                    f"!({_name_in('self')} in {_listed(_OF_POOLS)})",
                    "must not say how many ranks an instance has: use spec.pools[].parallelism",
                    lambda arg: flag_name(arg) not in _OF_POOLS,
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
    tls: EngineTls | None = None
    """HTTPS instead of HTTP between routers and engines; none: HTTP."""

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
        f"!self.env.exists(e, e.name == '{API_KEY}')",
        f"leave out {API_KEY}: {_NO_KEY}",
        field="env",
    )
    def _asks_for_no_key(self) -> bool:
        return self.type != "VLLM" or all(item.name != API_KEY for item in self.env)

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
        "!has(self.type) || self.type != 'VLLM' || !has(self.tls) || "
        "!has(self.tls.routerSecretName)",
        "vLLM would ask kubelet's probes for a certificate, too, and they have none: leave it out",
        field="tls.routerSecretName",
    )
    def _asks_for_no_certificate(self) -> bool:
        is_asked = self.tls is not None and bool(self.tls.router_secret_name)
        return self.type != "VLLM" or not is_asked

    # Flags of `vllm serve` that the fleet sets, or that its probes and heartbeats rely on.
    _leaves_model = _without(
        "--model --revision --served-model-name", "spec.model says which model, and its names"
    )
    _leaves_parallelism = _without(
        " ".join(SHORT_NAMES), "spec.pools[].parallelism says how many ranks an instance has"
    )
    _leaves_experts = _without(
        EXPERT.replace("--", "--no-"),
        "spec.pools[].parallelism.expert says whether experts are whole",
    )
    _leaves_address = _without(
        "--host --port --uds --grpc --headless",
        "routers and probes speak HTTP at the pod's address",
    )
    _leaves_certificate = _without("--ssl-*", "spec.engine.tls says whether it speaks TLS")
    _has_no_api_key = _without("--api-key", _NO_KEY)
    _leaves_transfer = _without(
        "--kv-transfer-config", "spec.engine.connector and spec.kvTransfer say it"
    )
    _leaves_drain = _without("--shutdown-timeout", "spec.drain.timeoutSeconds says it")
    _leaves_config = _without("--config", "give the flags themselves, so that they are checked")
    _is_one_engine = _without(
        "--data-parallel-* -dp* --nnodes -n* --node-rank -r*",
        "an instance is one pod; spec.pools[].parallelism.data says how many replicas are in it",
    )
    _keeps_its_connector = _without(
        "--kv-offloading-size",
        "with it vLLM has its offloading connector in place of the one that spec.engine.connector "
        "names",
        _MOVES_KV,
    )
    # What xpyd's connector and plugin refuse when vLLM starts, whatever the value: all but vLLM's
    # default (xpyd_kv.vllm: options.check_config, and instance).
    _does_not_speculate = _without(
        "--speculative-config -sc --spec-method --spec-model --spec-tokens",
        "the connector Xpyd is not tested with speculative decoding",
        _XPYD,
    )
    _has_own_config = _without(
        "--hf-config-path", "the connector Xpyd reads config.json in the model's folder", _XPYD
    )
    _never_sleeps = _without(
        "--enable-sleep-mode",
        "with the connector Xpyd KV may move while vLLM takes the cache's memory away",
        _XPYD,
    )
    _has_one_stream = _without(
        "--enable-dbo --ubatch-size",
        "the connector Xpyd needs the layers of a step one after another",
        _XPYD,
    )
    _has_whole_contexts = _without(
        "--prefill-context-parallel-size -pcp --decode-context-parallel-size -dcp",
        "the connector Xpyd does not know contexts that ranks share",
        _XPYD,
    )
    _has_one_server = _without(
        "--api-server-count -asc", "with the connector Xpyd vLLM's only API server beats", _XPYD
    )
    _has_no_root = _without(
        "--root-path", "with the connector Xpyd routers reach vLLM without a prefix", _XPYD
    )
