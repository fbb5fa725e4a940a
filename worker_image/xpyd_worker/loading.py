"""From a checkpoint folder to an engine that is ready to start: model, cache, KV transfer, engine.

Slow and blocking; main runs it on a thread while HTTP answers 503.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from xpyd_core.compat import compat_factors, compat_key
from xpyd_core.errors import UserError
from xpyd_core.sizes import format_bytes
from xpyd_core.tokenizer_files import TokenizerFiles
from xpyd_kv.connector.build import MakeStore
from xpyd_kv.transport.shared_memory import SharedMemory
from xpyd_kv.wire.messages import MAX_PROBE_BYTES
from xpyd_worker.config import CPU_CACHE_BYTES, WorkerConfig
from xpyd_worker.engine.api import Deliver
from xpyd_worker.engine.block_manager import BlockManager
from xpyd_worker.engine.core import EngineCore
from xpyd_worker.engine.inbox import Inbox
from xpyd_worker.engine.limits import Limits
from xpyd_worker.engine.request import EngineStats
from xpyd_worker.engine.stopping import StopRules
from xpyd_worker.kv_device import DeviceCache, beside, open_cache, paged
from xpyd_worker.kv_setup import Kv, KvParts, make_kv
from xpyd_worker.memory import give_back, log_memory, memory_table, resident_bytes
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.registry import load_config
from xpyd_worker.model.source import resolve_checkpoint
from xpyd_worker.runner.device import CudaDevice, choose_device, compute_capability
from xpyd_worker.runner.dtypes import cpu_is_fast_in, resolve_dtype, resolve_gpu_dtype
from xpyd_worker.runner.gpu_limits import GpuLimits
from xpyd_worker.runner.gpu_memory import GpuUse
from xpyd_worker.runner.kv_cache import host_memory
from xpyd_worker.runner.load import load_on_cpu, load_on_gpu
from xpyd_worker.runner.runner import ModelRunner
from xpyd_worker.runner.tokenizer import Tokenizer
from xpyd_worker.server.service import ServedModel
from xpyd_worker.server.tokenizer_files import ServedFiles

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """All parts, none started. `compatibility` is the key that P and D must share."""

    model: ServedModel
    engine: EngineCore
    runner: ModelRunner
    kv: Kv
    compatibility: str
    dtype: str
    cache_bytes: int

    def stats(self) -> EngineStats:
        """The engine's figures; what entered forwards as the runner counted it."""
        counters = self.runner.counters
        return replace(
            self.engine.stats(),
            forwards=counters.forwards,
            prompt_tokens_computed=counters.prompt_tokens_computed,
            output_tokens_computed=counters.output_tokens_computed,
        )


