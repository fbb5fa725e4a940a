"""What a model gives a draft head of its own forward: the inputs of layers, and the last norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.ranks.kit.threads import MemoryParallel, connect, together
from tests.worker.runner_driver import BLOCK_SIZE, tiny_checkpoint
from xpyd_core.parallel.ranks import Sizes
from xpyd_worker.kernels.api import KvShape, Span
from xpyd_worker.kernels.plain import PlainKernels
from xpyd_worker.model.config import ModelConfig
from xpyd_worker.model.decoder import Decoder
from xpyd_worker.model.loader import load_weights
from xpyd_worker.model.registry import load_config

CPU, FLOAT = torch.device("cpu"), torch.float32
TOKENS = [(7 * place) % 307 for place in range(40)]
CHUNKS = ((0, 17), (17, 22), (39, 1))
# In an order that is not the layers', one of them twice, and the first layer of a stage.
LAYERS = (3, 0, 4, 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model of 5 layers, uneven over stages, and transformers' own of it."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, tiny_checkpoint(folder, "llama", num_hidden_layers=5)


def decoder(
    folder: Path,
    config: ModelConfig,
    layers: tuple[int, ...],
    parallel: MemoryParallel | None = None,
) -> Decoder:
    """A loaded rank."""
    kernels, others = PlainKernels(), cast("Any", parallel)
    model = Decoder(config, FLOAT, kernels, CPU, parallel=others, feature_layers=layers)
    groups = Decoder(config, FLOAT, kernels, CPU).weight_groups()
    load_weights(
        folder,
        model.weight_groups(),
        kernels=kernels,
        device=CPU,
        is_tied=False,
        known={name for group in groups for name in group.checkpoint_tensors()},
    )
    return model


def run(
    model: Decoder, config: ModelConfig, parallel: MemoryParallel | None = None
) -> list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    """Hidden states and features of each chunk; nothing of a stage that is not the last."""
    part = model.part
    kv_heads = config.num_kv_heads // part.tensor_size
    shape = KvShape(kv_heads, config.head_dim, BLOCK_SIZE, FLOAT)
    caches = [
        torch.full((3, kv_heads, BLOCK_SIZE, 2 * config.head_dim), float("nan"))
        for _ in part.layers
    ]
    found: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]] = []
    for start, count in CHUNKS:
        ids = torch.tensor(TOKENS[start : start + count])
        positions = torch.arange(start, start + count)
        plan = PlainKernels().plan([Span(start, count, (2, 0, 1))], shape)
        entering: Any = ids
        if parallel is not None:
            parallel.boundary.begin_step()
            if not part.is_first:
                entering = parallel.boundary.receive(count)
        if part.is_last:
            hidden = model.forward(entering, positions, caches, plan, lambda _: None)
            # Behind another stage the next step comes into the same memory.
            found.append((hidden.clone(), model.take_features()))
            assert model.take_features() == (), "they are given once"
        else:
            assert parallel is not None
            parallel.boundary.send(model.stage(entering, positions, caches, plan, lambda _: None))
            assert model.take_features() == ()
    return found


@pytest.mark.parametrize(
    "sizes",
    [Sizes(), Sizes(tensor=2), Sizes(pipeline=2), Sizes(pipeline=3, tensor=2)],
    ids=["alone", "TP2", "PP2", "TP2 PP3"],
)
def test_the_inputs_of_the_named_layers_are_kept_whole_on_the_last_stage(
    sizes: Sizes, checkpoint: tuple[Path, Any]
) -> None:
    folder, oracle = checkpoint
    config = load_config(folder)
    ranks = connect(config, sizes, feature_layers=LAYERS)
    models = [decoder(folder, config, LAYERS, one) for one in ranks]

    with torch.inference_mode():
        states = oracle(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    wanted = torch.cat([states[layer][0] for layer in LAYERS], dim=1)

    def work(rank: int) -> list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
        with torch.inference_mode():
            return run(models[rank], config, ranks[rank])

    found = together([lambda rank=rank: work(rank) for rank in range(sizes.world)])
    for model, chunks in zip(models, found, strict=True):
        if not model.part.is_last:
            assert chunks == []
            continue
        if model.part.tensor_rank:
            # It does not draft.
            assert [features for _, features in chunks] == [()] * len(CHUNKS)
            continue
        torch.testing.assert_close(
            torch.cat([torch.cat(features, dim=1) for _, features in chunks]),
            wanted,
            atol=1e-4,
            rtol=1e-4,
        )
        # The last norm alone: what transformers calls the last hidden state.
        normed = model.normed(torch.cat([hidden for hidden, _ in chunks]))
        torch.testing.assert_close(normed, states[-1][0], atol=1e-4, rtol=1e-4)


def test_without_feature_layers_nothing_is_kept_or_sent(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    config = load_config(folder)
    ranks = connect(config, Sizes(pipeline=2))
    models = [decoder(folder, config, (), one) for one in ranks]

    def work(rank: int) -> list[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
        with torch.inference_mode():
            return run(models[rank], config, ranks[rank])

    _, last = together([lambda rank=rank: work(rank) for rank in range(2)])
    assert [features for _, features in last] == [()] * len(CHUNKS)
