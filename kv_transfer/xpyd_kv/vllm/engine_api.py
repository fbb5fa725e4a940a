"""vLLM's connector API as it is used here: the one file of the package that imports vLLM.

At run time the names are vLLM's. For type checks they are the small classes below, since vLLM is
not installed where this code is checked; so they also say what of vLLM the connector relies on.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from xpyd_core.errors import UserError

TESTED_VERSIONS = ("0.32.0",)
"""The versions of vLLM that this connector has run in."""
CHECKED_VERSIONS = ("0.33.0",)
"""Those whose source was compared with what is used here, and in which it has not run."""

if TYPE_CHECKING:
    import torch

    class KVConnectorRole(Enum):
        """The process that a connector object is in."""

        SCHEDULER = 0
        WORKER = 1

    class KVConnectorMetadata:
        """From the scheduler's object to each rank's, once for each step; pickled."""

    class KVConnectorWorkerMetadata:
        """From each rank's object to the scheduler's, with a step's output; pickled."""

    class KVConnectorHandshakeMetadata:
        """From each rank's object to the scheduler's, once at start; pickled."""

    @dataclass
    class KVConnectorTransferResults:
        """The requests whose loads a rank reports; those that failed are in both sets."""

        finished_sending: set[str]
        finished_recving: set[str]
        failed_recving: set[str]

    class KVConnectorStats:
        """Counts on their way to the API server, as plain values in `data`."""

        def __init__(self, data: dict[str, Any]) -> None:
            self.data = data

    class KVConnectorPromMetrics:
        """Prometheus' metrics of a connector, in the API server."""

        def __init__(
            self,
            vllm_config: VllmConfig,
            metric_types: Mapping[type[Any], type[Any]],
            labelnames: list[str],
            per_engine_labelvalues: dict[int, list[object]],
        ) -> None:
            self._counter_cls: type[Any] = object

    class SupportsHMA:
        """Declares `request_finished_all_groups`."""

    class KVConnectorBase_V1:
        """Base of a connector."""

        _vllm_config: VllmConfig

        def __init__(
            self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KvCacheConfig
        ) -> None: ...

        def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
            """Give a rank's object the step's metadata."""

    vllm_version: str
    Tensor = torch.Tensor

else:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics
    from vllm.version import __version__ as vllm_version

    KVConnectorBase_V1 = base.KVConnectorBase_V1
    KVConnectorHandshakeMetadata = base.KVConnectorHandshakeMetadata
    KVConnectorMetadata = base.KVConnectorMetadata
    KVConnectorRole = base.KVConnectorRole
    KVConnectorTransferResults = base.KVConnectorTransferResults
    KVConnectorWorkerMetadata = base.KVConnectorWorkerMetadata
    SupportsHMA = base.SupportsHMA
    KVConnectorPromMetrics = metrics.KVConnectorPromMetrics
    KVConnectorStats = metrics.KVConnectorStats


def _in_engine(module: str, name: str) -> Any:  # noqa: ANN401 - vLLM's own, of any type
    """A name of vLLM's that only a rank's process needs."""
    return getattr(importlib.import_module(f"vllm.{module}"), name)


def extract_layer_index(name: str) -> int:
    """Return the absolute index of the layer with this name."""
    return _in_engine("model_executor.models.utils", "extract_layer_index")(name)


def tensor_rank() -> int:
    """Return this process' place among the ranks of its pipeline stage."""
    return _in_engine("distributed.parallel_state", "get_tp_group")().rank_in_group


def pipeline_rank() -> int:
    """Return this process' pipeline stage."""
    return _in_engine("distributed.parallel_state", "get_pp_group")().rank_in_group


def stage_layers(num_layers: int, stage: int, stages: int) -> tuple[int, int]:
    """Return the first layer of a pipeline stage, and the one behind its last."""
    return _in_engine("distributed.utils", "get_pp_indices")(num_layers, stage, stages)


