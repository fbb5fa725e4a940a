"""Tiny models with weights of their own for each name, without a checkpoint: what a machine with a
GPU has suffices. And a runner over each kind of device."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from xpyd_worker.kernels.api import Kernels, KvShape
from xpyd_worker.kernels.plain import PlainKernels
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.decoder import Decoder
from xpyd_worker.model.registry import parse_config
from xpyd_worker.runner.graphs import DecodeGraphs, padded_sizes
from xpyd_worker.runner.kv_cache import KvCache, cache_bytes
from xpyd_worker.runner.runner import ModelRunner
from xpyd_worker.runner.sampler import Draw

BLOCK_SIZE = 16
CPU = torch.device("cpu")
SHARED: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 9,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
}


def model_config(family: str, **changes: Any) -> ModelConfig:
    """Of a tiny model."""
    return parse_config(SHARED | FAMILIES[family] | changes, {})


def shape_of(config: ModelConfig, dtype: torch.dtype) -> KvShape:
    """Of its cache."""
    return KvShape(config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype)


def make_model(
    config: ModelConfig, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> Decoder:
    """A loaded one; the same numbers on each device."""
    decoder = Decoder(config, dtype, kernels, device)
    for group in decoder.weight_groups():
        group.allocate(device)
        for name, stored in group.checkpoint_tensors().items():
            for piece in stored.pieces:
                piece.destination.copy_(_weight(name, stored.shape)[piece.slices])
        group.pack(kernels)
    return decoder


def cpu_runner(config: ModelConfig, *, blocks: int = 64) -> ModelRunner:
    """Plain torch in float32, step by step: what the others are compared with."""
    kernels = PlainKernels()
    model = make_model(config, kernels, CPU, torch.float32)
    cache = KvCache(
        shape_of(config, torch.float32), num_layers=config.num_layers, num_blocks=blocks
    )
    return ModelRunner(model, config, kernels, cache)


def gpu_runner(
    gpu: Any,
    kernels: Any,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    draw: Draw,
    largest_graph: int,
    blocks: int,
) -> ModelRunner:
    """On a GPU or what stands for it, with graphs of up to so many sequences; none for 0."""
    device, shape = gpu.torch_device, shape_of(config, dtype)
    model = make_model(config, kernels, device, dtype)
    size = cache_bytes(shape, num_layers=config.num_layers, num_blocks=blocks)
    # NaN: whoever reads a slot that nobody wrote shows it.
    memory = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
    cache = KvCache(shape, num_layers=config.num_layers, num_blocks=blocks, memory=memory)
    graphs = None
    if largest_graph:
        with torch.inference_mode():
            graphs = DecodeGraphs(
                gpu.graph_device(),
                lambda ids, at, plan: model.forward(ids, at, cache.layers, plan, lambda _: None),
                lambda count: kernels.static_plan(
                    shape, max_sequences=count, max_context=config.max_positions
                ),
                sizes=padded_sizes(largest_graph),
                on=device,
            )
    return ModelRunner(model, config, kernels, cache, device=gpu, graphs=graphs, draw=draw)


def _weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """Large enough that tokens differ."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode())))
    return 1 + 0.2 * made if "norm" in name else 0.15 * made
