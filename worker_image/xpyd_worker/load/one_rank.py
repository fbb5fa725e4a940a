"""An engine on one rank, in the engine's own process: weights, KV cache, runner."""

from __future__ import annotations

from pathlib import Path

import torch

from xpyd_worker.config import WorkerConfig
from xpyd_worker.kv.cache import CacheMemory, gpu_limits, open_cache, paged
from xpyd_worker.kv.engine import HeldKv
from xpyd_worker.kv.transports import check_host
from xpyd_worker.load.ready_model import ReadyModel, memory_table
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.runner.device import (
    CudaDevice,
    choose_device,
    cpu_dtype,
    dtype_name,
    gpu_dtype,
)
from xpyd_worker.runner.gpu_memory import GpuUse
from xpyd_worker.runner.load import fit_on_cpu, part_on_gpu
from xpyd_worker.runner.load_draft import open_draft
from xpyd_worker.system import resident_bytes


def load_one_rank(config: WorkerConfig, folder: Path, model: ModelConfig) -> ReadyModel:
    """Load the checkpoint in `folder`. UserError for what the user can mend."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    use: GpuUse | None = None
    draft = open_draft(config, model, folder)
    if device.type == "cuda":
        dtype = gpu_dtype(config.dtype, model.dtype, device)
        memory = CacheMemory(config, open_cache(config, device))
        fit = part_on_gpu(
            folder,
            model,
            dtype=dtype,
            gpu=CudaDevice(device),
            limits=gpu_limits(config, model),
            block_size_tokens=config.block_size,
            draft=draft,
        ).fit()
        use = fit.use
        # Where no KV moves the cache is torch's.
        runner = fit.make_runner(make_memory=None if memory.gpu is None else memory.gpu.allocate)
    else:
        check_host(config)
        memory = CacheMemory(config, None)
        runner = fit_on_cpu(
            folder,
            model,
            dtype=cpu_dtype(config.dtype, model.dtype),
            kv_cache_bytes=config.cpu_cache_bytes,
            block_size_tokens=config.block_size,
            draft=draft,
        ).make_runner(make_memory=memory.allocate)
    cache = runner.kv_cache
    held = None
    if config.moves_kv:
        seen = paged(cache.layers, memory.gpu, layers=range(len(cache.layers)))
        held = HeldKv(seen, seen.regions, memory.shared, memory.gpu)
    return ReadyModel(
        executor=runner,
        dtype=dtype_name(cache.shape.dtype),
        cache_bytes=cache.size_bytes,
        on_gpu=use is not None,
        memory=lambda: memory_table(
            config,
            weight_bytes=runner.weight_bytes,
            cache_bytes=cache.size_bytes,
            num_blocks=runner.num_blocks,
            resident_bytes=resident_bytes(),
            gpu=use,
            draft_bytes=runner.draft_bytes,
            draft_weight_bytes=runner.draft_weight_bytes,
        ),
        experts_chosen=runner.experts_chosen,
        kv=held,
    )
