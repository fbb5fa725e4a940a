"""A model's facts for a division, read from any decoder-only family's config.json. Pure.

It takes the usual field names, also those of families that the engine does not serve, and counts
parameters as a decoder with gated MLPs has them: attention with KV heads or a latent (MLA), experts
in all layers or in some. Biases and norms of heads are left out: they are less than a thousandth.
Every layer counts as one of full attention: a model with windows needs less KV than is said here.
The first part says how many bytes a parameter takes: types, quantized formats, and what names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType

from xpyd_core.errors import UserError
from xpyd_core.json_fields import Fields, Json
from xpyd_core.parallel.checks import Shape

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})
QUANTIZATIONS: Mapping[str, Fraction] = MappingProxyType(
    {
        "fp8": Fraction(8),
        "int8": Fraction(8),
        # A scale of 16 bits and a zero of 4 for each 128 weights.
        "int4": Fraction(4) + Fraction(20, 128),
        # A scale of 8 bits for each 32 weights, or for each 16.
        "mxfp4": Fraction(4) + Fraction(8, 32),
        "nvfp4": Fraction(4) + Fraction(8, 16),
    }
)
"""Bits of a layer's weight, its share of the scales included."""


@dataclass(frozen=True)
class Weights:
    """How parameters become bytes. `bits` of a layer's weight; embedding and head stay in 16 bits
    or more. `scale`: what `source` says of the total, as a share of what was computed."""

    label: str
    bits: Fraction
    outer_bits: int
    scale: Fraction = Fraction(1)
    source: str = "computed"

    def of_layers(self, params: int) -> Fraction:
        """Bytes of parameters in layers."""
        return params * self.bits / 8 * self.scale

    def of_outer(self, params: int) -> Fraction:
        """Bytes of parameters of embedding and head."""
        return params * self.outer_bits * self.scale / 8


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What the user says instead of the files. None: the files are right."""

    dtype: str | None = None
    quantization: str | None = None
    """A name of QUANTIZATIONS, or `none`."""
    params: float | None = None
    """Parameters in all; each then counts as much as a layer's."""


def read_dtype(fields: Fields, outer: Fields) -> str:
    """The type of weights and KV: of the decoder, or of the model around it."""
    for place in (fields, outer):
        for name in ("dtype", "torch_dtype"):
            if (value := place.get(name)) is not None:
                found = str(value).removeprefix("torch.")
                if found not in DTYPE_BYTES:
                    raise place.refusal(name, f"{', '.join(DTYPE_BYTES)}; or say --dtype")
                return found
    return "float32"


def weights_of(dtype: str, quantization: str) -> Weights:
    """Unquantized weights of `dtype`, or quantized ones with an embedding and a head of it."""
    bits = 8 * DTYPE_BYTES[dtype]
    if quantization == "none":
        return Weights(dtype, Fraction(bits), bits)
    return Weights(quantization, QUANTIZATIONS[quantization], bits)


def read_quantization(fields: Fields) -> str:
    """The name of the format that config.json names; `none` without one."""
    if fields.get("quantization_config") is None:
        return "none"
    inner = fields.inner("quantization_config")
    method = str(inner.get("quant_method")).lower()
    if method == "compressed-tensors":
        found = _of_compressed(inner)
    else:
        bits = inner.get("bits") or inner.get("w_bit")
        by_bits = {4: "int4", 8: "int8"}.get(bits) if isinstance(bits, int) else None
        by_method = {
            "fp8": "fp8",
            "fbgemm_fp8": "fp8",
            "mxfp4": "mxfp4",
            "awq": by_bits or "int4",
            "gptq": by_bits or "int4",
            "modelopt": str(inner.get("quant_algo")).lower(),
        }
        found = by_method.get(method)
    if found is None or found not in QUANTIZATIONS:
        known = ", ".join(("none", *QUANTIZATIONS))
        raise UserError(
            f"config.json: quantization_config of {method} is not known; say --quantization {known}"
        )
    return found


def _of_compressed(fields: Fields) -> str | None:
    groups = fields.inner("config_groups")
    weights = groups.inner("group_0").inner("weights")
    names = {(8, "float"): "fp8", (8, "int"): "int8", (4, "int"): "int4", (4, "float"): "nvfp4"}
    bits, kind = weights.get("num_bits"), weights.get("type")
    return names.get((bits, kind)) if isinstance(bits, int) and isinstance(kind, str) else None


