"""The demo model's draft heads as trainable modules, whose parameters have the published names.

Where it sits: `train.py` trains them on what the demo model makes of texts, and `measure.py` asks
how often they are right. An engine reads what comes of it (xpyd_worker.model.eagle3, .medusa); this
module shares no code with it, so that tests can hold one against the other.

A draft of several tokens is trained as it is made (arXiv 2503.01840, "training-time test"): run j
of a position reads the head's own hidden state of run j - 1, and sees the keys of true positions up
to its own and those of the runs before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from scripts.train_demo_model.weight_file import load_weights

FEATURE_LAYERS = (1, 3, 5)
"""The model's layers whose inputs the EAGLE-3 head reads."""
EAGLE3, MEDUSA = "demo-eagle3", "demo-medusa"
"""Their folders."""
DRAFT_TOKENS = 3
"""As many tokens are drafted in training; Medusa has a head for each."""


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self._eps)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, self._dim = config.hidden_size, config.head_dim
        self._heads, self._groups = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(2 * size, self._heads * self._dim, bias=False)
        self.k_proj = nn.Linear(2 * size, self._groups * self._dim, bias=False)
        self.v_proj = nn.Linear(2 * size, self._groups * self._dim, bias=False)
        self.o_proj = nn.Linear(self._heads * self._dim, size, bias=False)
        exponents = torch.arange(0, self._dim, 2) / self._dim
        rope: Any = config.rope_parameters
        self._frequencies: Tensor = rope["rope_theta"] ** -exponents

    def forward(self, x: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[rows, tokens, 2 * hidden] of the next run; `seen`: keys and values of those before, to
        which its own are added."""
        rows, tokens, _ = x.shape
        run = len(seen)
        angles = (torch.arange(tokens) + run).outer(self._frequencies).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()
        shares = self._heads // self._groups

        def heads(projected: Tensor, repeats: int) -> Tensor:
            found = projected.view(rows, tokens, -1, self._dim).transpose(1, 2)
            return found.repeat_interleave(repeats, dim=1)

        query = _turn(heads(self.q_proj(x), 1), cos, sin) / self._dim**0.5
        key = _turn(heads(self.k_proj(x), shares), cos, sin)
        seen.append((key, heads(self.v_proj(x), shares)))
        true_key, true_value = seen[0]
        above = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        scores = (query @ true_key.transpose(2, 3)).masked_fill(above, float("-inf"))
        later = [(query * one).sum(-1, keepdim=True) for one, _ in seen[1:]]
        shared = torch.cat((scores, *later), dim=-1).float().softmax(-1)
        out = shared[..., :tokens] @ true_value
        for place, (_, value) in enumerate(seen[1:]):
            out = out + shared[..., tokens + place, None] * value
        return self.o_proj(out.transpose(1, 2).reshape(rows, tokens, -1))


class _Mlp(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _MidLayer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = _Norm(size, eps)
        self.hidden_norm = _Norm(size, eps)
        self.post_attention_layernorm = _Norm(size, eps)
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(size, config.intermediate_size)

    def forward(
        self, embedded: Tensor, hidden: Tensor, seen: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        joined = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), dim=-1)
        x = hidden + self.self_attn(joined, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Module(nn.Module):
    """An EAGLE-3 head over `draft_ids` of the model's tokens, ascending. What it can begin with
    comes from the model: its last layer, norm and head."""

    def __init__(self, model: LlamaForCausalLM, draft_ids: Tensor) -> None:
        super().__init__()
        config: Any = model.config
        size = config.hidden_size
        self.fc = nn.Linear(len(FEATURE_LAYERS) * size, size, bias=False)
        self.midlayer = _MidLayer(config)
        self.norm = _Norm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(draft_ids), bias=False)
        self.d2t: Tensor
        self.t2d: Tensor
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        used = torch.zeros(config.vocab_size, dtype=torch.bool)
        self.register_buffer("t2d", used.index_fill(0, draft_ids, value=True))
        self._embedding = [model.model.embed_tokens.weight]
        layer: Any = model.model.layers[-1]
        with torch.no_grad():
            # The layer's inputs of today are the last of the features.
            self.fc.weight.mul_(0.1)[:, -size:] += torch.eye(size)
            self.midlayer.mlp.load_state_dict(layer.mlp.state_dict())
            self.midlayer.self_attn.o_proj.weight.copy_(layer.self_attn.o_proj.weight)
            self.norm.weight.copy_(model.model.norm.weight)
            self.lm_head.weight.copy_(model.lm_head.weight[draft_ids])

    def runs(self, ids: Tensor, features: Tensor, count: int) -> list[Tensor]:
        """Logits of each of `count` runs over `ids` [rows, tokens], each [rows, tokens - count,
        draft ids]: run j at position p has read the tokens up to p + 1 + j."""
        tokens = ids.shape[1] - count
        hidden = self.fc(features[:, :tokens])
        seen: list[tuple[Tensor, Tensor]] = []
        found: list[Tensor] = []
        for run in range(count):
            embedded = F.embedding(ids[:, 1 + run : 1 + run + tokens], self._embedding[0])
            hidden = self.midlayer(embedded, hidden, seen)
            found.append(self.lm_head(self.norm(hidden)))
        return found


class _Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, size, bias=False)])
        # It begins as the identity, as the authors' do.
        nn.init.zeros_(cast("nn.Linear", self.layers[0]).weight)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaModule(nn.Module):
    """Medusa heads over `draft_ids` of the model's tokens, with vLLM's names."""

    def __init__(self, model: LlamaForCausalLM, draft_ids: Tensor) -> None:
        super().__init__()
        size = model.model.norm.weight.shape[0]
        self.blocks = nn.ModuleList(_Block(size) for _ in range(DRAFT_TOKENS))
        self.lm_heads = nn.ModuleList(
            nn.Linear(size, len(draft_ids), bias=False) for _ in range(DRAFT_TOKENS)
        )
        self.token_map: Tensor
        self.register_buffer("token_map", draft_ids.clone())
        with torch.no_grad():
            for head in self.lm_heads:
                cast("nn.Linear", head).weight.copy_(model.lm_head.weight[draft_ids])

    def runs(self, last: Tensor, count: int) -> list[Tensor]:
        """Logits of the first `count` heads over the model's last hidden states [rows, tokens,
        hidden], each [rows, tokens - count, draft ids]: as those of Eagle3Module."""
        hidden = last[:, : last.shape[1] - count]
        pairs = zip(self.blocks[:count], self.lm_heads, strict=False)
        return [head(block(hidden)) for block, head in pairs]


def load_heads(folder: Path, model: LlamaForCausalLM) -> tuple[Eagle3Module, MedusaModule]:
    """Those that are stored in `folder`, in float32."""
    eagle3_weights = load_weights(folder / EAGLE3 / "model.safetensors")
    medusa_weights = load_weights(folder / MEDUSA / "model.safetensors")
    offsets = eagle3_weights["d2t"]
    eagle3 = Eagle3Module(model, offsets + torch.arange(len(offsets)))
    medusa = MedusaModule(model, medusa_weights["token_map"])
    for head, weights in ((eagle3, eagle3_weights), (medusa, medusa_weights)):
        head.load_state_dict(
            {name: one.float() if one.is_floating_point() else one for name, one in weights.items()}
        )
    return eagle3, medusa


def read_model(model: LlamaForCausalLM, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the model makes of `ids` [rows, tokens]: features for EAGLE-3, its last hidden states
    behind the norm, its logits."""
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    states = cast("Sequence[Tensor]", output.hidden_states)
    features = torch.cat([states[layer] for layer in FEATURE_LAYERS], dim=-1)
    return features, states[-1], output.logits