def cpu_isa(config: VllmConfig, block_size: int, head_size: int) -> str:
    """Return the name of the kernels that read and write a cache on a CPU, which vLLM chooses by
    the model's dtype."""
    return _in_engine("v1.attention.backends.cpu_attn", "_get_attn_isa")(
        config.model_config.dtype, block_size, head_size, config.cache_config.cache_dtype
    )


def attention_backends(config: VllmConfig) -> list[str]:
    """Return the names of the attention backends of the model's layers. Each once."""
    found = _in_engine("distributed.kv_transfer.kv_connector.utils", "get_current_attn_backends")
    return [backend.get_name() for backend in found(config)]


def load_chat_template(given: str) -> str | None:
    """Return the chat template that `--chat-template` names: a file, or the text itself."""
    return _in_engine("renderers.chat_utils", "load_chat_template")(given)


def is_plugin_named() -> bool:
    """Whether VLLM_PLUGINS names the plugin that sends heartbeats."""
    return "xpyd" in (_in_engine("envs", "VLLM_PLUGINS") or ())


class ModelConfig(Protocol):
    """vLLM's, as far as it is read."""

    model: str
    tokenizer: str
    hf_config_path: str | None
    hf_overrides: Mapping[str, Any]
    """`vllm serve` takes nothing but an object of JSON."""
    hf_text_config: Any
    """What transformers has read of config.json, for the part that makes text, with overrides."""
    quantization: str | None
    """In effect: `--quantization`, or what the checkpoint says."""
    quantization_config: object
    """`--quantization-config`."""
    served_model_name: str | Sequence[str]
    max_model_len: int
    dtype: torch.dtype
    logits_processors: Sequence[object] | None
    """`--logits-processors`."""

    @property
    def use_mla(self) -> bool: ...

    enable_sleep_mode: bool

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """What requests get that do not say it themselves, and `max_tokens` as a cap for all: of
        the checkpoint's generation_config.json and `--override-generation-config`."""
        ...

    def get_head_size(self) -> int: ...

    def get_total_num_kv_heads(self) -> int: ...

    def get_total_num_hidden_layers(self) -> int: ...

    def get_vocab_size(self) -> int: ...


class ParallelConfig(Protocol):
    """vLLM's, as far as it is read."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    prefill_context_parallel_size: int
    decode_context_parallel_size: int
    nnodes: int
    enable_dbo: bool
    ubatch_size: int
    distributed_executor_backend: object


class CacheConfig(Protocol):
    """vLLM's, as far as it is read."""

    block_size: int
    cache_dtype: str
    kv_cache_layout: str | None
    enable_prefix_caching: bool | None


class KvTransferConfig(Protocol):
    """vLLM's `--kv-transfer-config`."""

    kv_connector: str | None
    kv_role: str | None
    kv_port: int
    engine_id: str
    kv_load_failure_policy: str
    kv_connector_extra_config: dict[str, Any]


class VllmConfig(Protocol):
    """vLLM's, as far as it is read."""

    model_config: ModelConfig
    parallel_config: ParallelConfig
    cache_config: CacheConfig
    speculative_config: object | None
    watermark_config: object | None
    kv_transfer_config: KvTransferConfig
    instance_id: str
    shutdown_timeout: float


class KvCacheConfig(Protocol):
    """vLLM's, as far as it is read."""

    kv_cache_groups: Sequence[Any]


class Request(Protocol):
    """vLLM's, as far as it is read."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: Any
    num_output_tokens: int
    lora_request: object | None
    mm_features: Sequence[object]

    @property
    def status(self) -> Enum: ...


class NewRequest(Protocol):
    """A request of a step that no step had before."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


class CachedRequests(Protocol):
    """The requests of a step that earlier steps had."""

    req_ids: list[str]
    resumed_req_ids: set[str]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]


