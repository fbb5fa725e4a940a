"""Weights from safetensors: shards, dtypes, and every way a checkpoint may not fit its config."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.runner_driver import tiny_checkpoint
from xpyd_core.errors import UserError
from xpyd_worker.kernels.api import Kernels
from xpyd_worker.kernels.plain import PlainKernels
from xpyd_worker.model.decoder import Decoder
from xpyd_worker.model.loader import WeightGroup, load_weights
from xpyd_worker.model.registry import load_config, resolve_checkpoint
from xpyd_worker.model.shards import Stored

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CPU = torch.device("cpu")


class Recorded:
    """A group of the model's weights, kept as they are when the loader has filled them."""

    def __init__(self, group: WeightGroup) -> None:
        self._group = group
        self.tensors: dict[str, torch.Tensor] = {}

    def checkpoint_tensors(self) -> dict[str, Stored]:
        return self._group.checkpoint_tensors()

    def allocate(self, device: torch.device) -> None:
        self._group.allocate(device)
        for stored in self.checkpoint_tensors().values():
            for piece in stored.pieces:
                piece.destination.fill_(float("nan"))

    def pack(self, kernels: Kernels) -> None:
        for name, stored in self.checkpoint_tensors().items():
            (piece,) = stored.pieces
            self.tensors[name] = piece.destination
        self._group.pack(kernels)


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The model's weights by their checkpoint names."""
    config, kernels = load_config(folder), PlainKernels()
    groups = [Recorded(group) for group in Decoder(config, dtype, kernels, CPU).weight_groups()]
    load_weights(
        folder,
        groups,
        kernels=kernels,
        device=CPU,
        is_tied=config.tie_word_embeddings,
    )
    return {name: tensor for group in groups for name, tensor in group.tensors.items()}


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the stored tensors."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def split(folder: Path) -> None:
    """Rewrite the checkpoint as two shards with an index."""
    tensors = load_file(folder / SINGLE)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / SINGLE).unlink()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_checkpoint(tmp_path, "qwen3")
    return tmp_path


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_weight_is_what_the_file_holds(family: str, tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, family)
    stored = load_file(tmp_path / SINGLE)
    weights = loaded(tmp_path)
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)


def test_shards_give_what_a_single_file_gives(folder: Path) -> None:
    single = loaded(folder)
    split(folder)
    sharded = loaded(folder)
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name]) for name in single)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_the_dtype_is_converted_while_loading(
    folder: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    rewrite(folder, lambda t: t.update({name: value.to(stored) for name, value in t.items()}))
    tensors = load_file(folder / SINGLE)
    weights = loaded(folder, wanted)
    assert all(torch.equal(weights[name], tensors[name].to(wanted)) for name in tensors)


def test_a_tied_head_and_old_rotary_tables_are_left_out(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    table = "model.layers.0.self_attn.rotary_emb.inv_freq"

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = torch.zeros(3)
        tensors[table] = torch.zeros(8)

    rewrite(tmp_path, add)
    weights = loaded(tmp_path)
    assert "lm_head.weight" not in weights
    assert torch.equal(
        weights["model.embed_tokens.weight"],
        load_file(tmp_path / SINGLE)["model.embed_tokens.weight"],
    )


def without_head(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["lm_head.weight"]


def with_unknown(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight_scale"] = torch.zeros(1)


def with_more_layers(tensors: dict[str, torch.Tensor]) -> None:
    for index in range(9):
        tensors[f"model.layers.{index + 50}.mlp.up_proj.weight"] = torch.zeros(1)


def with_wrong_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(64, 100)


def with_integers(tensors: dict[str, torch.Tensor]) -> None:
    weight = tensors["model.norm.weight"]
    tensors["model.norm.weight"] = torch.zeros(weight.shape, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_head, ["lacks", "lm_head.weight"]),
        (with_unknown, ["q_proj.weight_scale", "no place"]),
        (with_more_layers, ["model.layers.50.mlp.up_proj.weight", "and 4 more"]),
        (with_wrong_shape, ["model.layers.1.mlp.down_proj.weight", "[64, 100]", "[64, 112]"]),
        (with_integers, ["model.norm.weight", "int8", "quantized"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_tensor(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], object], words: list[str]
) -> None:
    rewrite(folder, change)
    with pytest.raises(UserError) as caught:
        loaded(folder)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def only_pickled(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


def nothing(folder: Path) -> None:
    (folder / SINGLE).unlink()


def cut_short(folder: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:5000])


def junk(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"\xff" * 64)


def missing_shard(folder: Path) -> None:
    split(folder)
    (folder / "b.safetensors").unlink()


def broken_index(folder: Path) -> None:
    split(folder)
    (folder / INDEX).write_text('{"weight_map": 3}')


def index_outside(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": {"x": "../../elsewhere.safetensors"}}')


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (only_pickled, ["pickled", "convert"]),
        (nothing, ["no model.safetensors"]),
        (cut_short, ["cannot read", SINGLE]),
        (junk, ["cannot read", SINGLE]),
        (missing_shard, ["b.safetensors", INDEX]),
        (broken_index, ["cannot read", INDEX]),
        (index_outside, ["lacks", "elsewhere.safetensors"]),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused(
    folder: Path, change: Callable[[Path], object], words: list[str]
) -> None:
    change(folder)
    with pytest.raises(UserError) as caught:
        loaded(folder)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_checkpoint_is_a_folder_or_a_file_uri(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    assert resolve_checkpoint(str(folder)) == folder
    assert resolve_checkpoint(f"file://{folder}") == folder
    assert resolve_checkpoint(f"file://{tmp_path}/my%20model") == folder


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("/nowhere/at/all", "not a folder"),
        ("file:///nowhere", "not a folder"),
        ("file://./model", "absolute"),
        ("gs://bucket/model", "supported are"),
        ("hf://only-a-name", "hf://organisation/name"),
        ("hf://a/b/c", "hf://organisation/name"),
    ],
)
def test_an_address_that_names_no_checkpoint_is_refused(uri: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve_checkpoint(uri)


def test_only_the_hub_has_revisions(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--revision"):
        resolve_checkpoint(str(tmp_path), "main")


def test_the_hub_without_a_network_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants as constants

    # The library reads its environment at import; this is the switch that HF_HUB_OFFLINE sets.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="hf://some/model") as caught:
        resolve_checkpoint("hf://some/model")
    assert "local folder" in str(caught.value)


@pytest.mark.slow
def test_loading_imports_nothing_that_computes_with_symbols() -> None:
    """torch does for some calls on tensors without memory; each rank would wait a second or two."""
    code = (
        "import sys, torch; from pathlib import Path;"
        "from xpyd_worker.model.registry import load_config;"
        "from xpyd_worker.runner.load import fit_on_cpu;"
        "folder = Path('examples/demo-model');"
        "config = load_config(folder);"
        "fit_on_cpu(folder, config, dtype=torch.float32, kv_cache_bytes=1 << 20).make_runner();"
        "sys.exit('sympy' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
