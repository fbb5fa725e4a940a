"""Rotary frequencies against transformers' own, bit for bit, for plain, llama3 and yarn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from xpyd_core.json_fields import Fields
from xpyd_worker.model.layers import angle_scale, inverse_frequencies
from xpyd_worker.model.rope import read_rope

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
ROPES: dict[str, dict[str, Any]] = {
    "llama3": LLAMA3 | {"original_max_position_embeddings": 1024},
    "llama3, trained context in no field": LLAMA3,
    "yarn": YARN,
    "yarn, large base": YARN | {"rope_theta": 1e6},
    "yarn, small base": YARN | {"rope_theta": 20.0},
    "yarn, attention factor": YARN | {"attention_factor": 0.7},
    "yarn, mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5},
    "yarn, mscale alone": YARN | {"mscale": 0.707},
    "yarn, betas": YARN | {"beta_fast": 16, "beta_slow": 4},
    "yarn, the same beta twice": YARN | {"beta_fast": 2, "beta_slow": 2, "truncate": False},
    "yarn, range not truncated": YARN | {"truncate": False},
    "yarn, factor from the contexts": YARN | {"factor": None},
    "yarn, no stretching": YARN | {"factor": 1.0},
    "yarn, short trained context": YARN | {"original_max_position_embeddings": 16},
}


@pytest.mark.parametrize("head_dim", [16, 96, 128])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_attention_factor_are_those_of_transformers(
    name: str, head_dim: int
) -> None:
    fields = {"max_position_embeddings": 4096, "rope_parameters": {"rope_theta": 1e4} | ROPES[name]}
    kind = fields["rope_parameters"]["rope_type"]
    oracle_config: Any = LlamaConfig(hidden_size=2 * head_dim, num_attention_heads=2, **fields)
    expected, scale = ROPE_INIT_FUNCTIONS[kind](oracle_config, torch.device("cpu"))
    rope = read_rope(Fields(fields), default_theta=1e4)
    assert torch.equal(inverse_frequencies(rope, head_dim), expected)
    assert angle_scale(rope) == pytest.approx(scale, rel=1e-12)


def test_without_scaling_frequencies_fall_from_one_by_equal_factors() -> None:
    rope = read_rope(Fields({"rope_theta": 10000.0}), default_theta=1.0)
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001])
    torch.testing.assert_close(inverse_frequencies(rope, 8), expected)
    assert angle_scale(rope) == 1.0