def load(
    config: WorkerConfig,
    *,
    deliver: Deliver,
    keys: tuple[bytes, ...],
    incarnation: str,
    make_store: MakeStore | None,
) -> Loaded:
    """Load what `config` names. UserError for a checkpoint or a size that cannot work."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = resolve_checkpoint(config.model, config.revision)
    model_config = load_config(folder)
    ready = _make_runner(config, folder, model_config, choose_device(config.device))
    runner = ready.runner
    tokenizer = Tokenizer.load(folder)
    by_share = ready.gpu_use is not None and config.kv_cache_bytes is None
    sizing = "--gpu-memory-utilization" if by_share else "--kv-cache-memory"
    max_model_len = _context(config, model_config, runner.num_blocks, sizing)
    names = config.served_model_names or (_own_name(config.model, folder),)
    dtype_name = str(runner.kv_cache.shape.dtype).removeprefix("torch.")
    # Without a revision the weights' own fingerprint stands in the key, which is what matters.
    factors = compat_factors(
        folder, model=_own_name(config.model, folder), revision="", kv_dtype=dtype_name
    )
    pool = BlockManager(
        runner.num_blocks,
        block_size=config.block_size,
        enable_prefix_caching=config.prefix_caching,
    )
    inbox = Inbox()
    kv = Kv()
    if config.moves_kv:
        memory = paged(runner.kv_cache.layers, ready.gpu_cache)
        parts = KvParts(
            memory=memory,
            cache=memory.regions,
            pool=pool,
            wake=inbox.wake,
            factors=factors,
            keys=keys,
            incarnation=incarnation,
            max_model_len=max_model_len,
            buffer_bytes=config.buffer_bytes(ready.cache_bytes),
            shared=ready.shared,
            gpu=ready.gpu_cache,
        )
        kv = make_kv(config, parts, make_store)
    give_back()
    log_memory(
        memory_table(
            config,
            weight_bytes=runner.weight_bytes,
            cache_bytes=ready.cache_bytes,
            num_blocks=runner.num_blocks,
            resident_bytes=resident_bytes(),
            gpu=ready.gpu_use,
        )
    )
    engine = EngineCore(
        runner,
        pool=pool,
        inbox=inbox,
        limits=Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.batched_tokens(on_gpu=ready.gpu_use is not None),
            recompute_without_kv=config.kv_recompute,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy=config.scheduling_policy,
        ),
        rules=StopRules(model_config.eos_token_ids, max_model_len),
        deliver=deliver,
        producer=kv.connector.producer if kv.connector else None,
        consumer=kv.connector.consumer if kv.connector else None,
    )
    knows_developer = _template_has(folder, "developer")
    files = TokenizerFiles(
        tokenizer=tokenizer.to_json(),
        chat_templates=tokenizer.chat_templates,
        special_tokens=tokenizer.template_variables,
        knows_developer=knows_developer,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        prefix_caching=config.prefix_caching,
    )
    model = ServedModel(
        names=names,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(model_config.eos_token_ids),
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        created=int(time.time()),
        knows_developer=knows_developer,
        files=ServedFiles.of(files),
    )
    # Asks every token of the vocabulary; now, not when the first long prompt waits for it.
    _ = model.max_token_bytes
    return Loaded(model, engine, runner, kv, compat_key(factors), dtype_name, ready.cache_bytes)


@dataclass(frozen=True)
class _Ready:
    """A runner, and what the memory of its cache is. `gpu_use` is there only where it is a GPU's,
    `gpu_cache` where KV moves from there, `shared` where other processes may read the cache."""

    runner: ModelRunner
    gpu_use: GpuUse | None = None
    shared: SharedMemory | None = None
    gpu_cache: DeviceCache | None = None

    @property
    def cache_bytes(self) -> int:
        """Of all layers."""
        return sum(layer.nbytes for layer in self.runner.kv_cache.layers)


def _make_runner(
    config: WorkerConfig, folder: Path, model: ModelConfig, device: torch.device
) -> _Ready:
    if device.type == "cuda":
        return _make_gpu_runner(config, folder, model, device)
    dtype = resolve_dtype(config.dtype, model.dtype, is_fast=cpu_is_fast_in(model.dtype))
    shared: list[SharedMemory] = []

    def share(size_bytes: int) -> Tensor:
        # Its end is for probes.
        size = size_bytes + MAX_PROBE_BYTES
        try:
            shared.append(SharedMemory(size))
        except UserError as error:
            raise UserError(f"--kv-cache-memory: {format_bytes(size)}: {error}") from error
        return torch.frombuffer(shared[0].buffer, dtype=torch.uint8)

    runner = load_on_cpu(
        folder,
        model,
        dtype=dtype,
        kv_cache_bytes=CPU_CACHE_BYTES if config.kv_cache_bytes is None else config.kv_cache_bytes,
        block_size_tokens=config.block_size,
        make_memory=share if config.shares_kv else host_memory,
    )
    return _Ready(runner, shared=shared[0] if shared else None)


def _make_gpu_runner(
    config: WorkerConfig, folder: Path, model: ModelConfig, device: torch.device
) -> _Ready:
    capability = compute_capability(device)
    _log.info(
        "device %s: %s, compute capability %d.%d",
        device,
        torch.cuda.get_device_name(device),
        *capability,
    )
    cache = open_cache(config, device)
    kept = beside(config)
    runner, use = load_on_gpu(
        folder,
        model,
        dtype=resolve_gpu_dtype(config.dtype, model.dtype, capability=capability),
        gpu=CudaDevice(device),
        limits=GpuLimits(
            utilization=config.gpu_memory_utilization,
            cache_bytes=config.kv_cache_bytes,
            beside_bytes=kept.size_bytes,
            beside_percent=kept.percent,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.batched_tokens(on_gpu=True),
            max_model_len=config.max_model_len or model.max_positions,
            # A graph tells nobody of its layers, and D waits for those of P.
            use_graphs=not config.enforce_eager and config.role != "Prefill",
        ),
        block_size_tokens=config.block_size,
        make_memory=None if cache is None else cache.allocate,
    )
    return _Ready(runner, gpu_use=use, gpu_cache=cache)


def _own_name(model: str, folder: Path) -> str:
    """The checkpoint's name where none is given: `org/name` of the hub, else the folder's."""
    return model.removeprefix("hf://") if model.startswith("hf://") else folder.resolve().name


def _template_has(folder: Path, role: str) -> bool:
    """Whether the chat template, in either of its two places, speaks of `role`."""
    files = (folder / "chat_template.jinja", folder / "tokenizer_config.json")
    return any(path.exists() and role in path.read_text(errors="replace") for path in files)


def _context(config: WorkerConfig, model: ModelConfig, num_blocks: int, sizing: str) -> int:
    """Tokens of prompt and output together: what is asked, the model and the cache allow, whose
    size the flag `sizing` decides."""
    cache_tokens = num_blocks * config.block_size
    asked = config.max_model_len
    if asked is None:
        if cache_tokens < model.max_positions:
            _log.warning(
                "the KV cache holds %d tokens, fewer than the model's context of %d; requests are "
                "limited to that (%s)",
                cache_tokens,
                model.max_positions,
                sizing,
            )
        return min(model.max_positions, cache_tokens)
    if asked > model.max_positions:
        raise UserError(
            f"--max-model-len: {asked} is more than the model's context of {model.max_positions}"
        )
    if asked > cache_tokens:
        raise UserError(
            f"--max-model-len: {asked} tokens do not fit in the KV cache, which holds "
            f"{cache_tokens}; give more {sizing} or a smaller length"
        )
    return asked
