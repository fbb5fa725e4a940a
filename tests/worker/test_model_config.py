"""config.json: two generations of field names are read, what is not computed is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from xpyd_core.errors import UserError
from xpyd_worker.model.config import ModelConfig, RopeScaling, load_config, parse_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 3,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parsed(changes: dict[str, Any], base: dict[str, Any] = LLAMA) -> ModelConfig:
    """The configuration of `base` with changes."""
    return parse_config(base | changes, {})


def test_shapes_and_defaults() -> None:
    config = parsed({})
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.rope_theta, config.rope_scaling, config.dtype) == (10000.0, None, "float32")
    assert (config.tie_word_embeddings, config.qk_norm) == (False, False)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (False, False, False)
    assert parsed({"num_key_value_heads": None}).num_kv_heads == 4
    assert parsed({"head_dim": 24}).head_dim == 24


@pytest.mark.parametrize(
    ("base", "changes", "biases"),
    [
        (LLAMA, {"attention_bias": True}, (True, True, False)),
        (LLAMA, {"mlp_bias": True}, (False, False, True)),
        (QWEN2, {}, (True, False, False)),
        (QWEN3, {}, (False, False, False)),
        (QWEN3, {"attention_bias": True}, (True, True, False)),
    ],
)
def test_each_family_has_its_biases(
    base: dict[str, Any], changes: dict[str, Any], biases: tuple[bool, bool, bool]
) -> None:
    config = parsed(changes, base)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == biases
    assert config.qk_norm == (base is QWEN3)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}},
    ],
)
def test_rotary_parameters_in_the_older_and_the_newer_form(fields: dict[str, Any]) -> None:
    config = parsed(fields)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("fields", "theta"),
    [
        ({"rope_theta": 1e6}, 1e6),
        ({"rope_theta": 1e6, "rope_scaling": None}, 1e6),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "default"}}, 1e6),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6),
        ({"rope_parameters": {"rope_type": "default"}}, 10000.0),
    ],
)
def test_unscaled_rotary_parameters(fields: dict[str, Any], theta: float) -> None:
    config = parsed(fields)
    assert (config.rope_theta, config.rope_scaling) == (theta, None)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "torch.float32", "torch_dtype": "bfloat16"}, "float32"),
        ({"dtype": None, "torch_dtype": None}, "float32"),
    ],
)
def test_the_dtype_has_an_older_and_a_newer_name(fields: dict[str, Any], dtype: str) -> None:
    assert parsed(fields).dtype == dtype


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 3}, {}, (3,)),
        ({"eos_token_id": [3, 5]}, {"eos_token_id": [5, 7]}, (3, 5, 7)),
        ({"eos_token_id": None}, {"eos_token_id": 9}, (9,)),
        ({"eos_token_id": None}, {}, ()),
        ({"eos_token_id": 0}, {"eos_token_id": None}, (0,)),
    ],
)
def test_eos_ids_come_from_both_files(
    config: dict[str, Any], generation: dict[str, Any], ids: tuple[int, ...]
) -> None:
    assert parse_config(LLAMA | config, generation).eos_token_ids == ids


def test_an_absent_eos_id_is_the_family_default() -> None:
    without = {key: value for key, value in LLAMA.items() if key != "eos_token_id"}
    assert parse_config(without, {}).eos_token_ids == (2,)
    qwen = without | {"architectures": ["Qwen2ForCausalLM"]}
    assert parse_config(qwen, {}).eos_token_ids == ()


def test_a_sliding_window_that_no_layer_uses_is_fine() -> None:
    fields = {"sliding_window": 256, "max_window_layers": 0}
    assert parsed({**fields, "use_sliding_window": False}, QWEN2).num_layers == 2
    assert parsed({"use_sliding_window": True, "max_window_layers": 2}, QWEN2).num_layers == 2
    assert parsed({"layer_types": ["full_attention"] * 2}, QWEN3).num_layers == 2
    # transformers' Llama has no sliding window, whatever config.json says.
    assert parsed({"sliding_window": 256}).num_layers == 2


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type"),
        ({"rope_parameters": LLAMA3 | {"factor": None}}, "rope_parameters.factor"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"vocab_size": None}, "vocab_size"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
        ({"dtype": "int8"}, "dtype"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1, -1]}, "eos_token_id"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"mlp_bias": 1}, "mlp_bias"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as caught:
        parsed(changes)
    assert str(caught.value).startswith("config.json: ")
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
@pytest.mark.parametrize("base", [QWEN2, QWEN3])
def test_a_sliding_window_in_use_is_refused(
    base: dict[str, Any], changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(UserError, match=field):
        parsed(changes, base)


def test_a_long_value_is_shown_short() -> None:
    with pytest.raises(UserError) as caught:
        parsed({"quantization_config": {"x": "y" * 10_000}})
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("text", [None, "{", "[]", "\xff"])
def test_a_config_that_cannot_be_read_is_refused_with_its_path(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"config\.json"):
        load_config(tmp_path)


def test_a_folder_is_read_with_its_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_config(tmp_path).eos_token_ids == (3,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4]}')
    assert load_config(tmp_path).eos_token_ids == (3, 4)
