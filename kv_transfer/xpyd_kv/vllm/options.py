"""What the command line says of the transfer, and what is refused at start. Reads no environment.

Options of ours are members of `kv_connector_extra_config`; a member that is not known is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from xpyd_core.errors import UserError
from xpyd_core.keys import Keys, check_keys_given, fleet_keys
from xpyd_core.messages import HEARTBEAT_PERIOD_S
from xpyd_core.pod_env import parse_discovery
from xpyd_core.request_id import Address, is_dialable
from xpyd_kv.memory.store import StoreLimits
from xpyd_kv.plan.frames import FrameLimits
from xpyd_kv.session.settings import KvLimits, KvSettings
from xpyd_kv.transport.settings import TRANSPORTS, check_encrypted
from xpyd_kv.vllm import engine_api
from xpyd_kv.vllm.engine_api import KvCacheConfig, VllmConfig
from xpyd_kv.wire.messages import Mode

CONNECTOR = "XpydConnector"
"""Its name in `--kv-transfer-config`."""
_ROLES: Mapping[str | None, Literal["P", "D"]] = {"kv_producer": "P", "kv_consumer": "D"}
_FULL_ATTENTION = "FullAttentionSpec"
"""vLLM's class for a group of layers that keep the KV of all tokens, in blocks of one table. Its
subclasses keep other things."""
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]
_Bytes = Annotated[int, msgspec.Meta(ge=0)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The members of `kv_connector_extra_config`."""

    host: str = "127.0.0.1"
    """The literal ip of this pod: a D listens there, a P dials from there."""
    key_file: str = ""
    """The fleet's secret, as `--kv-key-file`."""
    insecure: bool = False
    """The fleet has no secret, as `--kv-insecure`."""
    accept_unsigned_pairs: bool = False
    """Take pair ids without the router's MAC: any client that reaches the HTTP port can then make
    a P dial an address of its choice."""
    mode: Mode = "put_async"
    """P's: when KV moves."""
    transports: tuple[str, ...] = ("tcp",)
    """What may move KV."""
    encryption: Literal["none", "tls"] = "none"
    """Whether what moves between instances is encrypted, as `--kv-encryption`."""
    socket_dir: str = ""
    """The folder of the Unix sockets that instances of this machine share."""
    buffer_bytes: _Bytes = 0
    """D: memory on the device for KV that comes before its request; P in mode get: for KV that
    waits."""
    pool_bytes: _Bytes = 0
    """The same in the host's memory."""
    group_bytes: _Bytes = 4 * 1024 * 1024
    """Bytes of layers that go together."""
    portable: bool = False
    """Send and take KV token by token, as our engine has it, also where the cache is not so."""
    wait_s: _Seconds = 10.0
    """D: how long a request waits for its prompt's KV."""
    lease_s: _Seconds = 30.0
    """How long P keeps blocks for a D that says nothing."""
    hold_s: _Seconds = 10.0
    """P in mode put: how long a step waits for D."""
    fail_without_kv: bool = False
    """Allow the policy `fail`: a request whose KV does not come ends with an error."""
    discovery: str = ""
    """The routers that get heartbeats, host:port with commas; '' for XPYD_DISCOVERY's."""
    heartbeat_period_s: Annotated[float, msgspec.Meta(ge=0.1, le=60)] = HEARTBEAT_PERIOD_S
    """Seconds between two heartbeats."""
    fleet: str = ""
    """What heartbeats say of this instance; '' for XPYD_FLEET."""
    pool: str = ""
    """The same; '' for XPYD_POOL."""
    instance: str = ""
    """The same; '' for XPYD_INSTANCE, or the HTTP address."""
    revision: str = ""
    """The same; '' for XPYD_REVISION."""

    @property
    def is_encrypted(self) -> bool:
        return self.encryption == "tls"

    @property
    def keys(self) -> Keys:
        """The keys to sign and to accept with, as their file has them from now on. UserError for a
        file that cannot be read."""
        return fleet_keys(Path(self.key_file) if self.key_file else None, insecure=self.insecure)

    @property
    def settings(self) -> KvSettings:
        """The same for the scheduler's half and for a rank's."""
        return KvSettings(
            limits=KvLimits(lease_s=self.lease_s, hold_s=self.hold_s),
            frames=FrameLimits(group_bytes=max(1, self.group_bytes)),
            # vLLM gives the blocks that KV may land in when its request runs, none before.
            store=StoreLimits(1.0, self.buffer_bytes, self.pool_bytes),
            mode=self.mode,
            engine=engine_name(),
        )


def engine_name() -> str:
    """HELLO's `engine`: another version may have other kernels."""
    return f"vllm {engine_api.vllm_version}"


