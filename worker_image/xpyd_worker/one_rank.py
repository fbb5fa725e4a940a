"""An engine on one rank, in the engine's own process: weights, KV cache, runner."""

from __future__ import annotations

import logging
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from xpyd_core.errors import UserError
from xpyd_core.sizes import format_bytes
from xpyd_kv.transport.host.shared_memory import SharedMemory
from xpyd_kv.wire.messages import MAX_PROBE_BYTES
from xpyd_worker.config import WorkerConfig
from xpyd_worker.kv_device import WHOLE, DeviceCache, beside, open_cache, paged
from xpyd_worker.kv_ways import check_host
from xpyd_worker.memory import MemoryUse, memory_table, resident_bytes
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.ready_model import OwnKv, ReadyModel
from xpyd_worker.runner.device import CudaDevice, choose_device, compute_capability
from xpyd_worker.runner.dtypes import cpu_is_fast_in, resolve_dtype, resolve_gpu_dtype
from xpyd_worker.runner.gpu_limits import GpuLimits
from xpyd_worker.runner.gpu_memory import GpuUse
from xpyd_worker.runner.kv_cache import host_memory
from xpyd_worker.runner.load import load_on_cpu, load_on_gpu
from xpyd_worker.runner.runner import ModelRunner

_log = logging.getLogger(__name__)


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
        dtype=cpu_dtype(config, model),
        kv_cache_bytes=config.cpu_cache_bytes,
        block_size_tokens=config.block_size,
        make_memory=share if config.shares_kv else host_memory,
    )
    return _ready(config, runner, shared=shared[0] if shared else None)


def _on_gpu(
    config: WorkerConfig, folder: Path, model: ModelConfig, device: torch.device
) -> ReadyModel:
    dtype = gpu_dtype(config, model, device)
    cache = open_cache(config, device)
    runner, use = load_on_gpu(
        folder,
        model,
        dtype=dtype,
        gpu=CudaDevice(device),
        limits=gpu_limits(config, model),
        block_size_tokens=config.block_size,
        make_memory=None if cache is None else cache.allocate,
    )
    return _ready(config, runner, use=use, cache=cache)


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
        dtype=dtype_name(runner),
        cache_bytes=runner.kv_cache.size_bytes,
        on_gpu=use is not None,
        memory=memory,
        kv=kv,
    )


def cpu_dtype(config: WorkerConfig, model: ModelConfig) -> torch.dtype:
    """Of weights and KV on this CPU."""
    return resolve_dtype(config.dtype, model.dtype, is_fast=cpu_is_fast_in(model.dtype))


def gpu_dtype(config: WorkerConfig, model: ModelConfig, device: torch.device) -> torch.dtype:
    """Of weights and KV on this GPU, which is logged."""
    capability = compute_capability(device)
    _log.info(
        "device %s: %s, compute capability %d.%d",
        device,
        torch.cuda.get_device_name(device),
        *capability,
    )
    return resolve_gpu_dtype(config.dtype, model.dtype, capability=capability)


def dtype_name(runner: ModelRunner) -> str:
    """As checkpoints call it."""
    return str(runner.kv_cache.shape.dtype).removeprefix("torch.")


def gpu_limits(config: WorkerConfig, model: ModelConfig, *, share: Fraction = WHOLE) -> GpuLimits:
    """What a GPU of this engine is to hold, with this share of the instance's KV cache."""
    kept = beside(config, share=share)
    return GpuLimits(
        utilization=config.gpu_memory_utilization,
        cache_bytes=config.kv_cache_bytes,
        beside_bytes=kept.size_bytes,
        beside_percent=kept.percent,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.batched_tokens(on_gpu=True),
        max_model_len=config.max_model_len or model.max_positions,
        # A graph tells nobody of its layers, and D waits for those of P.
        use_graphs=not config.enforce_eager and config.role != "Prefill",
    )
