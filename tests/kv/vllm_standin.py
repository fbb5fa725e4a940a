"""vLLM's modules as the connector imports them, where vLLM is not installed.

`install` puts small stand-ins into sys.modules; where vLLM is installed, its own stay. The base
class has the signatures of 0.32.0.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from abc import ABC, abstractmethod
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

VERSION = "0.32.0"
RANK: ContextVar[tuple[int, int]] = ContextVar("RANK", default=(0, 0))
"""The pipeline stage and the place in it of the rank whose connector is called."""


class Role(Enum):
    SCHEDULER = 0
    WORKER = 1


class Metadata: ...


@dataclass
class TransferResults:
    finished_sending: set = field(default_factory=set)
    finished_recving: set = field(default_factory=set)
    failed_recving: set = field(default_factory=set)


@dataclass
class Stats:
    data: dict = field(default_factory=dict)


class PromMetrics:
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        (self._counter_cls,) = metric_types.values()


class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request, block_ids): ...


class Base:
    def __init__(self, vllm_config, role, kv_cache_config):
        self._vllm_config, self._role = vllm_config, role

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config): ...
    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config): ...
    @classmethod
    def build_kv_connector_stats(cls, data=None): ...
    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues): ...
    def bind_connector_metadata(self, connector_metadata): ...
    def register_kv_caches(self, kv_caches): ...
    def get_handshake_metadata(self): ...
    def set_xfer_handshake_metadata_pp_aware(self, metadata): ...
    def bind_gpu_block_pool(self, gpu_block_pool): ...
    def start_load_kv(self, forward_context, **kwargs): ...
    def wait_for_layer_load(self, layer_name): ...
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
    def wait_for_save(self): ...
    def get_transfer_results(self, finished_req_ids): ...
    def build_connector_worker_meta(self): ...
    def on_new_request(self, request): ...
    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...
    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...
    def build_connector_meta(self, scheduler_output): ...
    def update_connector_output(self, connector_output): ...
    def has_pending_push_work(self): ...
    def reset_cache(self): ...
    def get_kv_connector_stats(self): ...
    def shutdown(self): ...


def _layer_index(name):
    return int(re.search(r"\.(\d+)\.", name)[1])


_MODULES = {
    "vllm.envs": {"VLLM_PLUGINS": ["xpyd"]},
    "vllm.renderers.chat_utils": {"load_chat_template": lambda given: f"read {given}"},
    "vllm.version": {"__version__": VERSION},
    "vllm.distributed.kv_transfer.kv_connector.v1.base": {
        "KVConnectorBase_V1": Base,
        "KVConnectorRole": Role,
        "KVConnectorMetadata": Metadata,
        "KVConnectorWorkerMetadata": Metadata,
        "KVConnectorHandshakeMetadata": Metadata,
        "KVConnectorTransferResults": TransferResults,
        "SupportsHMA": SupportsHMA,
    },
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics": {
        "KVConnectorStats": Stats,
        "KVConnectorPromMetrics": PromMetrics,
    },
    "vllm.distributed.kv_transfer.kv_connector.utils": {
        "get_current_attn_backends": lambda config: [SimpleNamespace(get_name=lambda: "FLASH_ATTN")]
    },
    "vllm.model_executor.models.utils": {"extract_layer_index": _layer_index},
    "vllm.distributed.utils": {
        "get_pp_indices": lambda layers, stage, stages: (
            layers * stage // stages,
            layers * (stage + 1) // stages,
        )
    },
    "vllm.v1.attention.backends.cpu_attn": {"_get_attn_isa": lambda *_: "vec"},
}


def install() -> None:
    """Once, before the connector is imported."""
    if importlib.util.find_spec("vllm") is None:
        for name, members in _MODULES.items():
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                path = ".".join(parts[:end])
                module = sys.modules.setdefault(path, ModuleType(path))
                # Others look whether there is a vllm: without a spec that is an error.
                module.__spec__ = ModuleSpec(path, loader=None)
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
            for member, value in members.items():
                setattr(sys.modules[name], member, value)
        sys.modules["vllm.distributed.parallel_state"] = ModuleType("parallel_state")
    groups = importlib.import_module("vllm.distributed.parallel_state")
    groups.get_pp_group = lambda: SimpleNamespace(rank_in_group=RANK.get()[0])
    groups.get_tp_group = lambda: SimpleNamespace(rank_in_group=RANK.get()[1])
