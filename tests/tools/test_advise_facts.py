"""What `xpyd advise` reads from a config.json and from the weights' files beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tools.advice import GB, MODELS, facts
from xpyd_core.errors import UserError
from xpyd_tools.advise.command import describe
from xpyd_tools.advise.facts import ModelFacts, Overrides, read_facts

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
}
# Queries and output 2 x 64 x 64, keys and values 2 x 64 x 32, two norms.
ATTENTION = 2 * 64 * 64 + 2 * 64 * 32 + 2 * 64
OUTER = 2 * 100 * 64


def read(changes: dict[str, Any], **overrides: Any) -> ModelFacts:
    return read_facts(SMALL | changes, files_bytes=None, overrides=Overrides(**overrides))


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama-8b", 8.03),
        ("llama-70b", 70.55),
        ("llama-405b-fp8", 405.85),
        ("mixtral-8x7b", 46.70),
        ("deepseek-v3", 671.03),
    ],
)
def test_parameters_are_those_that_the_models_are_known_to_have(
    model: str, billions: float
) -> None:
    assert round(facts(model).parameters / 1e9, 2) == billions


def test_a_dense_model() -> None:
    found = read({})
    assert found.parameters == OUTER + 2 * (ATTENTION + 3 * 64 * 128)
    assert found.weights_bytes == 2 * found.parameters
    assert (found.kv_numbers, found.kv_heads, found.experts) == (2 * 2 * 16, 2, None)


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        ({"tie_word_embeddings": True}, OUTER // 2 + 2 * (ATTENTION + 3 * 64 * 128)),
        ({"model_type": "gemma2"}, OUTER // 2 + 2 * (ATTENTION + 3 * 64 * 128)),
        ({"model_type": "starcoder2"}, OUTER + 2 * (ATTENTION + 2 * 64 * 128)),
        ({"head_dim": 32}, OUTER + 2 * (2 * ATTENTION - 128 + 3 * 64 * 128)),
        (
            {"num_local_experts": 4, "num_experts_per_tok": 2},
            OUTER + 2 * (ATTENTION + 4 * 64 + 4 * 3 * 64 * 128),
        ),
        (
            {
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "n_shared_experts": 2,
                "first_k_dense_replace": 1,
            },
            OUTER + 2 * ATTENTION + 3 * 64 * 128 + 4 * 64 + (4 + 2) * 3 * 64 * 32,
        ),
        (
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 16,
                "decoder_sparse_step": 2,
            },
            OUTER + 2 * ATTENTION + 3 * 64 * 128 + 4 * 64 + 3 * 64 * (4 * 32 + 16),
        ),
        (
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "mlp_only_layers": [0, 1],
            },
            OUTER + 2 * (ATTENTION + 3 * 64 * 128),
        ),
        ({"num_local_experts": 1}, OUTER + 2 * (ATTENTION + 3 * 64 * 128)),
    ],
)
def test_parameters_by_family(changes: dict[str, Any], parameters: int) -> None:
    assert read(changes).parameters == parameters


def test_a_latent_is_the_kv_of_a_token() -> None:
    found = facts("deepseek-v3")
    assert (found.kv_numbers, found.kv_heads) == (512 + 64, 0)
    assert found.expert_element_bytes == 1


def test_the_decoder_of_a_model_of_more_than_text() -> None:
    config = {"architectures": ["Some"], "torch_dtype": "float16", "text_config": SMALL}
    found = read_facts(config, files_bytes=None, overrides=Overrides())
    assert (found.architecture, found.dtype) == ("Some", "bfloat16")
    assert found.parameters == read({}).parameters


@pytest.mark.parametrize(
    ("config", "label", "bits"),
    [
        ({"quant_method": "fp8"}, "fp8", 8),
        ({"quant_method": "awq", "bits": 4}, "int4", 4.15625),
        ({"quant_method": "gptq", "bits": 8}, "int8", 8),
        ({"quant_method": "mxfp4"}, "mxfp4", 4.25),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 4.5),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            "fp8",
            8,
        ),
    ],
)
def test_quantized_weights(config: dict[str, Any], label: str, bits: float) -> None:
    found = read({"quantization_config": config})
    layers = found.parameters - OUTER
    assert found.weights.label == label
    assert found.weights_bytes == int(layers * bits / 8) + 2 * OUTER


def test_what_the_user_says_counts_more_than_the_files() -> None:
    def total(**overrides: Any) -> int:
        read = read_facts(SMALL, files_bytes=10**9, overrides=Overrides(**overrides))
        return round(read.weights_bytes / 10**6)

    assert total() == 1000
    assert total(params=70e9) == 140_000
    assert total(params=70e9, quantization="fp8") == 70_000
    assert total(dtype="float32") == round(4 * read({}).parameters / 10**6)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers is 1048576; supported: at most 4096"),
        ({"torch_dtype": "float8"}, "torch_dtype is 'float8'.*or say --dtype"),
        ({"quantization_config": {"quant_method": "new"}}, "new is not known; say --quantization"),
        ({"quantization_config": 3}, "quantization_config is 3; supported: an object"),
        ({"architectures": [1]}, "architectures"),
    ],
)
def test_what_is_missing_or_unknown_is_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        read(changes)


# --- files


def test_a_folder_a_file_and_a_uri_say_the_same() -> None:
    folder = MODELS / "llama-70b"
    found = [describe(str(folder)), describe(f"{folder}/config.json"), describe(f"file://{folder}")]
    assert {each.name for each in found} == {"llama-70b"}
    assert all(each.config == found[0].config for each in found)
    assert {each.files_bytes for each in found} == {None}


def test_the_weights_files_say_how_much_there_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert describe(str(tmp_path)).files_bytes == 1000
    index = {"metadata": {"total_size": 140 * GB}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert describe(str(tmp_path)).files_bytes == 140 * GB
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert describe(str(tmp_path)).files_bytes is None


@pytest.mark.parametrize(
    ("uri", "complaint"),
    [
        ("nowhere", "cannot read nowhere"),
        ("s3://bucket/model", "supported are a folder"),
        ("file://relative", "supported are a folder"),
        ("hf://name", "the form is hf://organisation/name"),
    ],
)
def test_models_that_cannot_be_read(uri: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        describe(uri)


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000])
def test_what_is_no_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"model: .*JSON"):
        describe(str(tmp_path))


def test_a_model_of_the_hub_is_its_config_alone(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--llama"
    commit = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "snapshots" / commit / "config.json").write_text(json.dumps(SMALL))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    script = (
        "from xpyd_core.cli import main;"
        "names = ('llama', 'other');"
        "print([main(['advise', f'hf://org/{name}', '--gpus', '1']) for name in names])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "llama: LlamaForCausalLM" in done.stdout
    assert done.stdout.endswith("[0, 2]\n")
    assert "cannot get the config.json of hf://org/other" in done.stderr
