"""Llama 2 and 3, and what shares their shape: biases where config.json asks for them."""

from __future__ import annotations

from xpyd_core.json_fields import Fields
from xpyd_worker.model.config import ModelConfig, decoder_config
from xpyd_worker.model.families.family import Family


def _read_config(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return decoder_config(fields, qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


FAMILY = Family("LlamaForCausalLM", _read_config, default_eos_ids=(2,))
