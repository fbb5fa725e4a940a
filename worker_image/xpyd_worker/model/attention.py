"""The attention block of a layer. How each operator runs is the Kernels' matter; it must not know
requests or block management.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpyd_worker.kernels.api import Kernels
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.layers import Linear, Norm, StepContext


class Attention:
    """Self-attention with grouped KV heads, rotary positions and, where configured, head norms."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        self._index, self._window = index, config.layers[index].window
        self._names = config.names.qkv
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._qkv = Linear(config.hidden_size, width, bias=config.qkv_bias, dtype=dtype)
        self._output = Linear(
            config.num_heads * config.head_dim,
            config.hidden_size,
            bias=config.output_bias,
            dtype=dtype,
        )
        self._norms: tuple[Norm, Norm] | None = None
        if config.qk_norm:
            eps = config.rms_norm_eps
            self._norms = (
                Norm(config.head_dim, eps=eps, dtype=dtype),
                Norm(config.head_dim, eps=eps, dtype=dtype),
            )

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; `step.kv_stored` is called on the way."""
        kernels, cache = step.kernels, step.caches[self._index]
        qkv = self._qkv(x).view(x.shape[0], self._heads + 2 * self._kv_heads, self._head_dim)
        norms = None
        if self._norms is not None:
            norms = (self._norms[0].weight, self._norms[1].weight, self._norms[0].eps)
        query = kernels.rotate_and_store(qkv, step.angles, norms, cache, step.plan)
        step.kv_stored(self._index)
        return self._output(kernels.attention(query, cache, step.plan, self._window))

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        for part in (self._qkv, self._output, *(self._norms or ())):
            part.allocate(device)

    def pack(self, kernels: Kernels) -> None:
        """All weights are read."""
        self._qkv.pack(kernels)
        self._output.pack(kernels)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> where it goes."""
        query, key = self._heads * self._head_dim, self._kv_heads * self._head_dim
        tensors = {
            **self._qkv.checkpoint_tensors(prefix, self._names, (query, key, key)),
            **self._output.checkpoint_tensors(prefix, ("o_proj",)),
        }
        if self._norms is not None:
            tensors[f"{prefix}q_norm.weight"] = self._norms[0].weight
            tensors[f"{prefix}k_norm.weight"] = self._norms[1].weight
        return tensors
