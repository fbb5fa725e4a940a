"""Random checkpoints: transformers loads each of them, and they make fair tests."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.train_demo_model.random_checkpoint import DEMO_MODEL, main, make_checkpoint
from scripts.train_demo_model.random_weights import Tensor, split

FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3-moe")
SMALL = {"layers": 2, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2}
KNOWN_TOKENS = 3072


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def weights_of(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def load(folder):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    return model


def greedy_logits(model, ids, count):
    output = model.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids)),
        min_new_tokens=count,
        max_new_tokens=count,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, len(ids) :].tolist(), torch.cat(output.logits)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_transformers_finds_every_tensor_and_gets_finite_logits(tmp_path, family, tie, shards):
    make_checkpoint(tmp_path, family=family, tie=tie, shards=shards, head_dim=32, **SMALL)
    model = load(tmp_path)
    assert model.config.model_type == family.replace("-", "_")
    assert model.config.tie_word_embeddings == tie
    logits = model(torch.arange(40).view(2, 20)).logits
    assert logits.isfinite().all()
    assert 2.0 < logits.std() < 8.0


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_goes_on_and_its_best_tokens_stand_apart(tmp_path, family, tie):
    model = load(make_checkpoint(tmp_path, family=family, tie=tie, **SMALL))
    ids = AutoTokenizer.from_pretrained(tmp_path).encode("San Francisco is a")
    written, logits = greedy_logits(model, ids, 32)
    assert len(set(written)) >= 8
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.3


@pytest.mark.parametrize(
    ("family", "present", "absent"),
    [
        ("llama", (), ("bias", "q_norm", "k_norm")),
        ("qwen2", ("q_proj.bias", "k_proj.bias", "v_proj.bias"), ("q_norm", "o_proj.bias")),
        ("qwen3", ("q_norm.weight", "k_norm.weight"), ("bias",)),
        ("mixtral", ("block_sparse_moe.gate.weight", "experts.7.w3.weight"), ("bias", "q_norm")),
        ("qwen3-moe", ("q_norm.weight", "mlp.gate.weight", "experts.7.up_proj"), ("bias",)),
    ],
)
def test_each_family_has_its_own_tensors(tmp_path, family, present, absent):
    names = weights_of(make_checkpoint(tmp_path, family=family, **SMALL)).keys()
    for part in present:
        assert sum(part in name for name in names) == SMALL["layers"]
    for part in absent:
        assert not any(part in name for name in names)


def test_a_seed_gives_the_same_weights_in_any_number_of_files(tmp_path):
    one = weights_of(make_checkpoint(tmp_path / "1", family="qwen3", **SMALL))
    five = weights_of(make_checkpoint(tmp_path / "5", family="qwen3", shards=5, **SMALL))
    other = weights_of(make_checkpoint(tmp_path / "o", family="qwen3", seed=1, **SMALL))
    assert one.keys() == five.keys()
    assert all(torch.equal(one[name], five[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_an_index_says_which_file_holds_which_tensor(tmp_path):
    make_checkpoint(tmp_path, family="llama", shards=4, dtype="bfloat16", **SMALL)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in files] == [
        f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)
    ]
    found = {}
    for path in files:
        with safe_open(path, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), path.name)
    assert found == index["weight_map"]
    tensors = weights_of(tmp_path).values()
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("tie", [False, True])
def test_rows_beyond_the_tokenizer_are_never_the_best(tmp_path, tie):
    make_checkpoint(tmp_path, family="llama", vocab=6000, tie=tie, **SMALL)
    model = load(tmp_path)
    assert model.lm_head.weight.shape[0] == 6000
    best = model(torch.arange(2000).view(4, 500)).logits.argmax(-1)
    assert best.max() < KNOWN_TOKENS


def test_the_tokenizer_and_the_ends_of_text_come_along(tmp_path):
    make_checkpoint(tmp_path, family="qwen2", **SMALL)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / name).read_bytes() == (DEMO_MODEL / name).read_bytes()
    model = load(tmp_path)
    assert model.config.eos_token_id == [5, 0]
    assert model.config.vocab_size == KNOWN_TOKENS


def test_without_a_tokenizer_the_vocabulary_may_be_smaller(tmp_path):
    make_checkpoint(tmp_path, family="qwen3", vocab=100, tokenizer_from=None, **SMALL)
    assert not (tmp_path / "tokenizer.json").exists()
    assert load(tmp_path).config.eos_token_id is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "gpt2"}, "family must be one of llama, qwen2, qwen3, mixtral, qwen3-moe"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"heads": 0}, "heads must be at least 1"),
        ({"kv_heads": 0}, "kv_heads must be at least 1"),
        ({"kv_heads": 3}, "heads (4) must be a multiple of kv_heads"),
        ({"heads": 3, "kv_heads": 1}, "hidden (64) is no multiple of heads: give head_dim"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"experts": 4}, "experts must be 0 for llama"),
        ({"family": "mixtral", "experts": 0}, "experts must be at least 1 for mixtral"),
        ({"family": "mixtral", "experts_per_token": 9}, "experts_per_token must be 1 to 8"),
        ({"vocab": 3071}, "vocab (3071) is below the tokenizer's 3072 tokens"),
        ({"tokenizer_from": None}, "vocab is needed"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16"),
        ({"shards": 0}, "shards must be 1 to 21"),
        ({"shards": 22}, "shards must be 1 to 21"),
    ],
)
def test_a_size_that_cannot_be_is_refused_before_anything_is_written(tmp_path, change, message):
    folder = tmp_path / "out"
    with pytest.raises(ValueError, match=re.escape(message)):
        make_checkpoint(folder, **({"family": "llama"} | SMALL | change))
    assert not folder.exists()


def test_files_that_are_there_are_not_mixed_with_new_ones(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FileExistsError, match="not empty"):
        make_checkpoint(tmp_path, family="llama", **SMALL)


def test_shards_are_never_empty_and_keep_the_order():
    tensors = [Tensor(str(n), (size,), 0.0, 1.0) for n, size in enumerate((1000, 1, 1, 1, 500, 1))]
    for shards in range(1, len(tensors) + 1):
        parts = split(tensors, shards)
        assert len(parts) == shards
        assert all(parts)
        assert [tensor for part in parts for tensor in part] == tensors


def test_the_command_writes_a_folder_and_says_its_size(tmp_path, capsys):
    sizes = ["--layers", "1", "--hidden", "32", "--intermediate", "32", "--heads", "2"]
    command = ["--family", "qwen3", *sizes, "--kv-heads", "1", "--tie", str(tmp_path / "out")]
    assert main(command) == 0
    assert "0.4 MB of weights" in capsys.readouterr().out
    assert load(tmp_path / "out").config.model_type == "qwen3"
    assert main(command) == 2
    assert "not empty" in capsys.readouterr().err