def read_options(config: VllmConfig) -> Options:
    """Read and check the options. UserError names the member and the fix."""
    given: Mapping[str, Any] = config.kv_transfer_config.kv_connector_extra_config
    try:
        options = msgspec.convert(given, Options)
    except msgspec.ValidationError as error:
        raise UserError(f"kv_connector_extra_config: {error}") from error
    check_keys_given(
        Path(options.key_file) if options.key_file else None,
        insecure=options.insecure,
        who="XpydConnector (key_file, insecure in kv_connector_extra_config)",
    )
    if not is_dialable(Address(options.host, config.kv_transfer_config.kv_port)):
        raise UserError(
            f"kv_connector_extra_config: host {options.host!r} with kv_port "
            f"{config.kv_transfer_config.kv_port}; expected a literal ip and a port from 1024 on"
        )
    try:
        parse_discovery(options.discovery)
    except UserError as error:
        raise UserError(f"kv_connector_extra_config: discovery: {error}") from error
    unknown = sorted(set(options.transports) - set(TRANSPORTS))
    if unknown:
        raise UserError(
            f"kv_connector_extra_config: transports: {unknown[0]}; expected some of "
            f"{', '.join(TRANSPORTS)}"
        )
    if options.encryption == "tls":
        check_encrypted(options.transports, connections=1, insecure=options.insecure)
    return options


def role_of(config: VllmConfig) -> Literal["P", "D"]:
    """P or D. UserError for an instance that is to be both."""
    role = config.kv_transfer_config.kv_role
    if role not in _ROLES:
        raise UserError(f"kv_role {role}: expected kv_producer or kv_consumer")
    return _ROLES[role]


def incarnation_of(config: VllmConfig) -> str:
    """The same in all processes of an instance, and another after a restart."""
    ids = f"{config.kv_transfer_config.engine_id} {config.instance_id}"
    return sha256(ids.encode()).hexdigest()[:16]


def check_config(config: VllmConfig, caches: KvCacheConfig, options: Options) -> None:
    """UserError, with the reason, for what this connector does not serve."""
    parallel, refusals = config.parallel_config, _model_refusals(config)
    if len(caches.kv_cache_groups) != 1:
        refusals.append(
            f"the model has {len(caches.kv_cache_groups)} KV cache groups (sliding window, Mamba "
            "or hybrid); one is supported"
        )
    others = {kind for group in caches.kv_cache_groups for kind in _kinds(group.kv_cache_spec)}
    if others - {_FULL_ATTENTION}:
        refusals.append(
            f"the model has a KV cache of {', '.join(sorted(others - {_FULL_ATTENTION}))}: of a "
            "long prompt vLLM may keep a part only (sliding window, chunked local attention); full "
            "attention is supported"
        )
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name) > 1:
            refusals.append(f"{name} must be 1")
    if parallel.data_parallel_size > 1:
        refusals.append("data_parallel_size must be 1: start a vLLM of its own for each")
    if options.discovery and not engine_api.is_plugin_named():
        refusals.append("discovery is given, but without VLLM_PLUGINS=xpyd no heartbeat is sent")
    if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        refusals.append("all ranks must be on one machine")
    if config.kv_transfer_config.kv_load_failure_policy == "fail" and not options.fail_without_kv:
        refusals.append(
            'requests would fail where their KV does not come: give "kv_load_failure_policy": '
            '"recompute", or fail_without_kv in kv_connector_extra_config'
        )
    if refusals:
        raise UserError(f"XpydConnector: {'; '.join(refusals)}")


def _kinds(spec: Any) -> set[str]:  # noqa: ANN401 - one of vLLM's many classes
    """The classes of a group's specs: layers of different sizes have one for each."""
    by_layer: Mapping[str, object] | None = getattr(spec, "kv_cache_specs", None)
    return {type(one).__name__ for one in (by_layer.values() if by_layer else (spec,))}


def _model_refusals(config: VllmConfig) -> list[str]:
    model, parallel, refusals = config.model_config, config.parallel_config, list[str]()
    if not Path(model.model).is_dir():
        refusals.append(f"the model {model.model!r} must be given as the folder of its checkpoint")
    if not Path(model.tokenizer).is_dir():
        refusals.append(f"the tokenizer {model.tokenizer!r} must be given as a folder")
    if model.hf_config_path:
        refusals.append("hf_config_path: config.json must be the one in the model's folder")
    if model.use_mla:
        refusals.append("MLA is not tested")
    if config.speculative_config is not None:
        refusals.append("speculative decoding is not tested")
    if model.enable_sleep_mode:
        refusals.append("enable_sleep_mode: KV may move while vLLM takes the cache's memory away")
    if parallel.enable_dbo or parallel.ubatch_size > 1:
        refusals.append("enable_dbo: layers of a step are computed on several streams at once")
    return refusals


def model_name(config: VllmConfig) -> str:
    """The first name under which the model is served."""
    names = config.model_config.served_model_name
    return names if isinstance(names, str) else names[0]
