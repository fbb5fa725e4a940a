"""From a checkpoint folder to a runner, on the CPU or on a GPU. Slow and blocking.

In phases, as ranks that hold a model together have to agree in between: `fit_on_cpu`, or
`part_on_gpu` and then, when all ranks have loaded, its `fit`, loads the weights and says for how
many KV blocks there is room; `make_runner` of what that gives takes the number that all ranks have
room for, or, where there is one rank, its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from xpyd_core.blocks import DEFAULT_BLOCK_SIZE
from xpyd_core.errors import UserError
from xpyd_core.parallel.checks import check_parallel
from xpyd_core.parallel.ranks import ONE_RANK, Sizes
from xpyd_core.sizes import format_bytes
from xpyd_worker.kernels.api import Kernels, KvShape
from xpyd_worker.kernels.cpu.kernels import choose_kernels
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.decoder import Decoder
from xpyd_worker.model.loader import load_weights
from xpyd_worker.parallel.api import Part
from xpyd_worker.runner.device import CPU, CudaDevice
from xpyd_worker.runner.gpu_fit import GpuPart
from xpyd_worker.runner.gpu_memory import GpuLimits, check_gpu_heads
from xpyd_worker.runner.kv_cache import (
    KvCache,
    MakeMemory,
    agreed_blocks,
    blocks_in_budget,
    cache_bytes,
    host_memory,
)
from xpyd_worker.runner.runner import ModelRunner

if TYPE_CHECKING:
    # Triton is not everywhere where torch is.
    from xpyd_worker.parallel.state import ParallelState
    from xpyd_worker.runner.load_draft import DraftSource, LoadedDraft


@dataclass(frozen=True)
class CpuFit:
    """A rank's part of a model, loaded, and the KV blocks for which its budget has room. Ranks
    whose cache is one agree on the least of their numbers before they make a runner."""

    model: Decoder
    config: ModelConfig
    kernels: Kernels
    shape: KvShape
    num_blocks: int
    parallel: ParallelState | None
    draft: LoadedDraft | None = None

    def make_runner(
        self, num_blocks: int | None = None, *, make_memory: MakeMemory = host_memory
    ) -> ModelRunner:
        """Make the runner with a cache of so many blocks, or as many as there is room for.
        UserError where the system does not give its memory."""
        blocks = agreed_blocks(self.num_blocks, num_blocks)
        layers = self.model.num_layers
        memory = make_memory(cache_bytes(self.shape, num_layers=layers, num_blocks=blocks))
        cache = KvCache(self.shape, num_layers=layers, num_blocks=blocks, memory=memory)
        return ModelRunner(
            self.model,
            self.config,
            self.kernels,
            cache,
            parallel=self.parallel,
            drafter=None if self.draft is None else self.draft.make(blocks),
        )


def fit_on_cpu(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    kv_cache_bytes: int,
    block_size_tokens: int = DEFAULT_BLOCK_SIZE,
    parallel: ParallelState | None = None,
    draft: DraftSource | None = None,
) -> CpuFit:
    """Read what this rank has of the checkpoint in `folder`, and of `draft`; its KV cache, a draft
    model's included, may have at most `kv_cache_bytes`. Nothing is said to other ranks.

    Raises UserError for a checkpoint that does not fit `config`, a model that cannot be divided so,
    or a budget below one block.
    """
    part = _part(config, parallel)
    shape = _shape(config, part, dtype, block_size_tokens)
    blocks_in_budget(shape, len(part.layers), kv_cache_bytes)  # refused before weights are read
    sizes = config.vector_sizes(_divided(parallel))
    kernels = choose_kernels(vector_sizes=sizes, head_dim=config.head_dim)
    model = _load_model(
        folder,
        config,
        dtype=dtype,
        kernels=kernels,
        device=CPU,
        parallel=parallel,
        draft=draft,
    )
    loaded = None
    if draft is not None and part.answers:
        loaded = draft.load(model, dtype=dtype)
    beside = 0 if loaded is None else loaded.block_bytes
    num_blocks = blocks_in_budget(shape, len(part.layers), kv_cache_bytes, beside=beside)
    return CpuFit(model, config, kernels, shape, num_blocks, parallel, loaded)


def deal_experts(folder: Path, fit: CpuFit) -> None:
    """Other ranks share the experts: load those of this one among them, layer by layer. UserError
    where a file cannot be read."""
    load_weights(
        folder,
        fit.model.deal(),
        kernels=fit.kernels,
        device=CPU,
        is_tied=fit.config.tie_word_embeddings,
        known=_tensor_names(fit.config, fit.shape.dtype, fit.kernels),
    )


def open_gpu(gpu: CudaDevice) -> None:
    """Import the kernels' libraries and make the process' context on the GPU. Both may take seconds
    in which no other thread of the process runs, as its watcher expects before it has opened."""
    with gpu.use():
        gpu.kernels()
        gpu.counters().free()


def part_on_gpu(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    gpu: CudaDevice,
    limits: GpuLimits,
    block_size_tokens: int = DEFAULT_BLOCK_SIZE,
    parallel: ParallelState | None = None,
    draft: DraftSource | None = None,
) -> GpuPart:
    """Read what this rank has of the checkpoint in `folder`, and of `draft`, to its GPU. Nothing is
    said to other ranks: files may be read fast here and slowly there.

    Raises UserError for a checkpoint that does not fit `config` or whose heads are too wide, or a
    model that cannot be divided so or does not fit.
    """
    part = _part(config, parallel)
    check_gpu_heads(config)
    with gpu.use():
        counters = gpu.counters()
        # An engine that this process had before may have left some with the allocator.
        counters.release()
        free = counters.free()
        kernels = gpu.kernels()
        try:
            model = _load_model(
                folder,
                config,
                dtype=dtype,
                kernels=kernels,
                device=gpu.torch_device,
                parallel=parallel,
                draft=draft,
            )
            loaded = None
            if draft is not None and part.answers:
                loaded = draft.load(model, dtype=dtype, gpu=gpu)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"--device: the model does not fit into the {format_bytes(free)} that are free on "
                f"{gpu.torch_device}: {error}"
            ) from error
    shape = _shape(config, part, dtype, block_size_tokens)
    return GpuPart(model, config, kernels, shape, gpu, limits, free, parallel, loaded)


def _part(config: ModelConfig, parallel: ParallelState | None) -> Part:
    """What is to be loaded. UserError where the model cannot be divided so."""
    if parallel is None:
        return Part(layers=range(config.num_layers))
    check_parallel(config.shape, _divided(parallel))
    return parallel.part


def _divided(parallel: ParallelState | None) -> Sizes:
    """How a stage is divided. Stages may be of any lengths; that they are all layers was checked
    when they were made."""
    if parallel is None:
        return ONE_RANK
    part, has_whole = parallel.part, parallel.experts is not None
    return Sizes(
        data=part.replicas,
        tensor=part.tensor_size,
        has_whole_experts=has_whole,
        redundant_experts=part.redundant_experts,
        is_elastic=part.is_elastic,
    )


def _shape(config: ModelConfig, part: Part, dtype: torch.dtype, block_size_tokens: int) -> KvShape:
    kv_heads = max(1, config.num_kv_heads // part.tensor_size)
    return KvShape(kv_heads, config.head_dim, block_size_tokens, dtype)


def _load_model(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    kernels: Kernels,
    device: torch.device,
    parallel: ParallelState | None,
    draft: DraftSource | None,
) -> Decoder:
    features = () if draft is None else draft.feature_layers
    model = Decoder(config, dtype, kernels, device, parallel=parallel, feature_layers=features)
    is_part = parallel is not None and parallel.part.ranks > 1
    load_weights(
        folder,
        model.weight_groups(),
        kernels=kernels,
        device=device,
        is_tied=config.tie_word_embeddings,
        known=_tensor_names(config, dtype, kernels) if is_part else None,
    )
    return model


def _tensor_names(config: ModelConfig, dtype: torch.dtype, kernels: Kernels) -> set[str]:
    """Those of the whole model."""
    everything = Decoder(config, dtype, kernels, CPU).weight_groups()
    return {name for group in everything for name in group.checkpoint_tensors()}