# --- the model

_MOST_LAYERS = 4096
_EXPERT_COUNTS = ("num_local_experts", "n_routed_experts", "num_experts")
_NOT_GATED = frozenset({"starcoder2", "phi", "gpt_neox", "nemotron", "opt"})
_TIED_BY_DEFAULT = ("gemma",)


@dataclass(frozen=True)
class LayerParams:
    """Parameters of one layer: what a tensor group divides, and the experts."""

    shared: int
    experts: int = 0


@dataclass(frozen=True)
class ExpertFacts:
    """`count` experts in each of `layers` layers, `per_token` of them for each token."""

    count: int
    per_token: int
    layers: int


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """One model. `kv_numbers`: numbers of KV for one token in one layer. `kv_heads`: in how many
    parts a tensor group can divide them; 0: a latent, which each rank keeps whole. `embedding` and
    `head`: parameters; a tied head is the embedding's and counts 0."""

    architecture: str
    hidden: int
    heads: int
    kv_heads: int
    kv_numbers: int
    intermediate_sizes: frozenset[int]
    expert_sizes: frozenset[int]
    layers: tuple[LayerParams, ...]
    embedding: int
    head: int
    max_positions: int
    experts: ExpertFacts | None
    dtype: str
    weights: Weights

    @property
    def element_bytes(self) -> int:
        """Bytes of a number of hidden states and KV."""
        return DTYPE_BYTES[self.dtype]

    @property
    def expert_element_bytes(self) -> int:
        """Bytes of a number of hidden states on the way to experts: experts in fp8 are sent fp8."""
        return 1 if self.weights.label == "fp8" else self.element_bytes

    @property
    def parameters(self) -> int:
        """The number of all parameters, as computed."""
        layers = sum(layer.shared + layer.experts for layer in self.layers)
        return layers + self.embedding + self.head

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights of one whole copy."""
        layers = sum(layer.shared + layer.experts for layer in self.layers)
        outer = self.embedding + self.head
        return int(self.weights.of_layers(layers) + self.weights.of_outer(outer))

    @property
    def shape(self) -> Shape:
        """What can be divided; a latent does not limit it."""
        return Shape(
            layers=len(self.layers),
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            intermediate_sizes=self.intermediate_sizes,
            experts=self.experts.count if self.experts else 0,
            expert_sizes=self.expert_sizes,
        )


def read_facts(config: Json, *, files_bytes: int | None, overrides: Overrides) -> ModelFacts:
    """The facts from config.json's content. `files_bytes`: what the weights' files hold, if that is
    known; it counts unless the user says otherwise. UserError naming the field."""
    outer, fields = Fields(config), Fields(config)
    if isinstance(config.get("text_config"), dict):  # a model of more than text: its decoder
        fields = outer.inner("text_config")
    experts, layers = _read_layers(fields)
    is_latent = fields.get("kv_lora_rank") is not None
    heads = fields.whole("num_attention_heads")
    kv_heads = fields.whole("num_key_value_heads", heads)
    if is_latent:
        kv_numbers = fields.whole("kv_lora_rank") + fields.whole("qk_rope_head_dim")
    else:
        kv_numbers = 2 * kv_heads * _head_dim(fields)
    embedding = fields.whole("vocab_size") * fields.whole("hidden_size")
    dtype = overrides.dtype or read_dtype(fields, outer)
    is_mixed = experts is None or experts.layers < len(layers)
    facts = ModelFacts(
        architecture=_architecture(outer),
        hidden=fields.whole("hidden_size"),
        heads=heads,
        kv_heads=0 if is_latent else kv_heads,
        kv_numbers=kv_numbers,
        intermediate_sizes=frozenset({fields.whole("intermediate_size")} if is_mixed else ()),
        expert_sizes=frozenset({_expert_size(fields)} if experts else ()),
        layers=layers,
        embedding=embedding,
        head=0 if _is_tied(fields, outer) else embedding,
        max_positions=fields.whole("max_position_embeddings"),
        experts=experts,
        dtype=dtype,
        weights=weights_of(dtype, overrides.quantization or read_quantization(outer)),
    )
    return _with_total(facts, files_bytes, overrides)


def _with_total(facts: ModelFacts, files_bytes: int | None, overrides: Overrides) -> ModelFacts:
    """`facts` with the total that the user or the files say in place of the computed one."""
    weights = facts.weights
    if overrides.params is not None:
        total, source = Fraction(overrides.params) * weights.bits / 8, "--params"
    elif files_bytes and overrides.dtype is None and overrides.quantization is None:
        total, source = Fraction(files_bytes), "the files"
    else:
        return facts
    scaled = replace(weights, scale=total / facts.weights_bytes, source=source)
    return replace(facts, weights=scaled)


def _read_layers(fields: Fields) -> tuple[ExpertFacts | None, tuple[LayerParams, ...]]:
    count = fields.whole("num_hidden_layers")
    if count > _MOST_LAYERS:
        raise fields.refusal("num_hidden_layers", f"at most {_MOST_LAYERS}")
    hidden = fields.whole("hidden_size")
    attention = _attention(fields) + 2 * hidden  # the two norms
    mlps = 2 if fields.get("model_type") in _NOT_GATED else 3
    dense = LayerParams(attention + mlps * hidden * fields.whole("intermediate_size"))
    name = next((name for name in _EXPERT_COUNTS if _is_number(fields.get(name), 2)), None)
    if name is None:
        return None, (dense,) * count
    experts = fields.whole(name)
    size = fields.whole("moe_intermediate_size", fields.whole("intermediate_size"))
    always = _always_on(fields, size)
    mixed = LayerParams(
        attention + hidden * experts + mlps * hidden * always, mlps * hidden * size * experts
    )
    layers = tuple(mixed if _has_experts(fields, i) else dense for i in range(count))
    with_experts = sum(layer is mixed for layer in layers)
    return ExpertFacts(experts, _per_token(fields), with_experts), layers


def _attention(fields: Fields) -> int:
    """Parameters of one layer's projections."""
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    if fields.get("kv_lora_rank") is None:
        size = _head_dim(fields)
        return 2 * hidden * size * (heads + fields.whole("num_key_value_heads", heads))
    latent, rope = fields.whole("kv_lora_rank"), fields.whole("qk_rope_head_dim")
    nope, value = fields.whole("qk_nope_head_dim"), fields.whole("v_head_dim")
    queries = heads * (nope + rope)
    if fields.get("q_lora_rank") is None:
        query = hidden * queries
    else:
        query = fields.whole("q_lora_rank") * (hidden + queries)
    return (
        query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
    )


