"""A model over several ranks, tensor and pipeline, against transformers in float32 token for token;
and what ranks say to each other in a step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.rank_fakes import Ranks
from tests.worker.runner_driver import (
    GREEDY,
    DrivenSequence,
    Driver,
    fork_by_copy,
    make_runner,
    oracle_logits,
    tiny_checkpoint,
    with_params,
)
from xpyd_core.errors import UserError, XpydError
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.engine.executor import SampleSpec, StepInput
from xpyd_worker.parallel.api import GroupError

VOCAB = 307
# 5 layers are uneven over 2 stages and over 3; 2 KV heads are fewer than 4 ranks.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied, biases": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("qwen2", {"intermediate_size": 128}),
    "qwen3": ("qwen3", {"head_dim": 32, "intermediate_size": 128}),
    "mixtral": ("mixtral", {"sliding_window": 21}),
    "qwen3_moe": (
        "qwen3_moe",
        {"attention_bias": True, "mlp_only_layers": [1], "moe_intermediate_size": 64},
    ),
}
LAYOUTS = {
    f"TP{tensor} PP{pipeline}": Sizes(tensor=tensor, pipeline=pipeline)
    for tensor, pipeline in ((1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (2, 2), (4, 2))
}
Start = Callable[..., Ranks]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Each rank has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Folder and oracle of a model, made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def model(name: str) -> tuple[Path, Any]:
        if name not in made:
            family, changes = MODELS[name]
            folder = tmp_path_factory.mktemp("checkpoint")
            oracle = tiny_checkpoint(folder, family, num_hidden_layers=5, **changes)
            made[name] = (folder, oracle)
        return made[name]

    return model


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts ranks, which end with the test."""
    started: list[Ranks] = []

    def start(folder: Path, sizes: Sizes, **options: Any) -> Ranks:
        started.append(Ranks(folder, sizes, **options))
        return started[-1]

    yield start
    for ranks in started:
        ranks.close()


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    """Random ones."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def assert_greedy(oracle: Any, *sequences: DrivenSequence) -> None:
    """Each has put out the best tokens."""
    for sequence in sequences:
        best = oracle_logits(oracle, sequence.tokens[:-1]).argmax(-1)
        assert sequence.output == best[len(sequence.prompt) - 1 :].tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_chunks_decodes_and_forks_write_what_transformers_writes(
    name: str, layout: str, models: Callable[[str], tuple[Path, Any]], start: Start
) -> None:
    folder, oracle = models(name)
    ranks = start(folder, LAYOUTS[layout])
    driver = Driver(ranks)
    batch = [driver.add(prompt) for prompt in prompts(2, 1, 61, 17)]
    driver.run(batch, tokens=5, budget=33)
    assert_greedy(oracle, *batch)
    # A copy of a block that one of the stages left out would be full of NaN.
    source = batch[1]
    fork = replace(source, seq_id=99, blocks=[*source.blocks[:-1], *driver.take_blocks(1)])
    fork.output = [*source.output]
    copies = [(source.blocks[-1], fork.blocks[-1])]
    driver.step([(source, 1), (fork, 1)], copies=copies)
    assert fork.output == source.output
    assert_greedy(oracle, fork)
