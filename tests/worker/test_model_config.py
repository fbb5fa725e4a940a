"""config.json: two generations of field names are read, what is not computed is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from xpyd_core.errors import UserError
from xpyd_core.parallel.checks import shape_of
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.model.config import LayerConfig, ModelConfig
from xpyd_worker.model.registry import load_config, parse_config
from xpyd_worker.model.rope import Llama3Scaling, RopeConfig, YarnScaling

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
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"]}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}


def parsed(changes: dict[str, Any], base: dict[str, Any] = LLAMA) -> ModelConfig:
    """The configuration of `base` with changes."""
    return parse_config(base | changes, {})


def test_shapes_and_defaults() -> None:
    config = parsed({})
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.rope, config.dtype) == (RopeConfig(10000.0, None), "float32")
    assert (config.num_layers, config.layers) == (2, (LayerConfig(), LayerConfig()))
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
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "default"}},
    ],
)
def test_rotary_parameters_in_the_older_and_the_newer_form(fields: dict[str, Any]) -> None:
    config = parsed(fields)
    assert config.rope == RopeConfig(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize(
    ("fields", "original"),
    [
        ({}, 512),
        ({"rope_parameters": {"original_max_position_embeddings": 64}}, 64),
        ({"original_max_position_embeddings": 32}, 32),
    ],
)
@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_the_trained_context_may_stand_in_three_places(
    fields: dict[str, Any], original: int, kind: str
) -> None:
    short = {"rope_type": kind, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = short | fields.get("rope_parameters", {})
    scaling = parsed(fields | {"rope_parameters": rope}).rope.scaling
    assert scaling is not None
    assert scaling.original_max_positions == original


@pytest.mark.parametrize(
    ("fields", "factor", "attention_factor"),
    [
        ({"factor": 4.0}, 4.0, 0.1 * math.log(4) + 1),
        ({"factor": None, "original_max_position_embeddings": 64}, 8.0, 0.1 * math.log(8) + 1),
        ({"factor": 4.0, "attention_factor": 0.5, "mscale": 2.0, "mscale_all_dim": 1.0}, 4.0, 0.5),
        (
            {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.4},
            4.0,
            (0.07 * math.log(4) + 1) / (0.14 * math.log(4) + 1),
        ),
        ({"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0}, 4.0, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0, 1.0),
    ],
)
def test_yarn_scales_attention_by_the_field_or_by_what_follows_from_the_others(
    fields: dict[str, Any], factor: float, attention_factor: float
) -> None:
    scaling = parsed({"rope_scaling": {"type": "yarn"} | fields}).rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (32.0, 1.0, True)
    assert scaling.factor == factor
    assert scaling.attention_factor == pytest.approx(attention_factor)


ORIGINAL = {"original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("fields", "context"),
    [
        ({}, 512),
        # Qwen2.5, whose field holds the original context, and Qwen3, whose is a little longer.
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 512}}, 2048),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 400}}, 1600),
        ({"rope_parameters": YARN | {"original_max_position_embeddings": 512}}, 2048),
        # The field holds the stretched context.
        ({"rope_scaling": YARN | ORIGINAL}, 512),
        ({"rope_scaling": YARN | ORIGINAL | {"factor": None}}, 512),
        ({"rope_scaling": YARN} | ORIGINAL, 512),
        # Without an original context the field holds it.
        ({"rope_scaling": YARN}, 2048),
        ({"rope_scaling": YARN | {"factor": 1.0}}, 512),
        ({"rope_scaling": YARN | {"factor": 1e200}}, 2**31 - 1),
        ({"rope_scaling": LLAMA3 | ORIGINAL}, 512),
        ({"rope_scaling": LLAMA3}, 512),
    ],
)
def test_the_context_is_what_the_rotary_embedding_is_stretched_to(
    fields: dict[str, Any], context: int
) -> None:
    assert parsed(fields).max_positions == context


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"rope_type": "default"}, YARN),
        ({"rope_theta": 1e6}, YARN),
        (YARN, {"type": "default"}),
        (YARN, YARN | {"factor": 2.0}),
        (YARN, YARN | {"beta_fast": 16}),
        (YARN | {"beta_fast": 16}, YARN),
        (YARN | {"rope_theta": 1e6}, YARN | {"rope_theta": 1e4}),
    ],
)
def test_two_sets_of_rotary_parameters_that_contradict_each_other_are_refused(
    parameters: dict[str, Any], scaling: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=r"rope_scaling is .*rope_parameters"):
        parsed({"rope_parameters": parameters, "rope_scaling": scaling})


@pytest.mark.parametrize(
    "scaling", [None, {}, YARN, {"type": "yarn", "factor": 4, "beta_fast": None}]
)
def test_two_sets_of_rotary_parameters_may_say_the_same(scaling: Any) -> None:
    fields = {"rope_parameters": YARN | {"rope_theta": 1e6}, "rope_scaling": scaling}
    rope = parsed(fields).rope
    assert isinstance(rope.scaling, YarnScaling)
    assert (rope.theta, rope.scaling.factor) == (1e6, 4.0)


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
    assert parsed(fields).rope == RopeConfig(theta, None)


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
    mixtral = without | {"architectures": ["MixtralForCausalLM"]}
    assert parse_config(mixtral, {}).eos_token_ids == (2,)


def test_an_absent_base_and_epsilon_are_the_family_default() -> None:
    without = {key: value for key, value in MIXTRAL.items() if key != "rms_norm_eps"}
    config = parse_config(without, {})
    assert (config.rope.theta, config.rms_norm_eps) == (1e6, 1e-5)


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("base", "fields", "windows"),
    [
        (QWEN2, {"sliding_window": 9, "max_window_layers": 0}, [None, None]),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 2}, [None, None]),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 1}, [None, 4096]),
        (QWEN2, {"use_sliding_window": True}, [None, None]),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, [9, 9]),
        (QWEN2, {"use_sliding_window": True, "sliding_window": None}, [None, None]),
        (QWEN3, {"layer_types": [FULL, FULL]}, [None, None]),
        (
            QWEN3,
            {"use_sliding_window": True, "sliding_window": 9, "layer_types": [SLIDING, FULL]},
            [9, None],
        ),
        (QWEN3_MOE, {"use_sliding_window": True, "sliding_window": 9}, [9, 9]),
        (QWEN3_MOE, {"sliding_window": 9}, [None, None]),
        (MIXTRAL, {"sliding_window": 9}, [9, 9]),
        (MIXTRAL, {"sliding_window": None}, [None, None]),
        # transformers' Llama has no sliding window, whatever config.json says.
        (LLAMA, {"sliding_window": 9, "use_sliding_window": True}, [None, None]),
    ],
)
def test_each_layer_has_the_window_that_its_family_gives_it(
    base: dict[str, Any], fields: dict[str, Any], windows: list[int | None]
) -> None:
    assert [layer.window for layer in parsed(fields, base).layers] == windows


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({}, []),
        ({"mlp_only_layers": [1, 3]}, [1, 3]),
        ({"decoder_sparse_step": 2}, [0, 2]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [0, 1, 2, 3]),
    ],
)
def test_experts_stand_where_the_two_fields_leave_them(
    fields: dict[str, Any], dense: list[int]
) -> None:
    layers = parsed({"num_hidden_layers": 4, **fields}, QWEN3_MOE).layers
    assert [index for index, layer in enumerate(layers) if layer.experts is None] == dense


def test_the_sizes_of_vectors_are_those_of_the_layers_there_are() -> None:
    assert parsed({}).vector_sizes() == {64, 128}
    assert parsed({}, MIXTRAL).vector_sizes() == {64, 128}
    assert parsed({}, QWEN3_MOE).vector_sizes() == {64, 24}
    mixed = parsed({"mlp_only_layers": [0]}, QWEN3_MOE)
    assert mixed.vector_sizes() == {64, 128, 24}
    assert mixed.vector_sizes(Sizes(tensor=2)) == {64, 12}
    assert mixed.vector_sizes(Sizes(tensor=2, has_whole_experts=True)) == {64, 24}


def test_experts_have_the_sizes_of_their_family() -> None:
    experts = parsed({}, QWEN3_MOE).layers[0].experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.intermediate_size) == (6, 3, 24)
    assert not experts.is_normalized
    renamed = {"num_experts": None, "num_local_experts": 5, "norm_topk_prob": True}
    experts = parsed(renamed, QWEN3_MOE).layers[1].experts
    assert experts is not None
    assert (experts.count, experts.is_normalized) == (5, True)
    experts = parsed({}, MIXTRAL).layers[1].experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.intermediate_size) == (8, 2, 128)
    assert experts.is_normalized


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type"),
        ({"rope_scaling": YARN | {"beta_fast": 0.5}}, "rope_scaling.beta_fast"),
        ({"rope_scaling": YARN | {"attention_factor": -1.0}}, "rope_scaling.attention_factor"),
        ({"rope_scaling": YARN | {"mscale": "1", "mscale_all_dim": 1.0}}, "rope_scaling.mscale"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "rope_scaling.truncate"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta"),
        ({"rope_parameters": {"full_attention": YARN}}, "rope_parameters.full_attention"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type"),
        ({"rope_parameters": LLAMA3 | {"factor": None}}, "rope_parameters.factor"),
        ({"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, "head_dim"),
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
    ("base", "changes", "field"),
    [
        (QWEN2, {"use_sliding_window": 1}, "use_sliding_window"),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        (QWEN3, {"layer_types": [FULL]}, "layer_types"),
        (QWEN3, {"layer_types": [FULL, "linear_attention"]}, "layer_types"),
        (QWEN3, {"layer_types": [FULL, SLIDING]}, "use_sliding_window"),
        (MIXTRAL, {"sliding_window": "9"}, "sliding_window"),
        (MIXTRAL, {"num_local_experts": 0}, "num_local_experts"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (QWEN3_MOE, {"num_experts": 2}, "num_experts_per_tok"),
        (QWEN3_MOE, {"moe_intermediate_size": -1}, "moe_intermediate_size"),
        (QWEN3_MOE, {"mlp_only_layers": 1}, "mlp_only_layers"),
        (QWEN3_MOE, {"mlp_only_layers": ["1"]}, "mlp_only_layers"),
        (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        (QWEN3_MOE, {"norm_topk_prob": "yes"}, "norm_topk_prob"),
    ],
)
def test_what_one_family_does_not_compute_is_refused_by_its_name(
    base: dict[str, Any], changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(UserError, match=rf"^config\.json: {field} "):
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


@pytest.mark.parametrize(
    "fields",
    [
        LLAMA,
        QWEN3 | {"num_key_value_heads": 1},
        MIXTRAL,
        QWEN3_MOE,
        QWEN3_MOE | {"mlp_only_layers": [1]},
        QWEN3_MOE | {"decoder_sparse_step": 2},
    ],
)
def test_who_reads_no_families_sees_the_same_shape_to_divide(fields: dict[str, Any]) -> None:
    """`xpyd up` checks layouts by it before an engine loads the model."""
    assert shape_of(fields) == parse_config(fields, {}).shape