class SchedulerOutput(Protocol):
    """One step."""

    scheduled_new_reqs: list[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    preempted_req_ids: set[str] | None


class KvCacheBlocks(Protocol):
    """The blocks of a request."""

    def get_block_ids(self) -> tuple[list[int], ...]: ...


class GpuBlockPool(Protocol):
    """vLLM's block pool, as far as it is used. The scheduler's thread only."""

    num_gpu_blocks: int
    blocks: Sequence[Any]

    def get_num_free_blocks(self) -> int: ...

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None: ...


class KvConnectorOutput(Protocol):
    """What the ranks report with a step."""

    kv_connector_worker_meta: object | None


_EXPECTED: Mapping[str, tuple[str, ...]] = {
    "__init__": ("vllm_config", "role", "kv_cache_config"),
    "bind_connector_metadata": ("connector_metadata",),
    "register_kv_caches": ("kv_caches",),
    "get_handshake_metadata": (),
    "set_xfer_handshake_metadata_pp_aware": ("metadata",),
    "bind_gpu_block_pool": ("gpu_block_pool",),
    "start_load_kv": ("forward_context", "kwargs"),
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "wait_for_save": (),
    "get_transfer_results": ("finished_req_ids",),
    "build_connector_worker_meta": (),
    "on_new_request": ("request",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "update_connector_output": ("connector_output",),
    "has_pending_push_work": (),
    "reset_cache": (),
    "get_kv_connector_stats": (),
    "shutdown": (),
    "request_finished_all_groups": ("request", "block_ids"),
    "get_required_kvcache_layout": ("vllm_config",),
    "requires_piecewise_for_cudagraph": ("extra_config",),
    "build_kv_connector_stats": ("data",),
    "build_prom_metrics": (
        "vllm_config",
        "metric_types",
        "labelnames",
        "per_engine_labelvalues",
    ),
}
"""The parameters, after self or cls, of the methods that vLLM must call as this connector has
them."""
_SINCE_0_33: Mapping[str, tuple[str, ...]] = {
    "supports_sleep_mode": ("kv_transfer_config",),
    "unregister_kv_caches": (),
    "restore_kv_caches": (),
}
"""The same, of methods that older versions do not have."""


def check_engine(connector: type) -> None:
    """UserError for a vLLM whose connector has other methods than `connector` has been written for;
    a warning for an untested version."""
    log()
    wrong = misfits(connector)
    if wrong:
        raise UserError(
            f"vLLM {vllm_version}: its connector API is not the one that xpyd knows "
            f"({'; '.join(wrong)}); take vLLM {TESTED_VERSIONS[-1]}, or a newer xpyd"
        )
    version, tested = vllm_version.partition("+")[0], ", ".join(TESTED_VERSIONS)
    if version in CHECKED_VERSIONS:
        log().info("vLLM %s: its connector API is the known one; tested: %s", version, tested)
    elif version not in TESTED_VERSIONS:
        log().warning("vLLM %s is untested with this connector (tested: %s)", vllm_version, tested)


def misfits(connector: type) -> list[str]:
    """Say how vLLM's base classes of `connector` differ from what it is written for: other
    parameters, a method that is missing, one more that a connector must have."""
    wrong: list[str] = []
    for name, expected in {**_EXPECTED, **_SINCE_0_33}.items():
        found = _parameters(name)
        if found == expected or (found is None and name in _SINCE_0_33):
            continue
        has = "missing" if found is None else f"({', '.join(found)})"
        wrong.append(f"{name}: {has}, expected ({', '.join(expected)})")
    abstract: frozenset[str] = getattr(connector, "__abstractmethods__", frozenset())
    return wrong + [f"{name}: not known to xpyd, and required" for name in sorted(abstract)]


def _parameters(name: str) -> tuple[str, ...] | None:
    """The parameters of the base classes' method, after self or cls; None: it is missing."""
    for base in (KVConnectorBase_V1, SupportsHMA):
        method = inspect.getattr_static(base, name, None)
        if method is not None:
            plain = getattr(method, "__func__", method)
            return tuple(inspect.signature(plain).parameters)[1:]
    return None


def log() -> logging.Logger:
    """The log of this package, in vLLM's form where vLLM writes one."""
    own, engine = logging.getLogger("xpyd_kv"), logging.getLogger("vllm")
    if engine.handlers and not own.handlers:
        own.handlers = list(engine.handlers)
        own.setLevel(engine.level)
    return own
