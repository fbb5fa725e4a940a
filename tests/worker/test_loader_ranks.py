"""What a rank reads of a checkpoint: its own slices of its own layers, and every name of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.ranks.kit.threads import connect, fit
from tests.worker.runner_driver import tiny_checkpoint
from tests.worker.test_model_loader import CPU, Recorded
from xpyd_core.errors import UserError
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.kernels.plain import PlainKernels
from xpyd_worker.model import loader
from xpyd_worker.model.decoder import Decoder
from xpyd_worker.model.registry import load_config

STORED = "model.safetensors"
# Over 4 ranks and 2 KV heads. Of these dimensions a rank has a share, of all others all.
HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 4, 2, 24, 112, 307
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_checkpoint(folder, "qwen3", num_hidden_layers=5)
    return folder


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to be changed."""
    for name in ("config.json", STORED):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    return tmp_path


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Change the stored tensors."""
    tensors = load_file(folder / STORED)
    change(tensors)
    save_file(tensors, folder / STORED)


def load(folder: Path, sizes: Sizes, rank: int) -> Any:
    """That rank's part."""
    config = load_config(folder)
    return fit(folder, config, connect(config, sizes)[rank], 4, torch.float32).model


def own(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
    """What rank `rank` of tensor 4 x pipeline 2 has of a tensor, by hand; None for nothing."""
    stage, share = divmod(rank, 4)
    head, inner, tokens = HEAD_DIM, INNER // 4, 128
    rows = {
        "q_proj": range(share * head, (share + 1) * head),
        # Two ranks have the same head.
        "k_proj": range(share // 2 * head, (share // 2 + 1) * head),
        "v_proj": range(share // 2 * head, (share // 2 + 1) * head),
        "gate_proj": range(share * inner, (share + 1) * inner),
        "up_proj": range(share * inner, (share + 1) * inner),
        "embed_tokens": range(share * tokens, min((share + 1) * tokens, VOCAB)),
        "lm_head": range(share * tokens, min((share + 1) * tokens, VOCAB)),
    }
    columns = {
        "o_proj": range(share * head, (share + 1) * head),
        "down_proj": range(share * inner, (share + 1) * inner),
    }
    parts = name.split(".")
    if parts[1] == "layers":
        if int(parts[2]) not in (range(3), range(3, 5))[stage]:
            return None
    elif (name == "model.embed_tokens.weight") != (stage == 0):
        return None
    kind = parts[-2]
    if kind in rows:
        return tensor[rows[kind].start : max(rows[kind].start, rows[kind].stop)]
    if kind in columns:
        return tensor[:, columns[kind].start : columns[kind].stop]
    return tensor


@pytest.mark.parametrize("rank", range(8))
def test_a_rank_has_its_own_slices_and_nothing_of_the_others(folder: Path, rank: int) -> None:
    """All else in the file is NaN. (Article facts 31 and 38.)"""
    expected: Tensors = {}

    def poison(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            part = own(name, tensor, rank)
            if part is not None:
                expected[name] = part.clone()
            tensor.fill_(float("nan"))
            if part is not None:
                part.copy_(expected[name])

    stored = load_file(folder / STORED).keys()
    rewrite(folder, poison)
    config, kernels = load_config(folder), PlainKernels()
    parallel = connect(config, Sizes(tensor=4, pipeline=2))[rank]
    model = Decoder(config, torch.float32, kernels, CPU, parallel=parallel)
    groups = [Recorded(group) for group in model.weight_groups()]
    loader.load_weights(folder, groups, kernels=kernels, device=CPU, is_tied=False, known=stored)
    found = {name: tensor for group in groups for name, tensor in group.tensors.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


class CountingFile:
    """An open checkpoint, and the bytes that were asked of it."""

    def __init__(self, file: Any, read: dict[str, int]) -> None:
        self._file, self._read = file, read

    def __enter__(self) -> CountingFile:
        self._opened = self._file.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._file.__exit__(*details)

    def keys(self) -> list[str]:
        return self._opened.keys()

    def get_slice(self, name: str) -> Any:
        source, read = self._opened.get_slice(name), self._read

        class Slice:
            def get_shape(self) -> list[int]:
                return source.get_shape()

            def __getitem__(self, at: tuple[slice, ...]) -> torch.Tensor:
                found = source[at]
                read[name] = read.get(name, 0) + found.nbytes
                return found

        return Slice()


def test_each_byte_is_read_by_the_ranks_that_have_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Article fact 38."""
    open_file = loader._open
    read: dict[str, int] = {}
    monkeypatch.setattr(loader, "_open", lambda path: CountingFile(open_file(path), read))
    stored = load_file(checkpoint / STORED)
    for rank in range(8):
        read.clear()
        load(checkpoint, Sizes(tensor=4, pipeline=2), rank)
        parts = {name: own(name, tensor, rank) for name, tensor in stored.items()}
        expected = {name: part.nbytes for name, part in parts.items() if part is not None}
        # Of a vocabulary of 307 the last of four ranks has none.
        assert {name: count for name, count in read.items() if count} == {
            name: count for name, count in expected.items() if count
        }


@pytest.mark.parametrize(
    ("sizes", "held"),
    [
        (Sizes(tensor=2), [(0, 1, 2), (3, 4)]),
        (Sizes(tensor=4), [(0, 1), (2,), (3,), (4,)]),
        (Sizes(data=2, tensor=2), [(0, 1), (2,), (3,), (4,)]),
        (Sizes(tensor=2, pipeline=2), [(0, 1, 2), (3, 4)] * 2),
    ],
    ids=["EP2", "EP4", "DP2 TP2", "EP2 PP2"],
)
def test_of_whole_experts_a_rank_reads_its_own_and_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: Sizes, held: list[tuple[int, ...]]
) -> None:
    """Article facts 54 and 61."""
    tiny_checkpoint(tmp_path, "mixtral", num_hidden_layers=2, num_local_experts=5)
    open_file = loader._open
    read: dict[str, int] = {}
    monkeypatch.setattr(loader, "_open", lambda path: CountingFile(open_file(path), read))
    stored = load_file(tmp_path / STORED)
    for rank, experts in enumerate(held):
        read.clear()
        load(tmp_path, replace(sizes, has_whole_experts=True), rank)
        layers = range(2) if sizes.pipeline == 1 else [rank // sizes.tensor]
        parts = [
            f"layers.{layer}.block_sparse_moe.experts.{expert}."
            for layer, expert in itertools.product(layers, experts)
        ]
        expected = {name for name in stored if any(part in name for part in parts)}
        assert len(expected) == 3 * len(experts) * len(layers)
        assert {name for name in read if ".experts." in name} == expected
        assert all(read[name] == stored[name].nbytes for name in expected)
        # Attention is divided as without.
        queries = f"model.layers.{layers[0]}.self_attn.q_proj.weight"
        assert read[queries] == stored[queries].nbytes // sizes.tensor


def test_a_rank_reads_the_experts_of_its_slots_copies_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_checkpoint(tmp_path, "mixtral", num_hidden_layers=2, num_local_experts=5)
    open_file = loader._open
    read: dict[str, int] = {}
    monkeypatch.setattr(loader, "_open", lambda path: CountingFile(open_file(path), read))
    stored = load_file(tmp_path / STORED)
    sizes = Sizes(tensor=2, has_whole_experts=True, redundant_experts=3)
    for rank, experts in enumerate([(0, 1, 2, 3), (4, 0, 1, 2)]):
        read.clear()
        load(tmp_path, sizes, rank)
        names = {name for name in read if ".experts." in name}
        assert {int(name.split(".")[5]) for name in names} == set(experts)
        assert len(names) == 2 * 3 * len(experts)
        assert all(read[name] == stored[name].nbytes for name in names)


def test_shards_without_a_rank_s_tensors_are_not_opened(folder: Path) -> None:
    """Such as those of other stages' layers; that they are there is checked."""
    tensors = load_file(folder / STORED)
    late = {name for name in tensors if any(f"layers.{index}." in name for index in (3, 4))}
    late |= {"model.norm.weight", "lm_head.weight"}
    shards = {"a.safetensors": tensors.keys() - late, "b.safetensors": late}
    save_file({name: tensors[name] for name in tensors.keys() - late}, folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes(b"none of stage 0's business")
    weight_map = {name: file for file, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / STORED).unlink()
    load(folder, Sizes(pipeline=2), 0)
    with pytest.raises(UserError, match=r"cannot read .*b\.safetensors"):
        load(folder, Sizes(pipeline=2), 1)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.4.mlp.up_proj.weight"), "lacks model.layers.4.mlp.up_proj"),
        (lambda t: t.pop("model.layers.0.mlp.up_proj.weight"), "lacks model.layers.0.mlp.up_proj"),
        (lambda t: t.pop("lm_head.weight"), "lacks lm_head.weight"),
        (
            lambda t: t.update({"model.layers.1.mlp.scale": torch.zeros(1)}),
            "has model.layers.1.mlp.scale, for which",
        ),
        (
            lambda t: t.update({"model.layers.5.mlp.up_proj.weight": torch.zeros(1)}),
            "has model.layers.5.mlp.up_proj.weight, for which",
        ),
    ],
)
def test_every_rank_says_what_is_wrong_anywhere_in_a_checkpoint(
    folder: Path, rank: int, change: Callable[[Tensors], object], words: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(UserError) as caught:
        load(folder, Sizes(tensor=2, pipeline=2), rank)
    assert words in str(caught.value)


def test_a_share_of_a_tensor_of_another_shape_is_refused(folder: Path) -> None:
    """Though the slice would be there."""
    name = "model.layers.1.mlp.down_proj.weight"
    rewrite(folder, lambda t: t.update({name: torch.zeros(64, 120)}))
    with pytest.raises(UserError, match=r"down_proj.* has shape \[64, 120\].*asks for \[64, 112\]"):
        load(folder, Sizes(tensor=2), 0)


def test_the_last_stage_has_a_tied_head_and_the_first_its_embedding(tmp_path: Path) -> None:
    """Article fact 38."""
    tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True, num_hidden_layers=2)
    names = [
        {
            name
            for group in load(tmp_path, Sizes(pipeline=2), rank).weight_groups()
            for name in group.checkpoint_tensors()
            if ".layers." not in name
        }
        for rank in range(2)
    ]
    assert names == [
        {"model.embed_tokens.weight"},
        {"model.embed_tokens.weight", "model.norm.weight"},
    ]
