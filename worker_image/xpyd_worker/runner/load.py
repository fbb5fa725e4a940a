"""From a checkpoint folder to a runner, on the CPU or on a GPU. Slow and blocking."""

from __future__ import annotations

from pathlib import Path

import torch

from xpyd_core.blocks import DEFAULT_BLOCK_SIZE
from xpyd_core.errors import UserError
from xpyd_core.sizes import format_bytes
from xpyd_worker.kernels.api import Kernels, KvShape
from xpyd_worker.kernels.cpu.kernels import choose_kernels
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.decoder import Decoder
from xpyd_worker.model.loader import load_weights
from xpyd_worker.model.registry import build_model
from xpyd_worker.runner.device import CPU, Gpu
from xpyd_worker.runner.gpu_fit import GpuLimits, fit
from xpyd_worker.runner.gpu_memory import GpuUse
from xpyd_worker.runner.kv_cache import (
    KvCache,
    MakeMemory,
    blocks_in_budget,
    cache_bytes,
    host_memory,
)
from xpyd_worker.runner.runner import ModelRunner

# The GPU's attention keeps whole heads in a program's shared memory; wider ones do not fit there.
_MOST_HEAD_DIM_GPU = 256


def load_on_cpu(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    kv_cache_bytes: int,
    block_size_tokens: int = DEFAULT_BLOCK_SIZE,
    make_memory: MakeMemory = host_memory,
) -> ModelRunner:
    """Read the checkpoint in `folder` and allocate a KV cache of at most `kv_cache_bytes`.

    Raises UserError for a checkpoint that does not fit `config` or a budget below one block.
    """
    shape = _shape(config, dtype, block_size_tokens)
    num_blocks = blocks_in_budget(shape, config.num_layers, kv_cache_bytes)
    kernels = choose_kernels(vector_sizes=config.vector_sizes, head_dim=config.head_dim)
    model = _load_model(folder, config, dtype=dtype, kernels=kernels, device=CPU)
    memory = make_memory(cache_bytes(shape, num_layers=config.num_layers, num_blocks=num_blocks))
    cache = KvCache(shape, num_layers=config.num_layers, num_blocks=num_blocks, memory=memory)
    return ModelRunner(model, config, kernels, cache)


def load_on_gpu(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    gpu: Gpu,
    limits: GpuLimits,
    block_size_tokens: int = DEFAULT_BLOCK_SIZE,
    make_memory: MakeMemory | None = None,
) -> tuple[ModelRunner, GpuUse]:
    """Read the checkpoint in `folder` to the GPU, and give its KV cache what is left of the share
    that `limits` name, in memory of torch's allocator or in that of `make_memory`.

    Raises UserError for a checkpoint that does not fit `config` or whose heads are too wide, or a
    share that is too small.
    """
    if config.head_dim > _MOST_HEAD_DIM_GPU:
        raise UserError(
            f"config.json: head_dim: {config.head_dim}; on a GPU heads have at most "
            f"{_MOST_HEAD_DIM_GPU} numbers; use --device cpu"
        )
    with gpu.use():
        counters = gpu.counters()
        # An engine that this process had before may have left some with the allocator.
        counters.release()
        free = counters.free()
        kernels = gpu.kernels()
        try:
            model = _load_model(
                folder, config, dtype=dtype, kernels=kernels, device=gpu.torch_device
            )
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"--device: the model does not fit into the {format_bytes(free)} that are free on "
                f"{gpu.torch_device}: {error}"
            ) from error
    return fit(
        model,
        config,
        kernels,
        _shape(config, dtype, block_size_tokens),
        gpu=gpu,
        limits=limits,
        free_at_start=free,
        make_memory=make_memory,
    )


def _shape(config: ModelConfig, dtype: torch.dtype, block_size_tokens: int) -> KvShape:
    return KvShape(config.num_kv_heads, config.head_dim, block_size_tokens, dtype)


def _load_model(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
) -> Decoder:
    model = build_model(config, dtype, kernels, device)
    load_weights(
        folder,
        model.weight_groups(),
        kernels=kernels,
        device=device,
        is_tied=config.tie_word_embeddings,
    )
    return model
