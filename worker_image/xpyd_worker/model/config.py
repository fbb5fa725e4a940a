"""A checkpoint's config.json as a frozen, checked value.

The first thing read from a checkpoint: every later part takes its shapes from here. It refuses by
name what the forward pass does not compute, so that no checkpoint is served wrongly. Plain JSON in
both generations of field names (transformers 4 and 5); it must not know torch or transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

from xpyd_core.errors import UserError

Json = Mapping[str, Any]

# Fields that change the result in variants of these families that are not built, with the values
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
    }
)
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class _Family:
    """What an architecture fixes; None: config.json says it (and false where it does not)."""

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    has_sliding_window: bool = False
    # What transformers takes where config.json has no such field.
    default_eos_ids: tuple[int, ...] = ()


_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "LlamaForCausalLM": _Family(mlp_bias=None, default_eos_ids=(2,)),
        "Qwen2ForCausalLM": _Family(qkv_bias=True, output_bias=False, has_sliding_window=True),
        "Qwen3ForCausalLM": _Family(qk_norm=True, has_sliding_window=True),
    }
)


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the low rotary frequencies."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one decoder-only model. `max_positions` is in tokens.

    `head_dim` need not be hidden_size / num_heads. `dtype` is the checkpoint's own. `eos_token_ids`
    end a text: those of config.json and generation_config.json together.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: Literal["float32", "bfloat16", "float16"]
    eos_token_ids: tuple[int, ...]


def load_config(folder: Path) -> ModelConfig:
    """The configuration of the checkpoint in `folder`. Raises UserError naming file and field."""
    generation = folder / "generation_config.json"
    return parse_config(
        _read_json(folder / "config.json"),
        _read_json(generation) if generation.exists() else {},
    )


def parse_config(config: Json, generation: Json) -> ModelConfig:
    """The configuration from the contents of config.json and generation_config.json.

    Raises UserError naming the field for what is missing, malformed or not supported.
    """
    architecture = _architecture(config)
    family = _FAMILIES[architecture]
    _refuse_variants(config, family)
    heads = _whole(config, "num_attention_heads")
    hidden = _whole(config, "hidden_size")
    attention_bias = _flag(config, "attention_bias")
    kv_heads = _whole(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise _refusal("num_key_value_heads", kv_heads, f"a divisor of {heads} attention heads")
    head_dim = _whole(config, "head_dim", default=hidden // heads)
    if head_dim % 2:
        raise _refusal("head_dim", head_dim, "an even number")
    theta, scaling = _rope(config)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_whole(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_whole(config, "intermediate_size"),
        num_layers=_whole(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=_whole(config, "max_position_embeddings"),
        rms_norm_eps=_number(config, "rms_norm_eps", default=1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=_flag(config, "mlp_bias") if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        dtype=_dtype(config),
        eos_token_ids=_eos_ids(config, generation, family),
    )


def _read_json(path: Path) -> Json:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"model: {path} does not exist; name a checkpoint folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"model: cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"model: {path} must hold a JSON object")
    return cast("Json", value)


def _refusal(field: str, value: object, allowed: str) -> UserError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return UserError(f"config.json: {field} is {shown}; supported: {allowed}")


def _architecture(config: Json) -> str:
    names: object = config.get("architectures")
    for name in _FAMILIES:
        if names == [name]:
            return name
    raise _refusal("architectures", names, "one of " + ", ".join(_FAMILIES))


def _refuse_variants(config: Json, family: _Family) -> None:
    """Refuse what would silently give other numbers than the checkpoint's authors meant."""
    for field, neutral in _NEUTRAL.items():
        if field in config and config[field] not in neutral:
            is_quantized = field in ("quantization_config", "compression_config")
            allowed = "unquantized checkpoints, without this field" if is_quantized else neutral[0]
            raise _refusal(field, config[field], str(allowed))
    if not family.has_sliding_window:
        return
    types = config.get("layer_types")
    if types is not None:
        if any(kind != "full_attention" for kind in cast("list[object]", types)):
            raise _refusal("layer_types", types, "full_attention in every layer")
        return
    window, first = config.get("sliding_window", 4096), config.get("max_window_layers", 28)
    in_use = _flag(config, "use_sliding_window") and window is not None
    if in_use and first < _whole(config, "num_hidden_layers"):
        raise _refusal("use_sliding_window", True, "false (full attention)")


def _rope(config: Json) -> tuple[float, RopeScaling | None]:
    """Base and scaling: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    given: object = config.get(field) or {}
    if not isinstance(given, dict):
        raise _refusal(field, given, "an object")
    rope = cast("Json", given)
    base = rope if "rope_theta" in rope else config
    theta = _number(base, "rope_theta", default=10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise _refusal(f"{field}.partial_rotary_factor", rope["partial_rotary_factor"], "1")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise _refusal(f"{field}.rope_type", kind, "default, llama3")
    scaling = RopeScaling(
        factor=_number(rope, "factor", path=field),
        low_freq_factor=_number(rope, "low_freq_factor", path=field),
        high_freq_factor=_number(rope, "high_freq_factor", path=field),
        original_max_positions=_whole(rope, "original_max_position_embeddings", path=field),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise _refusal(f"{field}.high_freq_factor", scaling.high_freq_factor, "> low_freq_factor")
    return theta, scaling


def _dtype(config: Json) -> Literal["float32", "bfloat16", "float16"]:
    field = "dtype" if config.get("dtype") is not None else "torch_dtype"
    value = config.get(field)
    name = "float32" if value is None else str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise _refusal(field, value, ", ".join(_DTYPES))
    return name


def _eos_ids(config: Json, generation: Json, family: _Family) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    absent = "eos_token_id" not in config and "eos_token_id" not in generation
    for source in (config, generation):
        value: object = source.get("eos_token_id")
        values: list[object] = cast("list[object]", value) if isinstance(value, list) else [value]
        for item in values:
            if item is None:
                continue
            if not isinstance(item, int) or isinstance(item, bool) or item < 0:
                raise _refusal("eos_token_id", item, "a token id or a list of them")
            ids[item] = None
    return family.default_eos_ids if absent else tuple(ids)


def _whole(config: Json, field: str, *, default: int | None = None, path: str = "") -> int:
    """A whole number from 1 to 2**31 - 1."""
    value = config.get(field)
    value = default if value is None else value
    name = f"{path}.{field}" if path else field
    if value is None:
        raise UserError(f"config.json: {name} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise _refusal(name, value, "a whole number above 0")
    return value


def _number(config: Json, field: str, *, default: float | None = None, path: str = "") -> float:
    """A finite number above 0."""
    value = config.get(field)
    value = default if value is None else value
    name = f"{path}.{field}" if path else field
    if value is None:
        raise UserError(f"config.json: {name} is missing")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e300:
        raise _refusal(name, value, "a number above 0")
    return float(value)


def _flag(config: Json, field: str) -> bool:
    value = config.get(field)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _refusal(field, value, "true or false")
    return value
