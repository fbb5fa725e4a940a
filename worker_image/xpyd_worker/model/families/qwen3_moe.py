"""Qwen3 with experts: Qwen3's attention; experts in all layers or in some of them. Unlike in Qwen3
a sliding window is in every layer or in none, and `max_window_layers` and `layer_types` are not
read: so does transformers."""

from __future__ import annotations

from xpyd_core.json_fields import Fields
from xpyd_worker.model.config import Experts, LayerConfig, ModelConfig, decoder_config
from xpyd_worker.model.families.family import Family
from xpyd_worker.model.families.qwen2 import read_window


def _read_config(fields: Fields) -> ModelConfig:
    window, experts = read_window(fields), _read_experts(fields)
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


def _read_experts(fields: Fields) -> Experts:
    # transformers 5 writes the newer name.
    name = "num_local_experts" if "num_local_experts" in fields else "num_experts"
    experts = Experts(
        count=fields.whole(name, 128),
        per_token=fields.whole("num_experts_per_tok", 8),
        intermediate_size=fields.whole("moe_intermediate_size", 768),
        is_normalized=fields.flag("norm_topk_prob"),
    )
    if experts.per_token > experts.count:
        raise fields.refusal("num_experts_per_tok", f"at most {experts.count}, the experts")
    return experts


FAMILY = Family("Qwen3MoeForCausalLM", _read_config)
