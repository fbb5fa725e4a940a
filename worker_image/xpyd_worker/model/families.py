"""The model families that are served: what the config.json of each means, and what its checkpoints
call things.

A family is a function that reads config.json's fields and a row of FAMILIES; `registry` finds the
family of a folder. They are read before torch is imported and must not know it: what a model
computes is in `decoder` and its parts. docs/new-model.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from xpyd_core.json_fields import Fields
from xpyd_worker.model.config import (
    ExpertsConfig,
    LayerConfig,
    MlpNames,
    ModelConfig,
    decoder_config,
)

_DEFAULT_WINDOW = 4096
_DEFAULT_FIRST_WINDOWED_LAYER = 28


@dataclass(frozen=True)
class Family:
    """One architecture. `read_config` raises UserError naming the field that is missing, malformed
    or not supported; `default_eos_ids` are those that transformers takes where no file has the
    field."""

    architecture: str
    read_config: Callable[[Fields], ModelConfig]
    default_eos_ids: tuple[int, ...] = ()


def _llama(fields: Fields) -> ModelConfig:
    """Llama 2 and 3, and what shares their shape: biases where config.json asks for them."""
    bias = fields.flag("attention_bias")
    return decoder_config(fields, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def _window(fields: Fields) -> int | None:
    """The sliding window of a Qwen config.json, whatever its layers make of it; None: not in use.
    A `sliding_window` of null is none; where it is absent, it is transformers' 4096."""
    is_null = "sliding_window" in fields and fields.get("sliding_window") is None
    if is_null or not fields.flag("use_sliding_window"):
        return None
    return fields.whole("sliding_window", _DEFAULT_WINDOW)


def _qwen_layers(fields: Fields) -> list[LayerConfig]:
    """Which layers have the window: `layer_types` says it, or all from `max_window_layers` on."""
    window, count = _window(fields), fields.whole("num_hidden_layers")
    if fields.get("layer_types") is None:
        first = fields.get("max_window_layers")
        # 0 is right here, and no whole number above 0.
        first = (
            0 if first == 0 else fields.whole("max_window_layers", _DEFAULT_FIRST_WINDOWED_LAYER)
        )
        return [LayerConfig(window if layer >= first else None) for layer in range(count)]
    types = fields.array("layer_types")
    if len(types) != count or not all(
        kind in ("full_attention", "sliding_attention") for kind in types
    ):
        raise fields.refusal(
            "layer_types", f"{count} of full_attention and sliding_attention, one per layer"
        )
    if "sliding_attention" in types and window is None:
        raise fields.refusal("use_sliding_window", "true where layer_types has sliding_attention")
    return [LayerConfig(window if kind == "sliding_attention" else None) for kind in types]


def _qwen2(fields: Fields) -> ModelConfig:
    """Qwen2 and Qwen2.5: biases on queries, keys and values; a sliding window in upper layers."""
    return decoder_config(fields, layers=_qwen_layers(fields), qkv_bias=True)


def _qwen3(fields: Fields) -> ModelConfig:
    """Qwen3, dense: a norm on each head of queries and keys; the sliding window is Qwen2's."""
    bias = fields.flag("attention_bias")
    return decoder_config(
        fields, layers=_qwen_layers(fields), qkv_bias=bias, output_bias=bias, qk_norm=True
    )


def _mixtral(fields: Fields) -> ModelConfig:
    """Mixtral: experts in every layer, whose weights always sum to 1; a sliding window in every
    layer or in none."""
    window = None
    if fields.get("sliding_window") is not None:
        window = fields.whole("sliding_window")
    experts = ExpertsConfig(
        count=fields.whole("num_local_experts", 8),
        per_token=fields.whole("num_experts_per_tok", 2),
        intermediate_size=fields.whole("intermediate_size"),
        is_normalized=True,
        block="block_sparse_moe",
        names=MlpNames(gate_up=("w1", "w3"), down="w2"),
    )
    if experts.per_token > experts.count:
        raise fields.refusal("num_experts_per_tok", f"at most {experts.count}, the experts")
    return decoder_config(
        fields, layers=[LayerConfig(window, experts)], default_eps=1e-5, default_theta=1e6
    )


def _qwen3_moe(fields: Fields) -> ModelConfig:
    """Qwen3 with experts: Qwen3's attention; experts in all layers or in some of them. Unlike in
    Qwen3 a sliding window is in every layer or in none, and `max_window_layers` and `layer_types`
    are not read: so does transformers."""
    window, experts = _window(fields), _qwen3_experts(fields)
    every = fields.whole("decoder_sparse_step", 1)
    dense = fields.array("mlp_only_layers")
    if not all(isinstance(layer, int) for layer in dense):
        raise fields.refusal("mlp_only_layers", "a list of layer numbers")
    layers = [
        LayerConfig(window, None if layer in dense or (layer + 1) % every else experts)
        for layer in range(fields.whole("num_hidden_layers"))
    ]
    bias = fields.flag("attention_bias")
    return decoder_config(fields, layers=layers, qkv_bias=bias, output_bias=bias, qk_norm=True)


def _qwen3_experts(fields: Fields) -> ExpertsConfig:
    # transformers 5 writes the newer name.
    name = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    experts = ExpertsConfig(
        count=fields.whole(name, 128),
        per_token=fields.whole("num_experts_per_tok", 8),
        intermediate_size=fields.whole("moe_intermediate_size", 768),
        is_normalized=fields.flag("norm_topk_prob"),
    )
    if experts.per_token > experts.count:
        raise fields.refusal("num_experts_per_tok", f"at most {experts.count}, the experts")
    return experts


FAMILIES = (
    Family("LlamaForCausalLM", _llama, default_eos_ids=(2,)),
    Family("Qwen2ForCausalLM", _qwen2),
    Family("Qwen3ForCausalLM", _qwen3),
    Family("MixtralForCausalLM", _mixtral, default_eos_ids=(2,)),
    Family("Qwen3MoeForCausalLM", _qwen3_moe),
)
