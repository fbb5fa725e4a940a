"""An engine on one rank, in the engine's own process: weights, KV cache, runner."""

from __future__ import annotations

from pathlib import Path

import torch

from xpyd_kv.transport.host.shared_memory import SharedMemory
from xpyd_worker.config import WorkerConfig
from xpyd_worker.kv.cache import CacheMemory, DeviceCache, gpu_limits, open_cache, paged
from xpyd_worker.kv.transports import check_host
from xpyd_worker.load.ready_model import MemoryUse, OwnKv, ReadyModel, memory_table
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.runner.device import CudaDevice, choose_device
from xpyd_worker.runner.dtypes import cpu_dtype, dtype_name, gpu_dtype
from xpyd_worker.runner.gpu_memory import GpuUse
from xpyd_worker.runner.load import fit_on_cpu, part_on_gpu
from xpyd_worker.runner.runner import ModelRunner
from xpyd_worker.system import resident_bytes


def load_one_rank(config: WorkerConfig, folder: Path, model: ModelConfig) -> ReadyModel:
    """Load the checkpoint in `folder`. UserError for what the user can mend."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    if device.type == "cuda":
        return _on_gpu(config, folder, model, device)
    return _on_cpu(config, folder, model)


def _on_cpu(config: WorkerConfig, folder: Path, model: ModelConfig) -> ReadyModel:
    check_host(config)
    memory = CacheMemory(config, None)
    fit = fit_on_cpu(
        folder,
        model,
        dtype=cpu_dtype(config.dtype, model.dtype),
        kv_cache_bytes=config.cpu_cache_bytes,
        block_size_tokens=config.block_size,
    )
    runner = fit.make_runner(make_memory=memory.allocate)
    return _ready(config, runner, shared=memory.shared)


def _on_gpu(
    config: WorkerConfig, folder: Path, model: ModelConfig, device: torch.device
) -> ReadyModel:
    dtype = gpu_dtype(config.dtype, model.dtype, device)
    cache = open_cache(config, device)
    part = part_on_gpu(
        folder,
        model,
        dtype=dtype,
        gpu=CudaDevice(device),
        limits=gpu_limits(config, model),
        block_size_tokens=config.block_size,
    )
    fit = part.fit()
    runner = fit.make_runner(make_memory=None if cache is None else cache.allocate)
    return _ready(config, runner, use=fit.use, cache=cache)


def _ready(
    config: WorkerConfig,
    runner: ModelRunner,
    *,
    shared: SharedMemory | None = None,
    use: GpuUse | None = None,
    cache: DeviceCache | None = None,
) -> ReadyModel:
    def memory() -> list[MemoryUse]:
        return memory_table(
            config,
            weight_bytes=runner.weight_bytes,
            cache_bytes=runner.kv_cache.size_bytes,
            num_blocks=runner.num_blocks,
            resident_bytes=resident_bytes(),
            gpu=use,
        )

    kv = None
    if config.moves_kv:
        tensors = runner.kv_cache.layers
        kv = OwnKv(paged(tensors, cache, layers=range(len(tensors))), shared, cache)
    return ReadyModel(
        executor=runner,
        dtype=dtype_name(runner.kv_cache.shape.dtype),
        cache_bytes=runner.kv_cache.size_bytes,
        on_gpu=use is not None,
        memory=memory,
        kv=kv,
    )
