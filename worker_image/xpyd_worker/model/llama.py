"""One decoder for the Llama, Qwen2 and Qwen3 families; the configuration says which parts it has.

Takes a flat [tokens, hidden] batch without padding and a paged KV cache. Each layer stores its keys
and values, tells the caller, then attends. It must not know requests, block management or sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xpyd_worker.model.attention import AttentionPlan, paged_attention, store_kv
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.layers import Linear, RmsNorm, silu_mul
from xpyd_worker.model.rotary import Rotary, rotate


@dataclass(frozen=True)
class StepContext:
    """What all layers of one forward share: the step's angles, cache and attention plan."""

    cos: Tensor
    sin: Tensor
    caches: Sequence[Tensor]
    plan: AttentionPlan
    kv_stored: Callable[[int], None]


class Attention:
    """Self-attention with grouped KV heads, rotary positions and, where configured, head norms."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
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
        self._norms: tuple[RmsNorm, RmsNorm] | None = None
        if config.qk_norm:
            eps = config.rms_norm_eps
            self._norms = (
                RmsNorm(config.head_dim, eps=eps, dtype=dtype),
                RmsNorm(config.head_dim, eps=eps, dtype=dtype),
            )

    def __call__(self, x: Tensor, layer: int, step: StepContext) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; `step.kv_stored(layer)` is called on the way."""
        tokens, turned = x.shape[0], self._heads + self._kv_heads
        qkv = self._qkv(x).view(tokens, turned + self._kv_heads, self._head_dim)
        if self._norms is None:
            query_key = rotate(qkv[:, :turned], step.cos, step.sin)
            query, key = query_key[:, : self._heads], query_key[:, self._heads :]
        else:
            query = rotate(self._norms[0](qkv[:, : self._heads]), step.cos, step.sin)
            key = rotate(self._norms[1](qkv[:, self._heads : turned]), step.cos, step.sin)
        kv = torch.cat((key, qkv[:, turned:]), dim=-1)
        store_kv(step.caches[layer], kv, step.plan)
        step.kv_stored(layer)
        out = paged_attention(query, kv, step.caches[layer], step.plan)
        return self._output(out.reshape(tokens, -1))

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> where it goes."""
        query, key = self._heads * self._head_dim, self._kv_heads * self._head_dim
        tensors: dict[str, Tensor] = {}
        _add(tensors, f"{prefix}q_proj", self._qkv.rows(0, query))
        _add(tensors, f"{prefix}k_proj", self._qkv.rows(query, key))
        _add(tensors, f"{prefix}v_proj", self._qkv.rows(query + key, key))
        _add(tensors, f"{prefix}o_proj", (self._output.weight, self._output.bias))
        if self._norms is not None:
            tensors[f"{prefix}q_norm.weight"] = self._norms[0].weight
            tensors[f"{prefix}k_norm.weight"] = self._norms[1].weight
        return tensors


class Mlp:
    """Gated feed-forward: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        hidden, bias = config.hidden_size, config.mlp_bias
        self._size = config.intermediate_size
        self._gate_up = Linear(hidden, 2 * self._size, bias=bias, dtype=dtype)
        self._down = Linear(self._size, hidden, bias=bias, dtype=dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self._down(silu_mul(self._gate_up(x)))

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> where it goes."""
        tensors: dict[str, Tensor] = {}
        _add(tensors, f"{prefix}gate_proj", self._gate_up.rows(0, self._size))
        _add(tensors, f"{prefix}up_proj", self._gate_up.rows(self._size, self._size))
        _add(tensors, f"{prefix}down_proj", (self._down.weight, self._down.bias))
        return tensors


class DecoderLayer:
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        self._index = index
        self._attention = Attention(config, dtype)
        self._mlp = Mlp(config, dtype)
        eps = config.rms_norm_eps
        self._input_norm = RmsNorm(config.hidden_size, eps=eps, dtype=dtype)
        self._mlp_norm = RmsNorm(config.hidden_size, eps=eps, dtype=dtype)

    def __call__(self, x: Tensor, step: StepContext) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        x = x + self._attention(self._input_norm(x), self._index, step)
        return x + self._mlp(self._mlp_norm(x))

    def checkpoint_tensors(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint name -> where it goes."""
        return {
            f"{prefix}input_layernorm.weight": self._input_norm.weight,
            f"{prefix}post_attention_layernorm.weight": self._mlp_norm.weight,
            **self._attention.checkpoint_tensors(f"{prefix}self_attn."),
            **self._mlp.checkpoint_tensors(f"{prefix}mlp."),
        }


class Llama:
    """The whole model. Weights are uninitialised until the loader filled `checkpoint_tensors`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
        self._is_tied = config.tie_word_embeddings
        self._head = self._embedding if self._is_tied else torch.empty_like(self._embedding)
        self._layers = [DecoderLayer(config, i, dtype) for i in range(config.num_layers)]
        self._norm = RmsNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self._rotary = Rotary(config)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Tensor],
        plan: AttentionPlan,
        kv_stored: Callable[[int], None],
    ) -> Tensor:
        """Hidden states [tokens, hidden] before the last norm, for a flat batch.

        `token_ids` and `positions` are [tokens] int64, `caches` one per layer. Layer i calls
        `kv_stored(i)` when the keys and values of all tokens stand in its cache.
        """
        cos, sin = self._rotary(positions, self._dtype)
        step = StepContext(cos, sin, caches, plan, kv_stored)
        x = F.embedding(token_ids, self._embedding)
        for layer in self._layers:
            x = layer(x, step)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Last norm and head over chosen rows [rows, hidden] -> float32 [rows, vocab]."""
        return F.linear(self._norm(hidden), self._head).to(torch.float32)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Checkpoint name -> the (part of a) weight that it fills; together they fill all."""
        tensors = {
            "model.embed_tokens.weight": self._embedding,
            "model.norm.weight": self._norm.weight,
        }
        if not self._is_tied:
            tensors["lm_head.weight"] = self._head
        for index, layer in enumerate(self._layers):
            tensors.update(layer.checkpoint_tensors(f"model.layers.{index}."))
        return tensors


def _add(tensors: dict[str, Tensor], name: str, parts: tuple[Tensor, Tensor | None]) -> None:
    weight, bias = parts
    tensors[f"{name}.weight"] = weight
    if bias is not None:
        tensors[f"{name}.bias"] = bias
