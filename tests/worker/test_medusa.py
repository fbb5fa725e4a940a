"""Medusa heads in the layouts they are published in, against their formulas in plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.worker.runner_driver import tiny_checkpoint
from xpyd_core.errors import UserError
from xpyd_worker.kernels.api import Kernels
from xpyd_worker.kernels.cpu.kernels import choose_kernels
from xpyd_worker.kernels.plain import PlainKernels
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.draft_heads import read_medusa
from xpyd_worker.model.medusa import Medusa, load_medusa
from xpyd_worker.model.registry import load_config

VOCAB, WIDTH, ROWS = 307, 64, 9
CPU = torch.device("cpu")
AUTHORS = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "lab/model"}
VLLM = {
    "architectures": ["MedusaModel"],
    "model_type": "medusa",
    "num_heads": 3,
    "num_hidden_layers": 2,
    "hidden_size": WIDTH,
    "vocab_size": VOCAB,
}


@dataclass
class Heads:
    """Random ones. `rows`: stored of each last linear."""

    config: dict[str, Any]
    file: str = "model.safetensors"
    rows: int = VOCAB
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    @property
    def is_vllms(self) -> bool:
        return "num_heads" in self.config

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers" if self.is_vllms else "medusa_num_layers"]

    def block(self, head: int, layer: int) -> str:
        return f"blocks.{head}.layers.{layer}" if self.is_vllms else f"{head}.{layer}.linear"

    def last(self, head: int) -> str:
        return f"lm_heads.{head}" if self.is_vllms else f"{head}.{self.layers}"

    def write(self, folder: Path) -> None:
        """Make the weights, and write them as they are published."""
        made = torch.Generator().manual_seed(5)
        for head in range(3):
            for layer in range(self.layers):
                name = self.block(head, layer)
                self.tensors[f"{name}.weight"] = torch.randn(WIDTH, WIDTH, generator=made) * 0.2
                if not self.is_vllms or self.config.get("medusa_fc_bias"):
                    self.tensors[f"{name}.bias"] = torch.randn(WIDTH, generator=made)
            self.tensors[f"{self.last(head)}.weight"] = torch.randn(
                self.rows, WIDTH, generator=made
            )
        if "truncated_vocab_size" in self.config:
            ids = torch.randperm(VOCAB, generator=made)
            self.tensors["token_map"] = ids[: self.config["truncated_vocab_size"]]
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / self.file)

    def best(self, hidden: Tensor, count: int) -> Tensor:
        """The published formulas, over the whole vocabulary."""
        found: list[Tensor] = []
        for head in range(count):
            x = hidden
            for layer in range(self.layers):
                name = self.block(head, layer)
                bias = self.tensors.get(f"{name}.bias")
                x = x + F.silu(F.linear(x, self.tensors[f"{name}.weight"], bias))
            weight = self.tensors[f"{self.last(head)}.weight"]
            ids = self.tensors.get("token_map")
            if ids is None:
                found.append((x @ weight.T).argmax(-1))
                continue
            logits = torch.full((len(x), VOCAB), float("-inf"))
            logits[:, ids] = x @ (weight if len(weight) == len(ids) else weight[ids]).T
            found.append(logits.argmax(-1))
        return torch.stack(found, dim=1)


HEADS: dict[str, Callable[[], Heads]] = {
    "authors": lambda: Heads(AUTHORS),
    "authors, 2 layers": lambda: Heads(AUTHORS | {"medusa_num_layers": 2}),
    "authors' file": lambda: Heads(AUTHORS, file="medusa_lm_head.safetensors"),
    "vllm": lambda: Heads(VLLM),
    "vllm, biases": lambda: Heads(VLLM | {"medusa_fc_bias": True, "num_hidden_layers": 1}),
    "vllm, truncated": lambda: Heads(VLLM | {"truncated_vocab_size": 90}, rows=90),
    "vllm, truncated from all": lambda: Heads(VLLM | {"truncated_vocab_size": 90}),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("target")
    tiny_checkpoint(folder, "llama")
    return load_config(folder)


def load(folder: Path, target: ModelConfig, kernels: Kernels | None = None) -> Medusa:
    return load_medusa(
        folder, target, dtype=torch.float32, kernels=kernels or PlainKernels(), device=CPU
    )


@pytest.mark.parametrize("is_compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("name", HEADS)
def test_each_head_draws_what_the_published_formulas_draw(
    name: str, is_compiled: bool, target: ModelConfig, tmp_path: Path
) -> None:
    written = HEADS[name]()
    written.write(tmp_path)
    kernels = choose_kernels(vector_sizes=(WIDTH,), head_dim=32) if is_compiled else None
    hidden = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        heads = load(tmp_path, target, kernels)
        assert heads.num_heads == 3
        for count in (1, 3):
            found = heads.best(hidden, count)
            assert found.dtype is torch.int64
            assert torch.equal(found, written.best(hidden, count))
    assert len(set(found.flatten().tolist())) > ROWS, "heads and rows differ"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, ["hidden_size is missing"]),
        (VLLM | {"hidden_size": 96}, ["hidden_size is 96", "the target's 64"]),
        (VLLM | {"vocab_size": 300}, ["vocab_size is 300", "the target's 307"]),
        (AUTHORS | {"vocab_size": 300}, ["vocab_size is 300", "the target's 307"]),
        (VLLM | {"num_heads": 0}, ["num_heads", "a whole number above 0"]),
        (VLLM | {"truncated_vocab_size": 308}, ["truncated_vocab_size is 308", "at most", "307"]),
        (VLLM | {"original_lm_head": True}, ["original_lm_head is True; supported: false"]),
        (VLLM | {"logit_scale": 0.5}, ["logit_scale is 0.5; supported: 1"]),
    ],
)
def test_fields_that_do_not_fit_are_named(
    config: dict[str, Any], words: list[str], target: ModelConfig, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        read_medusa(tmp_path, target)
    assert all(word in str(error.value) for word in words), str(error.value)


TRUNCATED = VLLM | {"truncated_vocab_size": 90}


@pytest.mark.parametrize(
    ("config", "name", "tensor", "words"),
    [
        (AUTHORS, "2.1.weight", None, ["lacks 2.1.weight"]),
        (AUTHORS, "0.0.linear.bias", None, ["lacks 0.0.linear.bias"]),
        (VLLM, "blocks.1.layers.1.weight", None, ["lacks blocks.1.layers.1.weight"]),
        (VLLM, "blocks.0.layers.0.bias", torch.zeros(64), ["blocks.0.layers.0.bias", "no place"]),
        (AUTHORS, "1.1.weight", torch.zeros(308, 64), ["1.1.weight", "[308, 64]", "307 rows"]),
        (AUTHORS, "1.1.weight", torch.zeros(307, 32), ["1.1.weight", "[307, 32]", "[307, 64]"]),
        (TRUNCATED, "token_map", None, ["lacks token_map", "307", "90"]),
        (TRUNCATED, "token_map", torch.full((90,), 307), ["token_map", "token 307 for entry 0"]),
        (TRUNCATED, "token_map", torch.arange(91), ["token_map", "[91]", "90 whole numbers"]),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    config: dict[str, Any],
    name: str,
    tensor: Tensor | None,
    words: list[str],
    target: ModelConfig,
    tmp_path: Path,
) -> None:
    written = Heads(config)
    written.write(tmp_path)
    tensors = written.tensors | ({} if tensor is None else {name: tensor})
    if tensor is None:
        del tensors[name]
    save_file(tensors, tmp_path / written.file)
    with pytest.raises(UserError) as error:
        load(tmp_path, target)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_pickled_heads_are_refused(target: ModelConfig, tmp_path: Path) -> None:
    Heads(AUTHORS).write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UserError, match=r"pickled weights .* convert them to safetensors"):
        load(tmp_path, target)
