"""What a checkpoint of random weights holds: its tensors' names, sizes, scales and values.

Where it sits: `random_checkpoint.py` writes what this module lists and draws. Nothing here touches
a file or builds a model.

Random weights can make a poor test: with a common initialisation logits lie within a rounding error
of each other, and greedy text repeats one token. The scales here keep logits some units apart and
let the context, not the last token alone, decide what comes next.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

Family = Literal["llama", "qwen2", "qwen3", "mixtral", "qwen3-moe"]
# Where a family with experts has them in a layer, and what it calls gate, up and down.
_EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3-moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}

# Standard deviation of the logits. The best two of some thousand then lie about one unit apart.
_LOGIT_STD = 4.0
# What all layers together write into the residual stream (root mean square). A tied embedding must
# be small against it, or every token predicts itself.
_RESIDUAL_RMS = 4.0
_TIED_RESIDUAL_RMS = 20.0
# Scores of attention need some spread, or it averages its context away.
_SCORE_STD = 2.0
# Root mean square of silu(g) * u, and of attention's output, for unit inputs.
_MLP_RMS = 0.6
_ATTENTION_RMS = 0.5
# Root mean square of some experts' weighted sum for outputs of 1, and what spreads their weights.
_EXPERTS_RMS = 0.75
_ROUTER_STD = 1.5
_NORM_SPREAD = 0.1
_BIAS_STD = 0.25


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a checkpoint, in Hugging Face's meaning."""

    family: Family
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    """Rows of the embedding."""
    known_tokens: int
    """Ids the tokenizer knows; the head's rows from here on are zero, so no model emits them."""
    tie: bool
    max_len: int
    rope_theta: float
    experts: int = 0
    """Experts of each layer, for the families that have some; `intermediate` is the size of one."""
    experts_per_token: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "vocab", "max_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.family not in get_args(Family):
            raise ValueError(f"family must be one of {', '.join(get_args(Family))}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError("head_dim must be even (rotary embedding turns pairs)")
        if (self.family in _EXPERT_NAMES) != (self.experts > 0):
            needed = "at least 1" if self.family in _EXPERT_NAMES else "0"
            raise ValueError(f"experts must be {needed} for {self.family}")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"experts_per_token must be 1 to {self.experts}, the experts")
        if self.vocab < self.known_tokens:
            raise ValueError(
                f"vocab ({self.vocab}) is below the tokenizer's {self.known_tokens} tokens;"
                " ask for more rows or for no tokenizer"
            )


class Tensor(NamedTuple):
    """A tensor to draw: Hugging Face name, sizes, mean, and standard deviation."""

    name: str
    sizes: tuple[int, ...]
    mean: float
    std: float
    live_rows: int | None = None
    """Rows from here on are zero; None: none are."""

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


def tensors_of(shape: Shape) -> Iterator[Tensor]:
    """Every tensor of a checkpoint of this shape, in the order in which it is stored."""
    live_rows = shape.known_tokens or None
    logit_std = _LOGIT_STD / math.sqrt(shape.hidden)
    table = (shape.vocab, shape.hidden)
    if shape.tie:
        yield Tensor("model.embed_tokens.weight", table, 0.0, logit_std, live_rows)
    else:
        yield Tensor("model.embed_tokens.weight", table, 0.0, _RESIDUAL_RMS / 2)
    for layer in range(shape.layers):
        yield from _layer_tensors(shape, f"model.layers.{layer}.")
    yield Tensor("model.norm.weight", (shape.hidden,), 1.0, _NORM_SPREAD)
    if not shape.tie:
        yield Tensor("lm_head.weight", table, 0.0, logit_std, live_rows)


def _layer_tensors(shape: Shape, prefix: str) -> Iterator[Tensor]:
    attention = f"{prefix}self_attn."
    q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    unit = 1.0 / math.sqrt(shape.hidden)
    # A score is the mean of head_dim products of q and k, times sqrt(head_dim): q and k share it.
    share = math.sqrt(_SCORE_STD)
    write = (_TIED_RESIDUAL_RMS if shape.tie else _RESIDUAL_RMS) / math.sqrt(2 * shape.layers)
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Tensor(f"{prefix}{name}.weight", (shape.hidden,), 1.0, _NORM_SPREAD)
    for name, size, scale in (("q", q_size, share), ("k", kv_size, share), ("v", kv_size, 1.0)):
        yield Tensor(f"{attention}{name}_proj.weight", (size, shape.hidden), 0.0, unit * scale)
        if shape.family == "qwen2":
            yield Tensor(f"{attention}{name}_proj.bias", (size,), 0.0, _BIAS_STD)
    if shape.family in ("qwen3", "qwen3-moe"):
        for name in ("q_norm", "k_norm"):
            yield Tensor(f"{attention}{name}.weight", (shape.head_dim,), share, _NORM_SPREAD)
    std = write / (_ATTENTION_RMS * math.sqrt(q_size))
    yield Tensor(f"{attention}o_proj.weight", (shape.hidden, q_size), 0.0, std)
    if not shape.experts:
        names = ("gate_proj", "up_proj", "down_proj")
        yield from _mlp_tensors(shape, f"{prefix}mlp.", names, write)
        return
    block, *names = _EXPERT_NAMES[shape.family]
    yield Tensor(
        f"{prefix}{block}.gate.weight", (shape.experts, shape.hidden), 0.0, unit * _ROUTER_STD
    )
    for expert in range(shape.experts):
        part = f"{prefix}{block}.experts.{expert}."
        yield from _mlp_tensors(shape, part, names, write / _EXPERTS_RMS)


def _mlp_tensors(shape: Shape, prefix: str, names: Sequence[str], write: float) -> Iterator[Tensor]:
    """Gate, up and down under their `names`; what comes out has the root mean square `write`."""
    unit = 1.0 / math.sqrt(shape.hidden)
    gate, up, down = names
    for name in (gate, up):
        yield Tensor(f"{prefix}{name}.weight", (shape.intermediate, shape.hidden), 0.0, unit)
    std = write / (_MLP_RMS * math.sqrt(shape.intermediate))
    yield Tensor(f"{prefix}{down}.weight", (shape.hidden, shape.intermediate), 0.0, std)


def draw(tensor: Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The values of `tensor`: the same for the same seed and name, whatever else is drawn."""
    digest = hashlib.sha256(f"{seed}:{tensor.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    values = torch.randn(tensor.sizes, generator=generator).mul_(tensor.std).add_(tensor.mean)
    if tensor.live_rows is not None:
        values[tensor.live_rows :] = 0.0
    return values.to(dtype)


def split(tensors: list[Tensor], shards: int) -> list[list[Tensor]]:
    """`tensors` in order, cut into exactly `shards` non-empty parts of about equal size."""
    if not 1 <= shards <= len(tensors):
        raise ValueError(f"shards must be 1 to {len(tensors)}, the number of tensors")
    target = sum(tensor.elements for tensor in tensors) / shards
    parts: list[list[Tensor]] = [[]]
    for index, tensor in enumerate(tensors):
        filled = sum(each.elements for each in parts[-1])
        needed = shards - len(parts)
        if parts[-1] and needed and (filled >= target or len(tensors) - index == needed):
            parts.append([])
        parts[-1].append(tensor)
    return parts
