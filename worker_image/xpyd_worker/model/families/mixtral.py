"""Mixtral: experts in every layer, whose weights always sum to 1; a sliding window in every layer
or in none."""

from __future__ import annotations

from xpyd_core.json_fields import Fields
from xpyd_worker.model.config import (
    Experts,
    LayerConfig,
    MlpNames,
    ModelConfig,
    decoder_config,
)
from xpyd_worker.model.families.family import Family


def _read_config(fields: Fields) -> ModelConfig:
    window = None
    if fields.get("sliding_window") is not None:
        window = fields.whole("sliding_window")
    experts = Experts(
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


FAMILY = Family("MixtralForCausalLM", _read_config, default_eos_ids=(2,))
