"""Every family against transformers, in float32 token for token: batched, chunked, preempted, with
a cached prefix, in odd shapes; in 16 bits within a tolerance."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.runner_driver import (
    BLOCK_SIZE,
    DrivenSequence,
    Driver,
    make_runner,
    oracle_logits,
    poison,
    tiny_checkpoint,
)
from xpyd_worker.kernels.api import KvShape, Span
from xpyd_worker.kernels.cpu.kernels import choose_kernels
from xpyd_worker.model.decoder import Decoder
from xpyd_worker.model.loader import load_weights
from xpyd_worker.model.registry import load_config

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
# Windows are no multiple of a block and shorter than most contexts here.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn with mscale": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "qwen2, windows from a layer on": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    ),
    "qwen3, windows by layer": (
        "qwen3",
        {
            "head_dim": 32,
            "use_sliding_window": True,
            "sliding_window": 13,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral, tied, window, one expert": (
        "mixtral",
        {"tie_word_embeddings": True, "sliding_window": 21, "num_experts_per_tok": 1},
    ),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe, yarn, biases, dense layers": (
        "qwen3_moe",
        {
            "rope_parameters": YARN,
            "attention_bias": True,
            "mlp_only_layers": [0],
            "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
        },
    ),
    # Sizes that only the operators in plain torch take.
    "qwen3_moe, window, plain": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 17, "moe_intermediate_size": 40},
    ),
    "qwen3, window, plain": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 0},
    ),
}
FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe")
VOCAB = 307


@dataclass(frozen=True)
class Checkpoint:
    """A folder, and transformers' model of it."""

    folder: Path
    oracle: Any

    def driver(self) -> Driver:
        """A runner over it whose cache is full of NaN."""
        driver = Driver(make_runner(self.folder))
        poison(driver.runner)
        return driver

    def agrees(self, *sequences: DrivenSequence) -> None:
        """Assert that each has put out the greedy tokens: one forward over all of a sequence says
        what the best token at each place is."""
        for sequence in sequences:
            best = oracle_logits(self.oracle, sequence.tokens[:-1]).argmax(-1)
            assert sequence.output == best[len(sequence.prompt) - 1 :].tolist()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a loaded machine make tiny models many times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    folder = tmp_path_factory.mktemp("checkpoint")
    family, changes = VARIANTS[request.param]
    return Checkpoint(folder, tiny_checkpoint(folder, family, **changes))


def prompts(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Random prompts."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def test_a_batch_writes_what_transformers_writes(checkpoint: Checkpoint) -> None:
    driver = checkpoint.driver()
    batch = [driver.add(prompt) for prompt in prompts(1, (1, 16, 17, 70))]
    driver.run(batch, tokens=10)
    checkpoint.agrees(*batch)


@pytest.mark.parametrize("budget", [5, 33])
def test_chunks_and_decodes_in_mixed_batches_change_no_token(
    checkpoint: Checkpoint, budget: int
) -> None:
    driver = checkpoint.driver()
    batch = [driver.add(prompt) for prompt in prompts(2, (9, 61, 30))]
    driver.run(batch, tokens=6, budget=budget)
    checkpoint.agrees(*batch)
    assert driver.runner.counters.forwards == driver.steps


def test_a_preempted_sequence_goes_on_with_the_tokens_it_would_have_had(
    checkpoint: Checkpoint,
) -> None:
    driver = checkpoint.driver()
    stays, goes = (driver.add(prompt) for prompt in prompts(3, (20, 37)))
    driver.run([stays, goes], tokens=4)
    driver.preempt(goes)
    driver.run([stays, goes], tokens=9, budget=32)
    checkpoint.agrees(stays, goes)


def test_a_cached_prefix_gives_the_tokens_that_computing_it_gives(checkpoint: Checkpoint) -> None:
    driver = checkpoint.driver()
    shared, tail = prompts(4, (2 * BLOCK_SIZE, 9))
    first = driver.add(shared)
    driver.run([first], tokens=2)
    hits = [driver.add([*shared, *tail[:n]], shared_blocks=first.blocks[:2]) for n in (1, 9)]
    driver.run([first, *hits], tokens=7)
    assert driver.runner.counters.prompt_tokens_computed == 2 * BLOCK_SIZE + 1 + 9
    checkpoint.agrees(first, *hits)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 96},
        {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 72},
        {"vocab_size": 50_257, "num_hidden_layers": 1},
        {"max_position_embeddings": 64},
    ],
    ids=["head_dim 96", "3 KV heads", "one layer, 50257 tokens", "context of 64"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_odd_shapes(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """With a prompt of one token, and one that leaves the context room for one token."""
    checkpoint = Checkpoint(tmp_path, tiny_checkpoint(tmp_path, family, **changes))
    driver = checkpoint.driver()
    shortest, longest = (driver.add(prompt) for prompt in prompts(5, (1, 63)))
    driver.run([longest], tokens=1)
    driver.run([shortest], tokens=6)
    checkpoint.agrees(shortest, longest)


def logits(folder: Path, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Our model's logits [tokens, vocab] of one sequence."""
    config = load_config(folder)
    kernels = choose_kernels(vector_sizes=config.vector_sizes(), head_dim=config.head_dim)
    device = torch.device("cpu")
    model = Decoder(config, dtype, kernels, device)
    load_weights(
        folder,
        model.weight_groups(),
        kernels=kernels,
        device=device,
        is_tied=config.tie_word_embeddings,
    )
    shape = KvShape(config.num_kv_heads, config.head_dim, BLOCK_SIZE, dtype)
    blocks = range(-(-len(tokens) // BLOCK_SIZE))
    size = (len(blocks), shape.kv_heads, BLOCK_SIZE, 2 * shape.head_dim)
    caches = [torch.zeros(size, dtype=dtype) for _ in config.layers]
    with torch.inference_mode():
        hidden = model.forward(
            torch.tensor(tokens),
            torch.arange(len(tokens)),
            caches,
            kernels.plan([Span(0, len(tokens), blocks)], shape),
            lambda layer: None,
        )
        return model.logits(hidden)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 3e-6), (torch.float16, 0.005), (torch.bfloat16, 0.04)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_within_a_share_of_their_own_spread(
    family: str, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    """The root mean square difference to transformers in float32 with the same weights, at the
    median position: in 16 bits a router that is of two minds now and then takes another expert."""
    oracle = tiny_checkpoint(tmp_path, family)
    (prompt,) = prompts(6, (90,))
    expected = oracle_logits(oracle.to(dtype).to(torch.float32), prompt)
    errors = (logits(tmp_path, prompt, dtype) - expected).square().mean(-1).sqrt()
    assert float(errors.median() / expected.std()) < tolerance
