"""A checkpoint's shapes and constants as a frozen, checked value.

Every later part takes its shapes from here. `decoder_config` reads what all families share; their
own rules are in `families`, and `registry` finds the family of a folder. It refuses by name what
the forward pass does not compute, so that no checkpoint is served wrongly. It must not know torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from xpyd_core.json_fields import Fields
from xpyd_core.parallel.checks import Shape
from xpyd_core.parallel.ranks import ONE_RANK, Sizes
from xpyd_worker.model.rope import RopeConfig, read_rope

# Fields that change the result in variants of the families that are not built, with the values
# that change nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "hidden_act": ("silu",),
        "partial_rotary_factor": (1, None),
        "pretraining_tp": (1, None),
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "logits_scaling": (1, None),
        "residual_multiplier": (1, None),
        "embedding_multiplier": (1, None),
        "quantization_config": (None,),
        "compression_config": (None,),
        "dual_chunk_attention_config": (None,),
    }
)
_QUANTIZED = ("quantization_config", "compression_config")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class MlpNames:
    """What a family calls the projections of a gated MLP: gate and up, or the one tensor that holds
    both, and down."""

    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


@dataclass(frozen=True)
class Names:
    """What a family calls the projections of a layer: those of queries, keys and values, or the
    one tensor that holds all three."""

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    mlp: MlpNames = MlpNames()


@dataclass(frozen=True)
class ExpertsConfig:
    """A layer's mixture of experts: of `count` gated MLPs of `intermediate_size` each token goes
    through the `per_token` that its router likes best. `is_normalized`: their weights sum to 1.
    `block` is what a checkpoint calls it, `names` an expert's projections."""

    count: int
    per_token: int
    intermediate_size: int
    is_normalized: bool
    block: str = "mlp"
    names: MlpNames = MlpNames()


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer. With `window` a token sees the last `window` tokens, its
    own included; with `experts` they replace the MLP."""

    window: int | None = None
    experts: ExpertsConfig | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one decoder-only model. `max_positions` is the longest context that
    its rotary embedding is made for, in tokens.

    `head_dim` need not be hidden_size / num_heads. `intermediate_size` is that of layers without
    experts. `dtype` is the checkpoint's own. `eos_token_ids` end a text: those of config.json and
    generation_config.json together.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    names: Names
    dtype: Literal["float32", "bfloat16", "float16"]
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def experts(self) -> tuple[ExpertsConfig, ...]:
        """Those of each layer that has any."""
        return tuple(layer.experts for layer in self.layers if layer.experts is not None)

    @property
    def shape(self) -> Shape:
        """What decides over how many ranks the model can be divided."""
        return Shape(
            layers=self.num_layers,
            heads=self.num_heads,
            kv_heads=self.num_kv_heads,
            intermediate_sizes=frozenset({self.intermediate_size} if self._has_mlps else ()),
            experts=min((each.count for each in self.experts), default=0),
            expert_sizes=frozenset(each.intermediate_size for each in self.experts),
        )

    @property
    def _has_mlps(self) -> bool:
        return len(self.experts) < self.num_layers

    def vector_sizes(self, sizes: Sizes = ONE_RANK) -> frozenset[int]:
        """How long the vectors are that norms and activations work on, but for those of heads,
        where each layer is divided so."""
        shape, of_experts = self.shape, 1 if sizes.has_whole_experts else sizes.tensor
        return frozenset(
            {
                self.hidden_size,
                *(size // sizes.tensor for size in shape.intermediate_sizes),
                *(size // of_experts for size in shape.expert_sizes),
            }
        )


_NAMES = Names()


def decoder_config(
    fields: Fields,
    *,
    layers: Sequence[LayerConfig] = (LayerConfig(),),
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    default_eps: float = 1e-6,
    default_theta: float = 10000.0,
    names: Names = _NAMES,
) -> ModelConfig:
    """The configuration from config.json's fields and what its family says of the rest.

    `layers` is one per layer, or one for all. The defaults are those of transformers where
    config.json has no such field. Raises UserError naming what is missing, malformed or not
    supported.
    """
    for name, neutral in _NEUTRAL.items():
        if name in fields and fields.get(name) not in neutral:
            unquantized = "unquantized checkpoints, without this field"
            raise fields.refusal(name, unquantized if name in _QUANTIZED else str(neutral[0]))
    heads, hidden = fields.whole("num_attention_heads"), fields.whole("hidden_size")
    kv_heads = fields.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.refusal("num_key_value_heads", f"a divisor of {heads} attention heads")
    if fields.get("head_dim") is None and hidden % heads:
        raise fields.refusal("head_dim", f"a number, as {heads} heads do not divide {hidden}")
    head_dim = fields.whole("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.refusal("head_dim", "an even number")
    num_layers = fields.whole("num_hidden_layers")
    rope = read_rope(fields, default_theta=default_theta)
    return ModelConfig(
        architecture=str(fields.array("architectures")[0]),
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(layers) * num_layers if len(layers) == 1 else tuple(layers),
        max_positions=rope.context(fields.whole("max_position_embeddings")),
        rms_norm_eps=fields.number("rms_norm_eps", default_eps),
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        names=names,
        dtype=_dtype(fields),
        eos_token_ids=token_ids(fields, "eos_token_id"),
    )


def token_ids(fields: Fields, name: str) -> tuple[int, ...]:
    """A field that holds a token id, a list of them, or null."""
    value = fields.get(name)
    values = fields.array(name) if isinstance(value, list) else [value]
    ids: dict[int, None] = {}
    for item in values:
        if item is None:
            continue
        if not isinstance(item, int) or isinstance(item, bool) or item < 0:
            raise fields.refusal(name, "a token id or a list of them")
        ids[item] = None
    return tuple(ids)


def _dtype(fields: Fields) -> Literal["float32", "bfloat16", "float16"]:
    field = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(field)
    name = "float32" if value is None else str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise fields.refusal(field, ", ".join(_DTYPES))
    return name