def _head_dim(fields: Fields) -> int:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    return fields.whole("head_dim", max(hidden // heads, 1))


def _always_on(fields: Fields, size: int) -> int:
    """Width of the experts that every token goes through."""
    if _is_number(fields.get("shared_expert_intermediate_size")):
        return fields.whole("shared_expert_intermediate_size")
    if _is_number(fields.get("n_shared_experts")):
        return fields.whole("n_shared_experts") * size
    return 0


def _per_token(fields: Fields) -> int:
    name = "num_experts_per_tok"
    return fields.whole("moe_topk" if fields.get("moe_topk") is not None else name)


def _has_experts(fields: Fields, layer: int) -> bool:
    first = fields.get("first_k_dense_replace")
    if isinstance(first, int) and layer < first:
        return False
    if layer in fields.array("mlp_only_layers"):
        return False
    if layer % fields.whole("moe_layer_freq", 1):
        return False
    return (layer + 1) % fields.whole("decoder_sparse_step", 1) == 0


def _expert_size(fields: Fields) -> int:
    return fields.whole("moe_intermediate_size", fields.whole("intermediate_size"))


def _is_number(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _architecture(fields: Fields) -> str:
    names = fields.array("architectures")
    name = names[0] if names else fields.get("model_type")
    if not isinstance(name, str):
        raise fields.refusal("architectures", "a list of one name")
    return name


def _is_tied(fields: Fields, outer: Fields) -> bool:
    family = str(fields.get("model_type") or outer.get("model_type") or "")
    default = outer.flag("tie_word_embeddings", default=family.startswith(_TIED_BY_DEFAULT))
    return fields.flag("tie_word_embeddings", default=default)
