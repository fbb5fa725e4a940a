"""Qwen3, dense: a norm on each head of queries and keys; the sliding window is Qwen2's."""

from __future__ import annotations

from xpyd_core.json_fields import Fields
from xpyd_worker.model.config import ModelConfig, decoder_config
from xpyd_worker.model.families.family import Family
from xpyd_worker.model.families.qwen2 import read_layers


def _read_config(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return decoder_config(
        fields, layers=read_layers(fields), qkv_bias=bias, output_bias=bias, qk_norm=True
    )


FAMILY = Family("Qwen3ForCausalLM", _read_config)
