"""The attention block of a layer. How each operator runs is the Kernels' matter; it must not know
requests or block management.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xpyd_worker.kernels.api import Kernels
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.layers import Linear, Norm, StepContext
from xpyd_worker.model.shards import Stored, all_of, is_first, share, whole
from xpyd_worker.parallel.api import NO_GROUP, TensorGroup


class Attention:
    """Self-attention with grouped KV heads, rotary positions and, where configured, head norms."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype,
        *,
        place: int | None = None,
        group: TensorGroup = NO_GROUP,
    ) -> None:
        """Of layer `index` of the model, which is `place` of those here (None: the same). Each rank
        of `group` has a share of the heads; KV heads that are fewer than ranks are there several
        times, beside the queries that attend to them."""
        self._place = index if place is None else place
        self._window, self._group = config.layers[index].window, group
        self._names = config.names.qkv
        self._head_dim = config.head_dim
        queries = share(config.num_heads, group, config.head_dim)
        keys = share(config.num_kv_heads, group, config.head_dim)
        hidden = whole(config.hidden_size)
        self._qkv = Linear(hidden, (queries, keys, keys), bias=config.qkv_bias, dtype=dtype)
        self._all_heads = self._qkv.weight.shape[0] // config.head_dim
        has_bias = config.output_bias and is_first(group)
        self._output = Linear(queries, (hidden,), bias=has_bias, dtype=dtype)
        self._norms: tuple[Norm, Norm] | None = None
        if config.qk_norm:
            eps = config.rms_norm_eps
            self._norms = (
                Norm(config.head_dim, eps=eps, dtype=dtype),
                Norm(config.head_dim, eps=eps, dtype=dtype),
            )

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; `step.kv_stored` is called on the way."""
        kernels, cache = step.kernels, step.caches[self._place]
        qkv = self._qkv(x).view(x.shape[0], self._all_heads, self._head_dim)
        norms = None
        if self._norms is not None:
            norms = (self._norms[0].weight, self._norms[1].weight, self._norms[0].eps)
        query = kernels.rotate_and_store(qkv, step.angles, norms, cache, step.plan)
        step.kv_stored(self._place)
        attended = kernels.attention(query, cache, step.plan, self._window)
        return self._group.all_reduce(self._output(attended))

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        for part in (self._qkv, self._output, *(self._norms or ())):
            part.allocate(device)

    def pack(self, kernels: Kernels) -> None:
        """All weights are read."""
        self._qkv.pack(kernels)
        self._output.pack(kernels)

    def checkpoint_tensors(self, prefix: str) -> dict[str, Stored]:
        """Checkpoint name -> where it goes."""
        tensors = {
            **self._qkv.checkpoint_tensors(prefix, self._names),
            **self._output.checkpoint_tensors(prefix, ("o_proj",)),
        }
        if self._norms is not None:
            tensors[f"{prefix}q_norm.weight"] = all_of(self._norms[0].weight)
            tensors[f"{prefix}k_norm.weight"] = all_of(self._norms[1].weight)
        return tensors
