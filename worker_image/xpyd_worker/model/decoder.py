"""One decoder for the families that share Llama's shape; the configuration says which parts it has.

Takes a flat [tokens, hidden] batch without padding and a paged KV cache. Each layer stores its keys
and values, tells the caller, then attends. How each operator runs is the Kernels' matter
(xpyd_worker.kernels.api). It must not know requests, block management or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from xpyd_worker.kernels.api import Kernels, Plan
from xpyd_worker.model.attention import Attention
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.experts import ExpertMlps
from xpyd_worker.model.layers import Linear, Norm, StepContext
from xpyd_worker.model.mlp import Mlp
from xpyd_worker.model.rotary import Rotary

if TYPE_CHECKING:
    # A forward needs no safetensors.
    from xpyd_worker.model.loader import WeightGroup


class DecoderLayer:
    """Attention and MLP or experts, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        self._index = index
        self._attention = Attention(config, index, dtype)
        self._mlp, self._mlp_name = _feed_forward(config, index, dtype)
        eps = config.rms_norm_eps
        self._input_norm = Norm(config.hidden_size, eps=eps, dtype=dtype)
        self._mlp_norm = Norm(config.hidden_size, eps=eps, dtype=dtype)

    def __call__(self, x: Tensor | None, residual: Tensor, step: StepContext) -> Tensor:
        """`x` [tokens, hidden] is what the layer before would add to `residual`, which is added to
        in place; what this layer would add is returned."""
        kernels, norm = step.kernels, self._input_norm
        if x is None:
            x = kernels.rms_norm(residual, norm.weight, norm.eps)
        else:
            x = kernels.add_rms_norm(x, residual, norm.weight, norm.eps)
        x = self._attention(x, step)
        norm = self._mlp_norm
        return self._mlp(kernels.add_rms_norm(x, residual, norm.weight, norm.eps), step)

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        for part in (self._attention, self._mlp, self._input_norm, self._mlp_norm):
            part.allocate(device)

    def pack(self, kernels: Kernels) -> None:
        """All weights are read."""
        self._attention.pack(kernels)
        self._mlp.pack(kernels)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Checkpoint name -> where it goes."""
        prefix = f"model.layers.{self._index}."
        return {
            f"{prefix}input_layernorm.weight": self._input_norm.weight,
            f"{prefix}post_attention_layernorm.weight": self._mlp_norm.weight,
            **self._attention.checkpoint_tensors(f"{prefix}self_attn."),
            **self._mlp.checkpoint_tensors(f"{prefix}{self._mlp_name}."),
        }


def _feed_forward(
    config: ModelConfig, index: int, dtype: torch.dtype
) -> tuple[Mlp | ExpertMlps, str]:
    """What follows attention in a layer, and its name in the checkpoint."""
    experts = config.layers[index].experts
    if experts is not None:
        return ExpertMlps(config.hidden_size, experts, dtype), experts.block
    mlp = Mlp(
        config.hidden_size,
        config.intermediate_size,
        bias=config.mlp_bias,
        names=config.names.mlp,
        dtype=dtype,
    )
    return mlp, "mlp"


class Ends:
    """What stands before the layers and behind them: embedding, last norm and head."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._is_tied = config.tie_word_embeddings
        self._head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        self._embedding = torch.empty_like(self._head.weight)
        self._norm = Norm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden], the caller's to write to."""
        return F.embedding(token_ids, self._embedding)

    def logits(self, hidden: Tensor, kernels: Kernels) -> Tensor:
        """Last norm and head over [rows, hidden] -> float32 [rows, vocab]."""
        x = kernels.rms_norm(hidden, self._norm.weight, self._norm.eps)
        return self._head(x).to(torch.float32)

    def allocate(self, device: torch.device) -> None:
        """Memory for all weights."""
        self._head.allocate(device)
        self._norm.allocate(device)
        self._embedding = self._head.weight
        if not self._is_tied:
            self._embedding = torch.empty_like(self._head.weight)

    def pack(self, kernels: Kernels) -> None:
        """All weights are read."""
        self._head.pack(kernels)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Checkpoint name -> where it goes."""
        tensors = {
            "model.embed_tokens.weight": self._embedding,
            "model.norm.weight": self._norm.weight,
        }
        if not self._is_tied:
            tensors["lm_head.weight"] = self._head.weight
        return tensors


class Decoder:
    """The whole model, to be loaded to `device`. It has no memory until the loader filled its
    `weight_groups`."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, kernels: Kernels, device: torch.device
    ) -> None:
        self._kernels = kernels
        self._ends = Ends(config, dtype)
        self._layers = [DecoderLayer(config, i, dtype) for i in range(config.num_layers)]
        self._rotary = Rotary(config, device)

    def weight_groups(self) -> Sequence[WeightGroup]:
        """Its weights in the pieces they are read and packed in."""
        return (self._ends, *self._layers)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Tensor],
        plan: Plan,
        kv_stored: Callable[[int], None],
    ) -> Tensor:
        """Hidden states [tokens, hidden] before the last norm, for a flat batch.

        `token_ids` and `positions` are [tokens] int64, `caches` one per layer, `plan` of the
        model's kernels. Layer i calls `kv_stored(i)` when the keys and values of all tokens stand
        in its cache.
        """
        step = StepContext(self._kernels, self._rotary(positions), caches, plan, kv_stored)
        residual = self._ends.embed(token_ids)
        x: Tensor | None = None
        for layer in self._layers:
            x = layer(x, residual, step)
        return residual if x is None else residual.add_(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Last norm and head over chosen rows [rows, hidden] -> float32 [rows, vocab]."""
        return self._ends.logits(hidden, self._kernels)
